//! Redo of key records: adds missing records to key files and directory. All are checked before
//! anything is written, because everything written is read at every later start.

use std::collections::{HashMap, HashSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};
use pagevault_keystore::directory::DirectoryError;
use pagevault_keystore::former::FormerFiles;
use pagevault_keystore::log::Settle;
use pagevault_keystore::state::StateError;
use pagevault_keystore::wal::{is_key_place, version_at};
use pagevault_keystore::wrappings::EndedKeyGroups;
use pagevault_keystore::{CheckValue, Record, RelFile, Scope, batch, wrappings};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::provider::unlock;
use super::store::compact::{compact, remove_former_wrappings};
use super::store::failures::recovery_needs_room;
use super::store::persist::{apply_logged, cluster_state, remember, settle_now, stage};
use super::store::{database_keys, directory, former, given_up};
use super::usage::{data_keys, destruction, wal};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result, internal};
use crate::{fault, shmem};

/// The records of the keystore in a WAL record.
pub(crate) fn decode(batch: &[u8]) -> Result<Vec<Record>> {
    batch::decode(batch).map_err(|e| {
        Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, format!("pagevault WAL record: {e}"))
    })
}

/// Replays a WAL record from `start` to `end`: adds records that the keystore does not have yet.
/// All are checked before anything is written.
pub(crate) fn replay(
    scope: Scope,
    id: &[u8; 16],
    records: &[Record],
    (start, end): (Lsn, Lsn),
) -> Result<()> {
    let destroys = records.iter().any(|record| matches!(record, Record::Destroyed { .. }));
    let sessions = if destroys { destruction::before_redo(records) } else { Vec::new() };
    let ends = records.iter().any(|record| matches!(record, Record::EndedKeyGroup { .. }));
    fault::point("redo.keys");
    await_keys_of_wal(records)?;
    let lock = KeystoreLock::acquire();
    let are_gone = records.iter().any(|record| matches!(record, Record::FormerFiles(_)));
    // All of it is read only where it matters: most records are about one file.
    let former = if are_gone { former::known(&lock)? } else { FormerFiles::default() };
    if records.iter().all(|record| is_known(&former, record)) {
        return if are_gone { former::end_recorded(&lock, records) } else { Ok(()) };
    }
    // Later records that this server already has take precedence.
    let is_old = shmem::required()?.control.position(scope).is_some_and(|log| start < log.logged);
    let brought = keys_in(records);
    let ended = ended_key_groups(&lock, records)?;
    let is_of_ended_group = |record: &Record| match record {
        Record::DatabaseKey { scope, .. } => ended.contains_key(scope),
        _ => false,
    };
    let counts = |record: &&Record| {
        let is_superseded = is_old && would_replace_later(record);
        !(is_superseded
            || restores_destroyed_key(record)
            || is_of_ended_group(record)
            || is_forgotten_database_key(record)
            || is_of_forgotten_key(&lock, record, &brought))
    };
    let buried =
        |record: &Record| wrappings::tombstone(record, &ended).unwrap_or_else(|| record.clone());
    let records: Vec<Record> = records.iter().filter(counts).map(buried).collect();
    if records.is_empty() {
        return Ok(());
    }
    require_consistent(scope, id, &records)?;
    former::require_room(&lock, &records)?;
    require_no_other_database_key(&lock, &records)?;
    let batch = batch::encode(&records).map_err(|e| internal(format!("keystore: {e}")))?;
    let staged = stage(&lock, scope, Some(*id), |log| log.stage_batch(&batch, start))?;
    remember(&staged, end)?;
    if Settle::in_redo(&records) == Settle::Now {
        settle_now(&lock, scope);
    }
    fault::point("redo.keys_in_file");
    apply_logged(&lock, &records);
    drop(sessions);
    if are_gone {
        former::end_recorded(&lock, &records)?;
    }
    if (destroys || ends)
        && let Err(report) = compact(&lock, scope)
    {
        // The keys are not used any more. Their bytes stay in the file until it is rewritten.
        report.send(PgLogLevel::WARNING);
    }
    let is_wrapped = |record: &Record| matches!(record, Record::DatabaseKey { .. });
    if records.iter().any(is_wrapped)
        && let Err(report) = remove_former_wrappings(&lock)
    {
        // The worker tries again.
        report.send(PgLogLevel::WARNING);
    }
    drop(lock);
    fault::point("redo.keys_in_use");
    let new = records.iter().filter_map(|record| match record {
        Record::DatabaseKey { scope, version, .. } => Some((*scope, *version)),
        _ => None,
    });
    let new: Vec<_> = new.collect();
    if !new.is_empty() {
        unlock::unlock_in_recovery(&new);
    }
    Ok(())
}

