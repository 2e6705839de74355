//! Key files that must be there (`pagevault_keystore::presence`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};

use pagevault_keystore::log::{self, Contents, Position};
use pagevault_keystore::presence::{
    LIMIT, NAME, Named, condensed, line, line_of_has, missing, parse, required,
};
use pagevault_keystore::{Lsn, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::failures::keystore_failure;
use crate::keys::provider::gone;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, code_of};
use crate::pg::{control_file, process, relation_files};
use crate::{keystore_dir, shmem};

/// Notes that a scope has a key file, which was created at this address. Durable on return. The
/// lock is held, as in [`note_has`]: the file may be replaced.
pub(crate) fn note(_lock: &KeystoreLock, scope: Scope, created: Lsn) -> Result<()> {
    append(&line(scope, created)).map_err(|error| failed(&error))
}

/// In a checkpoint: notes that a scope's key file has, durably, all that WAL before this address
/// says of it. An error stops nobody: the file then says less.
pub(crate) fn note_has(scope: Scope, logged: Lsn) {
    if logged == Lsn::INVALID || process::is_binary_upgrade() {
        return;
    }
    let _lock = KeystoreLock::acquire_absorbing_requests();
    if let Err(error) = append(&line_of_has(scope, logged)).and_then(|()| condense()) {
        failed(&error).send(PgLogLevel::WARNING);
    }
}

/// When recovery has ended, or a standby is consistent: notes the same of all key files of which it
/// is not noted, as after a base backup was started. Checkpoints do it only for those that change.
pub(crate) fn note_settled() {
    if !process::fsync() || process::is_binary_upgrade() {
        return;
    }
    if let Err(report) = note_new() {
        report.send(PgLogLevel::WARNING);
    }
}

fn note_new() -> Result<()> {
    let Some(shared) = shmem::get() else { return Ok(()) };
    let scopes = log::scopes(&keystore_dir::storage()?).map_err(|e| keystore_failure(&e))?;
    let _lock = KeystoreLock::acquire();
    let named = said()?;
    let settled = scopes.into_iter().filter_map(|scope| shared.control.position(scope));
    let settled = settled.filter(|log| log.is_settled() && log.logged != Lsn::INVALID);
    let new = settled.filter(|log| required(&named, Lsn(u64::MAX), log.scope) < Some(log.logged));
    let lines: String = new.map(|log| line_of_has(log.scope, log.logged)).collect();
    if lines.is_empty() { Ok(()) } else { append(&lines).map_err(|error| failed(&error)) }
}

/// Bytes from which the file is condensed.
const LARGE: u64 = 64 << 10;

/// Replaces the file if it has more than twice what it needs.
fn condense() -> std::io::Result<()> {
    let directory = process::data_directory();
    let path = directory.join(NAME);
    let size = path.metadata()?.len();
    if size < LARGE {
        return Ok(());
    }
    let text = condensed(&read()?);
    if text.len() as u64 > size / 2 { Ok(()) } else { replace(&text) }
}

fn replace(text: &str) -> std::io::Result<()> {
    let directory = process::data_directory();
    let new = directory.join(format!("{NAME}.new"));
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, directory.join(NAME))?;
    File::open(directory)?.sync_all()
}

fn append(lines: &str) -> std::io::Result<()> {
    let directory = process::data_directory();
    let mut file = File::options().append(true).create(true).open(directory.join(NAME))?;
    // Behind a line that was not written completely.
    file.write_all(format!("\n{lines}").as_bytes())?;
    file.sync_all()?;
    File::open(directory)?.sync_all()
}

/// At server start, before key files are read: refuses a data directory without key files that it
/// had, but for those of databases that were dropped. Not during pg_upgrade, which sets the address
/// of the new cluster at the end.
pub(crate) fn require(there: &[Scope]) -> Result<()> {
    if process::is_binary_upgrade() {
        return Ok(());
    }
    refuse_missing(|scope| there.contains(&scope) || was_dropped(scope))
}

/// What the file says, for [`refuse_older`].
pub(crate) fn said() -> Result<BTreeMap<Scope, Named>> {
    read().map_err(|error| failed(&error))
}

/// At server start: refuses a key file that is older than the data directory. Keys that are missing
/// in it would not be missed before something is read: files without pages, and new pages of files
/// with former keys, would be written in plaintext, or under these. Not where a base backup is
/// started: a key file that was rewritten during the copying may lack its last mark, which says how
/// far it is.
pub(crate) fn refuse_older(named: &BTreeMap<Scope, Named>, log: &Position) -> Result<()> {
    if process::is_binary_upgrade() || control_file::is_of_backup() {
        return Ok(());
    }
    let from = control_file::replayed_from();
    let older = required(named, from, log.scope).filter(|required| log.logged < *required);
    older.map_or(Ok(()), |required| Err(is_older(log, required, from)))
}

