//! What the programs that need no server believe of the key files of a data directory.
//!
//! Key files have a checksum, and nothing that says who wrote them. A data directory may be
//! anybody's: a backup from elsewhere, a directory of another user. What it says of providers
//! decides which files are read, where they are sent, and which programs run, with the rights of
//! who looks. So key files are believed if they, the data directory, and all that is above it,
//! belong to root or to who asks, and nobody else can write there (`trust::way`); and even then no
//! program is run that only they name, and no credential is read that only they name, or sent where
//! only they say: files keep neither owner nor history when they are copied. Who trusts them says
//! so, or says himself how providers are reached.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use pagevault_keystore::log;
use pagevault_keystore::protocol::{ErrorClass, ProviderSpec};
use pagevault_keystore::state::Provider;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failure::{Failure, unreadable};
use crate::options::printable;
use crate::providers;
use crate::trust::way::{Astray, follow};
use crate::trust::{What, insecure, require};

/// How providers may be reached.
#[derive(Default)]
pub struct Access {
    /// Key files may name programs.
    programs: bool,
    /// Key files may say which credentials are read, and where they are sent.
    credentials: bool,
    /// Providers by name, in place of what key files say of them.
    providers: BTreeMap<String, Given>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    kind: String,
    options: Map<String, Value>,
}

impl Access {
    /// As the command line says it; `providers` is a file: `{"NAME": {"kind": "...", "options":
    /// {...}}}`.
    ///
    /// # Errors
    /// When the file is somebody else's, or not of this form.
    pub fn new(
        programs: bool,
        credentials: bool,
        providers: Option<&Path>,
    ) -> Result<Self, Failure> {
        let providers = providers.map(read_providers).transpose()?.unwrap_or_default();
        Ok(Self { programs, credentials, providers })
    }

    /// A provider, as it is given, else as the key files of `data_directory` record it.
    ///
    /// # Errors
    /// `insecure` if these name programs, or have credentials sent, and may not.
    pub(crate) fn spec(
        &self,
        name: &str,
        recorded: &Provider,
        data_directory: &Path,
    ) -> Result<ProviderSpec, Failure> {
        if let Some(Given { kind, options }) = self.providers.get(name) {
            let (name, kind, options) = (name.to_owned(), kind.clone(), options.clone());
            return Ok(ProviderSpec { name, kind, options, programs: true });
        }
        let options: Map<String, Value> =
            serde_json::from_str(&recorded.options).map_err(|_| {
                let what = format!("the options of provider \"{name}\" are not JSON");
                Failure::new(ErrorClass::Internal, what)
            })?;
        if recorded.kind == "command" && !self.programs {
            let program = options.get("unwrap").unwrap_or(&Value::Null).to_string();
            return Err(insecure(format!("provider \"{}\" runs programs", printable(name)))
                .with_detail(format!(
                    "The key files in \"{}\" say so: {}. Nothing was run.",
                    data_directory.display(),
                    printable(&program)
                ))
                .with_hint("If you trust who wrote them: --allow-command. Or say how the provider is reached: --providers FILE."));
        }
        let reaching = providers::reaching(&recorded.kind, &options);
        if !self.credentials && !reaching.is_empty() {
            let shown =
                |name: &&str| format!("{name} {}", options.get(*name).unwrap_or(&Value::Null));
            let shown: Vec<String> = reaching.iter().map(shown).collect();
            let message = format!("provider \"{}\" has credentials sent", printable(name));
            return Err(insecure(message)
                .with_detail(format!(
                    "Which and where to is said by the key files in \"{}\" alone: {}. Nothing was read or sent.",
                    data_directory.display(),
                    printable(&shown.join(", "))
                ))
                .with_hint("If you trust who wrote them: --allow-credentials. Or say how the provider is reached: --providers FILE."));
        }
        let programs = self.programs && recorded.programs;
        Ok(ProviderSpec { name: name.to_owned(), kind: recorded.kind.clone(), options, programs })
    }
}

/// A file of providers, which only root and we can have written.
fn read_providers(path: &Path) -> Result<BTreeMap<String, Given>, Failure> {
    let absolute = std::path::absolute(path).map_err(|error| unreadable(path, &error))?;
    let place = follow(What::Providers, &absolute);
    let place = place.map_err(|astray| astray.or(|error| unreadable(path, error)))?;
    let text = read_ours(What::Providers, &place)?;
    serde_json::from_slice(&text).map_err(|error| {
        // The text is not repeated: somebody may have put a credential there by mistake.
        let message = format!("\"{}\" does not say what providers there are", path.display());
        Failure::new(ErrorClass::BadOptions, message)
            .with_detail(format!(
                "Reading stopped at line {}, column {}.",
                error.line(),
                error.column()
            ))
            .with_hint("It must hold JSON: {\"NAME\": {\"kind\": \"file\", \"options\": {\"path\": \"/etc/pagevault/keys\"}}}.")
    })
}

/// A data directory and the folder of its keystore, if only root and we can have written there. The
/// folder need not be there.
pub(crate) fn enter(data_directory: &Path, folder: &str) -> Result<(PathBuf, PathBuf), Failure> {
    let absolute =
        std::path::absolute(data_directory).map_err(|error| unreadable(data_directory, &error))?;
    let root = follow(What::Keystore, &absolute)
        .map_err(|astray| astray.or(|error| unreadable(data_directory, error)))?;
    require_directory(&root)?;
    let inside = root.join(folder);
    match follow(What::Keystore, &inside) {
        Err(Astray::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok((root, inside)),
        Err(astray) => Err(astray.or(|error| unreadable(&inside, error))),
        Ok(inside) => {
            require_directory(&inside)?;
            Ok((root, inside))
        }
    }
}

fn require_directory(path: &Path) -> Result<(), Failure> {
    let metadata = std::fs::symlink_metadata(path).map_err(|error| unreadable(path, &error))?;
    require(What::Keystore, path, &metadata)
}

/// The content of a file that only root and we can have written.
pub(crate) fn read_ours(what: What, path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| unreadable(path, &error);
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path);
    let file = opened.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    require(what, path, &metadata)?;
    if !metadata.is_file() || metadata.len() > log::MAX_LOG {
        return Err(failed(io::ErrorKind::InvalidData.into()));
    }
    let mut bytes = Vec::new();
    file.take(log::MAX_LOG).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}
