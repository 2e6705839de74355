//! `pagevault-keyring accept-restore`: writes a note of what a data directory contains in place of
//! the one that the anchor has, and so makes this directory the cluster.
//!
//! The server may be running. If it is another than the one that has written the former note, that
//! one finds out when it wants to write the next: a random number that is in the note and in the
//! data directory says which directory was accepted.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use pagevault_cipher::secret::fill_random;
use pagevault_keystore::anchor::{
    ACCEPTED, MAX_REASON, Note, Position, encode_accepted, is_reason,
};
use pagevault_keystore::audit::utc;

use crate::access::Access;
use crate::audit::tools::TrailEntry;
use crate::clock::now_us;
use crate::failure::{Failure, of_command, refuse, unprintable};
use crate::offline::{DIRECTORY, DatabaseKeys, Keystore, put};
use crate::provider::Environment;
use crate::retry::{Backoff, retry};
use crate::store::{Store, StoredNote, Written};
use crate::stores;
use crate::verify::Control;

/// Accepts a data directory for this reason, and prints the former note and the new one.
///
/// # Errors
/// If the keys of the data directory cannot be unwrapped, or the store cannot be read or written;
/// then nothing is changed.
pub fn accept_restore(
    data_directory: &Path,
    anchor: &Path,
    reason: &str,
    access: Access,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let reason = reason.trim();
    if !is_reason(reason) {
        return Err(refuse(format!(
            "the reason must be one line of at most {MAX_REASON} bytes, and not empty"
        )));
    }
    let time = access.time();
    let keystore = Keystore::read_to_write(data_directory, access)?;
    if keystore.data_directory().join("standby.signal").exists() {
        return Err(refuse("the data directory is that of a standby")
            .with_detail("The note of the anchor is about the primary. Nothing was changed.")
            .with_hint("Promote the standby first."));
    }
    let control = Control::ask(keystore.data_directory())?;
    let reached = control.noted.ok_or_else(|| {
        refuse("the file backup_label cannot be read")
            .with_detail("It says which part of WAL the data directory contains.")
            .with_hint("Restore the base backup again.")
    })?;
    let deadline = Some(Instant::now() + time);
    let data_directory = Some(keystore.data_directory().to_owned());
    // Whoever names the file here can run programs without this one.
    let environment =
        Environment { data_directory, deadline, programs: true, repeats_programs: false };
    let anchor = std::path::absolute(anchor)
        .map_err(|error| refuse(format!("could not find \"{}\": {error}", anchor.display())))?;
    let store = stores::build(&anchor, &environment)?;
    let entry = TrailEntry::begin(&keystore, "accept_restore", reason, &reached.to_string())?;
    let mut directory = [0; 16];
    fill_random(&mut directory).map_err(|error| refuse(error.to_string()))?;
    let note = |generation| Note {
        keystore: keystore.id(),
        system: control.system,
        reached,
        generation,
        time: utc(now_us()),
        accepted: Some(reason.to_owned()),
        directory: Some(directory),
    };
    // The number is here before the note: a running server may read that at once.
    let replaced = || {
        put(&keystore, ACCEPTED, encode_accepted(&directory).as_bytes()).map_err(|error| {
            let directory = keystore.data_directory().join(DIRECTORY);
            refuse(format!("could not write to \"{}\": {error}", directory.display()))
                .with_detail("The anchor has its note as before.")
        })?;
        replace(store.as_ref(), deadline, note)
    };
    // Without its keys the outcome could not be authenticated.
    let (keys, done) = match unlocked(&keystore) {
        Ok(keys) => (Some(keys), replaced()),
        Err(error) => (None, Err(error)),
    };
    let outcome = if done.is_ok() { "ok" } else { "failed" };
    let recorded = entry.end(&keystore, keys.as_ref(), outcome);
    let (before, generation) = done.map_err(of_command)?;
    recorded.map_err(|error| {
        refuse(format!("the data directory was accepted, but the outcome could not be recorded in the audit trail: {error}"))
    })?;
    print(out, before, reached, generation).map_err(unprintable)
}

/// The newest database key of the cluster, from which the audit trail's key is derived.
fn unlocked(keystore: &Keystore) -> Result<DatabaseKeys, Failure> {
    let versions = keystore.state().database_keys().map(|(scope, version, _)| (scope, version));
    let newest = versions.filter(|(scope, _)| scope.is_cluster()).max();
    keystore.unlock(&newest.into_iter().collect())
}

/// Replaces the note in the store. Returns the former one, and the generation of the new one.
fn replace(
    store: &dyn Store,
    deadline: Option<Instant>,
    note: impl Fn(u64) -> Note,
) -> Result<(Option<StoredNote>, u64), Failure> {
    let before = retry(Backoff::default(), deadline, drop, || store.read())?;
    let known = before.as_ref().and_then(|stored| Note::decode(stored.note.as_bytes()).ok());
    let generation = known.map_or(0, |note| note.generation).saturating_add(1);
    let text = note(generation).encode();
    let version = before.as_ref().map(|stored| stored.version);
    match retry(Backoff::default(), deadline, drop, || store.write(&text, version))? {
        Written::Done(_) => Ok((before, generation)),
        Written::Overtaken => Err(refuse("the anchor got another note at the same time")
            .with_detail("A server writes notes to it, or the first attempt to write this one was lost on its way back. Nothing else was changed.")
            .with_hint("Stop servers that must not write any more, and run the command again.")),
    }
}

fn print(
    out: &mut impl Write,
    before: Option<StoredNote>,
    reached: Position,
    generation: u64,
) -> std::io::Result<()> {
    match before.map(|stored| Note::decode(stored.note.as_bytes())) {
        None => writeln!(out, "Before: no note")?,
        Some(Err(error)) => writeln!(out, "Before: a note that cannot be read: {error}")?,
        Some(Ok(note)) => writeln!(out, "Before: {}, {}", note.reached, note.origin())?,
    }
    writeln!(out, "Now:    {reached}, note {generation}")
}
