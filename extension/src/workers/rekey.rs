//! The launcher of rekey workers, and the workers: they take jobs of one database until none is left.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use pgrx::bgworkers::{
    BackgroundWorkerBuilder, BackgroundWorkerStatus, BgWorkerStartTime, DynamicBackgroundWorker,
};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{IntoDatum, PgTryBuilder, pg_guard, pg_sys};

use crate::fault;
use crate::keys::unlock;
use crate::pg::{catalog, guc, process};
use crate::rekey::jobs::End;
use crate::rekey::{self, Job, wishes};

/// When the launcher begins to look for jobs from before the server's start.
const FIRST_LOOK: Duration = Duration::from_secs(3);

/// Longest sleep of the launcher: it looks then whether workers have ended.
const LOOK: Duration = Duration::from_secs(10);

pub(super) fn register() {
    BackgroundWorkerBuilder::new("pagevault rekey launcher")
        .set_type("pagevault rekey launcher")
        .set_library("pagevault")
        .set_function("pagevault_rekey_launcher_main")
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(Duration::from_secs(5)))
        .load();
}

/// Main function of the launcher.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pagevault_rekey_launcher_main(_argument: pg_sys::Datum) {
    process::handle_worker_signals();
    // A session starts by reading shared catalogs.
    while unlock::keeps_everyone_out() {
        process::wait_in_worker(LOOK);
    }
    process::connect_without_database();
    wishes::attend();
    // Others want their workers when the server starts, and there are not many.
    process::wait_in_worker(FIRST_LOOK);
    let mut waiting = VecDeque::new();
    let mut unknown: VecDeque<u32> = all_databases().into();
    let mut running: Vec<(u32, DynamicBackgroundWorker)> = Vec::new();
    loop {
        let (wished, everywhere) = wishes::take();
        waiting.extend(wished);
        if everywhere {
            unknown = all_databases().into();
        }
        running.retain(|(_, worker)| !has_ended(worker));
        if running.is_empty() && waiting.is_empty() {
            waiting.extend(unknown.pop_front()); // one at a time: most have no job
        }
        while running.len() < guc::rekey_workers()
            && let Some(database) = waiting.pop_front()
        {
            if !all_databases().contains(&database) {
                continue; // dropped since
            }
            match start_worker(database) {
                Some(worker) => running.push((database, worker)),
                None => {
                    waiting.push_front(database); // no slot is free: try again later
                    break;
                }
            }
        }
        process::wait_in_worker(LOOK);
    }
}

fn all_databases() -> Vec<u32> {
    let databases = pgrx::bgworkers::BackgroundWorker::transaction(catalog::databases);
    databases.into_iter().map(pg_sys::Oid::to_u32).collect()
}

fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    matches!(
        worker.pid(),
        Err(BackgroundWorkerStatus::Stopped | BackgroundWorkerStatus::PostmasterDied)
    )
}

fn start_worker(database: u32) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new("pagevault rekey")
        .set_type("pagevault rekey")
        .set_library("pagevault")
        .set_function("pagevault_rekey_main")
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(None)
        .set_argument(pg_sys::Oid::from(database).into_datum())
        .set_notify_pid(std::process::id() as i32)
        .load_dynamic()
        .ok()
}

/// Main function of a worker.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pagevault_rekey_main(database: pg_sys::Datum) {
    process::handle_worker_signals();
    let database = database.value() as u32;
    fault::point_of("rekey.worker", database);
    process::connect_to_database_if_there(pg_sys::Oid::from(database));
    process::write_back_soon();
    while let Some(job) = rekey::claim() {
        let outcome = PgTryBuilder::new(AssertUnwindSafe(|| rekey::run(&job).then_some(End::Done)))
            .catch_others(|error| Some(End::Failed(message_of(&error))))
            .catch_rust_panic(|error| Some(End::Failed(message_of(&error))))
            .execute();
        if matches!(outcome, Some(End::Failed(_))) {
            process::abort_transaction();
            if !rekey::claim_again(&job) {
                continue; // that gave it up, and another worker has taken it
            }
        }
        finish(&job, outcome);
    }
}

fn finish(job: &Job, outcome: Option<End>) {
    if let Some(End::Failed(error)) = &outcome {
        pgrx::warning!("pagevault: rekey job {} has failed: {error}", job.id);
    }
    rekey::finish(job, outcome);
    process::show_activity(None);
}

fn message_of(error: &CaughtError) -> String {
    let report = match error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    };
    match report.detail() {
        Some(detail) => format!("{} ({detail})", report.message()),
        None => report.message().to_owned(),
    }
}
