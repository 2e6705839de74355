//! Reading the keystore when the server starts, and after a crash restart.

use std::borrow::{Borrow, Cow};
use std::collections::HashSet;

use pagevault_cipher::{KeyVersion, Lsn, Secret32};
use pagevault_keystore::directory::Directory;
use pagevault_keystore::former;
use pagevault_keystore::job::STOPPED_KEPT;
use pagevault_keystore::job_table::JobTable;
use pagevault_keystore::log::{self, Log, LogError, Position, Trust};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::wrappings::{self, OfCluster};
use pagevault_keystore::{Record, Scope, log::Contents};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::store::failures::{self, keystore_failure};
use super::store::persist::{self, state_of};
use super::store::{
    database_keys, escrow, former as former_files, given_up, presence, rewound, unsettled,
};
use super::usage::{authenticated, fips, interim};
use crate::audit;
use crate::keystore_dir;
use crate::pg::locks::KeystoreLock;
use crate::pg::mapping::{self, MemoryKind, Region};
use crate::pg::report::{Report, Result, internal};
use crate::pg::{clock, compat, control_file, guc, heap, process};
use crate::shmem::anchor::Anchor;
use crate::shmem::control::{self, Control};
use crate::shmem::counters::{self, Counters};
use crate::shmem::dropped::Dropped;
use crate::shmem::health::Health;
use crate::shmem::secrets::{self, Secrets};
use crate::shmem::traffic::Traffic;
use crate::shmem::trail::Trail;
use crate::shmem::wal::Wal;
use crate::shmem::writers::Writers;
use crate::shmem::written_over::{self, WrittenOver};
use crate::shmem::{self, Shared};

/// The state after reading the keystore.
pub(crate) struct Loaded {
    pub(crate) shared: &'static Shared,
    /// Whether recovery would fail without the keys.
    pub(crate) needs_keys: bool,
    /// Whether the server starts; false after a crash of one of its processes.
    pub(crate) first_start: bool,
}

/// Reads the keystore into shared memory; in the postmaster.
pub(crate) fn start() -> Result<Loaded> {
    let storage = keystore_dir::storage()?;
    let recovering = process::was_not_shut_down();
    rewound::settle()?;
    // Before anything is changed: reading the logs of a crashed server rewrites them.
    let scopes = log::scopes(&storage).map_err(|e| keystore_failure(&e))?;
    presence::require(&scopes)?;
    require_cluster_log(&scopes)?;
    let mut logs = read_logs(&storage, scopes, process::replays_wal())?;
    require_one_keystore(&logs)?;
    presence::note_all(&logs)?;
    require_keys_for_wal(&logs)?;
    if !process::replays_wal() {
        unsettled::require_none_missing(&storage, &logs)?;
    }
    escrow::import_restored(&storage, &mut logs)?;
    let first_start = shmem::get().is_none();
    let shared = if first_start { map(&logs)? } else { reset()? };
    fill(shared, &logs)?;
    drop(logs);
    heap::give_back();
    authenticated::page_images_at_start();
    interim::start()?;
    given_up::before_redo()?;
    fips::warn_of_refused();
    audit::begin(shared, first_start)?;
    let reads_sealed_wal = shared.wal.switches.is_sealed_from(process::redo_start());
    let needs_keys = recovering || reads_sealed_wal;
    Ok(Loaded { shared, needs_keys, first_start })
}

/// A log is rewritten after a clean shutdown too if it has former wrappings of database keys, or is
/// larger than this, in bytes, and has more obsolete records than that. Each rotation of a database
/// key makes a record obsolete for each data key, so over years there are more of them than others.
const LARGE: u64 = 64 << 10;
const OBSOLETE: usize = 1000;

