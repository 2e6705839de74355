//! The worker that finds out which files of a database were dropped, and how it is started.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::PgLogLevel;
use pgrx::{PgSqlErrorCode, PgTryBuilder};

use super::dynamic;
use crate::keys::usage::dropped;
use crate::keys::usage::forgetting::{ALL_DATABASES, Question, Watch};
use crate::pg::report::{self, Report, Result};
use crate::pg::{process, worker};

/// Pause between looks whether a worker has ended.
const LOOK: Duration = Duration::from_millis(200);

/// The worker that is running, started by the worker that forgets keys.
#[derive(Default)]
pub(super) struct Running(Option<DynamicBackgroundWorker>);

impl Running {
    /// Pause until it is looked whether the worker has ended. That does not wake a process which
    /// has no database (bgworker.c ignores SIGUSR1 there).
    pub(super) fn due_in(&self) -> Option<Duration> {
        self.0.as_ref().map(|_| LOOK)
    }

    /// Starts the next worker when the last one has ended.
    pub(super) fn go_on(&mut self, forgetting: &mut Watch) {
        if let Some(worker) = &self.0 {
            if !dynamic::has_ended(worker) {
                return;
            }
            self.0 = None;
            forgetting.answered();
        }
        while let Some(Question { database, patience }) = forgetting.next_question() {
            let argument = u64::from(database) | patience.as_secs() << 32;
            let argument = pg_sys::Datum::from(argument);
            self.0 = dynamic::start("pagevault dropped files", "pagevault_dropped_main", argument);
            if self.0.is_some() {
                return;
            }
            // No free slot: it is asked again later.
            forgetting.answered();
        }
    }
}

/// Main function of the worker.
pub(super) fn main(argument: pg_sys::Datum) {
    worker::handle_worker_signals();
    let argument = argument.value() as u64;
    let (database, patience) = (argument as u32, Duration::from_secs(argument >> 32));
    if database == ALL_DATABASES {
        process::connect_without_database();
    } else {
        worker::connect_to_database_if_exists(Oid::from(database));
    }
    worker::restrict();
    worker::give_way();
    let look = || match database {
        ALL_DATABASES => dropped::note_databases(),
        _ => dropped::note_in_database(patience),
    };
    let done: Result<()> = PgTryBuilder::new(AssertUnwindSafe(|| worker::transaction(look)))
        .catch_when(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, |_| Ok(()))
        .catch_others(|error| {
            let message = report::of_caught(&error).message().to_owned();
            Err(Report::new(PgSqlErrorCode::ERRCODE_WARNING, message))
        })
        .execute();
    if let Err(report) = done {
        process::abort_transaction();
        report.send(PgLogLevel::WARNING);
    }
}
