//! Data keys: creating them, wrapping and rewrapping them with database keys.

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::wrap::{self, WrapError, WrapKey};
use pagevault_cipher::{CipherId, DataKey, DataKeyVersion, KeyVersion, Lsn, interim};
use pagevault_core::policy::Sealing;
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::{KeyGroup, Record, RelFile, Scope, data_key_aad, log, state};
use pgrx::PgSqlErrorCode;

use super::{authenticated, cache, fips, refused, withheld};
use crate::keys::store::failures;
use crate::keys::store::persist::{self, append, append_durably};
use crate::keys::store::{directory, former, key_groups};
use crate::pg::checkpoint::CheckpointDelay;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{buffers, process, relation_files, wal};
use crate::writers::{self, Activity};
use crate::{keystore_dir, shmem};

/// The scope whose database key wraps new data keys of a database: the database itself if it has a
/// key, otherwise the cluster.
pub(crate) fn wrapping_scope(database: u32) -> Result<Scope> {
    let own = Scope::database(database);
    let has_own = shmem::required()?.secrets.newest(own).is_some();
    Ok(if has_own { own } else { Scope::CLUSTER })
}

/// The database key that wraps new data keys of a database: scope and version. An error if neither
/// the database nor the cluster has a master key.
pub(crate) fn require_master_key(database: u32) -> Result<(Scope, KeyVersion)> {
    let scope = wrapping_scope(database)?;
    let newest = shmem::required()?.secrets.newest(scope);
    newest.map(|version| (scope, version)).ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "cannot encrypt: no master key is set",
        )
        .detail("Neither this database nor the cluster has a master key.")
        .hint("Use pagevault.add_provider() and then pagevault.set_cluster_master_key() or pagevault.set_database_master_key().")
    })
}

/// The database key that wraps new data keys of a key group. An error if it has no master key, or
/// is being shredded.
pub(crate) fn require_group_key(group: KeyGroup) -> Result<(Scope, KeyVersion)> {
    let scope = group.scope();
    if let Some((_, pid)) = key_groups::being_shredded().filter(|(other, _)| *other == group) {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("cannot encrypt: {} is being shredded", key_groups::describe(scope)),
        )
        .detail(format!("Process {pid} destroys its relations and its key.")));
    }
    let newest = shmem::required()?.secrets.newest(scope);
    newest.map(|version| (scope, version)).ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("cannot encrypt: {} has no master key", key_groups::describe(scope)),
        )
        .hint("Set one with pagevault.set_key_group_master_key().")
    })
}

/// The scope whose database key wraps a data key of a file that is encrypted so.
fn scope_for(file: RelFile, sealing: Sealing) -> Result<Scope> {
    match sealing.group {
        Some(group) => Ok(group.scope()),
        None => wrapping_scope(file.database),
    }
}

/// Calls `f` with an expanded database key; see
/// [`Secrets::with`](crate::shmem::secrets::Secrets::with).
pub(crate) fn with_wrap_key<R>(
    scope: Scope,
    version: KeyVersion,
    f: impl FnOnce(&WrapKey) -> Result<R>,
) -> Result<R> {
    let secrets = &shmem::required()?.secrets;
    secrets.with(scope, version, |key| f(&WrapKey::new(key))).unwrap_or_else(|| Err(locked(scope)))
}

/// The report for a database key that is known but not unwrapped.
pub(crate) fn locked(scope: Scope) -> Report {
    withheld::note();
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the key of {} is locked", key_groups::describe(scope)),
    )
    .detail("Its key provider did not answer or refused when the server started.")
    .hint("See pagevault.status for the cause. The server keeps trying; pagevault.unlock() tries again now.")
}

/// Wraps a data key and proves that it can be unwrapped. Within [`without_trace`].
pub(crate) fn wrap_data_key(
    key: &DataKey,
    wrap_key: &WrapKey,
    file: RelFile,
    version: DataKeyVersion,
) -> Result<Vec<u8>> {
    let mut wrapped = vec![0; key.expose().len() + wrap::OVERHEAD];
    let aad = data_key_aad(file, version, key.cipher() as u8);
    if let Err(WrapError::Random(error)) = wrap::wrap(wrap_key, &aad, key.expose(), &mut wrapped) {
        return Err(error.into());
    }
    let proven = cache::open_data_key(wrap_key, file, version, key.cipher(), &wrapped)
        .is_some_and(|again| again.is_same(key));
    if proven { Ok(wrapped) } else { Err(internal("a data key could not be wrapped".into())) }
}

/// Creates a data key of a new version for a file and writes its pages under it from now on.
/// Returns the end of the WAL record. Pages without an LSN (free space map, unlogged relations) do
/// not wait for that record, so a file that already has pages needs [`next_version`].
pub(crate) fn new_version(file: RelFile, sealing: Sealing) -> Result<Lsn> {
    make_version(file, sealing, Pages::None, |lock, scope, records, _| append(lock, scope, records))
}

