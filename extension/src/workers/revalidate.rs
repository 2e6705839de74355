//! Background worker: asks key providers regularly whether they would still unwrap the keys in use,
//! evicts pages of locked relations from shared buffers, forgets keys that nothing needs, and
//! removes former wrappings of database keys from the key file.

use std::time::{Duration, Instant};

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::prelude::PgLogLevel;

use super::dropped::Running;
use crate::audit;
use crate::keys::provider::revalidate::{Logged, revalidate};
use crate::keys::store::compact::Leftovers;
use crate::keys::store::escrow;
use crate::keys::usage::authenticated::{self, Conditions};
use crate::keys::usage::forgetting;
use crate::page::withdrawal::Withdrawal;
use crate::pg::{buffers, guc, worker};

/// Longest sleep; a change of settings ends it early.
const SLEEP: Duration = Duration::from_secs(3600);

pub(super) fn register() {
    BackgroundWorkerBuilder::new("pagevault revalidate")
        .set_type("pagevault revalidate")
        .set_library("pagevault")
        .set_function("pagevault_revalidate_main")
        .enable_shmem_access(None)
        .set_start_time(BgWorkerStartTime::PostmasterStart)
        .set_restart_time(Some(Duration::from_secs(5)))
        .load();
}

/// Main function of the worker, on primaries and standbys.
pub(super) fn main() {
    worker::handle_worker_signals();
    buffers::prepare_to_evict();
    audit::repeat_early_lines();
    escrow::log_new_bundle();
    let mut conditions = Conditions::default();
    conditions.log_change();
    let mut logged = Logged::default();
    // What an earlier worker has locked stays locked after that worker failed.
    let mut withdrawal = Withdrawal::default();
    let mut forgetting = forgetting::Watch::default();
    let mut dropped = Running::default();
    let mut former_wrappings = Leftovers::default();
    let mut last = Instant::now(); // server start has just asked
    loop {
        withdrawal.scan_if_due();
        forgetting.run_if_due();
        dropped.go_on(&mut forgetting);
        former_wrappings.run_if_due();
        let due_in =
            || guc::revalidate_interval().map(|pause| pause.saturating_sub(last.elapsed()));
        let pauses = [
            due_in(),
            withdrawal.due_in(),
            Some(forgetting.due_in()),
            dropped.due_in(),
            Some(former_wrappings.due_in()),
        ];
        worker::wait_in_worker(pauses.into_iter().flatten().fold(SLEEP, Duration::min));
        audit::settings::log_changes();
        authenticated::page_images_at_times();
        conditions.log_change();
        escrow::log_new_bundle();
        if due_in().is_some_and(|pause| pause.is_zero()) {
            if let Err(report) = revalidate(&mut logged) {
                report.send(PgLogLevel::WARNING);
            }
            last = Instant::now();
        }
    }
}
