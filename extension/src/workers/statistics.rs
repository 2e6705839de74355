//! Deletes statistics for a session that shreds: in its own transaction, which commits even if the
//! session's statement fails.

use pgrx::{PgSqlErrorCode as Code, pg_sys};

use super::dynamic;
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::{process, session, statistics, worker};

/// Makes a worker delete the statistics of all relations that this session has locked in
/// AccessExclusiveLock mode, and waits until the worker has ended.
///
/// # Errors
/// If no background worker slot is free.
pub(crate) fn delete_for_this_session() -> Result<()> {
    let pid = std::process::id();
    let argument = u64::from(pid) << 32 | u64::from(process::my_database());
    let argument = pg_sys::Datum::from(argument);
    let worker = dynamic::start("pagevault statistics", "pagevault_statistics_main", argument);
    let worker = worker.ok_or_else(|| {
        Report::new(
            Code::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            "no background worker is free to delete statistics",
        )
        .detail("Nothing was destroyed.")
        .hint("Try again later, or raise max_worker_processes.")
    })?;
    // The caller checks whether statistics are left.
    let _ = worker.wait_for_shutdown();
    Ok(())
}

/// Main function of the worker.
pub(super) fn main(argument: pg_sys::Datum) {
    worker::handle_worker_signals();
    let argument = argument.value() as u64;
    let (pid, database) = ((argument >> 32) as i32, argument as u32);
    worker::connect_to_database_if_exists(pg_sys::Oid::from(database));
    worker::restrict();
    // The holder of a lock may wait for the session, and the deadlock detector does not know that
    // the session waits for this worker.
    worker::wait_for_locks_at_most(c"10s");
    worker::transaction(|| {
        session::as_owner_of_the_cluster(|| statistics::delete_of_relations_locked_by(pid))
            .or_raise();
    });
}