/// The pages of a file whose key changes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// None: the file is new. If it is encrypted, it contains sealed pages only from now on.
    None,
    /// Pages that may be torn after a crash.
    Logged,
    /// Pages of an unlogged relation, which is empty after a crash.
    Unlogged,
}

impl Pages {
    /// The record that pages are being rewritten from `phase` on; see
    /// [`page::io::target_over`](crate::page::io::target_over).
    fn rewriting(self, file: RelFile, phase: Phase) -> Option<Record> {
        (self == Pages::Logged).then_some(Record::Rewriting { file, phase, done: false })
    }

    /// Writes dirty pages under the state before. So a page that is written under the new one was
    /// changed after the last checkpoint record that may precede the switch in WAL, and if a
    /// timeline branches off in between, `pg_rewind` copies that page from the source, whose
    /// keystore does not know the new key (`extractPageMap`, parsexlog.c, reads WAL from that
    /// record, not from its redo pointer). Redo does the same (`page::proven`).
    ///
    /// The pages are synced, because the switch is durable: recovery after a power cut would write
    /// those that were lost under the new state.
    ///
    /// # Errors
    /// If a process takes too long to write a page of the file. Raises ERROR if this session is
    /// cancelled.
    fn before_switch(self, file: RelFile) -> Result<Option<CheckpointDelay>> {
        if self != Pages::Logged {
            return Ok(None);
        }
        // Flushing would wait for it without being cancelled.
        writers::await_others(Activity::Writing, Some(file.relation))?;
        // What is written already need not be synced while checkpoints wait.
        buffers::sync_files(&[file]);
        let delay = CheckpointDelay::begin();
        buffers::flush_and_sync_files(&[file]);
        Ok(Some(delay))
    }
}

/// The first version that a file can have after `last` and all that it has had, here or elsewhere:
/// no version must mean two keys.
pub(super) fn unused_version(
    lock: &KeystoreLock,
    file: RelFile,
    last: Option<DataKeyVersion>,
) -> Result<DataKeyVersion> {
    let directory = &shmem::required()?.directory;
    let here = directory.find(file)?.map(|slot| directory.last_version(slot)).transpose()?;
    let elsewhere = last_elsewhere(file)?;
    let known = [last, here.flatten(), former::last_version(lock, file), elsewhere];
    DataKeyVersion::after(known.into_iter().max().flatten()).ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            format!("relation file {file} has used up its data key versions"),
        )
        .hint("Rewrite the relation into a new file with VACUUM FULL or REINDEX.")
    })
}

/// The last version of files with this number in other tablespaces: the file may be one of them,
/// with all its pages, if its database was moved while the library was not loaded, and it may move
/// back.
fn last_elsewhere(file: RelFile) -> Result<Option<DataKeyVersion>> {
    let tablespaces = relation_files::tablespaces()?;
    let others = relation_files::elsewhere(file, &tablespaces);
    Ok(others.filter_map(directory::last_version).max())
}

/// Like [`new_version`], for a file in use: the key is durable before any page is written under it.
pub(crate) fn next_version(file: RelFile, sealing: Sealing, pages: Pages) -> Result<()> {
    make_version(file, sealing, pages, append_durably).map(wal::flush)
}

/// The record of a new random data key, wrapped by the newest database key of its key group or
/// database.
pub(crate) fn make_key(file: RelFile, version: DataKeyVersion, sealing: Sealing) -> Result<Record> {
    fips::require_usable_by_module(sealing.cipher)?;
    let (scope, key_version) = match sealing.group {
        Some(group) => require_group_key(group)?,
        None => require_master_key(file.database)?,
    };
    let cipher = sealing.cipher;
    let wrapped = with_wrap_key(scope, key_version, |wrap_key| {
        wrap_data_key(&DataKey::random(cipher)?, wrap_key, file, version)
    })?;
    let cipher = cipher as u8;
    let created = process::now();
    Ok(Record::DataKey { file, version, cipher, scope, key_version, wrapped, created })
}

/// Refuses a version that an interim version could not tell from an earlier one under which a
/// server may have pages ([`super::interim`]): many jobs of the file have not ended.
fn require_few_versions(file: RelFile, next: DataKeyVersion) -> Result<()> {
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(()) };
    let first = match directory.floor(slot)? {
        Some(floor) => Some(floor),
        None => directory.keys(slot)?.filter_map(|key| Some(key.ok()?.version)).min(),
    };
    if first.is_none_or(|first| next.get() - first.get() < interim::RESIDUES) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("relation file {file} has pages under too many data keys"),
    )
    .detail(format!("No job has rewritten all of them for {} data keys.", interim::RESIDUES - 1))
    .hint("Let a rekey job of the relation end, or rewrite it into a new file with VACUUM FULL or REINDEX."))
}

