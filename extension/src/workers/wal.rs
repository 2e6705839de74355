//! Background worker of a primary: logs keys restored from escrow in WAL, and the end of key groups
//! that were given up; switches WAL encryption as `pagevault.wal_encryption` requires, and writes
//! notes to the anchor.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::prelude::PgLogLevel;

use crate::anchor::Watch;
use crate::keys::store::{escrow, given_up};
use crate::keys::usage::wal_switch;
use crate::pg::worker;

/// Longest sleep; a change of settings ends it early.
const SLEEP: Duration = Duration::from_secs(3600);
/// Pause before a retry.
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
    worker::handle_worker_signals();
    let mut last_warning = String::new();
    let mut is_first = true;
    let mut anchor = Watch::default();
    loop {
        // Each is tried, and tried again, whatever becomes of the others.
        let announced = given_up::announce();
        let announced = escrow::announce().and(announced);
        let done = wal_switch::reconcile();
        // After reconcile(): the newest switch may be one that does not apply.
        if std::mem::take(&mut is_first)
            && let Err(report) = wal_switch::repeat_newest()
        {
            report.send(PgLogLevel::WARNING);
        }
        let pause = match announced.and(done) {
            Ok(()) => {
                last_warning.clear();
                SLEEP
            }
            Err(report) => {
                if last_warning != report.message() {
                    last_warning = report.message().to_owned();
                    report.send(PgLogLevel::WARNING);
                }
                RETRY
            }
        };
        anchor.note_if_due();
        worker::wait_in_worker(anchor.due_in().map_or(pause, |due| due.min(pause)));
    }
}
