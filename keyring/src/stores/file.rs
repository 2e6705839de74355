//! A store of notes in a file, wrapped by a key provider: only who may use the master key can make
//! a note.
//!
//! | option | meaning |
//! |---|---|
//! | `path` | the file, outside of every data directory |
//! | `provider` | `{"kind": "...", "options": {...}}` |
//! | `key` | the master key |
//!
//! The content is what the provider returned for the note, which authenticates its context. So
//! nobody can change a note, but who can write the file can put back an older one: it is of use
//! only where that takes more rights than putting back the data directory.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::geteuid;
use pagevault_keystore::anchor::{MAX_NOTE, Note};
use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::keyfile::place::Place;
use crate::options::{Options, bad};
use crate::provider::{Environment, Provider};
use crate::providers;
use crate::providers::file::outside;
use crate::regular::read_if_there;
use crate::store::{Store, StoredNote, Written};
use crate::trust::FileKind;

/// Names of all options.
pub(super) const OPTIONS: &[&str] = &["path", "provider", "key"];

/// The context of wrapped notes; no database key has it.
const CONTEXT: &str = "pagevault/1/anchor";

/// Largest file in bytes. Providers add little to a note.
const LIMIT: u64 = 16 * MAX_NOTE as u64;

struct NoteFile {
    place: Place,
    provider: Box<dyn Provider>,
    key: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    kind: String,
    options: Map<String, Value>,
}

/// Creates the store from its options.
pub(super) fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Store>, Failure> {
    let hint = "Specify it as {\"provider\": {\"kind\": \"vault\", \"options\": {...}}}.";
    let given = options.object("provider")?;
    let given = given.ok_or_else(|| options.missing("provider", "{\"kind\": \"...\"}"))?;
    let Description { kind, options: of_provider } =
        serde_json::from_value(Value::Object(given.clone())).map_err(|_| {
            bad("option \"provider\" is not a description of a provider").with_hint(hint)
        })?;
    let place = Place::resolve_as(FileKind::Anchor, &options.absolute_path("path")?)?;
    outside(&place, environment.data_directory.as_deref())?;
    place.check_directories()?;
    // Whoever can write the anchor file may run programs as this user.
    let environment = Environment { programs: true, ..environment.clone() };
    Ok(Box::new(NoteFile {
        place,
        provider: providers::build(&kind, &of_provider, &environment)?,
        key: options.required_text("key")?.to_owned(),
    }))
}

impl NoteFile {
    /// The version of a note is its generation.
    fn opened(&self, wrapped: &[u8]) -> Result<StoredNote, Failure> {
        let opened = self.provider.unwrap(&self.key, CONTEXT, wrapped)?;
        let note = String::from_utf8_lossy(&opened.plaintext).into_owned();
        let version = Note::decode(note.as_bytes()).map_or(0, |note| note.generation);
        Ok(StoredNote { note, version })
    }

    fn failed(&self, what: &str, error: &io::Error) -> Failure {
        let path = self.place.path();
        Failure::new(
            ErrorClass::Unreachable,
            format!("could not {what} \"{}\": {error}", path.display()),
        )
        .with_detail("The note of the anchor is in this file.")
        .with_hint(
            "Check that its file system is mounted, and that the server's user may write there.",
        )
    }

    /// The right to replace the file.
    fn lock(&self) -> Result<Flock<File>, Failure> {
        let opened = lock_file(&self.place).map_err(|error| self.failed("lock", &error))?;
        Flock::lock(opened, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
            self.failed("lock", &error.into())
                .with_hint("Another process writes the note, or NFS has no locks there.")
                .transient()
        })
    }
}

/// A file beside the note that only its owner can open. Whoever can read a file or a directory can
/// lock it, and so keep notes from being written.
fn lock_file(place: &Place) -> io::Result<File> {
    let path = place.lock_path();
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(flags.bits()).open(&path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o77 == 0 {
        return Ok(file);
    }
    let shown = path.display();
    Err(io::Error::other(format!("other users can lock \"{shown}\", remove it")))
}

impl Store for NoteFile {
    fn read(&self) -> Result<Option<StoredNote>, Failure> {
        let wrapped = read_if_there(&self.place.path(), LIMIT);
        let wrapped = wrapped.map_err(|error| self.failed("read", &error))?;
        wrapped.map(|wrapped| self.opened(&wrapped)).transpose()
    }

    fn write(&self, note: &str, replaces: Option<u64>) -> Result<Written, Failure> {
        let _held = self.lock()?;
        if self.read()?.map(|stored| stored.version) != replaces {
            return Ok(Written::Overtaken);
        }
        let version = Note::decode(note.as_bytes())
            .map_err(|error| bad(format!("the note cannot be written: {error}")))?
            .generation;
        let wrapped = self.provider.wrap(&self.key, CONTEXT, note.as_bytes())?.wrapped;
        self.place.replace(&wrapped).map_err(|error| self.failed("write", &error))?;
        Ok(Written::Done(version))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn others_cannot_take_the_lock() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::resolve_as(FileKind::Anchor, &root.path().join("note")).unwrap();
        let lock = |file| Flock::lock(file, FlockArg::LockExclusiveNonblock);
        // Who may list the directory can lock it.
        let _other = lock(File::open(root.path()).unwrap()).unwrap();
        let held = lock(lock_file(&place).unwrap()).unwrap();
        assert_eq!(held.metadata().unwrap().mode() & 0o7777, 0o600);
        lock(lock_file(&place).unwrap()).unwrap_err();
        drop(held);
        lock(lock_file(&place).unwrap()).unwrap();
        fs::set_permissions(place.lock_path(), Permissions::from_mode(0o644)).unwrap();
        lock_file(&place).unwrap_err();
        fs::remove_file(place.lock_path()).unwrap();
        std::os::unix::fs::symlink(root.path().join("elsewhere"), place.lock_path()).unwrap();
        lock_file(&place).unwrap_err();
    }
}
