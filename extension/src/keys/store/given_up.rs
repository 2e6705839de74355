//! The server's part in giving up key groups: `pagevault-keyring give-up-key-group` has destroyed
//! them while the server was down, in a file beside the key files
//! (`pagevault_keystore::given_up`).
//!
//! The start takes that into the key files, before any page is read or written: the end of each
//! group, and tombstones for its data keys. No WAL record brings these records, so they are
//! appended as such that count without one, which no start cuts off. Recovery then passes what WAL
//! has about the groups like what is about groups that were shredded before a crash
//! ([`crate::page::lost`]). Keys of the groups that WAL brings are destroyed when they are replayed
//! ([`crate::keys::redo`]), as long as the file is there.
//!
//! When the server can write WAL, it logs the same, so that standbys, archives and backups learn of
//! it; then the file is removed. After a crash before that, the next start begins again with the
//! file. A standby keeps it until it is promoted.

use std::collections::BTreeMap;

use pagevault_cipher::{DataKeyVersion, page};
use pagevault_keystore::given_up::{AFTER_ALL_WAL, GivenUp, LIMIT, NAME};
use pagevault_keystore::interim::key_place;
use pagevault_keystore::log::{Contents, Log, Position};
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::wrappings::OfCluster;
use pagevault_keystore::{KeyGroup, Lsn, Record, RelFile, Scope, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::failures::keystore_failure;
use super::persist::{self, state_of};
use super::{compact, directory};
use crate::audit::{self, Operation};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{Report, Result};
use crate::pg::{buffers, relation_files, wal};
use crate::{fault, keystore_dir, shmem};

/// What the last start has taken in. Set in the postmaster; it does not change while the server
/// runs.
static HERE: ProcessLocal<Option<GivenUp>> = ProcessLocal::new(None);

/// Records in one batch.
const BATCH: usize = 1024;

/// The groups that this server was started without, and that WAL may still be about.
pub(crate) fn here() -> GivenUp {
    HERE.with(|here| here.clone()).unwrap_or_default()
}

/// Refuses a session while redo passes pages over: those in shared buffers are not what WAL says,
/// and would be served as if they were, by statements that run while a relation comes into a group,
/// and through indexes. Nobody has pinned a buffer when they are dropped at the end.
pub(crate) fn refuse_session() {
    let here = HERE.with(|here| here.is_some());
    if here && process::in_recovery() {
        Report::new(
            PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
            "this server accepts no connections until recovery has ended",
        )
        .detail("A key group was given up on it, so it passes over what WAL says about pages of the group.")
        .hint("Query the primary; or promote this server, with pg_ctl promote.")
        .fatal();
    }
}

/// Whether a page that is read may be for redo, which has WAL to pass that is about it: not for a
/// user. With asynchronous reads (PostgreSQL 18) other processes complete those of redo. If the
/// groups were not given up here, that WAL ends where the data directory is consistent.
pub(crate) fn may_be_for_redo() -> bool {
    let is_here = HERE.with(|here| here.is_some());
    process::in_recovery()
        && !process::serves_users()
        && (is_here
            || process::is_startup_process()
            || !shmem::get().is_some_and(|shared| shared.control.was_consistent()))
}

/// At server start, before the logs are read: reads the file.
pub(crate) fn begin(storage: &FileStorage) -> Result<GivenUp> {
    let given_up = read(storage)?;
    HERE.set(Some(given_up.clone()).filter(|given_up| !given_up.groups.is_empty()));
    Ok(given_up)
}

/// At server start: what is given up in the keystore of this log, which is the cluster's.
pub(crate) fn of_keystore(given_up: GivenUp, cluster: &Contents) -> GivenUp {
    let Position { keystore_id, scope, .. } = cluster.position;
    if given_up.keystore == keystore_id && scope.is_cluster() {
        return given_up;
    }
    HERE.set(None);
    GivenUp::default()
}

/// At server start: adds the ends of the groups to the cluster's log, if it lacks them. On return
/// they are durable.
pub(crate) fn end_groups(
    log: &mut Log<'_, FileStorage>,
    cluster: &mut Contents,
    given_up: &GivenUp,
) -> Result<()> {
    let state = state_of(cluster.records.iter().cloned())?;
    let missing = given_up.groups.iter().filter(|(group, _)| !state.has_ended(group.scope()));
    for (group, _) in missing.clone() {
        let name = state.key_group(*group).map(|known| known.name.clone()).unwrap_or_default();
        taken_in(&name).send(PgLogLevel::LOG);
    }
    let mut records = Vec::new();
    for &(group, at) in missing {
        records.push(Record::EndedKeyGroup { group, at });
        let (root, _) = key_place(group);
        if state.file(root).is_some() {
            records.push(root_destroyed(group, AFTER_ALL_WAL, at));
        }
    }
    add(log, cluster, records)
}

/// The tombstone of the key from which interim keys of a group are derived.
pub(crate) fn root_destroyed(group: KeyGroup, lsn: Lsn, at: i64) -> Record {
    let (file, through): (_, DataKeyVersion) = key_place(group);
    Record::Destroyed { file, through, cipher: 0, whole: false, lsn, at }
}

/// At server start: adds tombstones for the data keys that are under the keys of the groups. On
/// return they are durable.
pub(crate) fn destroy_keys(
    log: &mut Log<'_, FileStorage>,
    contents: &mut Contents,
    of_cluster: &OfCluster,
) -> Result<()> {
    let tombstones = of_cluster.tombstones(&contents.records);
    add(log, contents, tombstones)
}

fn add(
    log: &mut Log<'_, FileStorage>,
    contents: &mut Contents,
    records: Vec<Record>,
) -> Result<()> {
    for batch in records.chunks(BATCH) {
        fault::point("given_up.taking_in");
        log.append(batch).map_err(|e| keystore_failure(&e))?;
    }
    contents.position = log.position();
    contents.records.extend(records);
    Ok(())
}

/// When redo has ended, before users may read what it could not bring up to date: the files of the
/// groups, and those that have left one, are written, and dropped from shared buffers. Nobody has
/// used them until now ([`refuse_session`]). What redo could only blank is not dirty.
///
/// Then the pages under the lost keys are overwritten, so that they do not open under these keys
/// either. `pg_rewind` replaces the keystore by that of a server which still has the group, and
/// copies only pages that were changed since the timelines have parted; the others would be served
/// without the changes that were passed over. A page that was blanked is an error there.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn after_redo() -> Result<()> {
    if HERE.with(|here| here.is_none()) {
        return Ok(());
    }
    let lost = lost_files()?;
    buffers::flush_and_drop_files(&lost);
    fault::point("given_up.redone");
    overwrite_now(&lost)
}