/// Waits for the database keys of WAL keys, before anything is changed: at a new WAL key, because
/// WAL behind it is sealed before recovery gets to the switch; and at the switch, if a server that
/// has the WAL key was started again in between. Former WAL keys may be wrapped anew meanwhile.
fn await_keys_of_wal(records: &[Record]) -> Result<()> {
    let switches = &shmem::required()?.wal.switches;
    for record in records {
        let key = match record {
            Record::DataKey { file, version, scope, key_version, .. } if is_key_place(*file) => {
                let last = switches.iter().filter_map(|switch| switch.phase.version).max();
                let is_new = version_at(*file, *version) > last;
                is_new.then_some((*scope, *key_version))
            }
            Record::WalSwitch(switch) if !switches.contains(*switch) => {
                switch.phase.sealed().and_then(wal::wrapped_by)
            }
            _ => None,
        };
        if let Some(key) = key {
            unlock::unlock_for_wal(key);
        }
    }
    Ok(())
}

/// Refuses records from WAL that contradict this server's keystore, or for which it has no room.
fn require_consistent(scope: Scope, id: &[u8; 16], records: &[Record]) -> Result<()> {
    let shared = shmem::required()?;
    if shared.control.keystore_id().is_some_and(|own| own != *id) {
        return Err(contradiction("it is of another keystore".to_owned()));
    }
    if shared.control.position(scope).is_none() && !shared.control.has_any_room() {
        return Err(recovery_needs_room("key file"));
    }
    let jobs = |r: &&Record| matches!(r, Record::Job { .. } | Record::JobsForgotten { .. });
    let jobs = records.iter().filter(jobs).count();
    if jobs > 0 && !shared.jobs.has_room(jobs) {
        return Err(recovery_needs_room("rekey job"));
    }
    for record in records {
        match record {
            Record::DatabaseKey { scope, version, .. }
                if !shared.secrets.could_announce(*scope, *version) =>
            {
                database_keys::make_room()?;
                if !shared.secrets.could_announce(*scope, *version) {
                    return Err(recovery_needs_room("database key"));
                }
            }
            Record::WalSwitch(switch) if !shared.wal.switches.has_room_for(*switch) => {
                return Err(recovery_needs_room("switch of WAL keys"));
            }
            Record::DataKey { file, version, .. } if data_keys::is_another_key(record) => {
                let error = DirectoryError::KeyReplaced { file: *file, version: *version };
                return Err(contradiction(error.to_string()));
            }
            _ => {}
        }
    }
    shared.directory.check(records).map_err(|error| match error {
        DirectoryError::Full { .. } => {
            Report::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, error.to_string())
                .hint("Raise pagevault.max_data_keys and start the server again.")
        }
        _ => contradiction(error.to_string()),
    })
}

fn contradiction(detail: String) -> Report {
    let message = "pagevault: a record of keys in WAL contradicts this server's keystore";
    Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, message)
        .detail(format!("{}{}. Nothing was changed.", detail[..1].to_uppercase(), &detail[1..]))
        .hint("The keystore is not of the history that is replayed. Make this server anew from a base backup, with the directory pagevault/ of that backup.")
}

/// Check values of the database keys in the keystore, by scope and version. In recovery only redo
/// adds any, so the startup process reads them from the cluster's log once, not for each record.
static CHECK_VALUES: ProcessLocal<Option<HashMap<(Scope, KeyVersion), CheckValue>>> =
    ProcessLocal::new(None);

/// Refuses a database key that differs from the keystore's key with the same scope and version,
/// before anything is written. Otherwise data keys wrapped by the existing key would be lost, and
/// the log would become unreadable.
fn require_no_other_database_key(lock: &KeystoreLock, records: &[Record]) -> Result<()> {
    for record in records {
        let Record::DatabaseKey { scope, version, key } = record else { continue };
        let (scope, version) = (*scope, *version);
        if CHECK_VALUES.with(|values| values.is_none()) {
            let state = cluster_state(lock)?;
            let keys = state.database_keys();
            let known = keys.map(|(scope, version, key)| ((scope, version), key.check)).collect();
            CHECK_VALUES.set(Some(known));
        }
        let is_another = CHECK_VALUES.with(|values| {
            let values = values.get_or_insert_default();
            *values.entry((scope, version)).or_insert(key.check) != key.check
        });
        if is_another {
            let error = StateError::DatabaseKeyReplaced { scope, version };
            return Err(contradiction(error.to_string()));
        }
    }
    Ok(())
}