fn make_version(
    file: RelFile,
    sealing: Sealing,
    pages: Pages,
    append: impl FnOnce(&KeystoreLock, Scope, &[Record], Option<CheckpointDelay>) -> Result<Lsn>,
) -> Result<Lsn> {
    authenticated::require_untorn_pages(sealing.cipher, pages == Pages::Logged)?;
    refused::require_usable(scope_for(file, sealing)?)?;
    let delay = pages.before_switch(file)?;
    let lock = KeystoreLock::acquire();
    let version = unused_version(&lock, file, None)?;
    if directory::has_group_key(file) {
        require_few_versions(file, version)?;
    }
    // The record of the rewriting precedes that of the phase, so that no process sees the phase
    // without it.
    let mut records = vec![make_key(file, version, sealing)?];
    records.extend(pages.rewriting(file, Phase::under(version)));
    records.push(Record::Current { file, version });
    if pages == Pages::None {
        records.push(Record::SealedOnly { file, phase: Phase::under(version) });
    }
    let end = append(&lock, file.scope(), &records, delay)?;
    note_switch(&lock, file, Phase::under(version), pages, end)?;
    Ok(end)
}

/// Records where the state of a file with pages begins in WAL, for a run that continues the
/// rewriting of its pages.
fn note_switch(
    lock: &KeystoreLock,
    file: RelFile,
    phase: Phase,
    pages: Pages,
    lsn: Lsn,
) -> Result<()> {
    if pages == Pages::Logged {
        append(lock, file.scope(), &[Record::Switched { file, phase, lsn }])?;
    }
    Ok(())
}

/// Whether pages of a file are being rewritten, or an earlier rewriting has not ended.
pub(crate) fn is_mixed(file: RelFile) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    directory.find(file)?.map_or(Ok(false), |slot| Ok(directory.is_mixed(slot)?))
}

/// Whether a file has keys under that of a key group in which it is not any more.
pub(crate) fn has_left_key_group(file: RelFile) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(false) };
    let present = directory::current_key_group(file);
    for key in directory.keys(slot)? {
        let group = key?.scope.key_group();
        if group.is_some() && group != present {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where in WAL the present state of a file began whose pages are being rewritten, if that is
/// known. Reads the log of the file's database.
pub(crate) fn switched_at(file: RelFile) -> Result<Option<Lsn>> {
    let lock = KeystoreLock::acquire();
    let state = persist::log_state(&lock, file.scope())?;
    Ok(state.file(file).and_then(state::File::switched_at))
}

/// Writes pages of a file in plaintext from now on. Its keys are kept for pages that are sealed.
///
/// If the file has pages, the record is durable before any is written in plaintext: it says that
/// the file is not sealed only any more. Some of these pages have an older LSN, and do not wait for
/// it.
pub(crate) fn write_plaintext(file: RelFile, pages: Pages) -> Result<()> {
    if !directory::is_sealed(file) {
        return Ok(());
    }
    let delay = pages.before_switch(file)?;
    let lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(()) };
    let Some(after) = directory.last_version(slot)? else { return Ok(()) };
    let rewriting = pages.rewriting(file, Phase::plaintext_after(after));
    let mut records: Vec<_> = rewriting.into_iter().collect();
    records.push(Record::Plaintext { file, after });
    if pages == Pages::None {
        append(&lock, file.scope(), &records)?;
    } else {
        let end = append_durably(&lock, file.scope(), &records, delay)?;
        note_switch(&lock, file, Phase::plaintext_after(after), pages, end)?;
    }
    Ok(())
}

/// Destroys the keys of a new file up to this version: no page was written under them. Otherwise
/// the key group whose key wraps them could not end as long as there is the file.
pub(crate) fn discard_unused(file: RelFile, through: DataKeyVersion) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let cipher = directory::current_cipher(file).map_or(0, |cipher| cipher as u8);
    let (lsn, at) = (wal::end(), process::now());
    let record = Record::Destroyed { file, through, cipher, whole: false, lsn, at };
    append(&lock, file.scope(), &[record]).map(drop)
}

/// Records that all pages of a file on disk are under version `proven`; `None`: that all are
/// plaintext. `everywhere`: also on all servers that replay WAL up to now; a page in plaintext, or
/// under an earlier version, is refused from then on. False if the file is now written under
/// another version, to which the proof does not apply.
pub(crate) fn record_rewritten(
    file: RelFile,
    proven: Option<DataKeyVersion>,
    everywhere: bool,
) -> Result<bool> {
    let lock = KeystoreLock::acquire();
    if directory::current_version(file) != proven {
        return Ok(false);
    }
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(true) };
    let phase = directory.info(slot)?.phase;
    let done = directory.is_mixed(slot)?.then_some(Record::Rewriting { file, phase, done: true });
    let sealed_only = everywhere && proven.is_some() && directory.floor(slot)? != proven;
    let sealed_only = sealed_only.then_some(Record::SealedOnly { file, phase });
    let records: Vec<_> = done.into_iter().chain(sealed_only).collect();
    if !records.is_empty() {
        append(&lock, file.scope(), &records)?;
    }
    Ok(true)
}

