//! Running one job in a background worker, for all files of the relation and of those that follow
//! it.
//!
//! [`pagevault_core::rekey::file`] decides on the steps. Here each step is carried out ([`Online`])
//! in a transaction of its own, with an AccessShareLock on the relation where needed. Between
//! steps, only the right to rewrite the relation is held ([`Rewriting`]): there the worker waits to
//! keep its rate, reads changed settings, and notices that the job was paused or cancelled.

use std::ops::Range;
use std::time::{Duration, Instant};

use pagevault_cipher::{CipherId, PAGE_SIZE};
use pagevault_core::page::Fork;
use pagevault_core::rekey::file::{BATCH, Batch, BeginResult, End, StepResult, Storage, WaitsFor};
use pagevault_core::rekey::plan::{Plan, PlanFacts, plan};
use pagevault_core::rekey::run::{Member, Run};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::PgLogLevel;

use super::consent::{self, Wanted};
use super::file::{self, Images, Target};
use super::jobs::{self, Progress};
use super::{Job, JobKind};
use crate::fault;
use crate::keys::store::directory;
use crate::pg::locks::Rewriting;
use crate::pg::pages::{Held, Ring};
use crate::pg::relation;
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::{guc, process, worker};
use crate::policy;
use crate::verify;
use crate::writers::{Activity, Others};

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
enum Flow {
    GoOn,
    /// The job was paused, cancelled or forgotten.
    Stop,
}

/// Runs the job until it is complete, paused or cancelled. True if it is complete.
///
/// # Errors
/// Raises ERROR if a page cannot be read or decrypted, a key is locked, or the disk is full.
pub(super) fn run(job: &Job) -> bool {
    fault::point("rekey.claimed");
    let members = in_transaction(|| members_of(job));
    let mut run = Run::new(members);
    let mut pace = Pace::new(job);
    if pace.note(&run) == Flow::Stop {
        return false;
    }
    let mut online = Online::new(job, Oid::INVALID);
    while let Some((relation, _)) = run.next() {
        let oid = Oid::from(relation);
        if online.oid != oid {
            online = Online::new(job, oid);
        }
        let result = run.step(&mut online).or_raise();
        if let StepResult::Ended(end) = result {
            // Releases the right to rewrite the relation.
            online = Online::new(job, Oid::INVALID);
            if end == End::NeverEnds {
                in_transaction(|| Err::<(), _>(file::never_ends(oid)));
            }
        }
        if pace.after(oid, result, &online, &run) == Flow::Stop {
            return false;
        }
    }
    pace.note(&run) == Flow::GoOn
}

fn in_transaction<R>(work: impl FnOnce() -> Result<R>) -> R {
    worker::transaction(|| work().or_raise())
}

/// Like the error of a lock that was waited for too long.
fn not_available(oid: Oid, what: &str) -> Report {
    let message = format!("a job for relation {} {what}", oid.to_u32());
    Report::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, message)
}

/// All relations with files that belong to the job's relation, including partitions; none if it was
/// dropped.
///
/// A job that encrypts locks them as commands do that give a relation new storage: CREATE INDEX,
/// REPACK (CONCURRENTLY). Those that began before the policy required encryption may add files in
/// plaintext, which cannot be seen before they have committed. Later ones follow the policy.
fn members_of(job: &Job) -> Result<Vec<Member>> {
    let lock = match job.kind {
        JobKind::Encrypt => pg_sys::ShareUpdateExclusiveLock,
        JobKind::Rotate | JobKind::Decrypt => pg_sys::AccessShareLock,
    } as pg_sys::LOCKMODE;
    let mut members = Vec::new();
    for root in relation::with_partitions(job.relation) {
        if Held::open(root.oid).is_none() {
            continue; // dropped meanwhile
        }
        for facts in relation::family(root.oid, lock).iter().filter(|facts| facts.is_stored()) {
            let Some(held) = Held::open(facts.oid) else { continue };
            let pages = held.forks().iter().map(|(_, blocks)| i64::from(*blocks)).sum();
            members.push(Member { relation: facts.oid.to_u32(), pages });
        }
    }
    Ok(members)
}

/// Work between steps: keeps the rate, stores the progress, and checks whether to continue.
struct Pace<'a> {
    job: &'a Job,
    noted: Instant,
    /// Time of the last check whether to continue.
    asked: Instant,
    /// Time since which it waits for the same thing.
    waits_since: Option<(WaitsFor, Instant)>,
    bytes_since_noted: f64,
    bytes_per_second: f64,
}

