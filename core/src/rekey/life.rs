//! The life of a rekey job: request, claim, pause, resume, cancel, end.
//!
//! Jobs are kept in a table ([`JobTable`]) that changes only by records of the keystore's log. Each
//! function here reads the table, under the lock that excludes other writers, and returns the
//! records to append.
//!
//! ```text
//! requested          Waiting, step 0: its transaction may still roll back
//!   rolled back      -> Void
//!   committed        -> Waiting: workers claim it
//!     pause          -> Paused             resume -> Waiting
//!     cancel         -> Cancelled          resume -> Waiting
//!     error          -> Failed             resume -> Waiting
//!     complete       -> Done, final
//! ```

use std::fmt;

use pagevault_keystore::Record;
use pagevault_keystore::job::{JobId, JobKind, JobState, MAX_ERROR, Request, Step};
use pagevault_keystore::job_table::{Head, JobTable, Known};

/// State of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The current transaction of this session.
    Mine,
    /// In progress in another session, or prepared.
    InProgress,
    /// It has committed.
    Committed,
    /// Rolled back, interrupted by a crash, or unknown because a restore ended before it.
    Aborted,
}

/// Seconds before workers claim a job again whose worker ended in the middle of it.
pub const RETRY_DELAY: u32 = 2;

/// Seconds before another worker is started for a database to which one could not connect.
pub const CONNECT_DELAY: u32 = 10;

/// Whether workers process a job, or will when it is resumed.
#[must_use]
pub fn is_unfinished(state: JobState) -> bool {
    matches!(state, JobState::Waiting | JobState::Paused)
}

/// The state of a job as users see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownState {
    /// A worker does it at this moment.
    Running,
    /// As it is recorded.
    Recorded(JobState),
}

impl ShownState {
    /// Of this job.
    #[must_use]
    pub fn of(known: &Known) -> Self {
        match known.state {
            JobState::Waiting if known.process != 0 => Self::Running,
            state => Self::Recorded(state),
        }
    }

    /// As SQL spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Recorded(state) => state.name(),
        }
    }
}

impl fmt::Display for ShownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// State of the transaction that requested a job; calls `find_out` only if the job has no steps.
/// All steps are recorded after that transaction has committed, except the one that records its
/// abort.
pub fn outcome(known: &Known, find_out: impl FnOnce(u64) -> Outcome) -> Outcome {
    if known.step > 0 { Outcome::Committed } else { find_out(known.request.transaction) }
}

/// The record that moves a job to a state.
#[must_use]
pub fn step(known: &Known, state: JobState, error: &str, now: i64) -> Record {
    let error = error[..error.floor_char_boundary(MAX_ERROR)].to_owned();
    let step = known.step.saturating_add(1);
    let step = Step { step, state, started: known.started, at: now, error };
    Record::JobStep { job: known.job, step }
}

/// Result of a request for a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Submitted {
    /// The number of the new job, and the record to append.
    New(JobId, Record),
    /// The relation has this unfinished job already; [`conflict`] says what to do.
    Other(Known),
}

/// A session requests a job.
#[must_use]
pub fn submit(table: &JobTable<'_>, database: u32, request: Request) -> Submitted {
    let is_other = |head: &Head| {
        head.job.database == database
            && head.relation == request.relation
            && is_unfinished(head.state)
    };
    match table.select(is_other).into_iter().next() {
        Some(other) => Submitted::Other(other),
        None => {
            let job = JobId { database, number: table.next_number(database) };
            Submitted::New(job, Record::Job { job, request })
        }
    }
}

/// What to do if the relation of a request has an unfinished job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobConflict {
    /// That job does what is requested.
    Same,
    /// Wait for the end of its transaction and try again, as for a conflict in a unique index.
    Wait,
    /// Record that its transaction was rolled back, and try again.
    Settle,
    /// Refuse the request.
    InUse,
}