fn read_logs(storage: &FileStorage, scopes: Vec<Scope>, recovering: bool) -> Result<Vec<Contents>> {
    let mut logs = Vec::new();
    let mut of_cluster: Option<OfCluster> = None;
    let mut given_up = given_up::begin(storage)?;
    // Only WAL knows whether changes that no checkpoint has settled took place.
    let trust =
        if recovering { Trust::Settled { redo: process::redo_start() } } else { Trust::All };
    let said = presence::said()?;
    for scope in scopes {
        if !recovering {
            refuse_torn(storage, scope)?;
        }
        let opened = Log::open(storage, scope, trust).map_err(|e| keystore_failure(&e))?;
        let Some((mut log, mut contents)) = opened else { continue };
        presence::refuse_older(&said, &contents.position)?;
        if contents.torn > 0 {
            cut_off(scope, contents.torn).send(PgLogLevel::LOG);
        }
        if contents.unbelieved > 0 {
            left_to_wal(scope, contents.unbelieved).send(PgLogLevel::LOG);
        }
        // Scopes ascend: the cluster's log, which contains the database keys, is first.
        let of_cluster = match &mut of_cluster {
            Some(of_cluster) => of_cluster,
            None => {
                given_up = given_up::of_keystore(given_up, &contents);
                given_up::end_groups(&mut log, &mut contents, &given_up)?;
                let logged = contents.position.logged;
                of_cluster.insert(OfCluster::new(&contents.records, logged, &given_up))
            }
        };
        if !given_up.groups.is_empty() {
            given_up::destroy_keys(&mut log, &mut contents, of_cluster)?;
        }
        if recovering || !given_up.groups.is_empty() {
            of_cluster.bring_into_line(&mut contents.records);
            let known = of_cluster.database_keys();
            let is_ahead = wrappings::has_unknown(&contents.records, known);
            let whole = is_ahead.then(|| contents.records.clone());
            if is_ahead {
                wrappings::leave_out_unknown(&mut contents.records, known);
            }
            rewrite(&mut log, &mut contents, whole.as_deref())?;
        } else {
            leave_out_obsolete(&mut log, &mut contents, !given_up.groups.is_empty())?;
        }
        logs.push(contents);
    }
    Ok(logs)
}

/// After a clean shutdown: no backup is in progress that could need older wrappings, so they are
/// removed.
///
/// `destroyed`: there may be keys in it that were destroyed now.
fn leave_out_obsolete(
    log: &mut Log<'_, FileStorage>,
    contents: &mut Contents,
    destroyed: bool,
) -> Result<()> {
    let has_former = destroyed || wrappings::has_former_of_database_keys(contents.records.iter());
    if !has_former && contents.position.end <= LARGE {
        return Ok(());
    }
    let (scope, count) = (contents.position.scope, contents.records.len());
    let state = state_of(contents.records.iter().cloned())?;
    if has_former || count > state.count(scope) + OBSOLETE {
        contents.records = state.records(scope);
        replace(log, &mut contents.position, &contents.records)?;
    }
    Ok(())
}

/// Refuses key files of databases without the cluster's. If the server went on, what is missing
/// would be lost permanently.
fn require_cluster_log(scopes: &[Scope]) -> Result<()> {
    // Scopes ascend, so the cluster's is the first.
    if scopes.first().is_none_or(|scope| scope.is_cluster()) {
        return Ok(());
    }
    Err(incomplete(format!("key file \"{}\" is missing", log::file_name(Scope::CLUSTER)))
        .detail("The directory pagevault/ of the data directory is incomplete or mixed. Nothing was changed."))
}

/// Refuses key files that do not belong together, as after an incomplete restore.
fn require_one_keystore(logs: &[Contents]) -> Result<()> {
    let Some(first) = logs.first() else { return Ok(()) };
    let is_other = |log: &&Contents| log.position.keystore_id != first.position.keystore_id;
    let Some(other) = logs.iter().find(is_other) else { return Ok(()) };
    let name = log::file_name(other.position.scope);
    Err(incomplete(format!("key file \"{name}\" is of another keystore"))
        .detail("The directory pagevault/ of the data directory is incomplete or mixed. No key was changed."))
}

