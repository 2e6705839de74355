//! The life of jobs, at random: sessions request jobs, give commands and roll back; workers process
//! jobs and end in the middle; the server crashes, after which only the log is left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU32;

use pagevault_core::rekey::life::{
    self, JobConflict, Order, Outcome, Refused, ShownState, Submitted, Withdrawn,
};
use pagevault_keystore::Record;
use pagevault_keystore::job::{JobId, JobKind, JobState, Request};
use pagevault_keystore::job_table::{JobTable, Known};

use crate::random::Random;

const DATABASE: u32 = 5;
const CAPACITY: usize = 160;
const SESSIONS: usize = 3;
const WORKERS: u32 = 2;
const RELATIONS: u32 = 3;

struct Server<'a> {
    table: JobTable<'a>,
    log: Vec<Record>,
    /// Transactions by number: session and state.
    transactions: BTreeMap<u64, (usize, Outcome)>,
    /// The open transaction of each session.
    open: [Option<u64>; SESSIONS],
    /// The job of each worker, and its slot in the table.
    working: BTreeMap<u32, (JobId, usize)>,
    now: u32,
    done: BTreeSet<JobId>,
}

impl Server<'_> {
    fn outcome(&self, known: &Known, session: usize) -> Outcome {
        life::outcome(known, |number| match self.transactions[&number] {
            (of, Outcome::InProgress) if of == session => Outcome::Mine,
            (_, outcome) => outcome,
        })
    }

    fn append(&mut self, record: Record) {
        self.table.apply(&record).unwrap();
        self.log.push(record);
    }

    /// The number of the session's transaction.
    fn transaction(&mut self, session: usize) -> u64 {
        if let Some(number) = self.open[session] {
            return number;
        }
        let number = self.transactions.len() as u64 + 700;
        self.transactions.insert(number, (session, Outcome::InProgress));
        self.open[session] = Some(number);
        number
    }

    fn end_transaction(&mut self, session: usize, outcome: Outcome) {
        if let Some(number) = self.open[session].take() {
            self.transactions.insert(number, (session, outcome));
        }
    }

    fn submit(&mut self, session: usize, relation: u32, kind: JobKind) {
        let transaction = self.transaction(session);
        let request = Request { relation, kind, cipher: 0, requested_by: 10, at: 1, transaction };
        loop {
            match life::submit(&self.table, DATABASE, request) {
                Submitted::New(job, record) => {
                    assert!(self.table.find(job).is_none());
                    return self.append(record);
                }
                Submitted::Other(other) => {
                    let has_begun = self.table.has_begun_any(other.job);
                    let outcome = self.outcome(&other, session);
                    match life::conflict(&other, has_begun, outcome, &request) {
                        JobConflict::Settle => self.settle(),
                        JobConflict::Same => {
                            assert_eq!(other.request.kind, kind);
                            return assert_eq!(ShownState::of(&other).name(), "waiting");
                        }
                        JobConflict::Wait | JobConflict::InUse => return,
                    }
                }
            }
        }
    }

    /// Like the launcher.
    fn settle(&mut self) {
        let open = self.table.select(|head| head.step == 0);
        let news: Vec<_> = open
            .iter()
            .filter_map(|known| Some((known.job, life::settled(self.outcome(known, SESSIONS))?)))
            .collect();
        for record in life::settle(&self.table, &news, 2) {
            self.append(record);
        }
    }

    /// The jobs that a session can see.
    fn visible(&self, session: usize) -> Vec<Known> {
        let mut found = self.table.select(|_| true);
        found.retain(|known| {
            matches!(self.outcome(known, session), Outcome::Committed | Outcome::Mine)
        });
        found
    }

    fn order(&mut self, session: usize, order: Order, random: &mut Random) {
        let visible = self.visible(session);
        let Some(at) = (!visible.is_empty()).then(|| random.below(visible.len())) else { return };
        let known = &visible[at];
        let is_mine = self.outcome(known, session) == Outcome::Mine;
        match life::apply_order(&self.table, known.job, order, is_mine, 3) {
            Ok(record) => {
                assert_ne!(known.state, JobState::Done);
                self.append(record);
            }
            Err(Refused::NotBegun) => assert!(is_mine && order == Order::Pause),
            Err(Refused::Other(other)) => {
                assert_eq!(other.request.relation, known.request.relation)
            }
            Err(Refused::State) => {}
        }
    }

    fn withdraw(&mut self, session: usize, relation: u32, what: Withdrawn) {
        let jobs: Vec<_> = self
            .visible(session)
            .into_iter()
            .filter(|known| known.request.relation == relation)
            .map(|known| (known.job, self.outcome(&known, session) == Outcome::Mine))
            .collect();
        for record in life::withdraw(&self.table, &jobs, what, 4) {
            self.append(record);
        }
        for known in self.visible(session).iter().filter(|k| k.request.relation == relation) {
            let is_left = match what {
                Withdrawn::Decryption => {
                    known.request.kind == JobKind::Decrypt && life::is_unfinished(known.state)
                }
                Withdrawn::Stopped => !matches!(known.state, JobState::Waiting | JobState::Done),
            };
            assert!(!is_left, "{what:?} leaves {known:?}");
        }
    }

    fn claim(&mut self, worker: u32) {
        if self.working.contains_key(&worker) {
            return;
        }
        for known in life::claimable(&self.table, DATABASE, self.now, |_| false) {
            let asked = self.transactions[&known.request.transaction].1;
            assert_eq!(asked, Outcome::Committed, "{known:?} does not count yet");
            let others = self.working.values().any(|(job, _)| *job == known.job);
            assert!(!others || known.process == 0);
            if let Some(slot) = self.table.take(known.job, worker, 5) {
                self.working.insert(worker, (known.job, slot));
                return;
            }
        }
    }

    fn work(&mut self, worker: u32, random: &mut Random) {
        let Some((job, slot)) = self.working.get(&worker).copied() else { return };
        let end = random.pick(&[JobState::Done, JobState::Failed, JobState::Cancelled]);
        match random.below(4) {
            0 => {
                let before = self.table.find(job);
                let end = (end.unwrap(), "for some reason");
                match life::end(&self.table, job, worker, end, 6) {
                    Some(record) => {
                        assert_eq!(before.map(|known| known.state), Some(JobState::Waiting));
                        self.append(record);
                    }
                    // The job was paused, cancelled or removed meanwhile, and stays so.
                    None => assert!(before.is_none_or(|known| {
                        known.state != JobState::Waiting || known.process != worker
                    })),
                }
            }
            1 => return,
            _ if life::still_claimed_by(&self.table, job, worker).is_some() => return,
            _ => {}
        }
        let given_up = if random.one_in(2) { self.now } else { 0 };
        self.table.release(slot, worker, given_up);
        self.working.remove(&worker);
    }

    /// All processes end; the table is rebuilt from the log.
    fn crash(&mut self, random: &mut Random) {
        let jobs = |server: &Self| -> Vec<_> {
            let known = server.table.select(|_| true).into_iter();
            known.map(|known| (known.job, known.request, known.step, known.state)).collect()
        };
        let before = jobs(self);
        self.working.clear();
        for session in 0..SESSIONS {
            // A prepared transaction survives the crash, without a session.
            let Some(number) = self.open[session].take() else { continue };
            let outcome = if random.one_in(3) { Outcome::InProgress } else { Outcome::Aborted };
            self.transactions.insert(number, (SESSIONS + 1, outcome));
        }
        self.table.reset();
        for record in &self.log {
            self.table.apply(record).unwrap();
        }
        assert_eq!(jobs(self), before);
        assert!(self.table.select(|_| true).iter().all(|known| known.process == 0));
    }

    fn end_prepared(&mut self, random: &mut Random) {
        for (of, outcome) in self.transactions.values_mut() {
            if *of > SESSIONS && *outcome == Outcome::InProgress && random.one_in(2) {
                *outcome = if random.one_in(2) { Outcome::Committed } else { Outcome::Aborted };
            }
        }
    }

    fn check(&mut self) {
        let known = self.table.select(|_| true);
        for relation in 0..RELATIONS {
            let counts = |known: &&Known| {
                known.request.relation == relation
                    && life::is_unfinished(known.state)
                    && self.outcome(known, SESSIONS) != Outcome::Aborted
            };
            assert!(known.iter().filter(counts).count() <= 1, "two jobs of one relation");
        }
        for known in &known {
            if self.done.contains(&known.job) {
                assert_eq!(known.state, JobState::Done, "a job is done for good");
            }
            if known.state == JobState::Done {
                self.done.insert(known.job);
            }
            assert_ne!(known.state, JobState::Void, "nobody knows of it any more");
        }
    }
}

