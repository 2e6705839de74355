//! `file`: master keys in a file of this machine, for development and single hosts.
//!
//! Options: `path`, the absolute path of a key file outside the data directory ([`keyfile`]).
//!
//! The format of a wrapped key; associated data are the key's name, its version and the context:
//!
//! ```text
//! byte   0        1                        9
//!        +--------+------------------------+---------------------------------+
//!        | format | key version, 8 bytes,  | nonce, ciphertext, tag          |
//!        | = 1    | most significant first | (pagevault_cipher::wrap)        |
//!        +--------+------------------------+---------------------------------+
//! ```
//!
//! [`keyfile`]: crate::keyfile

use std::path::{Path, PathBuf};

use pagevault_cipher::wrap::{self, OVERHEAD, WrapError, WrapKey};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::findings::Findings;
use crate::keyfile::format::{Key, KeyFile, KeyVersion};
use crate::keyfile::place::Place;
use crate::keyfile::store;
use crate::options::{Options, printable};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};

/// Names of all options.
pub const OPTIONS: &[&str] = &["path"];

const FORMAT: u8 = 1;
const HEADER: usize = 9;

struct FileProvider {
    path: PathBuf,
    data_directory: Option<PathBuf>,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let path = options.absolute_path("path")?;
    Ok(Box::new(FileProvider { path, data_directory: environment.data_directory.clone() }))
}

impl FileProvider {
    /// The key file's place, if it is permitted.
    fn place(&self) -> Result<Place, Failure> {
        let place = Place::resolve(&self.path)?;
        outside(&place, self.data_directory.as_deref())?;
        place.check_directories()?;
        Ok(place)
    }

    /// Reads the file again for every operation: a request has few of them, and each must see a
    /// rotation by the one before.
    fn load(&self) -> Result<KeyFile, Failure> {
        store::load(&self.place()?)
    }

    fn find<'a>(&self, file: &'a KeyFile, name: &str) -> Result<&'a Key, Failure> {
        file.key(name).ok_or_else(|| {
            let shown = self.path.display();
            let names: Vec<String> =
                file.keys().take(10).map(|(name, _)| format!("\"{}\"", printable(name))).collect();
            let detail = match names.as_slice() {
                [] => "It contains no keys.".to_owned(),
                names => format!("It contains {}.", names.join(", ")),
            };
            let name = printable(name);
            Failure::new(
                ErrorClass::KeyMissing,
                format!("key file \"{shown}\" has no key \"{name}\""),
            )
            .with_detail(detail)
            .with_hint("Check the name, or restore the newest copy of the key file.")
        })
    }

    fn newest<'a>(&self, file: &'a KeyFile, name: &str) -> Result<&'a KeyVersion, Failure> {
        // The file's checks refuse keys without versions.
        self.find(file, name)?
            .newest()
            .ok_or_else(|| Failure::new(ErrorClass::Internal, "key has no version"))
    }

    fn lacks(&self, version: u64) -> Failure {
        let detail = format!(
            "It was wrapped by version {version} of the key, which this file does not contain."
        );
        self.refused(detail).with_hint(
            "Restore the newest copy of the key file. Each rotation adds a version to it.",
        )
    }

    fn refused(&self, cause: impl Into<String>) -> Failure {
        Failure::new(
            ErrorClass::WrongCiphertext,
            format!("wrapped key cannot be unwrapped with key file \"{}\"", self.path.display()),
        )
        .with_detail(cause)
        .with_hint("Use the key file that wrapped it, or an intact copy of it.")
    }
}

