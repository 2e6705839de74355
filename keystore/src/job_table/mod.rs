//! Rekey jobs in shared memory: what the logs of all databases record ([`crate::job`]), and, for
//! running jobs, process and progress, which only this server knows.
//!
//! Readers and writers exclude each other by a lock of their own, except in [`JobTable::release`]
//! and [`JobTable::postpone`].

mod layout;

use std::sync::atomic::{AtomicU32, Ordering::*};

use self::layout::*;
use crate::job::{self, JobId, JobKind, JobState, Over, Request, Step};
use crate::record::Record;

/// Progress of a running job.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Progress {
    /// Pages in the target state.
    pub pages_done: i64,
    /// Number of pages.
    pub pages_total: i64,
    /// Recent speed.
    pub bytes_per_second: f64,
}

/// All that is known of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Known {
    /// Its identifier.
    pub job: JobId,
    /// The request.
    pub request: Request,
    /// Number of its last step; 0: it is unknown whether the requesting transaction has committed.
    pub step: u32,
    /// Its state.
    pub state: JobState,
    /// The process that runs it; 0: none.
    pub process: u32,
    /// When a process stopped before the end of the job, in seconds; 0: none did, or the job runs
    /// again.
    pub given_up: u32,
    /// When a worker first began, in microseconds since 1970; 0: none did, or it is unknown.
    pub started: i64,
    /// When the job was over, in microseconds since 1970; 0 if it is not.
    pub ended: i64,
    /// Its progress.
    pub progress: Progress,
    /// Why it has failed.
    pub error: String,
}

/// There is no room for another job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// The part of a job by which jobs are searched.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// Its identifier.
    pub job: JobId,
    /// OID of the relation.
    pub relation: u32,
    /// Its state.
    pub state: JobState,
    /// Number of its last step.
    pub step: u32,
    /// The process that runs it; 0: none.
    pub process: u32,
    /// When a process stopped before the end of the job, in seconds; 0: none did, or the job runs
    /// again.
    pub given_up: u32,
}

/// The table.
#[derive(Debug, Clone, Copy)]
pub struct JobTable<'a> {
    words: &'a [AtomicU32],
    capacity: usize,
}

impl<'a> JobTable<'a> {
    /// Size in words of a table for `capacity` jobs.
    #[must_use]
    pub fn words_needed(capacity: usize) -> usize {
        HEADER + capacity * (HEAD + REST) + BEGUN * BEGUN_STRIDE
    }

    /// An empty table for `capacity` jobs in zeroed memory.
    ///
    /// # Panics
    /// If there are fewer words than [`JobTable::words_needed`].
    #[must_use]
    pub fn new(words: &'a [AtomicU32], capacity: usize) -> Self {
        assert!(words.len() >= Self::words_needed(capacity));
        Self { words, capacity }
    }

    /// Removes everything, before the logs are read again.
    pub fn reset(&self) {
        for slot in 0..self.used() {
            self.head(slot).iter().chain(self.rest(slot)).for_each(|word| word.store(0, Relaxed));
        }
        [USED, FREE, BEGUN_USED].iter().for_each(|at| self.header(*at).store(0, Relaxed));
    }