/// Compares a request with the unfinished job `other` of the same relation. `has_begun`: that job
/// has switched files of the relation to another key.
///
/// A rotation that has begun is not the same as a later one, which may be meant for a key that the
/// first has made: it has leaked meanwhile.
#[must_use]
pub fn conflict(
    other: &Known,
    has_begun: bool,
    outcome: Outcome,
    request: &Request,
) -> JobConflict {
    match outcome {
        Outcome::InProgress => JobConflict::Wait,
        Outcome::Aborted => JobConflict::Settle,
        Outcome::Mine | Outcome::Committed => {
            let same = (other.request.kind, other.request.cipher) == (request.kind, request.cipher);
            let waits = other.state == JobState::Waiting && other.process == 0;
            let is_late = has_begun && request.kind == JobKind::Rotate;
            if same && waits && !is_late { JobConflict::Same } else { JobConflict::InUse }
        }
    }
}

/// The state of a job whose requesting transaction has ended; `None` while that is in progress.
#[must_use]
pub fn settled(outcome: Outcome) -> Option<JobState> {
    match outcome {
        Outcome::Mine | Outcome::InProgress => None,
        Outcome::Committed => Some(JobState::Waiting),
        Outcome::Aborted => Some(JobState::Void),
    }
}

/// Records the results of [`settled`] for jobs that have no steps yet.
#[must_use]
pub fn settle(table: &JobTable<'_>, news: &[(JobId, JobState)], now: i64) -> Vec<Record> {
    let step = |(job, state): &(JobId, JobState)| {
        let known = table.find(*job).filter(|known| known.step == 0)?;
        Some(step(&known, *state, "", now))
    };
    news.iter().filter_map(step).collect()
}

/// Commands of users for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Stop for now.
    Pause,
    /// Continue.
    Resume,
    /// Stop for good.
    Cancel,
}

impl Order {
    /// What was done, as a participle for messages.
    #[must_use]
    pub fn done(self) -> &'static str {
        match self {
            Self::Pause => "paused",
            Self::Resume => "resumed",
            Self::Cancel => "cancelled",
        }
    }

    /// The new state, and the states in which the command is allowed; `None` if it is meaningless
    /// for a job that the current transaction requested (`is_mine`).
    #[must_use]
    pub fn transition(self, is_mine: bool) -> Option<(JobState, &'static [JobState])> {
        use JobState::{Cancelled, Failed, Paused, Void, Waiting};
        Some(match self {
            Self::Pause if is_mine => return None,
            Self::Pause => (Paused, &[Waiting]),
            Self::Resume => (Waiting, &[Paused, Cancelled, Failed]),
            // No other session has seen it.
            Self::Cancel if is_mine => (Void, &[Waiting]),
            Self::Cancel => (Cancelled, &[Waiting, Paused, Failed]),
        })
    }
}

/// Why a command is refused.
#[derive(Debug, Clone, PartialEq)]
pub enum Refused {
    /// The job starts only when this transaction commits.
    NotBegun,
    /// The command is not allowed in the job's state.
    State,
    /// This other job of the same relation is unfinished.
    Other(Box<Known>),
}

/// The record by which a command takes effect.
///
/// # Errors
/// If the command is refused.
pub fn apply_order(
    table: &JobTable<'_>,
    job: JobId,
    order: Order,
    is_mine: bool,
    now: i64,
) -> Result<Record, Refused> {
    let (state, from) = order.transition(is_mine).ok_or(Refused::NotBegun)?;
    let known = table.find(job).filter(|known| from.contains(&known.state));
    let known = known.ok_or(Refused::State)?;
    let is_other = |head: &Head| {
        head.job != job
            && (head.job.database, head.relation) == (job.database, known.request.relation)
            && is_unfinished(head.state)
    };
    match table.select(is_other).into_iter().next() {
        Some(other) if order == Order::Resume => Err(Refused::Other(Box::new(other))),
        _ => Ok(step(&known, state, "", now)),
    }
}