impl Provider for FileProvider {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let file = self.load()?;
        let newest = self.newest(&file, key)?;
        let mut wrapped = vec![0; HEADER + plaintext.len() + OVERHEAD];
        wrapped[0] = FORMAT;
        wrapped[1..HEADER].copy_from_slice(&newest.version.to_be_bytes());
        let bound = associated_data(key, newest.version, context);
        let wrap_key = WrapKey::new(newest.secret.expose());
        wrap::wrap(&wrap_key, &bound, plaintext, &mut wrapped[HEADER..]).map_err(|error| {
            Failure::new(ErrorClass::Internal, "could not wrap the key")
                .with_detail(format!("{error}."))
        })?;
        Ok(Wrapped { wrapped, key_version: newest.version })
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let Some((key_version, body)) = header(wrapped) else {
            return Err(self.refused(
                "It was not wrapped by a provider of kind \"file\", or by a newer version of pagevault.",
            ));
        };
        let file = self.load()?;
        let Some(version) = self.find(&file, key)?.version(key_version) else {
            return Err(self.lacks(key_version));
        };
        let mut plaintext = Zeroizing::new(vec![0; body.len().saturating_sub(OVERHEAD)]);
        let bound = associated_data(key, key_version, context);
        let wrap_key = WrapKey::new(version.secret.expose());
        wrap::unwrap(&wrap_key, &bound, body, &mut plaintext).map_err(|error| match error {
            WrapError::Length(_) => self.refused("It is too short."),
            _ => self.refused(
                "It was wrapped by another key of the same name or for another database, or it is damaged.",
            ),
        })?;
        Ok(Unwrapped { plaintext, key_version })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let place = self.place()?;
        let mut locked = store::lock(&place)?;
        let newest = self.newest(&locked.keys, key)?.version;
        match header(wrapped) {
            Some((version, _)) if version < newest => return Ok(newest),
            // The next version of this file is another key's of that file.
            Some((version, _)) if version > newest => return Err(self.lacks(version)),
            _ => {}
        }
        let version = add_version(&mut locked.keys, key)?;
        locked.replace()?;
        Ok(version)
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let file = self.load()?;
        let newest = self.newest(&file, key)?.version;
        let versions = self.find(&file, key)?.versions();
        Ok(KeyInfo {
            key_version: newest,
            oldest_version: versions.first().map(|oldest| oldest.version),
            summary: format!(
                "key file {} on this machine, readable by its owner only",
                self.path.display()
            ),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        let place = findings.note("the directory exists", Place::resolve(&self.path), |place| {
            place.directory().display().to_string()
        })?;
        let data_directory = self.data_directory.as_deref();
        findings.note(
            "the file is outside the data directory",
            outside(&place, data_directory),
            |()| match data_directory {
                Some(root) => format!("not inside {} or its tablespaces", root.display()),
                None => {
                    "no directory above it contains PG_VERSION (--data-directory was not specified)"
                        .to_owned()
                }
            },
        )?;
        findings.note("other users cannot replace the file", place.check_directories(), |()| {
            "all directories above it are safe".to_owned()
        })?;
        findings.note("other users cannot read the file", place.open(), |_| {
            "a regular file, owned by the current user, mode 0600 or less".to_owned()
        })?;
        findings.note("the file is a key file", store::load(&place), |file| {
            format!("intact, keys: {}", file.keys().count())
        })?;
        Some(())
    }

    fn check_options(&self) -> Result<(), Failure> {
        let place = match Place::resolve(&self.path) {
            Err(error) if error.class == ErrorClass::Unreachable => return self.outside_by_name(),
            other => other?,
        };
        outside(&place, self.data_directory.as_deref())?;
        place.check_directories()?;
        match place.open() {
            Err(error) if error.class == ErrorClass::Unreachable => Ok(()),
            opened => opened.map(drop),
        }
    }
}

impl FileProvider {
    /// [`outside`] for a directory that does not exist: only the path can be checked.
    fn outside_by_name(&self) -> Result<(), Failure> {
        match &self.data_directory {
            Some(root) if self.path.starts_with(root) => Err(Failure::new(
                ErrorClass::Insecure,
                format!("key file \"{}\" is inside the data directory", self.path.display()),
            )
            .with_hint("Move the key file to another directory, for example /etc/pagevault.")),
            _ => Ok(()),
        }
    }
}

/// Adds a version to the key `name`, which is created if it does not exist.
pub fn add_version(file: &mut KeyFile, name: &str) -> Result<u64, Failure> {
    match file.add_version(name) {
        Ok(Some(version)) => Ok(version),
        Ok(None) => Err(Failure::new(ErrorClass::Denied, "key has no further version number")),
        Err(error) => Err(Failure::new(ErrorClass::Internal, "could not create a key")
            .with_detail(format!("{error}."))),
    }
}

/// Refuses a place inside `data_directory`, or inside a directory that looks like another server's.
pub fn outside(place: &Place, data_directory: Option<&Path>) -> Result<(), Failure> {
    if let Some(data_directory) = data_directory {
        place.outside_of(data_directory)?;
    }
    place.require_outside_data_directories()
}

/// The version of the wrapping key, and the wrapped key.
fn header(wrapped: &[u8]) -> Option<(u64, &[u8])> {
    match wrapped.split_first_chunk::<HEADER>()? {
        ([FORMAT, version @ ..], body) => Some((u64::from_be_bytes(*version), body)),
        _ => None,
    }
}

/// Associated data: each part is preceded by its length, so that different triples give different
/// data.
fn associated_data(key: &str, version: u64, context: &str) -> Vec<u8> {
    let mut bound = b"pagevault file provider 1".to_vec();
    for part in [key.as_bytes(), &version.to_be_bytes(), context.as_bytes()] {
        bound.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bound.extend_from_slice(part);
    }
    bound
}