/// Whether the record, if it is old, would replace a later one of which the last counts: an older
/// wrapping by a master key that no longer exists, or an older address of a provider, would be used
/// at the next start.
fn would_replace_later(record: &Record) -> bool {
    match record {
        Record::DatabaseKey { scope, version, .. } => {
            shmem::secrets().is_some_and(|keys| keys.state(*scope, *version).is_some())
        }
        Record::Provider { .. }
        | Record::DropProvider { .. }
        | Record::KeyGroup { .. }
        | Record::EndedKeyGroup { .. } => true,
        _ => false,
    }
}

/// The key groups that have ended, and when, if records have a key of a group that is not known:
/// the keystore may be of a later time than what is replayed.
fn ended_key_groups(lock: &KeystoreLock, records: &[Record]) -> Result<EndedKeyGroups> {
    let is_unknown = |record: &Record| match record {
        Record::DatabaseKey { scope, version, .. }
        | Record::DataKey { scope, key_version: version, .. } => {
            scope.key_group().is_some()
                && shmem::secrets().is_none_or(|keys| keys.state(*scope, *version).is_none())
        }
        _ => false,
    };
    if !records.iter().any(is_unknown) {
        return Ok(EndedKeyGroups::new());
    }
    let last = shmem::required()?.control.position(Scope::CLUSTER).map(|log| log.logged);
    let state = cluster_state(lock)?;
    let ended = state.ended_key_groups();
    Ok(wrappings::ended_key_groups(ended, last.unwrap_or_default(), &given_up::here()))
}

/// Whether the record would bring back a destroyed key.
fn restores_destroyed_key(record: &Record) -> bool {
    match record {
        Record::DataKey { file, version, .. } => directory::destroyed_at(*file, *version).is_some(),
        _ => false,
    }
}

/// Whether the record is about a database key that this server has forgotten: it does not have it,
/// and has a later one of the scope. Its wrapping may be by a master key that is gone.
fn is_forgotten_database_key(record: &Record) -> bool {
    let Record::DatabaseKey { scope, version, .. } = record else { return false };
    shmem::secrets().is_some_and(|keys| {
        keys.state(*scope, *version).is_none() && keys.newest(*scope) > Some(*version)
    })
}

/// Files and versions of the keys in these records.
fn keys_in(records: &[Record]) -> HashSet<(RelFile, DataKeyVersion)> {
    let keys = records.iter().filter_map(|record| match record {
        Record::DataKey { file, version, .. } => Some((*file, *version)),
        _ => None,
    });
    keys.collect()
}

/// Whether the record is about a key that this server has forgotten, because the file was gone
/// before the address from which it replays WAL. Or each server records the like for itself.
fn is_of_forgotten_key(
    lock: &KeystoreLock,
    record: &Record,
    brought: &HashSet<(RelFile, DataKeyVersion)>,
) -> bool {
    let (file, version) = match record {
        Record::KeysForgotten { .. } => return true,
        Record::Current { file, version } => (*file, Some(*version)),
        Record::Plaintext { file, after } => (*file, Some(*after)),
        Record::Rewriting { file, phase, .. }
        | Record::Switched { file, phase, .. }
        | Record::SealedOnly { file, phase } => (*file, phase.version),
        _ => return false,
    };
    let Some(version) = version else { return false };
    Some(version) <= former::last_version(lock, file)
        && !directory::is_known(file)
        && !brought.contains(&(file, version))
}

/// Whether the record would change nothing. Providers and database keys are few, and always added.
fn is_known(former: &FormerFiles, record: &Record) -> bool {
    let Some(shared) = shmem::get() else { return false };
    match record {
        Record::FormerFiles(range) => former.contains(range),
        Record::WalSwitch(switch) => shared.wal.switches.contains(*switch),
        Record::Job { .. }
        | Record::JobStep { .. }
        | Record::JobBegun { .. }
        | Record::JobsForgotten { .. } => !shared.jobs.would_change(record),
        _ => shared.directory.would_change(record) == Ok(false),
    }
}