#[test]
fn random_sessions_and_workers() {
    let memory: Vec<AtomicU32> =
        (0..JobTable::words_needed(CAPACITY)).map(|_| AtomicU32::new(0)).collect();
    let kinds = [JobKind::Encrypt, JobKind::Rotate, JobKind::Decrypt];
    let mut seen: BTreeMap<&'static str, usize> = BTreeMap::new();
    for seed in 0..150 {
        memory.iter().for_each(|word| word.store(0, std::sync::atomic::Ordering::Relaxed));
        let table = JobTable::new(&memory, CAPACITY);
        let random = &mut Random::new(seed);
        let mut server = Server {
            table,
            log: Vec::new(),
            transactions: BTreeMap::new(),
            open: [None; SESSIONS],
            working: BTreeMap::new(),
            now: 1000,
            done: BTreeSet::new(),
        };
        for _ in 0..150 {
            let session = random.below(SESSIONS);
            let relation = random.below(RELATIONS as usize) as u32;
            let worker = 1 + random.below(WORKERS as usize) as u32;
            server.now += random.below(3) as u32;
            match random.below(16) {
                0..4 => server.submit(session, relation, random.pick(&kinds).unwrap()),
                4 | 5 => server.end_transaction(session, Outcome::Committed),
                6 => server.end_transaction(session, Outcome::Aborted),
                7 => server.settle(),
                8 | 9 => server.claim(worker),
                10 | 11 => server.work(worker, random),
                12 | 13 => {
                    let orders = [Order::Pause, Order::Resume, Order::Cancel];
                    server.order(session, random.pick(&orders).unwrap(), random);
                }
                14 => {
                    let what = [Withdrawn::Decryption, Withdrawn::Stopped];
                    server.withdraw(session, relation, random.pick(&what).unwrap());
                }
                _ if random.one_in(4) => server.crash(random),
                _ => server.end_prepared(random),
            }
            server.check();
        }
        // At the end all transactions commit, and workers process the remaining jobs.
        server.crash(random);
        for (_, outcome) in server.transactions.values_mut() {
            if *outcome == Outcome::InProgress {
                *outcome = Outcome::Committed;
            }
        }
        server.settle();
        server.now += life::RETRY_DELAY;
        let (loads, soon) = life::loads(&server.table, server.now, |_| false);
        let free = loads.get(&DATABASE).map_or(0, |load| load.free);
        assert!(!soon && loads.values().all(|load| load.taken == 0));
        for _ in 0..free {
            server.claim(1);
            let (job, slot) = server.working.remove(&1).unwrap();
            let end = life::end(&server.table, job, 1, (JobState::Done, ""), 7).unwrap();
            server.append(end);
            server.table.release(slot, 1, 0);
            server.check();
        }
        server.claim(1);
        assert!(server.working.is_empty());
        for known in server.table.select(|_| true) {
            assert_ne!(known.state, JobState::Waiting);
            *seen.entry(known.state.name()).or_default() += 1;
        }
    }
    for state in ["done", "failed", "cancelled", "paused"] {
        assert!(seen.get(state).is_some_and(|count| *count > 5), "{seen:?}");
    }
}

