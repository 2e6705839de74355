//! Workers that other processes start when there is something to do. Their end wakes a process that
//! has a database connection.

use pgrx::bgworkers::{
    BackgroundWorkerBuilder, BackgroundWorkerStatus, BgWorkerStartTime, DynamicBackgroundWorker,
};
use pgrx::pg_sys::Datum;

/// Starts a worker of this name; `None` if there is no free slot.
pub(super) fn start(
    name: &str,
    function: &str,
    argument: Datum,
) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new(name)
        .set_type(name)
        .set_library("pagevault")
        .set_function(function)
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(None)
        .set_argument(Some(argument))
        .set_notify_pid(std::process::id() as i32)
        .load_dynamic()
        .ok()
}

/// Whether a worker has ended, or the postmaster has.
pub(super) fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    matches!(
        worker.pid(),
        Err(BackgroundWorkerStatus::Stopped | BackgroundWorkerStatus::PostmasterDied)
    )
}