/// Before a key file is created, not by redo: it must not be one that is missing. At the start its
/// database may have seemed to be gone.
pub(crate) fn require_new(scope: Scope) -> Result<()> {
    if process::in_recovery() || process::is_binary_upgrade() {
        return Ok(());
    }
    refuse_missing(|other| other != scope)
}

/// Whether a scope has, or had, a key file: also one that was removed with its database.
pub(crate) fn is_named(scope: Scope) -> Result<bool> {
    read().map(|named| named.contains_key(&scope)).map_err(|error| failed(&error))
}

fn refuse_missing(may_lack: impl Fn(Scope) -> bool) -> Result<()> {
    let named = read().map_err(|error| failed(&error))?;
    let from = control_file::replayed_from();
    let missing = missing(&named, from, may_lack);
    missing.map_or(Ok(()), |(scope, created)| Err(is_missing(scope, created, from)))
}

/// Whether the database is gone, and not only its tablespace.
fn was_dropped(scope: Scope) -> bool {
    let any = |tablespace| RelFile { tablespace, database: scope.number(), relation: 1 };
    let are_there = |tablespaces: Vec<u32>| {
        tablespaces.into_iter().all(|tablespace| !relation_files::is_away(any(tablespace)))
    };
    gone::is_gone(scope) && relation_files::tablespaces().is_ok_and(are_there)
}

/// At server start: notes the key files that are there. In a base backup, this file may say what
/// key files have had after they were copied. Replay adds it, but not what later records replace.
/// So it is forgotten, and noted anew later ([`note_settled`]).
pub(crate) fn note_all(logs: &[Contents]) -> Result<()> {
    if process::is_binary_upgrade() {
        return Ok(());
    }
    let mut named = read().map_err(|error| failed(&error))?;
    if control_file::is_of_backup() {
        named.values_mut().for_each(Named::forget_has);
        replace(&condensed(&named)).map_err(|error| failed(&error))?;
    }
    let from = control_file::replayed_from();
    let there = logs.iter().map(|log| log.position.scope);
    let new = there.filter(|scope| !named.contains_key(scope));
    let lines: String = new.map(|scope| line(scope, from)).collect();
    if lines.is_empty() { Ok(()) } else { append(&lines).map_err(|error| failed(&error)) }
}

fn read() -> std::io::Result<BTreeMap<Scope, Named>> {
    let mut text = Vec::new();
    match File::open(process::data_directory().join(NAME)) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        file => drop(file?.take(LIMIT).read_to_end(&mut text)?),
    }
    Ok(parse(&String::from_utf8_lossy(&text)))
}

fn is_missing(scope: Scope, created: Lsn, from: Lsn) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("key file \"{}\" is missing", log::file_name(scope)),
    )
    .detail(format!(
        "The file \"{NAME}\" says that it was there at {created}, and WAL is replayed from {from} on. Nothing was changed."
    ))
    .hint(format!("Restore the directory pagevault/ from the backup that the data directory is from. If it was removed on purpose, or is lost for ever, {AS_LOST}"))
}

const AS_LOST: &str = "remove \"pagevault.files\" as well: what the keys have encrypted is unreadable then, and relations whose labels say encrypted are written in plaintext until pagevault.reconcile() was called for each row of pagevault.drift, in every database. Unreadable catalogs are to be truncated before: pg_statistic, pg_statistic_ext_data and pg_largeobject, whose read errors name the statements.";

fn is_older(log: &Position, required: Lsn, from: Lsn) -> Report {
    let name = log::file_name(log.scope);
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("key file \"{name}\" is of an earlier time than the data directory"),
    )
    .detail(format!("It has what WAL says of it up to {}. The file \"{NAME}\" says that it had more, up to {required}, and WAL is replayed from {from} on. So keys are missing. No key was changed.", log.logged))
    .hint(format!("Restore the directory pagevault/ from the backup that the data directory is from, or the whole data directory. If the newer keys are lost for ever, {AS_LOST}"))
}

fn failed(error: &std::io::Error) -> Report {
    Report::new(code_of(error), format!("could not read or write file \"{NAME}\": {error}"))
        .detail("It names the key files. Nothing was changed.")
}
