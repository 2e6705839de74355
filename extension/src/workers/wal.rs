//! On a primary: logs what was restored from escrow, and brings WAL to what
//! `pagevault.wal_encryption` wants.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::prelude::PgLogLevel;

use crate::keys::store::escrow;
use crate::keys::usage::wal_switch;
use crate::pg::process;

/// Longest sleep; a change of settings ends it early.
const SLEEP: Duration = Duration::from_secs(3600);
/// Pause before trying again what was not possible.
const RETRY: Duration = Duration::from_secs(5);

pub(super) fn register() {
    BackgroundWorkerBuilder::new("pagevault wal")
        .set_type("pagevault wal")
        .set_library("pagevault")
        .set_function("pagevault_wal_main")
        .enable_shmem_access(None)
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(RETRY))
        .load();
}

/// Main function of the worker.
pub(super) fn main() {
    process::handle_worker_signals();
    let mut said = String::new();
    let mut is_first = true;
    loop {
        let announced = escrow::announce();
        let done = wal_switch::reconcile();
        // After that: the newest may be one that does not count.
        if std::mem::take(&mut is_first)
            && let Err(report) = wal_switch::repeat_newest()
        {
            report.send(PgLogLevel::WARNING);
        }
        let pause = match announced.and(done) {
            Ok(()) => {
                said.clear();
                SLEEP
            }
            Err(report) => {
                if said != report.message() {
                    said = report.message().to_owned();
                    report.send(PgLogLevel::WARNING);
                }
                RETRY
            }
        };
        process::wait_in_worker(pause);
    }
}
