//! Recording changes of keys. WAL is authoritative; checkpoints bring the key files up to date.
//!
//! A change is *staged* at the end of the file, which proves that there is room; then logged in
//! WAL; then applied to the shared directory, from which other processes use it. A server that
//! replays WAL after a crash believes only what is *settled* in the files, which is durable in WAL.
//! It gets the rest from WAL, or never, like standbys and archives (`pagevault_keystore::log`). So
//! no server ever uses a key that WAL does not bring to the others.
//!
//! Data keys of new files are durable in WAL before a page that needs them is written to disk, and
//! are settled by the next checkpoint (`hooks/sync.rs`): an encrypted table costs no fsync of its
//! own. Keys that may be needed before they are replayed (database keys, WAL keys, keys of files
//! that have pages already) are settled before they are used. Redo of these records:
//! [`crate::keys::redo`].

use std::time::Duration;

use pagevault_cipher::secret::fill_random;
use pagevault_keystore::directory::MAX_CAPACITY;
use pagevault_keystore::job_table;
use pagevault_keystore::log::{self, Contents, Log, LogError, Position, Settle};
use pagevault_keystore::state::State;
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::wal as wal_keys;
use pagevault_keystore::{FormatError, Lsn, Record, Scope, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::failures::{SyncFailure, keystore_failure, recovery_needs_room};
use super::{database_keys, directory, former, presence};
use crate::pg::checkpoint::CheckpointDelay;
use crate::pg::locks::{KeystoreLock, ServerLock};
use crate::pg::report::{Report, Result, internal};
use crate::pg::{checkpoint, critical, process, wal};
use crate::shmem::{self, Shared, control, secrets};
use crate::{fault, keystore_dir};

/// Entries in the key directory that are reserved for recovery: keys recorded before a crash must
/// fit again after it.
const RESERVED_KEYS: u32 = 1024;

/// The size of a key directory in which there may be this many keys for new ones to be made. A
/// standby forgets keys by its own clock, which begins anew with each start, and not while a base
/// backup is taken from it. So it may have many more keys than its primary, and has room for twice
/// as many.
pub(crate) fn capacity_for(most_data_keys: u32) -> u32 {
    most_data_keys.saturating_mul(2).saturating_add(RESERVED_KEYS).min(MAX_CAPACITY)
}

/// How many keys there may be for new ones to be made. A server that was promoted has had room for
/// more.
pub(crate) fn most_data_keys(shared: &Shared, capacity: u32) -> u32 {
    match shared.control.was_standby() {
        true => capacity.saturating_sub(RESERVED_KEYS),
        false => shared.control.most_data_keys(),
    }
}

/// Refuses to create keys for which there is no room. Checked before anything is written, because
/// everything written is read at every start, and must fit then.
pub(crate) fn require_room(scope: Scope, records: &[Record]) -> Result<()> {
    let shared = shmem::required()?;
    if shared.control.position(scope).is_none() && !shared.control.has_room() {
        return Err(no_room("key files", "That of a dropped database is kept for old backups."));
    }
    // All records of one change are versions of one key, so only one of them is new.
    let is_new = |record: &Record| match record {
        Record::DatabaseKey { scope, version, .. } => {
            shared.secrets.state(*scope, *version).is_none()
        }
        _ => false,
    };
    if records.iter().any(is_new) && !shared.secrets.has_room() {
        database_keys::make_room()?;
    }
    if records.iter().any(is_new) && !shared.secrets.has_room() {
        return Err(no_room(
            "database keys",
            "Each version of a database key counts, also those of dropped databases: old backups need them.",
        ));
    }
    let jobs = records.iter().filter(|record| matches!(record, Record::Job { .. })).count();
    if jobs > 0 && !shared.jobs.has_room(jobs) {
        return Err(no_room(
            "rekey jobs",
            "There are as many that are not done as there may be data keys.",
        ));
    }
    let counts = shared.directory.counts()?;
    let limit = most_data_keys(shared, counts.capacity) as usize;
    let new = records.iter().filter(|record| match record {
        Record::DataKey { file, version, .. } => !directory::has_key(*file, *version),
        _ => false,
    });
    // A file whose keys were destroyed has an entry but no key.
    let entries = counts.keys.max(counts.files) as usize;
    let new = new.count();
    if new == 0 || entries + new <= limit {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("all {limit} data keys are in use"),
    )
    .detail(
        "Keys of dropped relations count until they are forgotten (pagevault.keep_former_keys).",
    )
    .hint(match shared.control.was_standby() {
        true => "Restart the server: at its start it reserves more room than is in use. Raise pagevault.max_data_keys.",
        false => "Raise pagevault.max_data_keys and restart the server.",
    }))
}

