//! Asks for locked keys repeatedly until none is left, then ends. In recovery the worker stays:
//! replay may bring locked keys, and goes on without some of them.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};

use crate::keys::provider::unlock;
use crate::pg::{process, worker};

/// Pause before the first attempt, because server start has just made one, and before a failed
/// worker is restarted.
const INTERVAL: Duration = Duration::from_secs(5);

/// How often in a row it is looked only whether directories are back.
const LOOKS: usize = 12;

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
    loop {
        // Asked first: of what replay brings before its end, nothing is missed.
        let in_recovery = process::in_recovery();
        let locked = unlock::all_locked_keys();
        if locked.is_empty() {
            if !in_recovery {
                return;
            }
            worker::wait_in_worker(INTERVAL);
            pause = INTERVAL;
            continue;
        }
        if !unlock::are_gone(&locked) {
            worker::wait_in_worker(pause);
            pause = unlock::unlock_quietly("unlock_worker");
            continue;
        }
        // Databases whose directories are not there are not asked for, but their file systems may
        // be mounted later. To find out which keys are in use takes longer than this.
        for _ in 0..LOOKS {
            worker::wait_in_worker(INTERVAL);
            if !unlock::are_gone(&locked) {
                break;
            }
        }
        pause = Duration::ZERO;
    }
}