fn incomplete(problem: String) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, problem)
        .hint("Restore the directory pagevault/ from the backup that the data directory is from.")
}

/// Refuses a keystore from which keys were forgotten that the data directory, or WAL which is
/// replayed from there on, may need: of files that were dropped later. That is a key file of a
/// later time than the data directory, a backup that took longer than `pagevault.keep_former_keys`,
/// or a `pg_rewind` to something older. Also after a clean shutdown: the directory may be an old
/// one. Not during pg_upgrade, which sets the address of the new cluster at the end.
fn require_keys_for_wal(logs: &[Contents]) -> Result<()> {
    if process::is_binary_upgrade() {
        return Ok(());
    }
    let start = control_file::replayed_from();
    for log in logs {
        let forgotten = log.records.iter().filter_map(|record| match record {
            Record::KeysForgotten { by, .. } => Some(*by),
            _ => None,
        });
        let Some(by) = forgotten.max().filter(|by| *by > start) else { continue };
        let name = log::file_name(log.position.scope);
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("key file \"{name}\" is of a later time than the data directory"),
        )
        .detail(format!("The data directory is of {start}, and WAL is replayed from there on. Keys that were not needed any more at {by} are forgotten: of files that were dropped, or replaced by later keys. Here they may be needed. Nothing was changed."))
        .hint("Restore the directory pagevault/ of the data directory from the same backup. After pg_rewind, or for a backup that took longer than pagevault.keep_former_keys, make a new copy of the server."));
    }
    Ok(())
}

/// After a clean shutdown no write is unfinished, and no WAL would bring back what is cut off. So
/// an unreadable end is damage. Reads only.
fn refuse_torn(storage: &FileStorage, scope: Scope) -> Result<()> {
    let torn = persist::read_log(storage, scope)?.map_or(0, |contents| contents.torn);
    if torn == 0 {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!(
            "key file \"{}\" is damaged: its last {torn} bytes are not readable",
            log::file_name(scope)
        ),
    )
    .detail("The server was shut down cleanly, so this is not an unfinished write. Nothing was changed.")
    .hint(failures::DAMAGED))
}

/// Rewrites a log. Required after a crash: if an fsync had failed before, the kernel may go on
/// returning bytes that are not on the disk, and report success; recovery would believe them and
/// add nothing.
///
/// `ahead`: all records of a log that contains records that cannot be interpreted yet; all of them
/// are kept.
fn rewrite(
    log: &mut Log<'_, FileStorage>,
    contents: &mut Contents,
    ahead: Option<&[Record]>,
) -> Result<()> {
    let scope = contents.position.scope;
    contents.records = fold(scope, std::mem::take(&mut contents.records))?;
    let Some(all) = ahead else {
        return replace(log, &mut contents.position, &contents.records);
    };
    let folded = fold(scope, all.iter().cloned())?;
    replace(log, &mut contents.position, &wrappings::with_older(&folded, all))
}

/// Replaces the contents of a log by these records.
fn replace(
    log: &mut Log<'_, FileStorage>,
    position: &mut Position,
    records: &[impl Borrow<Record>],
) -> Result<()> {
    match log.compact(records) {
        Ok(()) => *position = log.position(),
        // There may be no room for a second copy. The old log is unchanged, and almost certainly
        // good.
        Err(error @ LogError::Io { .. }) => keystore_failure(&error).send(PgLogLevel::WARNING),
        Err(error) => return Err(keystore_failure(&error)),
    }
    Ok(())
}

/// The records of `scope`, without those that later ones supersede.
fn fold(scope: Scope, records: impl IntoIterator<Item = Record>) -> Result<Vec<Record>> {
    Ok(state_of(records)?.records(scope))
}

fn cut_off(scope: Scope, bytes: u64) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!(
            "pagevault: cut {bytes} bytes of an unfinished write off \"{}\"",
            log::file_name(scope)
        ),
    )
}

