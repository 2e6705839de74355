//! Jobs: asked for, claimed, ordered about, ended.
//!
//! What is known of jobs stands in a table ([`JobTable`]); it changes by records of the keystore's
//! log. Here is said which: each function looks at the table, under the lock that keeps others from
//! writing, and returns what is to be appended.
//!
//! ```text
//! asked for          Waiting, step 0: nobody knows whether it counts
//!   rolled back      -> Void
//!   committed        -> Waiting: workers claim it
//!     pause          -> Paused             resume -> Waiting
//!     cancel         -> Cancelled          resume -> Waiting
//!     cannot go on   -> Failed             resume -> Waiting
//!     complete       -> Done, for good
//! ```

use std::fmt;

use pagevault_keystore::Record;
use pagevault_keystore::job::{JobId, JobKind, JobState, MAX_ERROR, Request, Step};
use pagevault_keystore::job_table::{Head, JobTable, Known};

/// What became of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is this session's, and not at its end.
    Mine,
    /// It is another session's, or prepared.
    InProgress,
    /// It has committed.
    Committed,
    /// It was rolled back, or the server crashed before its end, or it never was: a restore has
    /// ended before it.
    Aborted,
}

/// How long a job is left alone whose worker has ended in the middle of it, in seconds.
pub const LEFT_ALONE: u32 = 2;

/// Whether workers do a job, or will when it is resumed.
#[must_use]
pub fn is_unfinished(state: JobState) -> bool {
    matches!(state, JobState::Waiting | JobState::Paused)
}

/// Where a job stands, as users are told.
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

/// What became of the transaction that asked for a job; `find_out` if the job does not say. Every
/// step of a job was written after that transaction had committed, but for the one that says that
/// it has not.
pub fn outcome(known: &Known, find_out: impl FnOnce(u64) -> Outcome) -> Outcome {
    if known.step > 0 { Outcome::Committed } else { find_out(known.request.transaction) }
}

/// The step that brings a job into a state.
#[must_use]
pub fn step(known: &Known, state: JobState, error: &str, now: i64) -> Record {
    let error = error[..error.floor_char_boundary(MAX_ERROR)].to_owned();
    let step = known.step.saturating_add(1);
    let step = Step { step, state, started: known.started, at: now, error };
    Record::JobStep { job: known.job, step }
}

/// What a request for a job leads to.
#[derive(Debug, Clone, PartialEq)]
pub enum Submitted {
    /// This is to be appended; it is this job.
    New(JobId, Record),
    /// This one of the same relation is not at its end: [`met`] says what to do.
    Other(Known),
}

/// Somebody asks for a job.
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

/// What to do where a relation has an unfinished job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// It is what is asked for.
    Same,
    /// Wait for the end of its transaction, and ask again, as a unique index would have it.
    Wait,
    /// Write down that it never was, and ask again.
    Settle,
    /// Refuse.
    InUse,
}

/// A job is asked for of a relation that has this one.
#[must_use]
pub fn met(other: &Known, outcome: Outcome, request: &Request) -> Met {
    match outcome {
        Outcome::InProgress => Met::Wait,
        Outcome::Aborted => Met::Settle,
        Outcome::Mine | Outcome::Committed => {
            let same = (other.request.kind, other.request.cipher) == (request.kind, request.cipher);
            let waits = other.state == JobState::Waiting && other.process == 0;
            if same && waits { Met::Same } else { Met::InUse }
        }
    }
}

/// Where a job stands of which it was not known whether its transaction has committed; `None` if it
/// is still not known.
#[must_use]
pub fn settled(outcome: Outcome) -> Option<JobState> {
    match outcome {
        Outcome::Mine | Outcome::InProgress => None,
        Outcome::Committed => Some(JobState::Waiting),
        Outcome::Aborted => Some(JobState::Void),
    }
}

/// Writes down what [`settled`] says of jobs, unless others have.
#[must_use]
pub fn settle(table: &JobTable<'_>, news: &[(JobId, JobState)], now: i64) -> Vec<Record> {
    let step = |(job, state): &(JobId, JobState)| {
        let known = table.find(*job).filter(|known| known.step == 0)?;
        Some(step(&known, *state, "", now))
    };
    news.iter().filter_map(step).collect()
}

/// What a user may have done to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Stop for now.
    Pause,
    /// Go on.
    Resume,
    /// Stop for good.
    Cancel,
}