/// Rewraps every data key in the log of `home` whose database key satisfies `from`, with the key
/// `to`. Returns their number. All keys are readable at any time, because each record names the key
/// that wraps it.
pub(crate) fn rewrap_data_keys(
    home: Scope,
    from: impl Fn(Scope, KeyVersion) -> bool,
    to: (Scope, KeyVersion),
) -> Result<u64> {
    const RECORDS_AT_ONCE: usize = 10_000;
    let lock = KeystoreLock::acquire();
    let (scope, key_version) = to;
    let mut records = Vec::new();
    for (file, entry) in persist::log_state(&lock, home)?.files() {
        for (&version, key) in entry.keys.iter().filter(|(_, k)| from(k.scope, k.key_version)) {
            let wrapped = with_wrap_key(scope, key_version, |wrap_key| {
                wrap_data_key(&unwrap_record(file, version, key)?, wrap_key, file, version)
            })?;
            records.push(Record::DataKey {
                file,
                version,
                cipher: key.cipher,
                scope,
                key_version,
                wrapped,
                created: key.created,
            });
        }
    }
    let mut end = Lsn::INVALID;
    for batch in records.chunks(RECORDS_AT_ONCE) {
        end = append(&lock, home, batch)?;
    }
    drop(lock);
    wal::flush(end);
    Ok(records.len() as u64)
}

/// Unwraps a data key from its record. Within [`without_trace`].
pub(crate) fn unwrap_record(
    file: RelFile,
    version: DataKeyVersion,
    key: &state::DataKey,
) -> Result<DataKey> {
    let secret = shmem::required()?.secrets.get(key.scope, key.key_version);
    let secret = secret.ok_or_else(|| locked(key.scope))?;
    CipherId::try_from(key.cipher)
        .ok()
        .and_then(|cipher| {
            cache::open_data_key(
                &WrapKey::new(secret.expose()),
                file,
                version,
                cipher,
                &key.wrapped,
            )
        })
        .ok_or_else(|| {
            Report::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("data key version {version} of relation file {file} cannot be unwrapped"),
            )
        })
}

/// Whether two files have the same data key for a version. `None` if both have one, and one of them
/// cannot be unwrapped now.
pub(crate) fn have_same_key(one: RelFile, other: RelFile, version: DataKeyVersion) -> Option<bool> {
    if ![one, other].iter().all(|file| directory::has_key(*file, version)) {
        return Some(false);
    }
    without_trace(|| Some(present_key(one, version)?.is_same(&present_key(other, version)?)))
}

/// The data key of a file and version, if it exists and can be unwrapped now. Within
/// [`without_trace`].
fn present_key(file: RelFile, version: DataKeyVersion) -> Option<DataKey> {
    let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
    let found = directory::data_key(file, version, &mut wrapped)?;
    let secret = shmem::secrets()?.get(found.scope, found.key_version)?;
    let cipher = CipherId::try_from(found.cipher).ok()?;
    cache::open_data_key(
        &WrapKey::new(secret.expose()),
        file,
        version,
        cipher,
        &wrapped[..found.len],
    )
}

/// Whether a record has a different key for an existing version, not the same key in another
/// wrapping. False if either of them cannot be unwrapped now.
pub(crate) fn is_another_key(record: &Record) -> bool {
    let Record::DataKey { file, version, cipher, scope, key_version, wrapped, .. } = record else {
        return false;
    };
    let mut known = [0; MAX_WRAPPED_DATA_KEY];
    let Some(found) = directory::data_key(*file, *version, &mut known) else { return false };
    if known[..found.len] == wrapped[..] {
        return false;
    }
    let brought = || {
        let secret = shmem::secrets()?.get(*scope, *key_version)?;
        let cipher = CipherId::try_from(*cipher).ok()?;
        cache::open_data_key(&WrapKey::new(secret.expose()), *file, *version, cipher, wrapped)
    };
    without_trace(|| match (present_key(*file, *version), brought()) {
        (Some(present), Some(brought)) => !present.is_same(&brought),
        _ => false,
    })
}

/// The logs that may contain data keys wrapped by a scope's key: the database's own log, or for the
/// cluster and key groups every log.
pub(crate) fn logs_wrapped_by(scope: Scope) -> Result<Vec<Scope>> {
    if scope.is_database() {
        return Ok(vec![scope]);
    }
    log::scopes(&keystore_dir::storage()?).map_err(|e| failures::keystore_failure(&e))
}