fn left_to_wal(scope: Scope, bytes: u64) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!(
            "pagevault: cut {bytes} bytes off \"{}\" that no checkpoint has settled",
            log::file_name(scope)
        ),
    )
    .detail(format!("What of them has happened is in WAL, and is replayed. Until recovery has ended they stay in \"{}\".", log::unsettled::name(scope)))
}

/// First start: maps the memory that every process inherits.
fn map(logs: &[Contents]) -> Result<&'static Shared> {
    let existing = logs.iter().flat_map(|log| &log.records);
    let existing =
        existing.filter(|r| matches!(r, Record::DataKey { .. } | Record::Destroyed { .. })).count();
    // A server that was a standby has had room for more: it goes on.
    let most = match guc::max_data_keys() {
        most if existing > most => existing.saturating_add(most),
        most => most,
    };
    let most = u32::try_from(most)
        .map_err(|_| internal("the keystore holds too many data keys".into()))?;
    let capacity = persist::capacity_for(most);
    // Scopes ascend: the cluster's log, which contains the database keys, is first.
    let database_keys =
        logs.first().map_or(0, |cluster| wrappings::database_keys(&cluster.records).len());
    let directory_memory = map_region(Directory::words_needed(capacity), MemoryKind::Sparse)?;
    let directory = Directory::init_zeroed(directory_memory.entries, capacity)?;
    let secrets =
        Secrets::new(map_region(secrets::slots_needed(database_keys), MemoryKind::Secret)?);
    let temporary = Secret32::random()?;
    secrets.set_temporary(&temporary);
    let processes = compat::most_processes();
    let ranges = logs.iter().flat_map(|log| &log.records);
    let ranges = ranges.filter(|record| matches!(record, Record::FormerFiles(_))).count();
    let ranges: Region<(), _> =
        map_region(former::Table::words_needed(ranges + capacity as usize), MemoryKind::Sparse)?;
    // Unfinished jobs concern files that have keys, or will have. There are few finished jobs, and
    // those that were stopped have room of their own.
    let jobs = logs.iter().flat_map(|log| &log.records);
    let jobs = jobs.filter(|record| matches!(record, Record::Job { .. })).count();
    let most_jobs = jobs + capacity as usize + STOPPED_KEPT * logs.len();
    let jobs: Region<(), _> = map_region(JobTable::words_needed(most_jobs), MemoryKind::Sparse)?;
    let health: Region<Health> = map_region(0, MemoryKind::Sparse)?;
    let trail: Region<Trail> = map_region(0, MemoryKind::Sparse)?;
    let traffic: Region<Traffic> = map_region(0, MemoryKind::Sparse)?;
    let anchor: Region<Anchor> = map_region(0, MemoryKind::Sparse)?;
    let control =
        Control::new(map_region(control::entries_needed(logs.len()), MemoryKind::Sparse)?);
    control.set_most_data_keys(most);
    Ok(shmem::publish(Shared {
        directory,
        directory_memory,
        secrets,
        control,
        health: health.head,
        wal: Wal::new(map_region(0, MemoryKind::Sparse)?),
        counters: Counters::new(
            map_region(counters::slots_needed(processes), MemoryKind::Sparse)?,
            clock::choose(),
        ),
        writers: Writers::new(map_region(processes, MemoryKind::Sparse)?),
        jobs: JobTable::new(jobs.entries, most_jobs),
        former: former::Table::new(ranges.entries),
        dropped: Dropped::new(map_region(capacity as usize, MemoryKind::Sparse)?),
        written_over: WrittenOver::new(map_region(written_over::PLACES, MemoryKind::Sparse)?),
        trail: trail.head,
        traffic: traffic.head,
        anchor: anchor.head,
    }))
}

fn map_region<H: mapping::Shared, E: mapping::Shared>(
    entries: usize,
    kind: MemoryKind,
) -> Result<Region<H, E>> {
    Region::map(entries, kind).map_err(|error| {
        let size = Region::<H, E>::size(entries).div_ceil(1 << 20);
        Report::new(
            PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY,
            format!("could not map {size} MiB for pagevault's key directory: {error}"),
        )
        .hint("Lower pagevault.max_data_keys.")
    })
}

