//! Data keys: made, wrapped by a database key, wrapped again by another.

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::wrap::{self, WrapKey};
use pagevault_cipher::{CipherId, DataKey, Epoch};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::{Record, RelFile, data_key_aad, log, state};
use pgrx::PgSqlErrorCode;

use super::{cache, refused};
use crate::keys::scope;
use crate::keys::store::directory;
use crate::keys::store::persist::{self, append, append_durably};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{process, wal};
use crate::{keystore_dir, shmem};

/// Whose database key wraps new data keys of a database: its own, else the cluster's.
fn wrapping_scope(database: u32) -> Result<u32> {
    let own = shmem::required()?.secrets.newest(database).is_some();
    Ok(if own { database } else { 0 })
}

/// Which database key wraps new data keys of a database: scope and version. An error if neither the
/// database nor the cluster has a master key.
pub(crate) fn require_master_key(database: u32) -> Result<(u32, u32)> {
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

/// Runs `f` with a database key, expanded; see
/// [`Secrets::with`](crate::shmem::secrets::Secrets::with).
pub(crate) fn with_wrap_key<R>(
    scope: u32,
    version: u32,
    f: impl FnOnce(&WrapKey) -> Result<R>,
) -> Result<R> {
    let secrets = &shmem::required()?.secrets;
    secrets.with(scope, version, |key| f(&WrapKey::new(key))).unwrap_or_else(|| Err(locked(scope)))
}

/// The report for a database key that is known but not unwrapped.
pub(crate) fn locked(scope: u32) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the key of {} is locked", scope::name(scope)),
    )
    .detail("Its key provider did not answer or refused when the server started.")
    .hint("See pagevault.status for the cause. The server keeps trying; pagevault.unlock() tries again now.")
}

/// Wraps a data key and proves that it unwraps. Within [`without_trace`].
pub(crate) fn wrap_data_key(
    key: &DataKey,
    wrap_key: &WrapKey,
    file: RelFile,
    epoch: u16,
) -> Result<Vec<u8>> {
    let mut wrapped = vec![0; key.expose().len() + wrap::OVERHEAD];
    let aad = data_key_aad(file, epoch, key.cipher() as u8);
    let proven = wrap::wrap(wrap_key, &aad, key.expose(), &mut wrapped)
        .ok()
        .and_then(|_| cache::open_data_key(wrap_key, file, epoch, key.cipher(), &wrapped))
        .is_some_and(|again| again.is_same(key));
    if proven { Ok(wrapped) } else { Err(internal("a data key could not be wrapped".into())) }
}

/// Makes a data key of a new epoch for a file and has pages written under it from now on. Returns
/// the end of the WAL record. Pages without an LSN (free space map, unlogged relations) do not wait
/// for it: a file that has pages already wants [`next_epoch`].
pub(crate) fn new_epoch(file: RelFile, cipher: CipherId) -> Result<u64> {
    make_epoch(file, cipher, Pages::None, append)
}

/// What a file holds that gets another key, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Nothing: it is new.
    None,
    /// Pages that a crash may leave torn.
    Logged,
    /// Pages of an unlogged relation: after a crash it is empty.
    Unlogged,
}

impl Pages {
    /// Says that from `phase` on pages are rewritten; see
    /// [`page::io::target_over`](crate::page::io::target_over).
    fn rewriting(self, file: RelFile, phase: Phase) -> Option<Record> {
        (self == Pages::Logged).then_some(Record::Rewriting { file, phase, done: false })
    }
}

/// As [`new_epoch`], for a file in use: the key is safe before any page is written under it.
pub(crate) fn next_epoch(file: RelFile, cipher: CipherId, pages: Pages) -> Result<()> {
    make_epoch(file, cipher, pages, append_durably).map(wal::flush)
}

/// The record of a new random data key, wrapped by the newest database key of its database.
pub(crate) fn make_key(file: RelFile, epoch: u16, cipher: CipherId) -> Result<Record> {
    let (scope, key_version) = require_master_key(file.database)?;
    let wrapped = with_wrap_key(scope, key_version, |wrap_key| {
        wrap_data_key(&DataKey::random(cipher)?, wrap_key, file, epoch)
    })?;
    let cipher = cipher as u8;
    let created = process::now();
    Ok(Record::DataKey { file, epoch, cipher, scope, key_version, wrapped, created })
}

fn make_epoch(
    file: RelFile,
    cipher: CipherId,
    pages: Pages,
    append: impl FnOnce(&KeystoreLock, u32, &[Record]) -> Result<u64>,
) -> Result<u64> {
    refused::require_usable(wrapping_scope(file.database)?)?;
    let lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    let epoch = match directory.find(file)? {
        None => 1,
        Some(slot) => directory.next_epoch(slot)?.ok_or_else(|| {
            Report::new(
                PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                format!("relation file {file} has used up its data key versions"),
            )
            .hint("Rewrite the relation into a new file with VACUUM FULL or REINDEX.")
        })?,
    };
    // The rewriting comes before the phase, so that nobody sees the phase without it.
    let mut records = vec![make_key(file, epoch, cipher)?];
    records.extend(pages.rewriting(file, Phase { epoch, plaintext: false }));
    records.push(Record::Current { file, epoch });
    append(&lock, file.database, &records)
}

