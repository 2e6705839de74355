//! Keeps asking for locked keys until none is left, then ends.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};

use crate::keys::provider::unlock;
use crate::pg::process;

/// Pause before the first attempt, for start-up has just made one, and before a worker that died is
/// started again.
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

/// Main function of the worker. Returning (exit code 0) ends it for good.
pub(super) fn main() {
    process::handle_worker_signals();
    let mut pause = INTERVAL;
    while !unlock::locked_keys().is_empty() {
        process::wait_in_worker(pause);
        pause = unlock::unlock_quietly("unlock_worker");
    }
}