/// Whether the keystore has or had keys of a database: its own database key, or data keys of its
/// files.
pub(crate) fn has_keys_of(database: Scope) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let shared = shmem::required()?;
    let has_log = shared.control.position(database).is_some();
    Ok(has_log || shared.secrets.newest(database).is_some())
}

/// Adds records to the log of `scope`, to WAL and to the directory. Returns the WAL record's end.
///
/// The first argument proves that the lock is held: positions and directory have one writer at a
/// time.
pub(crate) fn append(lock: &KeystoreLock, scope: Scope, records: &[Record]) -> Result<Lsn> {
    append_as(lock, scope, records, Settle::of(records), None)
}

/// Like [`append`], but the records are durable in WAL and file before they are used: for a key of
/// an existing file, some pages of which are written without waiting for WAL, and may be read
/// before WAL brings the key. `delay` ends as soon as they are in WAL.
pub(crate) fn append_durably(
    lock: &KeystoreLock,
    scope: Scope,
    records: &[Record],
    delay: Option<CheckpointDelay>,
) -> Result<Lsn> {
    append_as(lock, scope, records, Settle::Now, delay)
}

fn append_as(
    lock: &KeystoreLock,
    scope: Scope,
    records: &[Record],
    settle: Settle,
    delay: Option<CheckpointDelay>,
) -> Result<Lsn> {
    if process::in_recovery() {
        return Err(internal("keys cannot be changed during recovery".to_owned()));
    }
    require_room(scope, records)?;
    shmem::required()?.directory.check(records)?;
    let batch = batch::encode(records).map_err(|e| internal(format!("keystore: {e}")))?;
    let mut checkpoints_held = None;
    let staged = stage(lock, scope, None, |log| {
        // A server that starts from a checkpoint after this address believes the batch, so no such
        // checkpoint may end before the batch is logged. Sync requests alone do not ensure that,
        // because they are ignored if fsync is off.
        checkpoints_held = Some(ServerLock::ReplicationSlotAllocation.acquire());
        log.stage_batch(&batch, wal::end())
    })?;
    fault::point("keys.in_file");
    let lsn = critical::section(|| {
        // No way back from here: a change in WAL is final.
        let lsn = wal::insert_keys(scope, &staged.keystore_id, &batch);
        remember(&staged, lsn).map(|()| lsn)
    })?;
    drop((checkpoints_held, delay));
    fault::point("keys.in_wal");
    if settle == Settle::Now {
        settle_now(lock, scope);
    }
    apply_logged(lock, records);
    Ok(lsn)
}

/// Adds records to the cluster's log, and waits until they are durable in WAL.
pub(crate) fn write_cluster(records: &[Record]) -> Result<()> {
    let end = append(&KeystoreLock::acquire(), Scope::CLUSTER, records)?;
    wal::flush(end);
    Ok(())
}

