//! Records that this start, and earlier starts that failed, have cut off key files. They are kept
//! in files beside these until recovery has ended (`pagevault_keystore::log::unsettled`).

use pagevault_keystore::log::{self, Contents, unsettled};
use pagevault_keystore::state::State;
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Record, Scope, wal as wal_keys};
use pgrx::PgSqlErrorCode;

use super::failures::keystore_failure;
use super::persist;
use crate::pg::relation_files;
use crate::pg::report::{Report, Result, internal};
use crate::{keystore_dir, shmem};

/// Removes these files when recovery has ended, or all WAL is replayed that makes a standby
/// consistent: all records that are needed have been replayed, and are settled first.
///
/// An error stops nobody: the records are in WAL still, and the files beside. It is tried again
/// ([`crate::workers::self_check`]).
pub(crate) fn forget() -> Result<()> {
    if shmem::get().is_none() {
        return Ok(());
    }
    let storage = keystore_dir::storage()?;
    for scope in unsettled::scopes(&storage).map_err(|e| keystore_failure(&e))? {
        persist::settle(scope)?;
        unsettled::forget(&storage, scope).map_err(|e| keystore_failure(&e))?;
    }
    Ok(())
}

/// At a start after a clean shutdown, when no WAL is replayed: an error if keys of existing files
/// were cut off. These files would be written in plaintext, or under older keys.
pub(crate) fn require_none_missing(storage: &FileStorage, logs: &[Contents]) -> Result<()> {
    let failed = |error| keystore_failure(&error);
    for scope in unsettled::scopes(storage).map_err(failed)? {
        let log_of = |scope| logs.iter().find(|log| log.position.scope == scope);
        let Some(cluster) = log_of(Scope::CLUSTER) else { return Ok(()) };
        let beside =
            unsettled::read(storage, scope, &cluster.position.keystore_id).map_err(failed)?;
        let own = log_of(scope).filter(|log| !log.position.scope.is_cluster());
        let records = [Some(cluster), own].into_iter().flatten().flat_map(|log| &log.records);
        let state = State::from_records(records.cloned())
            .map_err(|error| internal(format!("keystore: {error}")))?;
        let missing = unsettled::missing(&state, beside);
        let files = missing.iter().filter(|record| match record {
            &&Record::DataKey { file, .. } => {
                !wal_keys::is_key_place(file) && relation_files::may_exist(file)
            }
            _ => false,
        });
        let count = files.count();
        if count > 0 {
            return Err(missed(scope, count));
        }
    }
    Ok(())
}

fn missed(scope: Scope, count: usize) -> Report {
    let (log, beside) = (log::file_name(scope), unsettled::name(scope));
    let message = format!("key file \"{log}\" lacks keys that an earlier start cut off");
    Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, message)
        .detail(format!("\"{beside}\" holds {count} data keys of relation files that exist. That start has failed, and no WAL is left to bring the keys: it was reset, perhaps. Nothing was changed."))
        .hint("Run \"pagevault-keyring restore-unsettled\" with the data directory, and start the server again. Only if WAL has been replayed since, remove the file.")
}

/// A further sentence for the HINT of an error about a missing key.
pub(crate) fn hint() -> Option<&'static str> {
    let scopes = unsettled::scopes(&keystore_dir::storage().ok()?).ok()?;
    (!scopes.is_empty()).then_some(
        " What starts that failed have cut off key files is in pagevault/*.unsettled until recovery has ended: keep these files. If WAL is lost for good, see \"pagevault-keyring restore-unsettled\".",
    )
}
