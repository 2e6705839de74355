//! Asks for locked keys repeatedly until none is left, then ends.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};

use crate::keys::provider::unlock;
use crate::pg::worker;

/// Pause before the first attempt, because server start has just made one, and before a failed
/// worker is restarted.
const INTERVAL: Duration = Duration::from_secs(5);

pub(super) fn register() {
    BackgroundWorkerBuilder::new("pagevault unlock")
        .set_type("pagevault unlock")
        .set_library("pagevault")
        .set_function("pagevault_unlock_main")
        .enable_shmem_access(None)
        .set_start_time(BgWorkerStartTime::PostmasterStart)
        .set_restart_time(Some(INTERVAL))
        .load();
}

/// Main function of the worker. If it returns (exit code 0), the worker is not restarted.
pub(super) fn main() {
    worker::handle_worker_signals();
    let mut pause = INTERVAL;
    // Those of a database whose directory is not there are not asked for, but its file system may
    // be mounted later.
    while !unlock::all_locked_keys().is_empty() {
        worker::wait_in_worker(pause);
        pause = match unlock::locked_keys().is_empty() {
            true => INTERVAL,
            false => unlock::unlock_quietly("unlock_worker"),
        };
    }
}