/// Adds a batch to the end of a log file, where it is not valid yet. Creates the log, and first of
/// all the keystore, if necessary. If [`remember`] is called, the next checkpoint settles the
/// batch. Returns the new end of the log.
pub(crate) fn stage(
    lock: &KeystoreLock,
    scope: Scope,
    id_from_wal: Option<[u8; 16]>,
    add: impl FnOnce(&mut Log<'_, FileStorage>) -> std::result::Result<(), LogError>,
) -> Result<Position> {
    let shared = shmem::required()?;
    let storage = keystore_dir::storage()?;
    let id = match shared.control.keystore_id().or(id_from_wal) {
        Some(id) => id,
        None => new_keystore_id()?,
    };
    let known = shared.control.position(scope);
    let is_new = known.is_none();
    let mut log = match known {
        Some(position) => Log::resume(&storage, position),
        None => {
            presence::require_new(scope)?;
            Log::create(&storage, id, scope, &[]).map_err(|e| keystore_failure(&e))?
        }
    };
    shared.control.set_keystore_id(&id);
    let remembered = shared.control.set_position(&log.position());
    remembered.map_err(|control::TooManyLogs| recovery_needs_room("key file"))?;
    // The next start notes what this has not.
    if is_new {
        presence::note(lock, scope, wal::reached())?;
    }
    // First of all: a checkpoint with a redo pointer after the address at which the batch is staged
    // waits for the lock, and then finds the batch logged.
    checkpoint::request_sync(scope);
    add(&mut log).map_err(|e| keystore_failure(&e))?;
    Ok(log.position())
}

/// Makes a staged batch valid: its WAL record, which ends at `lsn`, is inserted.
pub(crate) fn remember(staged: &Position, lsn: Lsn) -> Result<()> {
    let control = &shmem::required()?.control;
    control.set_logged(lsn);
    control.set_position(staged).map_err(|control::TooManyLogs| recovery_needs_room("key file"))
}

/// How often it is tried again to settle a log at once, and the pause before.
const TRIED_AGAIN: u32 = 20;
const BEFORE_NEXT_TRY: Duration = Duration::from_millis(50);

/// Settles a log at once, under the lock. WAL has the batch, so there is no way back. An error that
/// leaves the log as it was may pass (too many open files, a full disk), so it is tried again. If
/// the file cannot get the batch, or it is unknown whether the disk has it ([`keystore_failure`]),
/// a PANIC: the next start replays it.
pub(crate) fn settle_now(_lock: &KeystoreLock, scope: Scope) {
    // The log with its mark: an attempt that has got so far is continued.
    let mut marked = None;
    let mut settle = || -> Result<()> {
        let control = &shmem::required()?.control;
        let Some(staged) = control.position(scope) else { return Ok(()) };
        wal::flush(control.logged());
        let storage = keystore_dir::storage()?;
        let mut log = Log::resume(&storage, marked.unwrap_or(staged));
        let sync = |log: &Log<'_, FileStorage>| if process::fsync() { log.sync() } else { Ok(()) };
        sync(&log).map_err(|e| keystore_failure(&e))?;
        if marked.is_none() && log.append_settled(&staged).map_err(|e| keystore_failure(&e))? {
            marked = Some(log.position());
            sync(&log).map_err(|e| keystore_failure(&e))?;
        }
        control
            .set_position(&log.position())
            .map_err(|_| internal("a key file has lost its place".to_owned()))
    };
    for _ in 0..TRIED_AGAIN {
        if settle().is_ok() {
            return;
        }
        process::close_idle_files();
        // Not a wait for events: the lock is held, and the change is not complete.
        std::thread::sleep(BEFORE_NEXT_TRY);
    }
    if let Err(report) = settle() {
        report
            .detail("The change is in WAL, and the key file could not take it in. The server restarts, and takes it from WAL.")
            .send(PgLogLevel::PANIC);
    }
}

/// [`apply`] for records that were checked and are in WAL.
pub(crate) fn apply_logged(lock: &KeystoreLock, records: &[Record]) {
    if let Err(report) = former::apply(lock, records) {
        report.send(PgLogLevel::PANIC);
    }
    for (left, record) in (1..=records.len() as u32).rev().zip(records) {
        fault::point_of("keys.remaining", left);
        if let Err(report) = apply_one(record) {
            report.send(PgLogLevel::PANIC);
        }
    }
}

fn new_keystore_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    fill_random(&mut id)?;
    Ok(id)
}

/// Applies records, which are already written, to the directory and the list of database keys.
pub(crate) fn apply(lock: &KeystoreLock, records: &[Record]) -> Result<()> {
    former::apply(lock, records)?;
    records.iter().try_for_each(apply_one)
}

/// Except for what [`former::apply`] does.
fn apply_one(record: &Record) -> Result<()> {
    let shared = shmem::required()?;
    if let Record::DatabaseKey { scope, version, .. } = record {
        let announced = shared.secrets.announce(*scope, *version);
        announced.map_err(|secrets::Full| recovery_needs_room("database key"))?;
    }
    shared.directory.apply(record).map_err(|e| {
        Report::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, e.to_string())
            .hint("Raise pagevault.max_data_keys and restart the server.")
    })?;
    shared.jobs.apply(record).map_err(|job_table::Full| recovery_needs_room("rekey job"))?;
    match record {
        Record::DataKey { file, version, .. } if wal_keys::is_key_place(*file) => {
            if wal_keys::version_at(*file, *version).is_some() {
                shared.wal.set_has_keys();
            }
        }
        Record::DataKey { file, .. } => {
            shared.control.set_sealed();
            if let Some(slot) = shared.directory.find(*file)? {
                shared.dropped.clear(slot);
            }
        }
        Record::Destroyed { .. } => {
            // Pages sealed under the key still exist, and must be distinguished from plaintext.
            shared.control.set_sealed();
            shared.control.count_destruction();
        }
        Record::KeyGroup { .. } => shmem::count_label_change(),
        Record::EndedKeyGroup { group, .. } => {
            shared.secrets.forget_scope(group.scope());
            shmem::count_label_change();
        }
        Record::WalSwitch(switch) => {
            shared.wal.switches.add(*switch).map_err(|full| internal(full.to_string()))?;
        }
        _ => {}
    }
    Ok(())
}