/// At server start, when the logs have been read: overwrites such pages as well, because there may
/// be no redo: after a clean shutdown, or if no record follows the last checkpoint
/// (`PerformWalRecovery`, xlogrecovery.c). Redo could not bring any of them up to date.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn before_redo() -> Result<()> {
    if HERE.with(|here| here.is_some()) {
        overwrite_now(&lost_files()?)?;
    }
    Ok(())
}

fn lost_files() -> Result<Vec<RelFile>> {
    let files = shmem::required()?.directory.files()?.filter_map(std::result::Result::ok);
    Ok(files.map(|info| info.file).filter(|file| directory::is_lost(*file)).collect())
}

/// At a start. What cannot be overwritten keeps nobody out: [`announce`] tries again.
fn overwrite_now(lost: &[RelFile]) -> Result<()> {
    let done = overwrite(lost);
    shmem::required()?.control.set_has_given_up_pages(done.is_err());
    if let Err(report) = done {
        report.send(PgLogLevel::WARNING);
    }
    Ok(())
}

/// Overwrites what is there and can be written; the error of the first file of which that is not
/// so.
fn overwrite(lost: &[RelFile]) -> Result<()> {
    let mut all = Ok(());
    for &file in lost {
        let is_meant = |header: &[u8]| {
            page::version_of(header).is_some_and(|version| directory::is_lost_key(file, version))
        };
        let done = match relation_files::is_away(file) {
            true => Err(away(file)),
            false => relation_files::overwrite(file, is_meant),
        };
        all = all.and(done);
    }
    all
}

fn away(file: RelFile) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relation file {file} may have pages of a key group that was given up"),
    )
    .detail("The directory of its tablespace does not exist.")
    .hint("Mount it, or drop the tablespace.")
}