impl<'a> Pace<'a> {
    fn new(job: &'a Job) -> Pace<'a> {
        let now = Instant::now();
        Pace {
            job,
            noted: now,
            asked: now,
            waits_since: None,
            bytes_since_noted: 0.0,
            bytes_per_second: 0.0,
        }
    }

    fn after(&mut self, oid: Oid, result: StepResult, online: &Online<'_>, run: &Run) -> Flow {
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
                process::wait_in_worker(POLL_INTERVAL);
            }
            StepResult::Done | StepResult::StartedOver | StepResult::Ended(_) => {
                process::wait_in_worker(Duration::ZERO)
            }
        }
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
        if self.noted.elapsed() < PROGRESS_INTERVAL {
            return self.ask();
        }
        self.asked = Instant::now();
        self.bytes_per_second = self.bytes_since_noted / self.noted.elapsed().as_secs_f64();
        (self.noted, self.bytes_since_noted) = (Instant::now(), 0.0);
        let Progress { pages_done, pages_total, .. } = run.progress();
        self.show(oid, &format!("{pages_done} of {pages_total} pages"));
        self.note(run)
    }

    /// Waits until rewriting this number of bytes is permitted by the rate. At the lowest rates
    /// that takes minutes, in which the rate may be changed or the job paused.
    fn keep_rate(&mut self, bytes: f64) -> Flow {
        let rewritten = Instant::now();
        loop {
            let takes = guc::rekey_rate().map_or(0.0, |rate| bytes / rate);
            let left = Duration::from_secs_f64(takes).saturating_sub(rewritten.elapsed());
            process::wait_in_worker(left.min(CHECK_INTERVAL));
            if left <= CHECK_INTERVAL {
                return Flow::GoOn;
            }
            if self.ask() == Flow::Stop {
                return Flow::Stop;
            }
        }
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

    fn note(&self, run: &Run) -> Flow {
        let progress = Progress { bytes_per_second: self.bytes_per_second, ..run.progress() };
        if in_transaction(|| jobs::note(self.job, &progress)) { Flow::GoOn } else { Flow::Stop }
    }
}

/// The file of one relation that the job is rewriting.
struct Online<'a> {
    job: &'a Job,
    oid: Oid,
    right: Option<Rewriting>,
    /// Processes that may still write under a former key.
    others: Option<Others>,
    images: Images,
    ring: Ring,
}

impl<'a> Online<'a> {
    fn new(job: &'a Job, oid: Oid) -> Online<'a> {
        Online { job, oid, right: None, others: None, images: Images::Stale, ring: Ring::new() }
    }

    fn waits_for(&self, reason: WaitsFor) -> String {
        match reason {
            WaitsFor::Rewriter => "waits for a command that rewrites it".to_owned(),
            WaitsFor::Labeller => "waits for who may label it".to_owned(),
            WaitsFor::Writers => match self.others.as_ref().and_then(Others::first) {
                Some(pid) => format!("waits for process {pid}"),
                None => "waits for writers".to_owned(),
            },
        }
    }

    /// Whether the processes have ended that were writing a page of the file when this was first
    /// asked. One that exceeds the timeout is named in the server log.
    fn nobody_writes(&mut self, file: RelFile) -> bool {
        let at = || Others::at(Activity::Writing, Some(file.relation));
        let others = self.others.get_or_insert_with(at);
        if others.are_done() {
            return true;
        }
        if others.take_too_long() {
            in_transaction(|| {
                others.report().send(PgLogLevel::LOG);
                Ok(())
            });
            self.others = Some(at());
        }
        false
    }

    /// Decides what the job has to do with the relation and switches its key, in one transaction.
    fn switch(&self, looked_at: Option<RelFile>, images: &mut Images) -> Result<BeginResult> {
        if self.job.kind == JobKind::Decrypt {
            match consent::policy_for_decryption(self.job, self.oid)? {
                Wanted::Plaintext => {}
                Wanted::Otherwise => return Ok(BeginResult::Nothing),
                Wanted::Unknown => return Ok(BeginResult::Undecided),
            }
        }
        let Some(held) = Held::open(self.oid) else { return Ok(BeginResult::Nothing) };
        let file = held.file();
        verify::refuse_destroyed(file)?;
        let of_job =
            JobFacts { job: self.job, oid: self.oid, current: directory::current_cipher(file) };
        match plan(self.job.kind, self.job.cipher, &of_job)? {
            Plan::Nothing => Ok(BeginResult::Nothing),
            Plan::Keep => {
                let target = file::present(file);
                *images = Images::continued(target)?;
                Ok(BeginResult::Target(target))
            }
            Plan::Plaintext => file::unseal(&held).map(BeginResult::Target),
            Plan::NewKey(_) if looked_at != Some(file) => Ok(BeginResult::NeedsLook(file)),
            Plan::NewKey(cipher) => {
                let target = file::seal_checked(&held, cipher)?;
                *images = Images::after_switch(&held, target);
                if self.job.kind == JobKind::Rotate {
                    jobs::note_begun(self.job, self.oid)?;
                    fault::point("rekey.begun");
                }
                Ok(BeginResult::Target(target))
            }
        }
    }

    /// The relation, if it still has the target's file.
    fn held(&self, target: Target) -> Option<Held> {
        Held::open(self.oid).filter(|held| held.file() == target.file)
    }

    fn batch(&self, target: Target, fork: Fork, blocks: Range<u32>) -> Result<Batch> {
        let Some(held) = self.held(target) else { return Ok(Batch::Replaced) };
        let number = file::number_of(fork);
        let forks = held.forks();
        let length =
            forks.iter().find(|(known, _)| *known == number).map_or(0, |(_, blocks)| *blocks);
        let blocks = blocks.start..blocks.end.min(length);
        if blocks.is_empty() {
            return Ok(Batch::End);
        }
        // Read the next blocks ahead while these are rewritten.
        held.prefetch(number, blocks.end..blocks.end.saturating_add(BATCH).min(length));
        let rewritten =
            file::rewrite(&held, target, self.images, fork, blocks.clone(), &self.ring)?;
        Ok(Batch::Done { pages: blocks.end - blocks.start, rewritten })
    }
}

/// Answers for [`plan`].
struct JobFacts<'a> {
    job: &'a Job,
    oid: Oid,
    current: Option<CipherId>,
}

