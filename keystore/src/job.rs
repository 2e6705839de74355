//! Rekey jobs: requests, and their outcome.
//!
//! A job is recorded in the log of its database. It counts only if the requesting transaction has
//! committed, which the log does not know; the first step of the job says so. The step with the
//! highest number is the present one, in whatever order steps are applied. Jobs that are over are
//! kept for a while (`superfluous`); a forgotten job does not come back, even if older WAL
//! contains records of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::scope::Scope;

/// Number of jobs of a database that are kept after they are over, for information: the newest.
pub const ENDED_KEPT: usize = 100;
/// Number of jobs of a database that are kept in addition, because they were stopped.
pub const STOPPED_KEPT: usize = 1000;
/// Longest error text, in bytes.
pub const MAX_ERROR: usize = 400;
/// Highest job number: numbers are `bigint` in SQL.
pub const MAX_NUMBER: u64 = i64::MAX as u64;

/// Identifies a job in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId {
    /// Database OID.
    pub database: u32,
    /// From 1, in the order of the requests in this database.
    pub number: u64,
}

impl JobId {
    /// The log that holds the job's records.
    pub const fn scope(self) -> Scope {
        Scope::database(self.database)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.database, self.number)
    }
}

/// What a job does with its relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum JobKind {
    /// Encrypt plaintext pages.
    Encrypt = 1,
    /// Put encrypted pages under a new data key.
    Rotate = 2,
    /// Decrypt encrypted pages.
    Decrypt = 3,
}

impl JobKind {
    /// The kind with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Encrypt, Self::Rotate, Self::Decrypt].into_iter().find(|kind| *kind as u8 == number)
    }

    /// The name in SQL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Encrypt => "encrypt",
            Self::Rotate => "rotate",
            Self::Decrypt => "decrypt",
        }
    }
}

/// State of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum JobState {
    /// Waiting for a worker, or running.
    Waiting = 1,
    /// Not to be run until it is resumed.
    Paused = 2,
    /// Complete.
    Done = 3,
    /// Cancelled by a user.
    Cancelled = 4,
    /// Ended by an error.
    Failed = 5,
    /// The requesting transaction has not committed, or the work was done in another way. Not
    /// visible any more.
    Void = 6,
}

impl JobState {
    const ALL: [Self; 6] =
        [Self::Waiting, Self::Paused, Self::Done, Self::Cancelled, Self::Failed, Self::Void];

    /// The state with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u8 == number)
    }

    /// The name in SQL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Paused => "paused",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Void => "void",
        }
    }

    /// Whether the job is over, and stays so unless it is resumed.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }
}

/// A request for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// OID of the relation. The relations that follow it are included.
    pub relation: u32,
    /// What to do.
    pub kind: JobKind,
    /// For [`JobKind::Encrypt`]: the cipher; 0 if none was named.
    pub cipher: u8,
    /// OID of the requesting role.
    pub requested_by: u32,
    /// Time of the request, in microseconds since 1970.
    pub at: i64,
    /// The requesting transaction or subtransaction (`FullTransactionId`).
    pub transaction: u64,
}

/// A change of a job's state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Step {
    /// From 1. The highest counts.
    pub step: u32,
    /// State of the job.
    pub state: JobState,
    /// When a worker first began, in microseconds since 1970; 0 if none did or it is unknown.
    pub started: i64,
    /// Time of this step, in microseconds since 1970.
    pub at: i64,
    /// Why the job has failed.
    pub error: String,
}

/// A job that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Over {
    pub(crate) relation: u32,
    pub(crate) number: u64,
    pub(crate) is_done: bool,
}

/// The job to forget next, of those of a database that are over.
///
/// The last job of a relation tells, if it was cancelled or has failed, that the relation is a
/// mixture. So it is not forgotten like one that is done, but only if there are too many such jobs.
///
/// The answer for some of these jobs names none that is kept among all of them: reading a compacted
/// log, in whatever order, forgets nothing.
pub(crate) fn superfluous(mut over: Vec<Over>) -> Option<u64> {
    if over.len() <= ENDED_KEPT {
        return None;
    }
    over.sort_unstable();
    let (mut needed, mut others) = (Vec::new(), Vec::new());
    for of_relation in over.chunk_by(|a, b| a.relation == b.relation) {
        let Some((last, earlier)) = of_relation.split_last() else { continue };
        others.extend(earlier.iter().map(|job| job.number));
        let kind = if last.is_done { &mut others } else { &mut needed };
        kind.push(last.number);
    }
    if others.len() > ENDED_KEPT {
        others.into_iter().min()
    } else if over.len() > ENDED_KEPT + STOPPED_KEPT {
        needed.into_iter().min()
    } else {
        None
    }
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The request.
    pub request: Request,
    /// The last step, if any.
    pub step: Option<Step>,
    /// Relations (OIDs) whose files the job has switched to another key.
    pub begun: BTreeSet<u32>,
}