/// When the server can write WAL: logs the tombstones and the ends of the groups, and removes the
/// file. What a server knows already changes nothing.
pub(crate) fn announce() -> Result<()> {
    let storage = keystore_dir::storage()?;
    let Some(id) = shmem::required()?.control.keystore_id() else { return Ok(()) };
    let here = here();
    let mut given_up = read(&storage)?;
    if given_up.keystore != id || given_up.groups.is_empty() {
        return Ok(());
    }
    // The server has read the file before that was written. It runs, so nothing is to be given up.
    let (taken_in, too_late) =
        given_up.groups.into_iter().partition(|(group, _)| here.has(group.scope()));
    given_up.groups = taken_in;
    if !Vec::is_empty(&too_late) {
        came_too_late(&GivenUp { keystore: id, groups: too_late }).send(PgLogLevel::WARNING);
    }
    if given_up.groups.is_empty() {
        return storage.remove(NAME).map_err(|error| not_read(&error));
    }
    // What could not be overwritten when the server started. A source of `pg_rewind` that knows of
    // the end would not bring the keystore back under which such pages open.
    let control = &shmem::required()?.control;
    if control.has_given_up_pages() {
        overwrite(&lost_files()?)?;
        control.set_has_given_up_pages(false);
    }
    fault::point("given_up.announcing");
    let lock = KeystoreLock::acquire();
    let tombstones = tombstones()?;
    let mut changed = vec![Scope::CLUSTER];
    for (database, tombstones) in tombstones {
        let scope = Scope::database(database);
        persist::append_durably(&lock, scope, &tombstones, None)?;
        changed.push(scope);
    }
    let ends: Vec<_> = given_up.records().collect();
    wal::flush(persist::append_durably(&lock, Scope::CLUSTER, &ends, None)?);
    for scope in changed {
        if let Err(report) = compact::compact(&lock, scope) {
            report.send(PgLogLevel::WARNING);
        }
    }
    drop(lock);
    fault::point("given_up.announced");
    let operation = Operation {
        action: "give_up_key_group",
        by: "wal_worker",
        object: Some(batch::describe_all(&ends)),
        ..Operation::default()
    };
    audit::log_operation(&operation, "logged");
    storage.remove(NAME).map_err(|error| not_read(&error))?;
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        "pagevault: key groups that were given up have ended in WAL as well",
    )
    .detail(batch::describe_all(&ends))
    .send(PgLogLevel::LOG);
    Ok(())
}

/// The tombstones of keys that were destroyed while WAL was still to be replayed, by database.
fn tombstones() -> Result<BTreeMap<u32, Vec<Record>>> {
    let directory = &shmem::required()?.directory;
    let at = process::now();
    let mut all: BTreeMap<u32, Vec<Record>> = BTreeMap::new();
    for info in directory.files()? {
        let info = info?;
        let (Some(through), lsn) = directory.destroyed(info.slot)? else { continue };
        if lsn != AFTER_ALL_WAL {
            continue;
        }
        let file = info.file;
        let cipher = info.current.map_or(0, |(_, cipher)| cipher);
        let record = Record::Destroyed { file, through, cipher, whole: false, lsn, at };
        all.entry(file.database).or_default().push(record);
    }
    Ok(all)
}

fn read(storage: &FileStorage) -> Result<GivenUp> {
    let Some(bytes) = storage.read(NAME, 0, LIMIT).map_err(|error| not_read(&error))? else {
        return Ok(GivenUp::default());
    };
    GivenUp::decode(&bytes).map_err(|error| {
        Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("key file \"{NAME}\" is not readable: {error}"),
        )
        .hint("Run pagevault-keyring give-up-key-group again, or make this server anew. Do not take the file away, nor an older keystore: pages that recovery has passed over would be served.")
    })
}

fn taken_in(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("pagevault: key group \"{name}\" was given up, and has ended on this server"),
    )
    .detail("Its relations can never be read again. WAL about them is passed over.")
    .hint("DROP its relations; or TRUNCATE them, to use them again.")
}

fn came_too_late(given_up: &GivenUp) -> Report {
    let groups: Vec<_> = given_up.groups.iter().map(|(group, _)| group.scope().name()).collect();
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("{} was given up while the server was starting", groups.join(", ")),
    )
    .detail("The server has started with it, so it has not ended. Nothing was destroyed.")
}

fn not_read(error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read or write key file \"{NAME}\": {error}"),
    )
}