    fn header(&self, at: usize) -> &'a AtomicU32 {
        &self.words[at]
    }

    fn used(&self) -> usize {
        (self.header(USED).load(Relaxed) as usize).min(self.capacity)
    }

    fn head(&self, slot: usize) -> &'a [AtomicU32] {
        let at = HEADER + slot * HEAD;
        &self.words[at..at + HEAD]
    }

    fn rest(&self, slot: usize) -> &'a [AtomicU32] {
        let at = HEADER + self.capacity * HEAD + slot * REST;
        &self.words[at..at + REST]
    }

    fn begun(&self, entry: usize) -> &'a [AtomicU32] {
        let at = HEADER + self.capacity * (HEAD + REST) + entry * BEGUN_STRIDE;
        &self.words[at..at + BEGUN_STRIDE]
    }

    /// Slots in use, with their heads.
    fn heads(&self) -> impl Iterator<Item = (usize, Head)> + use<'a> {
        let table = *self;
        (0..self.used()).filter_map(move |slot| {
            let words = table.head(slot);
            let database = words[DATABASE].load(Relaxed);
            let packed = words[PACKED].load(Relaxed);
            let state = JobState::from_number((packed >> 16) as u8)?;
            (database != 0 && packed & 0xFF != 0).then(|| {
                let head = Head {
                    job: JobId { database, number: load(&words[NUMBER..]) },
                    relation: words[RELATION].load(Relaxed),
                    state,
                    step: words[STEP].load(Relaxed),
                    process: words[PROCESS].load(Relaxed),
                    given_up: words[GIVEN_UP].load(Relaxed),
                };
                (slot, head)
            })
        })
    }

    fn slot_of(&self, job: JobId) -> Option<usize> {
        self.heads().find(|(_, head)| head.job == job).map(|(slot, _)| slot)
    }

    fn known(&self, slot: usize, head: Head) -> Known {
        let (words, rest) = (self.head(slot), self.rest(slot));
        let packed = words[PACKED].load(Relaxed);
        let request = Request {
            relation: head.relation,
            kind: JobKind::from_number(packed as u8).unwrap_or(JobKind::Rotate),
            cipher: (packed >> 8) as u8,
            requested_by: rest[REQUESTED_BY].load(Relaxed),
            at: load(&rest[REQUESTED_AT..]) as i64,
            transaction: load(&rest[TRANSACTION..]),
        };
        let progress = Progress {
            pages_done: load(&rest[PAGES_DONE..]) as i64,
            pages_total: load(&rest[PAGES_TOTAL..]) as i64,
            bytes_per_second: f64::from_bits(load(&rest[RATE..])),
        };
        Known {
            job: head.job,
            request,
            step: head.step,
            state: head.state,
            process: head.process,
            given_up: head.given_up,
            started: load(&rest[STARTED..]) as i64,
            ended: load(&rest[ENDED..]) as i64,
            progress,
            error: load_text(&rest[ERROR..]),
        }
    }

    /// The jobs whose head satisfies `wanted`, by number within each database.
    pub fn select(&self, wanted: impl Fn(&Head) -> bool) -> Vec<Known> {
        let found = self.heads().filter(|(_, head)| wanted(head));
        let mut found: Vec<_> = found.map(|(slot, head)| self.known(slot, head)).collect();
        found.sort_by_key(|known| known.job);
        found
    }

    /// A job.
    #[must_use]
    pub fn find(&self, job: JobId) -> Option<Known> {
        let (slot, head) = self.heads().find(|(_, head)| head.job == job)?;
        Some(self.known(slot, head))
    }

    /// The number of the next job of a database.
    #[must_use]
    pub fn next_number(&self, database: u32) -> u64 {
        let known = self.heads().filter(|(_, head)| head.job.database == database);
        let last = known.map(|(_, head)| head.job.number).max().unwrap_or(0);
        last.max(self.forgotten(database)) + 1
    }

    /// Whether there is room for `more` jobs.
    #[must_use]
    pub fn has_room(&self, more: usize) -> bool {
        let free = self.header(FREE).load(Relaxed) as usize;
        // Each may be the first of its database and be forgotten later, which takes one more slot.
        self.used() - free.min(self.used()) + more < self.capacity
    }

    fn forgotten_slot(&self, database: u32) -> Option<usize> {
        (0..self.used()).find(|slot| {
            let words = self.head(*slot);
            words[DATABASE].load(Relaxed) == database && words[PACKED].load(Relaxed) == 0
        })
    }

    /// The number up to which unknown jobs of a database are forgotten.
    #[must_use]
    pub fn forgotten(&self, database: u32) -> u64 {
        self.forgotten_slot(database).map_or(0, |slot| load(&self.head(slot)[NUMBER..]))
    }

    fn note_forgotten(&self, database: u32, through: u64) -> Result<(), Full> {
        let slot = match self.forgotten_slot(database) {
            Some(slot) => slot,
            None => {
                let slot = self.take_slot()?;
                self.head(slot)[DATABASE].store(database, Relaxed);
                slot
            }
        };
        let number = &self.head(slot)[NUMBER..];
        store(number, load(number).max(through));
        Ok(())
    }

    /// Returns a slot filled with zeros.
    fn take_slot(&self) -> Result<usize, Full> {
        let (used, free) = (self.used(), self.header(FREE).load(Relaxed));
        let slot = if free == 0 {
            if used == self.capacity {
                return Err(Full);
            }
            self.header(USED).store(used as u32 + 1, Relaxed);
            used
        } else {
            let is_free = |slot: &usize| self.head(*slot)[DATABASE].load(Relaxed) == 0;
            self.header(FREE).store(free - 1, Relaxed);
            (0..used).find(is_free).ok_or(Full)?
        };
        self.head(slot).iter().chain(self.rest(slot)).for_each(|word| word.store(0, Relaxed));
        Ok(slot)
    }

    fn free_slot(&self, slot: usize) {
        self.head(slot)[DATABASE].store(0, Relaxed);
        self.header(FREE).fetch_add(1, Relaxed);
    }

    /// Forgets a job for good.
    fn drop(&self, slot: usize, job: JobId) -> Result<(), Full> {
        self.forget_begun(job);
        self.free_slot(slot);
        self.note_forgotten(job.database, job.number)
    }

    /// Applies a record about jobs, if it contains anything new. Ignores other records.
    ///
    /// # Errors
    /// If there is no room.
    pub fn apply(&self, record: &Record) -> Result<(), Full> {
        if !self.would_change(record) {
            return Ok(());
        }
        match record {
            Record::Job { job, request } => self.ask(*job, request),
            Record::JobStep { job, step } => self.step(*job, step),
            Record::JobBegun { job, relation } => {
                self.begin(*job, *relation);
                Ok(())
            }
            Record::JobsForgotten { database, through, all } => {
                let is_gone = |head: &Head| {
                    *all && head.job.database == *database && head.job.number <= *through
                };
                let gone: Vec<_> = self.heads().filter(|(_, head)| is_gone(head)).collect();
                for (slot, head) in gone {
                    self.forget_begun(head.job);
                    self.free_slot(slot);
                }
                self.note_forgotten(*database, *through)
            }
            _ => Ok(()),
        }
    }

    /// Whether a record contains anything new about jobs.
    #[must_use]
    pub fn would_change(&self, record: &Record) -> bool {
        match record {
            Record::Job { job, .. } => {
                job.number > self.forgotten(job.database) && self.slot_of(*job).is_none()
            }
            Record::JobStep { job, step } => {
                let known = self.heads().find(|(_, head)| head.job == *job);
                known.is_some_and(|(_, head)| step.step > head.step && head.state != JobState::Done)
            }
            Record::JobBegun { job, relation } => {
                let known = self.heads().find(|(_, head)| head.job == *job);
                known.is_some_and(|(_, head)| head.state != JobState::Done)
                    && !self.has_begun(*job, *relation)
            }
            Record::JobsForgotten { database, through, all } => {
                *through > self.forgotten(*database)
                    || (*all
                        && self.heads().any(|(_, head)| {
                            head.job.database == *database && head.job.number <= *through
                        }))
            }
            _ => false,
        }
    }

    fn ask(&self, job: JobId, request: &Request) -> Result<(), Full> {
        let slot = self.take_slot()?;
        let rest = self.rest(slot);
        rest[REQUESTED_BY].store(request.requested_by, Relaxed);
        store(&rest[REQUESTED_AT..], request.at as u64);
        store(&rest[TRANSACTION..], request.transaction);
        let words = self.head(slot);
        words[RELATION].store(request.relation, Relaxed);
        store(&words[NUMBER..], job.number);
        let packed = u32::from(request.kind as u8) | u32::from(request.cipher) << 8;
        words[PACKED].store(packed | (JobState::Waiting as u32) << 16, Relaxed);
        words[DATABASE].store(job.database, Relaxed);
        Ok(())
    }

    fn step(&self, job: JobId, step: &Step) -> Result<(), Full> {
        let Some(slot) = self.slot_of(job) else { return Ok(()) };
        let (words, rest) = (self.head(slot), self.rest(slot));
        let packed = words[PACKED].load(Relaxed) & 0xFFFF;
        words[PACKED].store(packed | (step.state as u32) << 16, Relaxed);
        words[STEP].store(step.step, Relaxed);
        if step.started != 0 {
            store(&rest[STARTED..], step.started as u64);
        }
        store(&rest[ENDED..], if step.state.is_over() { step.at as u64 } else { 0 });
        store_text(&rest[ERROR..], &step.error);
        match step.state {
            JobState::Void => self.drop(slot, job),
            JobState::Done => {
                self.forget_begun(job);
                self.prune(job.database)
            }
            state if state.is_over() => self.prune(job.database),
            _ => Ok(()),
        }
    }

    /// Forgets the jobs that are over, beyond those to keep.
    fn prune(&self, database: u32) -> Result<(), Full> {
        let is_over = |head: &Head| head.job.database == database && head.state.is_over();
        let over = |head: Head| Over {
            relation: head.relation,
            number: head.job.number,
            is_done: head.state == JobState::Done,
        };
        loop {
            let all = self.heads().map(|(_, head)| head).filter(is_over).map(over).collect();
            let Some(number) = job::superfluous(all) else { return Ok(()) };
            let job = JobId { database, number };
            let Some(slot) = self.slot_of(job) else { return Ok(()) };
            self.drop(slot, job)?;
        }
    }

    fn begun_entries(&self) -> usize {
        (self.header(BEGUN_USED).load(Relaxed) as usize).min(BEGUN)
    }

    fn is_of(&self, entry: usize, job: JobId) -> bool {
        let words = self.begun(entry);
        words[0].load(Relaxed) == job.database && load(&words[1..]) == job.number
    }

    fn begin(&self, job: JobId, relation: u32) {
        let entry = self.begun_entries();
        if entry < BEGUN {
            let words = self.begun(entry);
            words[0].store(job.database, Relaxed);
            store(&words[1..], job.number);
            words[3].store(relation, Relaxed);
            self.header(BEGUN_USED).store(entry as u32 + 1, Relaxed);
        }
    }

    fn forget_begun(&self, job: JobId) {
        let mut entry = 0;
        while entry < self.begun_entries() {
            if self.is_of(entry, job) {
                let last = self.begun_entries() - 1;
                for (to, from) in self.begun(entry).iter().zip(self.begun(last)) {
                    to.store(from.load(Relaxed), Relaxed);
                }
                self.header(BEGUN_USED).store(last as u32, Relaxed);
            } else {
                entry += 1;
            }
        }
    }

    /// Whether a job has already switched the files of a relation.
    #[must_use]
    pub fn has_begun(&self, job: JobId, relation: u32) -> bool {
        (0..self.begun_entries())
            .any(|entry| self.is_of(entry, job) && self.begun(entry)[3].load(Relaxed) == relation)
    }

    /// Whether a job has already switched the files of any relation.
    #[must_use]
    pub fn has_begun_any(&self, job: JobId) -> bool {
        (0..self.begun_entries()).any(|entry| self.is_of(entry, job))
    }

    /// Assigns a job to a process, if it has none. Returns its slot.
    #[must_use]
    pub fn take(&self, job: JobId, process: u32, now: i64) -> Option<usize> {
        let slot = self.slot_of(job)?;
        if self.head(slot)[PROCESS].load(Acquire) != 0 {
            return None;
        }
        self.head(slot)[GIVEN_UP].store(0, Relaxed);
        self.head(slot)[PROCESS].store(process, Release);
        let started = &self.rest(slot)[STARTED..];
        if load(started) == 0 {
            store(started, now as u64);
        }
        Some(slot)
    }

    /// The process stops running the job in this slot. `given_up`: the time in seconds, if it stops
    /// before the end of the job; else 0. Needs no lock, so that an exiting process can call it.
    pub fn release(&self, slot: usize, process: u32, given_up: u32) {
        if slot < self.capacity && self.head(slot)[PROCESS].load(Acquire) == process {
            self.head(slot)[GIVEN_UP].store(given_up, Relaxed);
            let _ = self.head(slot)[PROCESS].compare_exchange(process, 0, AcqRel, Relaxed);
        }
    }

    /// Treats all jobs of a database that no process runs as given up at this time, in seconds.
    /// Needs no lock, like [`JobTable::release`].
    pub fn postpone(&self, database: u32, given_up: u32) {
        let of_database = |head: &Head| head.job.database == database && head.process == 0;
        for (slot, _) in self.heads().filter(|(_, head)| of_database(head)) {
            self.head(slot)[GIVEN_UP].store(given_up, Relaxed);
        }
    }

    /// Stores as the error of a job that is not over why it waits for keys; nothing if it waits no
    /// longer. Returns whether the waiting begins or ends.
    pub fn note_waiting(&self, job: JobId, why: &str) -> bool {
        let is_it = |head: &Head| head.job == job && !head.state.is_over();
        let Some((slot, _)) = self.heads().find(|(_, head)| is_it(head)) else { return false };
        let error = &self.rest(slot)[ERROR..];
        let waited = error[0].load(Relaxed) != 0;
        store_text(error, why);
        waited == why.is_empty()
    }

    /// Stores the progress of a job.
    pub fn note(&self, job: JobId, progress: &Progress) {
        let Some(slot) = self.slot_of(job) else { return };
        let rest = self.rest(slot);
        store(&rest[PAGES_DONE..], progress.pages_done as u64);
        store(&rest[PAGES_TOTAL..], progress.pages_total as u64);
        store(&rest[RATE..], progress.bytes_per_second.to_bits());
    }
}