/// State, command, new state.
#[test]
fn commands_for_jobs() {
    use JobState::{Cancelled, Done, Failed, Paused, Void, Waiting};
    use Order::{Cancel, Pause, Resume};
    let table = [
        (Waiting, Pause, Some(Paused)),
        (Waiting, Resume, None),
        (Waiting, Cancel, Some(Cancelled)),
        (Paused, Pause, None),
        (Paused, Resume, Some(Waiting)),
        (Paused, Cancel, Some(Cancelled)),
        (Cancelled, Pause, None),
        (Cancelled, Resume, Some(Waiting)),
        (Cancelled, Cancel, None),
        (Failed, Pause, None),
        (Failed, Resume, Some(Waiting)),
        (Failed, Cancel, Some(Cancelled)),
        (Done, Pause, None),
        (Done, Resume, None),
        (Done, Cancel, None),
        (Void, Pause, None),
        (Void, Resume, None),
        (Void, Cancel, None),
    ];
    for (state, order, to) in table {
        let (next, from) = order.transition(false).unwrap();
        assert_eq!(from.contains(&state).then_some(next), to, "{state:?}, {order:?}");
    }
    // A job that the current transaction requested can only be cancelled.
    assert_eq!(Pause.transition(true), None);
    assert_eq!(Cancel.transition(true).unwrap(), (Void, &[Waiting][..]));
    assert!(!Resume.transition(true).unwrap().1.contains(&Waiting));
}

