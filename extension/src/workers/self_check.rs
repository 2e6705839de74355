//! Proves in a real backend, once after every start, that reads really come through our functions.
//!
//! Interposition checks its own writes to memory; it cannot see whether a compiler turned some of
//! the server's indirect calls into direct ones. A server where they pass us by must not go on.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use crate::hooks::{files, smgr};
use crate::keys::provider::unlock;
use crate::keys::store::unsettled;
use crate::pg::report::Report;
use crate::pg::{pages, process};

/// Between looks at keys that are locked, and before a worker that died is started again.
const PAUSE: Duration = Duration::from_secs(5);

/// How often the page is tried to be read, and the pause between.
const TRIES: u32 = 5;
const RETRY: Duration = Duration::from_secs(1);

pub(super) fn register() {
    BackgroundWorkerBuilder::new("pagevault self-check")
        .set_type("pagevault self-check")
        .set_library("pagevault")
        .set_function("pagevault_self_check_main")
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::ConsistentState)
        .set_restart_time(Some(PAUSE))
        .load();
}

/// Main function of the worker. Returning (exit code 0) ends it for good.
pub(super) fn main() {
    process::handle_worker_signals();
    // Where no WAL was replayed at all, nobody else does it.
    unsettled::forget();
    wait_for_catalogs();
    files::forget_opens();
    process::connect_without_database();
    smgr::forget_reads();
    let report = match read_a_page() {
        Err(cause) => cannot_tell(&cause),
        Ok(()) => match (smgr::saw_read(), files::saw_open()) {
            (true, true) => return,
            (false, _) => passed_by("reads pages past the storage manager table"),
            (true, false) => passed_by("opens files past its table of imported functions"),
        },
    };
    report.send(pgrx::prelude::PgLogLevel::LOG);
    process::shut_server_down();
}

/// A session starts by reading shared catalogs.
fn wait_for_catalogs() {
    while unlock::keeps_everyone_out() {
        process::wait_in_worker(PAUSE);
    }
}

/// Reads a page that every session needs. A server in which that cannot be done for a while is of
/// no use, and as long as it was not done it may be one that writes past us: so this ends.
fn read_a_page() -> std::result::Result<(), String> {
    for tried in 1.. {
        let read = PgTryBuilder::new(|| {
            pages::read_from_disk(pg_sys::DatabaseRelationId);
            Ok(())
        })
        .catch_others(|error| Err(message_of(&error)))
        .execute();
        let Err(cause) = read else { break };
        process::abort_transaction();
        pgrx::log!("pagevault: the self-check cannot read a page: {cause}");
        if tried == TRIES {
            return Err(cause);
        }
        process::wait_in_worker(RETRY);
        wait_for_catalogs(); // their key may have been revoked meanwhile
    }
    Ok(())
}

fn passed_by(what: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("pagevault: this server {what}"),
    )
    .detail("A page was read and pagevault did not see it. The server is shut down before it writes anything unencrypted.")
    .hint("This build of PostgreSQL cannot be used with pagevault; remove it from shared_preload_libraries.")
}

fn cannot_tell(cause: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        "pagevault: cannot find out whether this server reads and writes through it",
    )
    .detail(format!("The first page of pg_database cannot be read: {cause}. The server is shut down before it writes anything unencrypted."))
    .hint("Fix the cause and start the server again.")
}

fn message_of(error: &CaughtError) -> String {
    let report = match error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    };
    report.message().to_owned()
}
