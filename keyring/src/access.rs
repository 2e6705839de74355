//! Which key files of a data directory are trusted by commands that run without a server.
//!
//! Key files have a checksum, but nothing that identifies their author. A data directory may come
//! from anybody: a foreign backup, a directory of another user. Its key files name providers, and
//! so decide which files are read, where they are sent, and which programs run, with the rights of
//! the user who runs the command. So they are trusted only if they, the data directory and all
//! directories above it belong to root or to this user, and nobody else can write there
//! (`trust::resolve`). Even then no program runs and no credential is read that only they name, and
//! no credential is sent to a place that only they name, because copied files lose their owner and
//! history. Options can permit this, or a file of the user describes the providers instead.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;
use pagevault_keystore::log;
use pagevault_keystore::protocol::{ErrorClass, ProviderSpec};
use pagevault_keystore::state::Provider;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failure::{Failure, unreadable};
use crate::options::printable;
use crate::providers;
use crate::trust::resolve::{Unresolved, follow};
use crate::trust::{FileKind, insecure, require};

/// How providers may be reached.
#[derive(Default)]
pub struct Access {
    /// Programs named by key files may run.
    programs: bool,
    /// Credentials named by key files may be read, and sent to the places that key files name.
    credentials: bool,
    /// Directories above the data directory may be writable by others.
    on_volume: bool,
    /// Providers by name, used instead of those in key files.
    providers: BTreeMap<String, ProviderConfig>,
    /// Time limit for a request to all of them, if not [`TIME`].
    time: Option<Duration>,
}

/// Time limit for unwrapping all keys.
pub const TIME: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProviderConfig {
    kind: String,
    options: Map<String, Value>,
}

impl Access {
    /// From the command line; `providers` is a file: `{"NAME": {"kind": "...", "options": {...}}}`.
    ///
    /// # Errors
    /// If the file is not trusted, or has another form.
    pub fn new(
        programs: bool,
        credentials: bool,
        providers: Option<&Path>,
    ) -> Result<Self, Failure> {
        let providers = providers.map(read_providers).transpose()?.unwrap_or_default();
        Ok(Self { programs, credentials, providers, ..Self::default() })
    }

    /// Also accepts a data directory below directories that others can write to.
    #[must_use]
    pub fn on_volume(self, on_volume: bool) -> Self {
        Self { on_volume, ..self }
    }

    /// Has providers unwrap all keys within this time.
    #[must_use]
    pub fn within(self, time: Duration) -> Self {
        Self { time: Some(time), ..self }
    }

    /// Time limit for unwrapping all keys.
    pub(crate) fn time(&self) -> Duration {
        self.time.unwrap_or(TIME)
    }

    /// Which data directories are trusted, and no access to providers.
    pub(crate) fn only_places(&self) -> Self {
        Self { on_volume: self.on_volume, ..Self::default() }
    }

    /// How a provider is reached: as the user's file says, else as the key files of
    /// `data_directory` record it.
    ///
    /// # Errors
    /// `insecure` if the key files name programs or credentials, and this is not permitted.
    pub(crate) fn spec(
        &self,
        name: &str,
        recorded: &Provider,
        data_directory: &Path,
    ) -> Result<ProviderSpec, Failure> {
        if let Some(ProviderConfig { kind, options }) = self.providers.get(name) {
            let (name, kind, options) = (name.to_owned(), kind.clone(), options.clone());
            return Ok(ProviderSpec { name, kind, options, programs: true });
        }
        let options: Map<String, Value> =
            serde_json::from_str(&recorded.options).map_err(|_| {
                let what = format!("the options of provider \"{name}\" are not JSON");
                Failure::new(ErrorClass::Internal, what)
            })?;
        if let Some(what) = program_of(&recorded.kind, &options)
            && !self.programs
        {
            let name = printable(name);
            let message = format!("running the program of provider \"{name}\" is not allowed");
            return Err(insecure(message)
                .with_detail(format!(
                    "Only the key files in \"{}\" name the program: {}. Nothing was run.",
                    data_directory.display(),
                    printable(&what)
                ))
                .with_hint("If you trust the origin of the key files, use --allow-command. Otherwise, configure the provider in a file, and use --providers FILE."));
        }
        let named_options = providers::credential_options(&recorded.kind, &options);
        if !self.credentials && !named_options.is_empty() {
            let shown =
                |name: &&str| format!("{name} {}", options.get(*name).unwrap_or(&Value::Null));
            let shown: Vec<String> = named_options.iter().map(shown).collect();
            let message =
                format!("using the credentials of provider \"{}\" is not allowed", printable(name));
            return Err(insecure(message)
                .with_detail(format!(
                    "Only the key files in \"{}\" name the credentials or their destination: {}. Nothing was read or sent.",
                    data_directory.display(),
                    printable(&shown.join(", "))
                ))
                .with_hint("If you trust the origin of the key files, use --allow-credentials. Otherwise, configure the provider in a file, and use --providers FILE."));
        }
        let programs = self.programs && recorded.programs;
        Ok(ProviderSpec { name: name.to_owned(), kind: recorded.kind.clone(), options, programs })
    }
}