/// Jobs of one database.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Jobs {
    jobs: BTreeMap<u64, Job>,
    over: BTreeSet<u64>,
    /// Unknown jobs with numbers up to this one are forgotten for good.
    forgotten: u64,
}

impl Jobs {
    /// Adds a requested job.
    pub fn ask(&mut self, number: u64, request: Request) {
        if number > self.forgotten {
            let job = || Job { request, step: None, begun: BTreeSet::new() };
            self.jobs.entry(number).or_insert_with(job);
        }
    }

    /// Applies a step. After `Done`, further steps are ignored.
    pub fn step(&mut self, number: u64, step: Step) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        let is_news = |known: &Step| known.step < step.step && known.state != JobState::Done;
        if !job.step.as_ref().is_none_or(is_news) {
            return;
        }
        let state = step.state;
        job.step = Some(step);
        if state == JobState::Done {
            job.begun.clear();
        }
        if state.is_over() {
            self.over.insert(number);
        } else {
            self.over.remove(&number);
        }
        if state == JobState::Void {
            self.drop(number);
        }
        while let Some(superfluous) = superfluous(self.all_over()) {
            self.drop(superfluous);
        }
    }

    fn all_over(&self) -> Vec<Over> {
        let over = |number: &u64| {
            let job = self.jobs.get(number)?;
            let is_done = job.step.as_ref().is_some_and(|step| step.state == JobState::Done);
            Some(Over { relation: job.request.relation, number: *number, is_done })
        };
        self.over.iter().filter_map(over).collect()
    }

    /// Records that a job has switched the files of a relation.
    pub fn begin(&mut self, number: u64, relation: u32) {
        if let Some(job) = self.jobs.get_mut(&number) {
            let is_done = job.step.as_ref().is_some_and(|step| step.state == JobState::Done);
            if !is_done {
                job.begun.insert(relation);
            }
        }
    }

    /// Forgets unknown jobs with numbers up to `through`, and with `all` known ones, too.
    pub fn forget(&mut self, through: u64, all: bool) {
        self.forgotten = self.forgotten.max(through);
        if all {
            self.jobs.retain(|number, _| *number > through);
            self.over.retain(|number| *number > through);
        }
    }

    fn drop(&mut self, number: u64) {
        self.jobs.remove(&number);
        self.over.remove(&number);
        self.forgotten = self.forgotten.max(number);
    }

    /// All jobs, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Job)> {
        self.jobs.iter().map(|(number, job)| (*number, job))
    }

    /// Unknown jobs with numbers up to this one were forgotten.
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::{ENDED_KEPT, JobId, JobKind, JobState, Request, STOPPED_KEPT, Step};
    use crate::Scope;
    use crate::compaction;
    use crate::record::Record;
    use crate::state::State;

    const DATABASE: u32 = 5;

    fn asked(number: u64) -> Record {
        asked_of(number, 16384 + number as u32)
    }

    fn asked_of(number: u64, relation: u32) -> Record {
        let request = Request {
            relation,
            kind: JobKind::Rotate,
            cipher: 0,
            requested_by: 10,
            at: 1,
            transaction: 700 + number,
        };
        Record::Job { job: JobId { database: DATABASE, number }, request }
    }

    fn step(number: u64, step: u32, state: JobState) -> Record {
        let step = Step { step, state, started: 0, at: 2, error: String::new() };
        Record::JobStep { job: JobId { database: DATABASE, number }, step }
    }

    fn begun(number: u64, relation: u32) -> Record {
        Record::JobBegun { job: JobId { database: DATABASE, number }, relation }
    }

    fn fold(records: &[Record]) -> State {
        State::from_records(records.iter().cloned()).unwrap()
    }

    fn known(state: &State) -> Vec<u64> {
        state.jobs(DATABASE).unwrap().iter().map(|(number, _)| number).collect()
    }

    /// One hundred and fifty jobs that are over, one paused job among them, and one whose
    /// transaction was rolled back.
    fn history() -> Vec<Record> {
        let mut records = Vec::new();
        for number in 1..=151 {
            records.push(asked(number));
            records.push(step(number, 1, JobState::Waiting));
            records.push(begun(number, 20_000));
            let end = if number == 7 { JobState::Paused } else { JobState::Done };
            records.push(step(number, 2, end));
        }
        records.extend([asked(152), step(152, 1, JobState::Void)]);
        records
    }

    #[test]
    fn the_highest_step_counts() {
        let steps = [step(1, 3, JobState::Cancelled), step(1, 4, JobState::Waiting)];
        for order in [[0, 1], [1, 0]] {
            let mut records = vec![asked(1)];
            records.extend(order.map(|at: usize| steps[at].clone()));
            let state = fold(&records);
            let (_, job) = state.jobs(DATABASE).unwrap().iter().next().unwrap();
            assert_eq!(job.step.as_ref().map(|step| step.state), Some(JobState::Waiting));
        }
    }

    #[test]
    fn all_unfinished_and_the_newest_ended_jobs_are_kept() {
        let state = fold(&history());
        let numbers = known(&state);
        assert_eq!(numbers.len(), ENDED_KEPT + 1);
        assert_eq!((numbers[0], numbers[1], numbers[100]), (7, 52, 151));
        assert_eq!(state.jobs(DATABASE).unwrap().forgotten(), 152);
    }

    /// Records of jobs, given as number, relation and last state.
    fn of_jobs(jobs: impl IntoIterator<Item = (u64, u32, JobState)>) -> Vec<Record> {
        let records =
            |(number, relation, state)| [asked_of(number, relation), step(number, 1, state)];
        jobs.into_iter().flat_map(records).collect()
    }

    /// Nothing else may say that their relations are mixtures.
    #[test]
    fn stopped_jobs_outlive_later_ones_of_other_relations() {
        let later = (3..=300).map(|number| (number, 3, JobState::Done));
        let stopped = [(1, 1, JobState::Failed), (2, 2, JobState::Cancelled)];
        let mut records = of_jobs(stopped.into_iter().chain(later));
        let numbers = known(&fold(&records));
        assert_eq!(numbers[..3], [1, 2, 201]);
        // Until a later job of the same relation is over. Then they are the oldest.
        let ends = [(301, 1, JobState::Done), (302, 2, JobState::Failed)];
        records.extend(of_jobs(ends));
        assert_eq!(known(&fold(&records))[..2], [202, 203]);
        let later = (303..=500).map(|number| (number, 3, JobState::Done));
        records.extend(of_jobs(later));
        let state = fold(&records);
        assert_eq!(known(&state)[..2], [302, 401]);
        assert_eq!(fold(&state.records(Scope::database(DATABASE))), state);
    }

    #[test]
    fn there_is_a_limit_for_stopped_jobs() {
        let stopped = |number: u64| (number, 16384 + number as u32, JobState::Cancelled);
        // Every seventh relation has been rekeyed since.
        let done = |number: u64| (number + 2000, 16384 + 7 * number as u32, JobState::Done);
        let records = of_jobs((1..=2000).map(stopped).chain((1..=200).map(done)));
        let most = ENDED_KEPT + STOPPED_KEPT;
        // The last 58 of them are among those that are kept.
        for (part, kept) in [(4000, most), (4150, most), (4400, most - 58)] {
            let part = &records[..part];
            let state = fold(part);
            let numbers = known(&state);
            assert_eq!(numbers.len(), kept);
            assert!(numbers.contains(&2000));
            // A restart keeps them, from a compacted log in either order.
            let kept = state.records(Scope::database(DATABASE));
            assert_eq!(fold(&kept), state);
            let log: Vec<_> = part.iter().cloned().map(|record| vec![record]).collect();
            assert_eq!(fold(&in_place(&kept, &log).concat()), state);
            assert_eq!(fold(&[&kept[..], part].concat()), state);
        }
    }

    fn in_place(kept: &[Record], log: &[Vec<Record>]) -> Vec<Vec<Record>> {
        let kept: Vec<_> = kept.iter().collect();
        let batches = compaction::in_place(&kept, log).into_iter();
        batches.map(|batch| batch.into_iter().cloned().collect()).collect()
    }

    #[test]
    fn forgotten_jobs_do_not_come_back() {
        let history = history();
        let state = fold(&history);
        let kept = state.records(Scope::database(DATABASE));
        assert_eq!(fold(&kept), state);
        // Redo can begin anywhere.
        for from in [0, 27, 300, 600] {
            let repeated = [&kept[..], &history[from..]].concat();
            assert_eq!(fold(&repeated), state, "from {from}");
        }
        // Compaction keeps the state, also when repeated and with later records.
        let mut log: Vec<Vec<Record>> =
            history.iter().cloned().map(|record| vec![record]).collect();
        for _ in 0..2 {
            log = in_place(&kept, &log);
            assert_eq!(fold(&log.concat()), state);
        }
        log.extend([vec![asked(153)], vec![step(7, 3, JobState::Waiting)]]);
        let state = fold(&log.concat());
        let log = in_place(&state.records(Scope::database(DATABASE)), &log);
        assert_eq!(fold(&log.concat()), state);
        assert_eq!((known(&state)[0], known(&state).last()), (7, Some(&153)));
    }

    #[test]
    fn jobs_of_a_dropped_database_are_forgotten() {
        let gone = Record::JobsForgotten { database: DATABASE, through: 152, all: true };
        let records = [history(), vec![gone]].concat();
        let state = fold(&records);
        assert!(known(&state).is_empty());
        assert_eq!(fold(&[state.records(Scope::database(DATABASE)), history()].concat()), state);
    }
}
