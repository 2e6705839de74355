//! Runs the self-check ([`proof`]) once after every start, even without sessions, and stops a
//! server that fails it.

use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::prelude::PgLogLevel;

use crate::hooks::proof::{self, Unproven};
use crate::keys::provider::unlock;
use crate::keys::store::{presence, unsettled};
use crate::pg::{process, worker};

/// Pause while keys are locked or the disk is full, and before a failed worker is restarted.
const PAUSE: Duration = Duration::from_secs(5);

/// Number of attempts with the scratch file, and the pause between them.
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

/// Main function of the worker. If it returns (exit code 0), the worker is not restarted.
pub(super) fn main() {
    worker::handle_worker_signals();
    // If no WAL was replayed, no other code does this.
    let forgotten = unsettled::forget();
    presence::note_settled();
    // Connecting reads shared catalogs.
    while unlock::prevents_connections() {
        worker::wait_in_worker(PAUSE);
    }
    process::connect_without_database();
    prove();
    if let Err(report) = forgotten {
        report.send(PgLogLevel::WARNING);
        while unsettled::forget().is_err() {
            worker::wait_in_worker(PAUSE);
        }
    }
}

/// Returns when the server has passed, or is being shut down.
fn prove() {
    let mut tries = 0;
    loop {
        let Err(unproven) = BackgroundWorker::transaction(proof::prove) else { return };
        let report = unproven.report();
        match unproven {
            Unproven::Unknown { disk_full: true, .. } => {
                report.send(PgLogLevel::LOG);
                worker::wait_in_worker(PAUSE);
            }
            // A server that still fails after these attempts may be one that bypasses pagevault.
            Unproven::Unknown { .. } if tries < TRIES => {
                report.send(PgLogLevel::LOG);
                tries += 1;
                worker::wait_in_worker(RETRY);
            }
            Unproven::Unknown { .. } | Unproven::Bypassed(_) => {
                report.send(PgLogLevel::LOG);
                return process::shut_server_down();
            }
        }
    }
}
