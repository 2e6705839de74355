//! Running one job in a background worker, for all files of the relation and of those that follow
//! it.
//!
//! [`pagevault_core::rekey::file`] decides on the steps. Here each step is carried out ([`Online`])
//! in a transaction of its own, with an AccessShareLock on the relation where needed. Between
//! steps, only the right to rewrite the relation is held ([`Rewriting`]): there the worker waits to
//! keep its rate, reads changed settings, and notices that the job was paused or cancelled.

use std::ops::Range;

use pagevault_cipher::CipherId;
use pagevault_core::page::Fork;
use pagevault_core::rekey::file::{BATCH, Batch, BeginResult, End, StepResult, Storage, WaitsFor};
use pagevault_core::rekey::plan::{Plan, PlanFacts, plan};
use pagevault_core::rekey::run::{Member, Run};
use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::PgLogLevel;

use super::consent::{self, Wanted};
use super::file::{self, Images, Target};
use super::jobs;
use super::pace::{Flow, Pace};
use super::{Job, JobKind};
use crate::fault;
use crate::keys::store::directory;
use crate::pg::locks::Rewriting;
use crate::pg::pages::{Held, Ring};
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::worker;
use crate::pg::{inheritance, relation};
use crate::policy;
use crate::verify;
use crate::writers::{Activity, Others};

const WEAK: pg_sys::LOCKMODE = pg_sys::AccessShareLock as pg_sys::LOCKMODE;

/// Runs the job until it is complete, paused or cancelled. True if it is complete.
///
/// # Errors
/// Raises ERROR if a page cannot be read or decrypted, a key is locked, or the disk is full.
pub(super) fn run(job: &Job) -> bool {
    fault::point("rekey.claimed");
    let roots = roots_of(job);
    let mut run = Run::new(members_of(job, &roots));
    let mut pace = Pace::new(job);
    if pace.note(&run) == Flow::Stop {
        return false;
    }
    let mut online = Online::new(job, Oid::INVALID);
    loop {
        let Some((relation, _)) = run.next() else {
            if run.follow(&present_members_of(&roots), job.kind) {
                continue;
            }
            break;
        };
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

pub(super) fn in_transaction<R>(work: impl FnOnce() -> Result<R>) -> R {
    worker::transaction(|| work().or_raise())
}

/// The job's relation and its partitions; none if it was dropped.
fn roots_of(job: &Job) -> Vec<Oid> {
    let relations = in_transaction(|| Ok(inheritance::with_partitions(job.relation)));
    relations.iter().map(|relation| relation.oid).collect()
}

/// All relations with files that belong to these.
///
/// A job that encrypts locks them as commands do that give a relation new storage: CREATE INDEX,
/// REPACK (CONCURRENTLY). Those that began before the policy required encryption may add files in
/// plaintext, which cannot be seen before they have committed. Later ones follow the policy.
///
/// So does any job if an index is not ready. CREATE INDEX and REINDEX CONCURRENTLY commit its row
/// first, and then write its pages past shared buffers (`index_concurrently_build`, index.c;
/// `_bt_blwritepage`, nbtsort.c), with zero pages in between which they fill later. What the job
/// read meanwhile would stay in shared buffers. They hold this lock on the table until the index is
/// ready; the lock of one that has failed is free. This job's weaker locks are released first:
/// REINDEX would wait for them (`WaitForLockersMultiple`).
fn members_of(job: &Job, roots: &[Oid]) -> Vec<Member> {
    const STRONG: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
    let mut members = Vec::new();
    // In a transaction each: nothing is locked while this waits for the next lock.
    for root in roots.iter().copied() {
        if job.kind != JobKind::Encrypt {
            let (found, are_ready) = in_transaction(|| Ok(members_under(root, WEAK)));
            if are_ready {
                members.extend(found);
                continue;
            }
        }
        members.extend(in_transaction(|| Ok(members_under(root, STRONG))).0);
    }
    members
}

/// The same at the end of the job: it waits for commands that give a file to another relation.
/// Partitions that were attached meanwhile are not the job's, nor are indexes that are being built:
/// their files are new.
fn present_members_of(roots: &[Oid]) -> Vec<Member> {
    let ready = |root| in_transaction(|| Ok(family_under(root, WEAK)));
    let ready = roots.iter().flat_map(|root| ready(*root)).filter(|(_, is_ready)| *is_ready);
    ready.map(|(member, _)| member).collect()
}

/// The members of a table's family that are seen under such locks, and whether all of them were
/// ready when they were listed. None if the table was dropped.
fn members_under(table: Oid, lock: pg_sys::LOCKMODE) -> (Vec<Member>, bool) {
    let family = family_under(table, lock);
    let are_ready = family.iter().all(|(_, is_ready)| *is_ready);
    (family.into_iter().map(|(member, _)| member).collect(), are_ready)
}

/// The same, and whether each of them is ready.
fn family_under(table: Oid, lock: pg_sys::LOCKMODE) -> Vec<(Member, bool)> {
    let mut members = Vec::new();
    // Under no weaker lock, for which REINDEX CONCURRENTLY would wait, as this waits for it.
    if Held::open_under(table, lock).is_none() {
        return members;
    }
    for facts in relation::family(table, lock).iter().filter(|facts| facts.is_stored()) {
        let Some(held) = Held::open(facts.oid) else { continue };
        let pages = held.forks().iter().map(|(_, blocks)| i64::from(*blocks)).sum();
        let (relation, file) = (facts.oid.to_u32(), held.file());
        members.push((Member { relation, file, pages }, held.is_ready()));
    }
    members
}

/// The file of one relation that the job is rewriting.
pub(super) struct Online<'a> {
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

    pub(super) fn waits_for(&self, reason: WaitsFor) -> String {
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
        // A partition may have a label of its own.
        if self.job.kind == JobKind::Encrypt
            && policy::wanted(&relation::require(self.oid)?)?
                .is_some_and(|wanted| wanted.is_plaintext_by_own_label())
        {
            return Ok(BeginResult::Nothing);
        }
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