/// Which jobs of a relation are withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withdrawn {
    /// Decryption: the relation is to be encrypted from now on.
    Decryption,
    /// Stopped jobs: their work was done by a command, so users need not see them any more.
    Stopped,
}

/// The records that withdraw jobs; each job comes with whether the current transaction requested
/// it.
#[must_use]
pub fn withdraw(
    table: &JobTable<'_>,
    jobs: &[(JobId, bool)],
    what: Withdrawn,
    now: i64,
) -> Vec<Record> {
    let step = |(job, is_mine): &(JobId, bool)| {
        let known = table.find(*job)?;
        let (state, why) = match (what, known.state) {
            (Withdrawn::Decryption, state)
                if is_unfinished(state) && known.request.kind == JobKind::Decrypt =>
            {
                (JobState::Cancelled, "the relation is to be encrypted")
            }
            (Withdrawn::Stopped, JobState::Paused | JobState::Cancelled | JobState::Failed) => {
                (JobState::Void, "")
            }
            _ => return None,
        };
        Some(step(&known, if *is_mine { JobState::Void } else { state }, why, now))
    };
    jobs.iter().filter_map(step).collect()
}

/// Jobs of a database that a worker may claim, in the order in which it tries them. Those that were
/// given up most recently come last, so that jobs that fail to get a lock again and again do not
/// starve others. `is_held`: jobs that are not to run now.
#[must_use]
pub fn claimable(
    table: &JobTable<'_>,
    database: u32,
    now_seconds: u32,
    is_held: impl Fn(&Known) -> bool,
) -> Vec<Known> {
    let is_claimable = |head: &Head| {
        head.job.database == database
            && is_ready(head)
            && head.process == 0
            && !is_delayed(head.given_up, now_seconds)
    };
    let mut found = table.select(is_claimable);
    found.retain(|known| !is_held(known));
    found.sort_by_key(|known| known.given_up);
    found
}

/// Whether workers may process a job: only after its transaction has committed.
fn is_ready(head: &Head) -> bool {
    head.state == JobState::Waiting && head.step > 0
}

fn is_delayed(given_up: u32, now_seconds: u32) -> bool {
    now_seconds.saturating_sub(given_up) < RETRY_DELAY
}

/// The job, if this process is still to continue with it: it is not paused, cancelled or gone.
#[must_use]
pub fn still_claimed_by(table: &JobTable<'_>, job: JobId, process: u32) -> Option<Known> {
    let is_its = |known: &Known| known.state == JobState::Waiting && known.process == process;
    table.find(job).filter(is_its)
}

/// The record by which a process ends a job that is still its own.
#[must_use]
pub fn end(
    table: &JobTable<'_>,
    job: JobId,
    process: u32,
    (state, error): (JobState, &str),
    now: i64,
) -> Option<Record> {
    Some(step(&still_claimed_by(table, job, process)?, state, error, now))
}

/// Number of jobs to process in a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Jobs that no worker has claimed.
    pub free: usize,
    /// Jobs that workers process.
    pub taken: usize,
}

/// The load of each database; and whether a delayed job becomes claimable soon, without a
/// notification. `is_held` as for [`claimable`].
#[must_use]
pub fn loads(
    table: &JobTable<'_>,
    now_seconds: u32,
    is_held: impl Fn(&Known) -> bool,
) -> (std::collections::BTreeMap<u32, Load>, bool) {
    let mut loads = std::collections::BTreeMap::<u32, Load>::new();
    let mut soon = false;
    let is_idle = |known: &Known| known.process == 0 && is_held(known);
    for known in table.select(is_ready).into_iter().filter(|known| !is_idle(known)) {
        let load = loads.entry(known.job.database).or_default();
        if known.process != 0 {
            load.taken += 1;
        } else if known.given_up != 0 && is_delayed(known.given_up, now_seconds) {
            soon = true;
        } else {
            load.free += 1;
        }
    }
    (loads, soon)
}