/// Has pages of a file written in plaintext from now on. Its keys stay, for pages that are sealed.
pub(crate) fn write_plaintext(file: RelFile, pages: Pages) -> Result<()> {
    if !directory::is_sealed(file) {
        return Ok(());
    }
    let lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(()) };
    let after = directory.last_epoch(slot)?;
    let rewriting = pages.rewriting(file, Phase { epoch: after, plaintext: true });
    let mut records: Vec<_> = rewriting.into_iter().collect();
    records.push(Record::Plaintext { file, after });
    append(&lock, file.database, &records).map(|_| ())
}

/// Notes that no page of a file on disk is written under another epoch than `proven` any more;
/// `None`: that all are plaintext. False if the file is to be written otherwise by now: then that
/// is not what was proven.
pub(crate) fn retire_older_epochs(file: RelFile, proven: Option<Epoch>) -> Result<bool> {
    let lock = KeystoreLock::acquire();
    if directory::current_epoch(file) != proven {
        return Ok(false);
    }
    let directory = &shmem::required()?.directory;
    let Some(slot) = directory.find(file)? else { return Ok(true) };
    if directory.is_mixed(slot)? {
        let phase = directory.info(slot)?.phase;
        append(&lock, file.database, &[Record::Rewriting { file, phase, done: true }])?;
    }
    Ok(true)
}

/// Wraps every data key in the log of `home` that `from` wraps with the key `to` instead. Returns
/// how many; readable at every moment, since each record names the key that wraps it.
pub(crate) fn rewrap_data_keys(
    home: u32,
    from: impl Fn(u32, u32) -> bool,
    to: (u32, u32),
) -> Result<u64> {
    const RECORDS_AT_ONCE: usize = 10_000;
    let lock = KeystoreLock::acquire();
    let (scope, key_version) = to;
    let mut records = Vec::new();
    for (file, entry) in persist::log_state(&lock, home)?.files() {
        for (&epoch, key) in entry.keys.iter().filter(|(_, k)| from(k.scope, k.key_version)) {
            let wrapped = with_wrap_key(scope, key_version, |wrap_key| {
                wrap_data_key(&unwrap_record(file, epoch, key)?, wrap_key, file, epoch)
            })?;
            records.push(Record::DataKey {
                file,
                epoch,
                cipher: key.cipher,
                scope,
                key_version,
                wrapped,
                created: key.created,
            });
        }
    }
    let mut end = 0;
    for batch in records.chunks(RECORDS_AT_ONCE) {
        end = append(&lock, home, batch)?;
    }
    drop(lock);
    wal::flush(end);
    Ok(records.len() as u64)
}

/// A data key from its record. Within [`without_trace`].
pub(crate) fn unwrap_record(file: RelFile, epoch: u16, key: &state::DataKey) -> Result<DataKey> {
    let secret = shmem::required()?.secrets.get(key.scope, key.key_version);
    let secret = secret.ok_or_else(|| locked(key.scope))?;
    CipherId::try_from(key.cipher)
        .ok()
        .and_then(|cipher| {
            cache::open_data_key(&WrapKey::new(secret.expose()), file, epoch, cipher, &key.wrapped)
        })
        .ok_or_else(|| {
            Report::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("data key version {epoch} of relation file {file} cannot be unwrapped"),
            )
        })
}

/// Whether two files have the same data key for an epoch. No, where one of them cannot be unwrapped
/// now.
pub(crate) fn have_same_key(one: RelFile, other: RelFile, epoch: u16) -> bool {
    without_trace(|| match (present_key(one, epoch), present_key(other, epoch)) {
        (Some(one), Some(other)) => one.is_same(&other),
        _ => false,
    })
}

/// The data key of a file and epoch, if there is one and it can be unwrapped now. Within
/// [`without_trace`].
fn present_key(file: RelFile, epoch: u16) -> Option<DataKey> {
    let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
    let found = directory::data_key(file, epoch, &mut wrapped)?;
    let secret = shmem::secrets()?.get(found.scope, found.key_version)?;
    let cipher = CipherId::try_from(found.cipher).ok()?;
    cache::open_data_key(&WrapKey::new(secret.expose()), file, epoch, cipher, &wrapped[..found.len])
}

/// Whether a record brings another key for an epoch that has one, not the same key in another
/// wrapping. No, where either of them cannot be unwrapped now.
pub(crate) fn is_another_key(record: &Record) -> bool {
    let Record::DataKey { file, epoch, cipher, scope, key_version, wrapped, .. } = record else {
        return false;
    };
    let mut known = [0; MAX_WRAPPED_DATA_KEY];
    let Some(found) = directory::data_key(*file, *epoch, &mut known) else { return false };
    if known[..found.len] == wrapped[..] {
        return false;
    }
    let brought = || {
        let secret = shmem::secrets()?.get(*scope, *key_version)?;
        let cipher = CipherId::try_from(*cipher).ok()?;
        cache::open_data_key(&WrapKey::new(secret.expose()), *file, *epoch, cipher, wrapped)
    };
    without_trace(|| match (present_key(*file, *epoch), brought()) {
        (Some(present), Some(brought)) => !present.is_same(&brought),
        _ => false,
    })
}

/// The logs that may hold data keys wrapped by a scope's key: the database's own, or for the
/// cluster every one there is.
pub(crate) fn homes_of_scope(scope: u32) -> Result<Vec<u32>> {
    if scope != 0 {
        return Ok(vec![scope]);
    }
    log::scopes(&keystore_dir::storage()?).map_err(|e| persist::keystore_failure(&e))
}
