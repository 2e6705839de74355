//! Does the self-check ([`proof`]) once after every start, whether or not there are sessions, and
//! ends a server that cannot be proven to read and write through pagevault.

use std::time::Duration;

use pgrx::PgTryBuilder;
use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};

use crate::hooks::proof::{self, Unproven};
use crate::keys::provider::unlock;
use crate::keys::store::unsettled;
use crate::pg::{process, xact};

/// Between looks at keys that are locked or a disk that is full, and before a worker that died is
/// started again.
const PAUSE: Duration = Duration::from_secs(5);

/// How often the scratch file is tried, and the pause between.
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
    // Connecting reads shared catalogs.
    while unlock::keeps_everyone_out() {
        process::wait_in_worker(PAUSE);
    }
    process::connect_without_database();
    let mut tries = 0;
    loop {
        let proven = PgTryBuilder::new(|| xact::within(proof::prove))
            .catch_others(|error| Err(Unproven::raised(&error)))
            .execute();
        let Err(unproven) = proven else { return };
        process::abort_transaction();
        let report = unproven.report();
        match unproven {
            Unproven::Unknown { disk_full: true, .. } => {
                report.send(pgrx::prelude::PgLogLevel::LOG);
                process::wait_in_worker(PAUSE);
            }
            // A server in which that cannot be done for a while may be one that writes past us.
            Unproven::Unknown { .. } if tries < TRIES => {
                report.send(pgrx::prelude::PgLogLevel::LOG);
                tries += 1;
                process::wait_in_worker(RETRY);
            }
            Unproven::Unknown { .. } | Unproven::Bypassed(_) => {
                report.send(pgrx::prelude::PgLogLevel::LOG);
                return process::shut_server_down();
            }
        }
    }
}
