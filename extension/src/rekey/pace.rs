//! What a worker does between the steps of a job: it keeps the rate, stores the progress, and
//! checks whether to continue.

use std::time::{Duration, Instant};

use pagevault_cipher::PAGE_SIZE;
use pagevault_core::rekey::file::{StepResult, WaitsFor};
use pagevault_core::rekey::pace::Busy;
use pagevault_core::rekey::run::Run;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::Job;
use super::engine::{Online, in_transaction};
use super::jobs::{self, Progress};
use super::traffic::Auto;
use crate::pg::guc::{self, RekeyRate};
use crate::pg::report::Report;
use crate::pg::{process, worker};

/// Interval between updates of the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between checks whether the job was paused or cancelled. Not after each batch, because
/// at full speed there are hundreds in a second.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How long a worker waits for a lock on a relation, or for a session that may hold one as long as
/// it likes, before it continues with other jobs: there are few workers.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Polling interval of a worker that waits for another process.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Whether to continue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    GoOn,
    /// The job was paused, cancelled or forgotten.
    Stop,
}

/// Work between steps: keeps the rate, stores the progress, and checks whether to continue.
pub(super) struct Pace<'a> {
    job: &'a Job,
    noted: Instant,
    /// Time of the last check whether to continue.
    asked: Instant,
    /// Time since which it waits for the same thing.
    waits_since: Option<(WaitsFor, Instant)>,
    bytes_since_noted: f64,
    bytes_per_second: f64,
    auto: Option<Auto>,
    /// What was shown as the reason why it goes slower.
    shown: Option<Busy>,
}

impl<'a> Pace<'a> {
    pub(super) fn new(job: &'a Job) -> Pace<'a> {
        let now = Instant::now();
        Pace {
            job,
            noted: now,
            asked: now,
            waits_since: None,
            bytes_since_noted: 0.0,
            bytes_per_second: 0.0,
            auto: None,
            shown: None,
        }
    }

    pub(super) fn after(
        &mut self,
        oid: Oid,
        result: StepResult,
        online: &Online<'_>,
        run: &Run,
    ) -> Flow {
        if !matches!(result, StepResult::Waits(_)) {
            self.waits_since = None;
        }
        match result {
            StepResult::Rewrote { pages, rewritten } => {
                return self.batch(oid, pages, rewritten, run);
            }
            StepResult::Waits(reason) => {
                let what = online.waits_for(reason);
                self.show(oid, &what);
                if self.waits_too_long(reason) {
                    in_transaction(|| Err::<(), _>(not_available(oid, &what)));
                }
                worker::wait_in_worker(POLL_INTERVAL);
            }
            StepResult::Done | StepResult::StartedOver | StepResult::Ended(_) => {
                worker::wait_in_worker(Duration::ZERO)
            }
        }
        self.auto.iter_mut().for_each(Auto::resume);
        self.ask()
    }

    /// Whether to give up the job for now. Not because of writers: they end as soon as the disk
    /// lets them.
    fn waits_too_long(&mut self, reason: WaitsFor) -> bool {
        match self.waits_since {
            Some((same, since)) if same == reason => {
                reason != WaitsFor::Writers && since.elapsed() > LOCK_WAIT
            }
            _ => {
                self.waits_since = Some((reason, Instant::now()));
                false
            }
        }
    }

    fn batch(&mut self, oid: Oid, pages: u32, rewritten: u32, run: &Run) -> Flow {
        self.bytes_since_noted += f64::from(pages) * PAGE_SIZE as f64;
        if self.keep_rate(f64::from(rewritten) * PAGE_SIZE as f64) == Flow::Stop {
            return Flow::Stop;
        }
        let busy = self.auto.as_ref().and_then(Auto::busy);
        let is_due = self.noted.elapsed() >= PROGRESS_INTERVAL;
        if is_due || busy != self.shown {
            let Progress { pages_done, pages_total, .. } = run.progress();
            let speed = self.auto.as_ref().map(|auto| format!(", {}", auto.describe()));
            let speed = speed.unwrap_or_default();
            self.show(oid, &format!("{pages_done} of {pages_total} pages{speed}"));
            self.shown = busy;
        }
        if !is_due {
            return self.ask();
        }
        self.asked = Instant::now();
        self.bytes_per_second = self.bytes_since_noted / self.noted.elapsed().as_secs_f64();
        (self.noted, self.bytes_since_noted) = (Instant::now(), 0.0);
        self.note(run)
    }

    /// Waits until rewriting this number of bytes is permitted by the rate. At the lowest rates
    /// that takes minutes, in which the rate may be changed or the job paused.
    fn keep_rate(&mut self, bytes: f64) -> Flow {
        let rewritten = Instant::now();
        let pause = self.pause_by_itself();
        loop {
            let takes = match guc::rekey_rate() {
                RekeyRate::Auto => pause,
                RekeyRate::Limit(rate) => Duration::from_secs_f64(bytes / rate),
                RekeyRate::Unlimited => Duration::ZERO,
            };
            let left = takes.saturating_sub(rewritten.elapsed());
            worker::wait_in_worker(left.min(CHECK_INTERVAL));
            if left <= CHECK_INTERVAL {
                self.auto.iter_mut().for_each(Auto::resume);
                return Flow::GoOn;
            }
            if self.ask() == Flow::Stop {
                return Flow::Stop;
            }
        }
    }

    /// The pause after a batch if the rate is `auto`.
    fn pause_by_itself(&mut self) -> Duration {
        if guc::rekey_rate() != RekeyRate::Auto {
            self.auto = None;
            return Duration::ZERO;
        }
        if self.auto.is_none() {
            self.auto = Auto::begin();
        }
        let Some(auto) = &mut self.auto else { return Duration::ZERO };
        let pause = auto.pause();
        if auto.is_due() {
            in_transaction(|| {
                auto.look();
                Ok(())
            });
        }
        pause
    }

    /// Shows the worker's activity in `pg_stat_activity`.
    fn show(&self, oid: Oid, what: &str) {
        let Job { id, kind, .. } = self.job;
        let (kind, oid) = (kind.name(), oid.to_u32());
        let text = format!("pagevault: {kind} job {id}, relation {oid}: {what}");
        process::show_activity(Some(&text));
    }

    /// Checks whether to continue, if the last check is old enough.
    fn ask(&mut self) -> Flow {
        if self.asked.elapsed() < CHECK_INTERVAL {
            return Flow::GoOn;
        }
        self.asked = Instant::now();
        let continues = in_transaction(|| jobs::continues(self.job));
        if continues { Flow::GoOn } else { Flow::Stop }
    }

    pub(super) fn note(&self, run: &Run) -> Flow {
        let progress = Progress { bytes_per_second: self.bytes_per_second, ..run.progress() };
        if in_transaction(|| jobs::note(self.job, &progress)) { Flow::GoOn } else { Flow::Stop }
    }
}

/// Like the error of a lock that was waited for too long.
fn not_available(oid: Oid, what: &str) -> Report {
    let message = format!("a job for relation {} {what}", oid.to_u32());
    Report::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, message)
}
