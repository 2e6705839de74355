//! The server's part in escrow: which database keys are in a bundle, and importing the file that
//! `pagevault-keyring escrow restore` has left while the server was down.
//!
//! The restored wrappings are used from the start on, but recovery may replay older ones over them.
//! So they are written again when the server can write WAL, through which they reach archives and
//! standbys; then the file is removed. After a crash before that, the next start begins again with
//! the file.

use std::collections::BTreeSet;

use pagevault_keystore::escrow::{LIMIT, MARK, Mark, RESTORED, Restored};
use pagevault_keystore::log::{Contents, Log};
use pagevault_keystore::state::State;
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::{Record, Scope, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::failures::keystore_failure;
use super::persist;
use crate::audit::{self, Operation};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result, internal};
use crate::pg::wal;
use crate::{keystore_dir, shmem};

/// The cluster's log holds providers and database keys.
const SCOPE: Scope = Scope::CLUSTER;

/// The contents of the newest bundle, if there is one of this keystore.
pub(crate) fn mark() -> Option<Mark> {
    let id = shmem::required().ok()?.control.keystore_id()?;
    let bytes = keystore_dir::storage().ok()?.read(MARK, 0, LIMIT).ok()??;
    Mark::decode(&bytes).filter(|mark| mark.keystore == id)
}

/// Records in the audit trail that a bundle was made since the last call in this process. Who made
/// it, and for whom, is in `audit.tools`, which that program writes.
pub(crate) fn log_new_bundle() {
    static KNOWN: ProcessLocal<Option<Option<i64>>> = ProcessLocal::new(None);
    let mark = mark();
    let made = mark.as_ref().map(|mark| mark.made);
    let known = KNOWN.replace(Some(made));
    let Some(mark) = mark.filter(|_| known.is_some_and(|known| known != made)) else { return };
    let operation = Operation {
        action: "escrow_export",
        by: "pagevault-keyring",
        object: Some(format!("{} database keys", mark.keys.len())),
        ..Operation::default()
    };
    audit::log_operation(&operation, "noticed");
}

/// At server start: adds restored keys to the cluster's log, if it does not contain them already.
pub(crate) fn import_restored(storage: &FileStorage, logs: &mut [Contents]) -> Result<()> {
    let Some(cluster) = logs.first_mut() else { return Ok(()) };
    let Some(restored) = read(storage, cluster.position.keystore_id)? else { return Ok(()) };
    let state = State::from_records(cluster.records.iter().cloned())
        .map_err(|e| internal(format!("keystore: {e}")))?;
    let mut with_restored = state.clone();
    let folded = restored.iter().cloned().try_for_each(|record| with_restored.apply(record));
    folded.map_err(|e| not_ours(&e.to_string()))?;
    if with_restored == state {
        return Ok(());
    }
    let mut log = Log::resume(storage, cluster.position);
    log.append(&restored).map_err(|e| keystore_failure(&e))?;
    cluster.position = log.position();
    cluster.records.extend(restored);
    Ok(())
}

/// When the server can write WAL: writes restored keys to keystore and WAL, and removes the file.
pub(crate) fn announce() -> Result<()> {
    let storage = keystore_dir::storage()?;
    let Some(id) = shmem::required()?.control.keystore_id() else { return Ok(()) };
    let Some(records) = read(&storage, id)? else { return Ok(()) };
    let end = persist::append(&KeystoreLock::acquire(), SCOPE, &records)?;
    wal::flush(end);
    storage.remove(RESTORED).map_err(|e| not_read(&e))?;
    let keys: BTreeSet<_> = records.iter().filter_map(scope_of).collect();
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("database keys were restored from escrow, of {} scopes", keys.len()),
    )
    .detail(batch::describe_all(&records))
    .send(PgLogLevel::LOG);
    Ok(())
}

fn scope_of(record: &Record) -> Option<Scope> {
    match record {
        Record::DatabaseKey { scope, .. } => Some(*scope),
        _ => None,
    }
}

fn read(storage: &FileStorage, id: [u8; 16]) -> Result<Option<Vec<Record>>> {
    let Some(bytes) = storage.read(RESTORED, 0, LIMIT).map_err(|e| not_read(&e))? else {
        return Ok(None);
    };
    let restored = Restored::decode(&bytes).map_err(|e| {
        Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("key file \"{RESTORED}\" is not readable: {e}"),
        )
        .hint("Remove it from the directory pagevault/ of the data directory, and restore the escrow again.")
    })?;
    Ok((restored.keystore == id).then_some(restored.records))
}

/// The report if restored keys contradict the keystore. Recording them would make the keystore
/// unreadable.
fn not_ours(problem: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("key file \"{RESTORED}\" does not belong here: {problem}"),
    )
    .detail("Nothing was changed.")
    .hint("Remove it from the directory pagevault/ of the data directory, and restore the escrow again.")
}

fn not_read(error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read or remove key file \"{RESTORED}\": {error}"),
    )
}