impl Order {
    /// What is done, in the past tense.
    #[must_use]
    pub fn done(self) -> &'static str {
        match self {
            Self::Pause => "paused",
            Self::Resume => "resumed",
            Self::Cancel => "cancelled",
        }
    }

    /// The state that it leads to, and those that it leads from; `None` if it has no meaning for a
    /// job that counts only when the present transaction commits (`is_mine`).
    #[must_use]
    pub fn leads(self, is_mine: bool) -> Option<(JobState, &'static [JobState])> {
        use JobState::{Cancelled, Failed, Paused, Void, Waiting};
        Some(match self {
            Self::Pause if is_mine => return None,
            Self::Pause => (Paused, &[Waiting]),
            Self::Resume => (Waiting, &[Paused, Cancelled, Failed]),
            // Nobody else has seen it.
            Self::Cancel if is_mine => (Void, &[Waiting]),
            Self::Cancel => (Cancelled, &[Waiting, Paused, Failed]),
        })
    }
}

/// Why an order is not carried out.
#[derive(Debug, Clone, PartialEq)]
pub enum Refused {
    /// The job begins when this transaction commits.
    NotBegun,
    /// Its state has no room for that.
    State,
    /// This other job is doing something to the relation.
    Other(Box<Known>),
}

/// What an order writes down.
///
/// # Errors
/// When it cannot be carried out.
pub fn obey(
    table: &JobTable<'_>,
    job: JobId,
    order: Order,
    is_mine: bool,
    now: i64,
) -> Result<Record, Refused> {
    let (state, from) = order.leads(is_mine).ok_or(Refused::NotBegun)?;
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

/// What somebody has still to do to a relation is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakenBack {
    /// Decrypting it: it is to be encrypted from now on.
    Decryption,
    /// What a stopped job has left: it was done at once, and nobody needs to know of it any more.
    Stopped,
}

/// What a transaction writes down that takes back jobs; with each whether it has asked for it
/// itself.
#[must_use]
pub fn take_back(
    table: &JobTable<'_>,
    jobs: &[(JobId, bool)],
    what: TakenBack,
    now: i64,
) -> Vec<Record> {
    let step = |(job, is_mine): &(JobId, bool)| {
        let known = table.find(*job)?;
        let (state, why) = match (what, known.state) {
            (TakenBack::Decryption, state)
                if is_unfinished(state) && known.request.kind == JobKind::Decrypt =>
            {
                (JobState::Cancelled, "the relation is to be encrypted")
            }
            (TakenBack::Stopped, JobState::Paused | JobState::Cancelled | JobState::Failed) => {
                (JobState::Void, "")
            }
            _ => return None,
        };
        Some(step(&known, if *is_mine { JobState::Void } else { state }, why, now))
    };
    jobs.iter().filter_map(step).collect()
}

/// Jobs of a database that a worker may take, in the order in which it tries. Each has its turn,
/// also where many are locked out again and again.
#[must_use]
pub fn claimable(table: &JobTable<'_>, database: u32, now_seconds: u32) -> Vec<Known> {
    let is_claimable = |head: &Head| {
        head.job.database == database
            && is_ready(head)
            && head.process == 0
            && !is_left_alone(head.given_up, now_seconds)
    };
    let mut found = table.select(is_claimable);
    found.sort_by_key(|known| known.given_up);
    found
}

/// Whether workers do a job: not before its transaction has committed.
fn is_ready(head: &Head) -> bool {
    head.state == JobState::Waiting && head.step > 0
}

fn is_left_alone(given_up: u32, now_seconds: u32) -> bool {
    now_seconds.saturating_sub(given_up) < LEFT_ALONE
}

/// A job, as long as this process is to go on with it: until it is paused, cancelled or gone.
#[must_use]
pub fn still_done_by(table: &JobTable<'_>, job: JobId, process: u32) -> Option<Known> {
    let is_its = |known: &Known| known.state == JobState::Waiting && known.process == process;
    table.find(job).filter(is_its)
}

/// How a job ends that a process does, unless it is not to go on with it; `error` says why.
#[must_use]
pub fn end(
    table: &JobTable<'_>,
    job: JobId,
    process: u32,
    (state, error): (JobState, &str),
    now: i64,
) -> Option<Record> {
    Some(step(&still_done_by(table, job, process)?, state, error, now))
}

/// What there is to be done in a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Jobs that nobody does.
    pub free: usize,
    /// Jobs that workers do.
    pub taken: usize,
}

/// What there is to be done, by database; and whether some job is to be done soon, without anybody
/// saying so.
#[must_use]
pub fn loads(
    table: &JobTable<'_>,
    now_seconds: u32,
) -> (std::collections::BTreeMap<u32, Load>, bool) {
    let mut loads = std::collections::BTreeMap::<u32, Load>::new();
    let mut soon = false;
    for known in table.select(is_ready) {
        let load = loads.entry(known.job.database).or_default();
        if known.process != 0 {
            load.taken += 1;
        } else if known.given_up != 0 && is_left_alone(known.given_up, now_seconds) {
            soon = true;
        } else {
            load.free += 1;
        }
    }
    (loads, soon)
}
