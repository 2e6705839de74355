//! The worker that rotates a key by age, and how the launcher of rekey workers starts it.

use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorker, DynamicBackgroundWorker};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::PgLogLevel;
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use super::dynamic;
use crate::pg::report::{self, Report, Result};
use crate::pg::{catalog, process, worker};
use crate::rotation::Task;
use crate::rotation::perform::perform;
use crate::rotation::schedule::Schedule;

/// How long a worker waits for a lock: whoever has it may be idle, and other keys are due, too.
const LOCK_WAIT: &CStr = c"5s";

/// Starts workers for what is due, one at a time.
#[derive(Default)]
pub(super) struct Launcher {
    schedule: Schedule,
    running: Option<(Task, DynamicBackgroundWorker)>,
}

impl Launcher {
    /// Looks at what is due. The time until it has to be called again, if any; the end of a worker
    /// wakes the launcher.
    pub(super) fn look(&mut self) -> Option<Duration> {
        if let Some((task, worker)) = &self.running {
            if !dynamic::has_ended(worker) {
                return None;
            }
            self.schedule.ended(*task);
            self.running = None;
        }
        if self.schedule.due_in().is_some_and(|pause| pause.is_zero()) {
            let databases =
                || catalog::databases().into_iter().map(|database| database.to_u32()).collect();
            let next =
                BackgroundWorker::transaction(AssertUnwindSafe(|| self.schedule.next(databases)));
            match next {
                Ok(Some(task)) => {
                    let argument = pg_sys::Datum::from(task.encode());
                    let worker =
                        dynamic::start("pagevault rotation", "pagevault_rotation_main", argument);
                    self.running = worker.map(|worker| (task, worker));
                }
                Ok(None) => {}
                Err(report) => report.send(PgLogLevel::WARNING),
            }
        }
        self.schedule.due_in().filter(|_| self.running.is_none())
    }
}

/// Main function of the worker.
pub(super) fn main(argument: pg_sys::Datum) {
    worker::handle_worker_signals();
    let Some(task) = Task::decode(argument.value() as u64) else { return };
    match task {
        Task::DataKeys(database)
        | Task::SharedDataKeys(database)
        | Task::InterimPages(database) => worker::connect_to_database_if_exists(database.into()),
        _ => process::connect_without_database(),
    }
    worker::restrict();
    worker::give_way();
    worker::wait_for_locks_at_most(LOCK_WAIT);
    let failed = |error: CaughtError| {
        let error = report::of_caught(&error);
        let report = Report::new(PgSqlErrorCode::ERRCODE_WARNING, error.message());
        Err(report.detail(error.detail().unwrap_or_default()))
    };
    let done: Result<()> =
        PgTryBuilder::new(AssertUnwindSafe(|| worker::transaction(|| perform(task))))
            .catch_others(failed)
            .catch_rust_panic(failed)
            .execute();
    if let Err(report) = done {
        process::abort_transaction();
        if process::is_told_to_stop() {
            return;
        }
        let what = match task {
            Task::FindInterimPages => "look for pages under interim keys",
            Task::InterimPages(_) => "give relations with pages under interim keys new data keys",
            _ => "rotate a key by age",
        };
        let message = format!("pagevault: could not {what}: {}", report.message());
        Report::new(PgSqlErrorCode::ERRCODE_WARNING, message)
            .detail(report.detail_text())
            .hint("It is tried again, after pauses that become longer.")
            .send(PgLogLevel::WARNING);
    }
}
