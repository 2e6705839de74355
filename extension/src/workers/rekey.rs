//! The launcher of rekey workers, and the workers, each of which runs jobs of one database until
//! none is left, or a relation stays locked. No worker is started for a database without jobs.

use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use pgrx::bgworkers::{
    BackgroundWorker, BackgroundWorkerBuilder, BgWorkerStartTime, DynamicBackgroundWorker,
};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use super::dynamic;
use super::rotation;

use crate::fault;
use crate::keys::provider::unlock;
use crate::keys::usage::{authenticated, withheld};
use crate::pg::report::{self, OrRaise};
use crate::pg::{catalog, exit, guc, process, worker};
use crate::rekey::jobs::{self, End};
use crate::rekey::pending::{Pending, pending};
use crate::rekey::{self, Job, launcher};

/// How long a worker waits for a lock on a relation before it continues with other jobs: there are
/// few workers, and any owner of a table may lock it indefinitely.
const LOCK_WAIT: &CStr = c"5s";

/// Delay before the launcher first looks for jobs that existed before server start.
const FIRST_LOOK: Duration = Duration::from_secs(3);

/// Longest sleep of the launcher.
const LOOK: Duration = Duration::from_secs(10);

/// The same while there are jobs that may become ready without notification, e.g. when another
/// session commits their prepared transaction.
const LOOK_SOON: Duration = Duration::from_secs(1);

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
pub(super) fn launcher_main() {
    worker::handle_worker_signals();
    // Connecting reads shared catalogs.
    while unlock::prevents_connections() {
        worker::wait_in_worker(LOOK);
    }
    process::connect_without_database();
    launcher::register();
    // Other libraries start workers at server start too, and slots are few.
    worker::wait_in_worker(FIRST_LOOK);
    let mut running: Vec<(u32, DynamicBackgroundWorker)> = Vec::new();
    let mut turns = Turns::default();
    let mut rotation = rotation::Launcher::default();
    loop {
        let ended = running.extract_if(.., |(_, worker)| dynamic::has_ended(worker));
        let ended: Vec<u32> = ended.map(|(database, _)| database).collect();
        let (pending, open) = BackgroundWorker::transaction(|| {
            let pending = pending().or_raise();
            // Most of the time there are no jobs, and no catalog need be read.
            let open = if pending.databases.is_empty() { Vec::new() } else { catalog::databases() };
            (pending, open)
        });
        let mut has_left_jobs = false;
        while running.len() < guc::rekey_workers()
            && let Some(database) = next_database(&pending, &open, &running, &turns)
        {
            if ended.contains(&database) {
                has_left_jobs = true;
                break;
            }
            let argument = pg_sys::Datum::from(database);
            match dynamic::start("pagevault rekey", "pagevault_rekey_main", argument) {
                Some(worker) => {
                    turns.note(database);
                    running.push((database, worker));
                }
                None => break, // no free slot: retry later
            }
        }
        if has_left_jobs {
            // A worker that cannot be forked, or fails at once, wakes us when it ends.
            worker::pause_worker(LOOK_SOON);
            continue;
        }
        let look = if pending.soon { LOOK_SOON } else { LOOK };
        worker::wait_in_worker(rotation.look().map_or(look, |due| due.min(look)));
    }
}

/// Which databases got a worker last, the latest at the end. Otherwise one whose jobs never end, as
/// their tables are locked, would always come before another.
#[derive(Default)]
struct Turns(Vec<u32>);

impl Turns {
    fn note(&mut self, database: u32) {
        self.0.retain(|known| *known != database);
        self.0.push(database);
    }

    /// 0 for a database that got none yet.
    fn of(&self, database: u32) -> usize {
        self.0.iter().position(|known| *known == database).map_or(0, |at| at + 1)
    }
}

/// The database for which to start another worker: it has more ready jobs than workers for them
/// and, among such databases, the fewest workers; among these, it has waited longest.
fn next_database(
    pending: &Pending,
    open: &[pg_sys::Oid],
    running: &[(u32, DynamicBackgroundWorker)],
    turns: &Turns,
) -> Option<u32> {
    let workers = |database| running.iter().filter(|(of, _)| *of == database).count();
    let wanting = pending.databases.iter().filter(|(database, load)| {
        load.free > workers(**database).saturating_sub(load.taken)
            && open.contains(&(**database).into())
    });
    wanting
        .map(|(database, _)| *database)
        .min_by_key(|database| (workers(*database), turns.of(*database)))
}

/// The result of running a job.
enum Run {
    /// It has ended, or was stopped.
    Over(Option<End>),
    /// The relation stayed locked by another session, or another session waited for the worker.
    LockedOut,
    /// This error, for something that ends by itself ([`withheld`]).
    Waits(String),
}

/// Main function of a worker.
pub(super) fn main(database: pg_sys::Datum) {
    worker::handle_worker_signals();
    let database = database.value() as u32;
    jobs::serve(database);
    // Before connecting, which may fail.
    exit::at_exit(jobs::postpone);
    fault::point_of("rekey.worker", database);
    worker::connect_to_database_if_exists(pg_sys::Oid::from(database));
    worker::restrict();
    worker::give_way();
    worker::wait_for_locks_at_most(LOCK_WAIT);
    worker::at_exit(jobs::give_up);
    process::write_back_early();
    while let Some(job) = rekey::claim() {
        if !unlock::withholds_keys_of(database) && !authenticated::may_wait_for_images(job.cipher) {
            no_longer_waits(&job);
        }
        withheld::take();
        let failed = |error: &CaughtError| Run::Over(Some(End::Failed(message_of(error))));
        let run = PgTryBuilder::new(AssertUnwindSafe(|| {
            Run::Over(rekey::run(&job).then_some(End::Done))
        }))
        .catch_when(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, |_| Run::LockedOut)
        // A transaction that has locked an index may go on to lock its table.
        .catch_when(PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED, |_| Run::LockedOut)
        .catch_when(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, |_| Run::LockedOut)
        .catch_when(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, |error| {
            fault::point("rekey.refused");
            match withheld::take() {
                true => Run::Waits(message_of(&error)),
                false => failed(&error),
            }
        })
        .catch_others(|error| failed(&error))
        .catch_rust_panic(|error| failed(&error))
        .execute();
        match run {
            Run::LockedOut => {
                process::abort_transaction();
                jobs::give_up();
                // Other databases may be waiting for a worker, and more tables may be locked here.
                return;
            }
            Run::Waits(error) => {
                process::abort_transaction();
                if jobs::note_waiting(&job, &error).or_raise() {
                    pgrx::log!("pagevault: rekey job {} waits: {error}", job.id);
                }
                jobs::give_up();
            }
            Run::Over(end) => {
                no_longer_waits(&job);
                if let Some(End::Failed(error)) = &end {
                    process::abort_transaction();
                    pgrx::warning!("pagevault: rekey job {} has failed: {error}", job.id);
                }
                rekey::finish(&job, end);
            }
        }
        process::show_activity(None);
    }
}

/// Each attempt would be a line in the log otherwise, and there is one every few seconds.
fn no_longer_waits(job: &Job) {
    if jobs::note_waiting(job, "").or_raise() {
        pgrx::log!("pagevault: rekey job {} waits no longer", job.id);
    }
}

fn message_of(error: &CaughtError) -> String {
    let report = report::of_caught(error);
    match report.detail() {
        Some(detail) => format!("{} ({detail})", report.message()),
        None => report.message().to_owned(),
    }
}