/// Crash restart: a process may have died while writing, so the directory is rebuilt.
fn reset() -> Result<&'static Shared> {
    let shared = shmem::required()?;
    let capacity = shared.directory.counts()?.capacity;
    let not_cleared = |error: std::io::Error| internal(format!("could not clear memory: {error}"));
    shared.directory_memory.clear().map_err(not_cleared)?;
    Directory::init_zeroed(shared.directory_memory.entries, capacity)?;
    let (most, was_standby) = (shared.control.most_data_keys(), shared.control.was_standby());
    shared.control.reset().map_err(not_cleared)?;
    shared.control.set_most_data_keys(most);
    if was_standby {
        shared.control.set_was_standby();
    }
    shared.wal.reset().map_err(not_cleared)?;
    shared.jobs.reset();
    shared.former.clear();
    shared.dropped.reset().map_err(not_cleared)?;
    shared.writers.reset().map_err(not_cleared)?;
    shared.written_over.reset().map_err(not_cleared)?;
    Ok(shared)
}

fn fill(shared: &Shared, logs: &[Contents]) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let mut left_out = Vec::new();
    for log in logs {
        shared.control.set_keystore_id(&log.position.keystore_id);
        shared
            .control
            .set_position(&log.position)
            .map_err(|control::TooManyLogs| failures::recovery_needs_room("key file"))?;
        let (applied, without_room) = announce(shared, &log.records);
        persist::apply(&lock, &applied)?;
        left_out.extend(without_room);
    }
    announce_needed(shared, &left_out)?;
    let from = if process::replays_wal() { control_file::replayed_from() } else { Lsn(u64::MAX) };
    former_files::end_all(&lock, from)
}

/// Announces the database keys of these records. Those for which there is no room are returned, and
/// the other records. A crash restart keeps the table of these keys, from which versions may have
/// been taken that the key file has ([`database_keys::make_room`]).
fn announce<'a>(
    shared: &Shared,
    records: &'a [Record],
) -> (Cow<'a, [Record]>, Vec<(Scope, KeyVersion)>) {
    let key_of = |record: &Record| match record {
        Record::DatabaseKey { scope, version, .. } => Some((*scope, *version)),
        _ => None,
    };
    let has_no_room = |(scope, version): &_| shared.secrets.announce(*scope, *version).is_err();
    let mut left_out: Vec<_> = records.iter().filter_map(key_of).filter(has_no_room).collect();
    if left_out.is_empty() {
        return (Cow::Borrowed(records), left_out);
    }
    let is_in = |record: &&Record| !key_of(record).is_some_and(|key| left_out.contains(&key));
    let applied = records.iter().filter(is_in).cloned().collect();
    // Of a group that has ended nothing is in use.
    let ended = records.iter().filter_map(|record| match record {
        Record::EndedKeyGroup { group, .. } => Some(group.scope()),
        _ => None,
    });
    let ended: HashSet<Scope> = ended.collect();
    left_out.retain(|(scope, _)| !ended.contains(scope));
    (Cow::Owned(applied), left_out)
}

/// Announces those of them that are in use.
fn announce_needed(shared: &Shared, left_out: &[(Scope, KeyVersion)]) -> Result<()> {
    if left_out.is_empty() {
        return Ok(());
    }
    let wrapping = database_keys::wrapping()?;
    let newest = shared.secrets.newest_of_each();
    let is_needed = |(scope, version): &&_| {
        wrapping.contains(&(*scope, *version)) || newest.get(scope) < Some(version)
    };
    for (scope, version) in left_out.iter().filter(is_needed) {
        if shared.secrets.announce(*scope, *version).is_err() {
            database_keys::make_room()?;
            let announced = shared.secrets.announce(*scope, *version);
            announced.map_err(|secrets::Full| failures::recovery_needs_room("database key"))?;
        }
    }
    Ok(())
}