/// The program, or the module of PKCS#11, that a provider runs.
fn program_of(kind: &str, options: &Map<String, Value>) -> Option<String> {
    let option = match kind {
        "command" => "unwrap",
        "pkcs11" => "module",
        _ => return None,
    };
    Some(options.get(option).unwrap_or(&Value::Null).to_string())
}

/// Reads a file of providers, which only root and the current user may be able to write.
fn read_providers(path: &Path) -> Result<BTreeMap<String, ProviderConfig>, Failure> {
    let absolute = std::path::absolute(path).map_err(|error| unreadable(path, &error))?;
    let place = follow(FileKind::Providers, &absolute);
    let place = place.map_err(|unresolved| unresolved.or(|error| unreadable(path, error)))?;
    let text = read_trusted(FileKind::Providers, &place)?;
    serde_json::from_slice(&text).map_err(|error| {
        // The text is not repeated: it may contain a credential by mistake.
        let message = format!("\"{}\" is not a valid providers file", path.display());
        Failure::new(ErrorClass::BadOptions, message)
            .with_detail(format!(
                "The error is at line {}, column {}.",
                error.line(),
                error.column()
            ))
            .with_hint("It must contain JSON: {\"NAME\": {\"kind\": \"file\", \"options\": {\"path\": \"/etc/pagevault/keys\"}}}.")
    })
}

/// A data directory and the directory of its keystore, if only root and the current user can write
/// there; and by which rules the files in it are judged. The latter directory need not exist.
pub(crate) fn trusted_directories(
    data_directory: &Path,
    folder: &str,
    access: &Access,
) -> Result<(PathBuf, PathBuf, FileKind), Failure> {
    let absolute =
        std::path::absolute(data_directory).map_err(|error| unreadable(data_directory, &error))?;
    let what = if access.on_volume { FileKind::KeystoreOnVolume } else { FileKind::Keystore };
    let root = follow(what, &absolute)
        .map_err(|unresolved| unresolved.or(|error| unreadable(data_directory, error)))?;
    let mode = require_directory(FileKind::Keystore, &root)?;
    let kind = match access.on_volume && mode & 0o077 == 0 {
        true => FileKind::KeystoreBehindDoor,
        false => FileKind::Keystore,
    };
    let inside = root.join(folder);
    match follow(what, &inside) {
        Err(Unresolved::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            Ok((root, inside, kind))
        }
        Err(unresolved) => Err(unresolved.or(|error| unreadable(&inside, error))),
        // By a symbolic link it may be elsewhere.
        Ok(inside) => {
            let kind = if inside.starts_with(&root) { kind } else { FileKind::Keystore };
            require_directory(kind, &inside)?;
            Ok((root, inside, kind))
        }
    }
}

/// Returns its mode.
fn require_directory(what: FileKind, path: &Path) -> Result<u32, Failure> {
    let metadata = std::fs::symlink_metadata(path).map_err(|error| unreadable(path, &error))?;
    require(what, path, &metadata)?;
    Ok(metadata.mode())
}

/// The content of a file that only root and the current user can write.
pub(crate) fn read_trusted(what: FileKind, path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| unreadable(path, &error);
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path);
    let file = opened.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    // Another name may be where others can write.
    let has_one_name = metadata.nlink() <= 1;
    let what = match what {
        FileKind::KeystoreBehindDoor if !has_one_name => FileKind::Keystore,
        what => what,
    };
    require(what, path, &metadata)?;
    if !metadata.is_file() || metadata.len() > log::MAX_LOG {
        return Err(failed(io::ErrorKind::InvalidData.into()));
    }
    let mut bytes = Vec::new();
    file.take(log::MAX_LOG).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}