fn no_room(what: &str, detail: &str) -> Report {
    let message = format!("there is no room for more {what}");
    Report::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, message)
        .detail(detail)
        .hint("Restart the server: at its start it reserves more room than is in use.")
}

/// The path of a log in messages.
pub(crate) fn path_of(scope: Scope) -> String {
    format!("{}/{}", keystore_dir::NAME, log::file_name(scope))
}

/// Settles the log of a scope; for the checkpointer, and others that can try again. Returns the
/// address before which all WAL records about it are in the log, durably.
pub(crate) fn settle(scope: Scope) -> std::result::Result<Lsn, SyncFailure> {
    let unavailable = SyncFailure::Refused;
    let control = &shmem::required().map_err(unavailable)?.control;
    let storage = keystore_dir::storage().map_err(unavailable)?;
    let (position, logged) = {
        let _lock = KeystoreLock::acquire_absorbing_requests();
        (control.position(scope), control.logged())
    };
    let Some(before) = position else { return Ok(Lsn::INVALID) };
    if before.is_settled() {
        return Ok(before.logged);
    }
    fault::point("keys.settling");
    // Settled records must be in WAL: in recovery, before the address that this server must replay
    // to be consistent.
    wal::flush(logged);
    Log::resume(&storage, before).sync()?;
    let marked = {
        let _lock = KeystoreLock::acquire_absorbing_requests();
        let Some(now) = control.position(scope) else { return Ok(Lsn::INVALID) };
        let mut log = Log::resume(&storage, now);
        let marked = log.append_settled(&before)?;
        // The entry exists, so this cannot fail.
        let _ = control.set_position(&log.position());
        marked
    };
    if marked {
        Log::resume(&storage, before).sync()?;
    }
    Ok(before.logged)
}

/// The state of the cluster's log: providers and database keys.
pub(crate) fn cluster_state(lock: &KeystoreLock) -> Result<State> {
    log_state(lock, Scope::CLUSTER)
}

/// Like [`cluster_state`], taking the lock while the log is read.
pub(crate) fn current_cluster_state() -> Result<State> {
    cluster_state(&KeystoreLock::acquire())
}

/// The state of a log as it is in the file at this moment, without the lock.
pub(crate) fn state_at_hand(scope: Scope) -> Result<State> {
    let records = read_log(&keystore_dir::storage()?, scope)?.map(|contents| contents.records);
    state_of(records.unwrap_or_default())
}

/// The contents of a log, if it exists. Reads only: does not sync, or cut off an unreadable end.
pub(crate) fn read_log(storage: &FileStorage, scope: Scope) -> Result<Option<Contents>> {
    read(storage, scope, log::replay)
}

pub(super) fn read<T>(
    storage: &FileStorage,
    scope: Scope,
    replay: impl Fn(&[u8], Scope) -> std::result::Result<T, FormatError>,
) -> Result<Option<T>> {
    let name = log::file_name(scope);
    let bytes = storage.read(&name, 0, log::MAX_LOG).map_err(|source| {
        keystore_failure(&LogError::Io { name: name.clone(), action: "read", source })
    })?;
    let contents = bytes.map(|bytes| replay(&bytes, scope)).transpose();
    contents.map_err(|error| keystore_failure(&LogError::Format { name, error }))
}

/// The state of a log.
pub(crate) fn log_state(_lock: &KeystoreLock, scope: Scope) -> Result<State> {
    state_at_hand(scope)
}

/// The state that these records lead to.
pub(crate) fn state_of(records: impl IntoIterator<Item = Record>) -> Result<State> {
    State::from_records(records)
        .map_err(|e| Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, format!("keystore: {e}")))
}