/// Whoever requests a rotation may mean the key that an earlier one has made already.
#[test]
fn a_rotation_that_has_begun_does_not_stand_for_a_later_one() {
    let memory: Vec<AtomicU32> =
        (0..JobTable::words_needed(CAPACITY)).map(|_| AtomicU32::new(0)).collect();
    let table = JobTable::new(&memory, CAPACITY);
    for (relation, kind) in [(1, JobKind::Rotate), (2, JobKind::Encrypt)] {
        let (requested_by, transaction) = (10, 700);
        let request = Request { relation, kind, cipher: 0, requested_by, at: 1, transaction };
        let Submitted::New(job, record) = life::submit(&table, DATABASE, request) else {
            panic!("there is no other");
        };
        table.apply(&record).unwrap();
        let answer = || {
            let Submitted::Other(other) = life::submit(&table, DATABASE, request) else {
                panic!("there is one");
            };
            let has_begun = table.has_begun_any(other.job);
            life::conflict(&other, has_begun, Outcome::Committed, &request)
        };
        assert_eq!(answer(), JobConflict::Same);
        table.apply(&Record::JobBegun { job, relation: 3 }).unwrap();
        let is_same = kind == JobKind::Encrypt;
        assert_eq!(answer() == JobConflict::Same, is_same, "{kind:?}");
    }
}

#[test]
fn a_job_that_was_given_up_is_claimable_after_a_delay_and_comes_last() {
    let memory: Vec<AtomicU32> =
        (0..JobTable::words_needed(CAPACITY)).map(|_| AtomicU32::new(0)).collect();
    let table = JobTable::new(&memory, CAPACITY);
    let mut jobs = Vec::new();
    for relation in 0..2 {
        let request = Request {
            relation,
            kind: JobKind::Rotate,
            cipher: 0,
            requested_by: 10,
            at: 1,
            transaction: 700,
        };
        let Submitted::New(job, record) = life::submit(&table, DATABASE, request) else {
            panic!("there is no other");
        };
        table.apply(&record).unwrap();
        jobs.push(job);
    }
    assert!(
        life::claimable(&table, DATABASE, 1000, |_| false).is_empty(),
        "nobody knows whether they count"
    );
    let news: Vec<_> = jobs.iter().map(|job| (*job, JobState::Waiting)).collect();
    life::settle(&table, &news, 2).iter().for_each(|record| table.apply(record).unwrap());
    assert!(life::settle(&table, &news, 2).is_empty(), "it is known");
    let slot = table.take(jobs[0], 1, 5).unwrap();
    table.release(slot, 1, 1000);
    let claimable = |now| -> Vec<u64> {
        life::claimable(&table, DATABASE, now, |_| false)
            .iter()
            .map(|known| known.job.number)
            .collect()
    };
    assert_eq!(claimable(1001), [jobs[1].number]);
    assert!(life::loads(&table, 1001, |_| false).1, "soon");
    assert_eq!(claimable(1002), [jobs[1].number, jobs[0].number]);
    assert!(!life::loads(&table, 1002, |_| false).1);
    // No worker could connect to the database.
    let slot = table.take(jobs[0], 1, 1002).unwrap();
    table.postpone(DATABASE + 1, 1010);
    assert_eq!(claimable(1010), [jobs[1].number], "another database");
    table.postpone(DATABASE, 1010);
    assert!(claimable(1011).is_empty());
    assert!(life::loads(&table, 1011, |_| false).1, "soon");
    table.release(slot, 1, 0);
    assert_eq!(claimable(1011), [jobs[0].number], "it was running");
    assert_eq!(claimable(1012), [jobs[0].number, jobs[1].number]);
    // It waits for keys, and is cancelled.
    let error = || table.select(|head| head.job == jobs[0])[0].error.clone();
    assert!(table.note_waiting(jobs[0], "the key is locked"), "it begins to wait");
    assert!(!table.note_waiting(jobs[0], "the key is locked"));
    assert_eq!(error(), "the key is locked");
    assert!(table.note_waiting(jobs[0], ""), "it waits no longer");
    assert!(!table.note_waiting(jobs[0], "") && error().is_empty());
    let known = table.select(|head| head.job == jobs[0]).remove(0);
    table.apply(&life::step(&known, JobState::Cancelled, "it is not wanted", 3)).unwrap();
    assert!(!table.note_waiting(jobs[0], ""), "it is over");
    assert_eq!(error(), "it is not wanted");
}
