//! Proves in a real backend, once after every start, that reads really come through our functions.
//!
//! Interposition checks its own writes to memory; it cannot see whether a compiler turned some of
//! the server's indirect calls into direct ones. A server where they pass us by must not go on.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};

use crate::hooks::{files, smgr};
use crate::keys::unlock;
use crate::pg::pages;
use crate::pg::process;
use crate::pg::report::Report;

/// Between looks at keys that are locked, and before a worker that died is started again.
const PAUSE: Duration = Duration::from_secs(5);

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
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pagevault_self_check_main(_argument: pg_sys::Datum) {
    process::handle_worker_signals();
    // A session starts by reading shared catalogs.
    while unlock::keeps_everyone_out() {
        process::wait_in_worker(PAUSE);
    }
    files::forget_opens();
    process::connect_without_database();
    smgr::forget_reads();
    pages::read_from_disk(pg_sys::DatabaseRelationId);
    let unseen = match (smgr::saw_read(), files::saw_open()) {
        (true, true) => return,
        (false, _) => "reads pages past the storage manager table",
        (true, false) => "opens files past its table of imported functions",
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("pagevault: this server {unseen}"),
    )
    .detail("A page was read and pagevault did not see it. The server is shut down before it writes anything unencrypted.")
    .hint("This build of PostgreSQL cannot be used with pagevault; remove it from shared_preload_libraries.")
    .send(pgrx::prelude::PgLogLevel::LOG);
    process::shut_server_down();
}
