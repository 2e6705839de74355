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

use std::fs::File;
use std::io;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};
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

    /// The right to replace the file: a lock of its directory, which needs no file of its own.
    fn lock(&self) -> Result<Flock<File>, Failure> {
        let directory: &Path = self.place.directory();
        let opened = File::open(directory).map_err(|error| self.failed("lock", &error))?;
        Flock::lock(opened, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| self.failed("lock", &error.into()).transient())
    }
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