impl PlanFacts for JobFacts<'_> {
    type Error = Report;

    fn current(&self) -> Option<CipherId> {
        self.current
    }

    fn wanted_cipher(&self) -> Result<CipherId> {
        policy::cipher_wanted_of(&relation::require(self.oid)?)
    }

    fn is_in_other_key_group(&self) -> Result<bool> {
        policy::is_in_other_key_group(&relation::require(self.oid)?)
    }

    fn has_begun(&self) -> Result<bool> {
        jobs::has_begun(self.job, self.oid)
    }
}

/// Runs each step in a transaction of its own. Errors are raised there.
impl Storage for Online<'_> {
    type Error = Report;

    fn take_right(&mut self) -> Result<bool> {
        self.right = in_transaction(|| {
            let is_shared = Held::open(self.oid).is_some_and(|held| held.is_shared());
            Ok(Rewriting::try_for_session(self.oid, is_shared))
        });
        Ok(self.right.is_some())
    }

    fn begin(&mut self, looked_at: Option<RelFile>) -> Result<BeginResult> {
        // The switch flushes the file, and would wait for these with locks held.
        let file = match self.job.kind {
            JobKind::Decrypt => in_transaction(|| Ok(Held::open(self.oid).map(|held| held.file()))),
            _ => looked_at,
        };
        if file.is_some_and(|file| !self.nobody_writes(file)) {
            return Ok(BeginResult::Busy);
        }
        self.others = None;
        let mut images = Images::Stale;
        let begun = in_transaction(|| self.switch(looked_at, &mut images));
        self.images = images;
        Ok(begun)
    }

    fn look(&mut self, file: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool> {
        let more =
            in_transaction(|| verify::refuse_lost_versions(file, file::number_of(fork), blocks));
        if !more && fork == Fork::Init {
            fault::point("rekey.looked");
        }
        Ok(more)
    }

    /// Like [`file::await_writers`], but without any lock.
    fn writers_are_done(&mut self, target: Target) -> Result<bool> {
        let done = self.nobody_writes(target.file);
        if done {
            fault::point("rekey.barrier_passed");
        }
        Ok(done)
    }

    fn rewrite(&mut self, target: Target, fork: Fork, blocks: Range<u32>) -> Result<Batch> {
        let batch = in_transaction(|| self.batch(target, fork, blocks));
        if matches!(batch, Batch::Done { .. }) {
            fault::point("rekey.batch_done");
        }
        Ok(batch)
    }

    fn flush(&mut self, target: Target) -> Result<bool> {
        let flushed = in_transaction(|| {
            let held = self.held(target);
            held.iter().for_each(Held::flush);
            Ok(held.is_some())
        });
        if flushed {
            fault::point("rekey.flushed");
        }
        Ok(flushed)
    }

    fn sync(&mut self, target: Target, fork: Fork, segment: u32) -> Result<bool> {
        let number = file::number_of(fork);
        let more = in_transaction(|| verify::sync_segment(target.file, number, segment));
        if !more && fork == Fork::Init {
            fault::point("rekey.synced");
        }
        Ok(more)
    }

    fn is_proven(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool)> {
        Ok(in_transaction(|| verify::are_fresh(target, file::number_of(fork), blocks)))
    }

    fn finish(&mut self, target: Target) -> Result<bool> {
        Ok(in_transaction(|| match self.held(target) {
            Some(held) => {
                // A file that is not there any more would be proven to have no stale page.
                held.forks();
                file::finish(target, self.images.prove())
            }
            None => Ok(false),
        }))
    }

    fn is_present(&mut self, target: Target) -> Result<bool> {
        Ok(in_transaction(|| {
            Ok(self.held(target).is_some() && target == file::present(target.file))
        }))
    }
}
