//! Doing one job, in a background worker: every file of the relation and of what follows it.
//!
//! A batch of pages is one transaction, which holds an AccessShareLock on the one relation. Between
//! batches nothing is held but the right to rewrite the relation ([`Rewriting`]), which only those
//! want who would rewrite it as well: that is where the worker waits to keep its rate, where
//! settings change, and where jobs are paused and cancelled.
//!
//! Looking at the whole file, before its key changes and when it is proven, takes no lock at all,
//! and is done in parts as well. What was seen of one part stays true while others are looked at:
//!
//! - Once the key has changed and everybody who had looked it up before is done
//!   ([`crate::writers`]), whatever is written to the file is written under the new key. (Where
//!   hint bits are not logged a page may keep the key that it has on disk while its LSN stays,
//!   [`crate::page::io::target_over`]: one that was seen with the new key keeps that.) So a page
//!   that was seen as it should be stays so, and blocks that are added are so from the start.
//! - The key does not change, for nobody else has the right to rewrite the relation; and if it does
//!   nevertheless, no older one is retired, since that is done under the keystore's lock, and only
//!   for the key that was proven.
//! - If the file is cut, there is less to be proven. What is added again behind the cut is written
//!   under the new key.
//! - If the relation gets another file, the old one does not matter any more. Whether it has is
//!   asked last, with the relation locked, before any key is retired.

use std::ops::Range;
use std::time::{Duration, Instant};

use pagevault_cipher::{CipherId, PAGE_SIZE};
use pagevault_keystore::RelFile;
use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys::{self, ForkNumber, Oid};
use pgrx::prelude::PgLogLevel;

use super::file::{self, BATCH, LOOK, MAX_ROUNDS, Target};
use super::jobs::{self, Progress};
use super::requests::{self, Wanted};
use super::{Job, Kind};
use crate::keys::store::directory;
use crate::pg::locks::Rewriting;
use crate::pg::pages::{Held, Ring};
use crate::pg::relation::{self, Facts};
use crate::pg::report::{OrRaise, Result};
use crate::pg::{guc, process};
use crate::writers::{Act, Others};
use crate::{fault, policy, verify};

/// How often progress is written down.
const NOTE_EVERY: Duration = Duration::from_secs(1);

/// How often it is asked whether the job goes on: not for each batch, since at full speed there are
/// hundreds in a second.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How often a worker that waits for somebody looks whether he is done.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    GoOn,
    /// The job was paused or cancelled, or is gone.
    Stop,
}

/// Does the job, or as much of it as is wanted. True if it is complete.
///
/// # Errors
/// Raises ERROR: a page cannot be read or opened, a key is locked, the disk is full.
pub(super) fn run(job: &Job) -> bool {
    fault::point("rekey.claimed");
    let members = in_transaction(|| members_of(job));
    let mut run = Run::new(job, members.iter().map(|member| member.blocks).sum());
    if run.note() == Flow::Stop {
        return false;
    }
    for member in &members {
        if run.relation(member.oid) == Flow::Stop {
            return false;
        }
    }
    run.note() == Flow::GoOn
}

/// A relation with storage, as it was when the job began.
struct Member {
    oid: Oid,
    blocks: i64,
}

fn in_transaction<R>(work: impl FnOnce() -> Result<R>) -> R {
    // What the worker catches is an ERROR, and nothing of ours outlives it.
    BackgroundWorker::transaction(std::panic::AssertUnwindSafe(|| work().or_raise()))
}

/// Everything with files that belongs to the job's relation, partitions included; nothing if it is
/// gone.
fn members_of(job: &Job) -> Result<Vec<Member>> {
    let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let mut members = Vec::new();
    for root in relation::with_partitions(job.relation) {
        if Held::open(root.oid).is_none() {
            continue; // dropped meanwhile
        }
        for facts in relation::family(root.oid, lock).iter().filter(|facts| facts.is_stored()) {
            let Some(held) = Held::open(facts.oid) else { continue };
            let blocks = held.forks().iter().map(|(_, blocks)| i64::from(*blocks)).sum();
            members.push(Member { oid: facts.oid, blocks });
        }
    }
    Ok(members)
}

/// A job being done.
struct Run<'a> {
    job: &'a Job,
    progress: Progress,
    noted: Instant,
    /// When it was last asked whether to go on.
    asked: Instant,
    bytes_since_noted: f64,
    /// When the next batch may begin.
    due: Instant,
    ring: Ring,
}

/// What became of a batch.
enum Batch {
    /// So many pages looked at, so many of them rewritten.
    Done(u32, u32),
    /// The fork ends before it.
    End,
    /// The relation is gone or has another file.
    Replaced,
}

impl<'a> Run<'a> {
    fn new(job: &'a Job, pages_total: i64) -> Run<'a> {
        let now = Instant::now();
        let progress = Progress { pages_total, ..Progress::default() };
        Run {
            job,
            progress,
            noted: now,
            asked: now,
            bytes_since_noted: 0.0,
            due: now,
            ring: Ring::new(),
        }
    }

    /// Rekeys the file of one relation; again from the start if it gets another one meanwhile.
    fn relation(&mut self, oid: Oid) -> Flow {
        let before = self.progress.pages_done;
        let Some(_right) = self.right_to_rewrite(oid) else { return Flow::Stop };
        loop {
            self.progress.pages_done = before;
            let target = match self.switch(oid) {
                Switched::To(target) => target,
                Switched::Nothing => return Flow::GoOn,
                Switched::Stopped => return Flow::Stop,
            };
            // Also where nothing was switched now: whoever did may not have waited to the end.
            if self.await_writers(oid, target) == Flow::Stop {
                return Flow::Stop;
            }
            for _ in 0..MAX_ROUNDS {
                match self.rewrite(oid, target) {
                    Rewritten::Stopped => return Flow::Stop,
                    Rewritten::Replaced => break,
                    Rewritten::All => {}
                }
                match self.prove(oid, target) {
                    Proof::Whole => return Flow::GoOn,
                    Proof::Stopped => return Flow::Stop,
                    Proof::Replaced => break,
                    Proof::Stale => self.progress.pages_done = before,
                }
            }
            if in_transaction(|| Ok(is_present(oid, target))) {
                in_transaction(|| Err::<(), _>(file::never_ends(oid)));
            }
        }
    }

    /// Waits for a command that rewrites the relation. `None` if the job is not to go on.
    fn right_to_rewrite(&mut self, oid: Oid) -> Option<Rewriting> {
        loop {
            let right = in_transaction(|| {
                let is_shared = Held::open(oid).is_some_and(|held| held.is_shared());
                Ok(Rewriting::try_for_session(oid, is_shared))
            });
            if right.is_some() {
                return right;
            }
            self.show(oid, "waits for a command that rewrites it");
            process::wait_in_worker(LOOK_AGAIN);
            if self.ask() == Flow::Stop {
                return None;
            }
        }
    }

    /// Has the relation's file written as the job wants from now on.
    fn switch(&mut self, oid: Oid) -> Switched {
        let mut looked_at = None;
        loop {
            match in_transaction(|| self.begin(oid, looked_at)) {
                Begun::Nothing => return Switched::Nothing,
                Begun::NotYet => {
                    self.show(oid, "waits for who may label it");
                    process::wait_in_worker(LOOK_AGAIN);
                    if self.ask() == Flow::Stop {
                        return Switched::Stopped;
                    }
                }
                Begun::With(target) => return Switched::To(target),
                Begun::WantsLook(file) => {
                    let flow = self.through(|fork, first| {
                        file::look_for_lost_epochs(file, fork, first).map(|more| (true, more))
                    });
                    if flow.is_none() {
                        return Switched::Stopped;
                    }
                    fault::point("rekey.looked");
                    looked_at = Some(file);
                }
            }
        }
    }

    /// [`Run::switch`] in one transaction, if the file was looked at as far as that is needed.
    fn begin(&self, oid: Oid, looked_at: Option<RelFile>) -> Result<Begun> {
        if self.job.kind == Kind::Decrypt {
            match requests::is_still_to_be_plain(self.job, oid)? {
                Wanted::Plain => {}
                Wanted::Otherwise => return Ok(Begun::Nothing),
                Wanted::NotSaidYet => return Ok(Begun::NotYet),
            }
        }
        let Some(held) = Held::open(oid) else { return Ok(Begun::Nothing) };
        let file = held.file();
        verify::refuse_destroyed(file)?;
        let current = directory::current_cipher(file);
        let seal = |cipher, done: &dyn Fn() -> Result<()>| {
            if looked_at != Some(file) {
                return Ok(Begun::WantsLook(file));
            }
            let target = file::seal_looked_at(&held, cipher)?;
            done().map(|()| Begun::With(target))
        };
        match self.job.kind {
            Kind::Encrypt => {
                let wanted = wanted_cipher(self.job, &relation::require(oid)?, current)?;
                if current == Some(wanted) {
                    Ok(Begun::With(Target::present(file)))
                } else {
                    seal(wanted, &|| Ok(()))
                }
            }
            Kind::Rotate => {
                let Some(cipher) = current else { return Ok(Begun::Nothing) };
                // Of a file that came later than the job the key is new enough.
                if jobs::has_begun(self.job, oid)? {
                    return Ok(Begun::With(Target::present(file)));
                }
                seal(cipher, &|| {
                    jobs::note_begun(self.job, oid)?;
                    fault::point("rekey.begun");
                    Ok(())
                })
            }
            Kind::Decrypt if current.is_none() => Ok(Begun::With(Target::present(file))),
            Kind::Decrypt => file::unseal(&held).map(Begun::With),
        }
    }

    /// As [`file::await_writers`], without any lock; whoever takes too long is named in the server
    /// log.
    fn await_writers(&mut self, oid: Oid, target: Target) -> Flow {
        let wait = || Others::at(Act::Writing, Some(target.file.relation));
        let mut others = wait();
        while !others.are_done() {
            if let Some(pid) = others.first() {
                self.show(oid, &format!("waits for process {pid}"));
            }
            if others.take_too_long() {
                in_transaction(|| {
                    others.report().send(PgLogLevel::LOG);
                    Ok(())
                });
                others = wait();
            }
            process::wait_in_worker(LOOK_AGAIN);
            if self.ask() == Flow::Stop {
                return Flow::Stop;
            }
        }
        fault::point("rekey.barrier_passed");
        Flow::GoOn
    }

    /// Goes through all forks of a file in parts, without a lock, for as long as `look` says so
    /// first; second it says whether there is more of the fork. What it said last, or `None` if the
    /// job is not to go on.
    fn through(
        &mut self,
        mut look: impl FnMut(ForkNumber::Type, u32) -> Result<(bool, bool)>,
    ) -> Option<bool> {
        for fork in verify::ALL_FORKS {
            for first in (0..).step_by(LOOK as usize) {
                let (goes_on, more) = in_transaction(|| look(fork, first));
                if !goes_on {
                    return Some(false);
                }
                if !more {
                    break;
                }
                process::wait_in_worker(Duration::ZERO);
                if self.ask() == Flow::Stop {
                    return None;
                }
            }
        }
        Some(true)
    }

    /// Writes and syncs what was rewritten, and reads the header of every page. If each is as it
    /// should be, the older epochs of the file are retired.
    fn prove(&mut self, oid: Oid, target: Target) -> Proof {
        let flushed = in_transaction(|| {
            let held = held_for(oid, target);
            held.iter().for_each(Held::flush);
            Ok(held.is_some())
        });
        if !flushed {
            return Proof::Replaced;
        }
        fault::point("rekey.flushed");
        for fork in verify::ALL_FORKS {
            for segment in 0.. {
                if !in_transaction(|| verify::sync_segment(target.file, fork, segment)) {
                    break;
                }
                process::wait_in_worker(Duration::ZERO);
                if self.ask() == Flow::Stop {
                    return Proof::Stopped;
                }
            }
        }
        fault::point("rekey.synced");
        match self.through(|fork, first| file::is_proven(target, fork, first)) {
            None => return Proof::Stopped,
            Some(false) => return Proof::Stale,
            Some(true) => {}
        }
        in_transaction(|| {
            let Some(_held) = held_for(oid, target) else { return Ok(Proof::Replaced) };
            Ok(if file::retire(target)? { Proof::Whole } else { Proof::Replaced })
        })
    }

    /// Rewrites what is not as it should be.
    fn rewrite(&mut self, oid: Oid, target: Target) -> Rewritten {
        for fork in ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM {
            let mut next = 0u32;
            loop {
                let blocks = next..next.saturating_add(BATCH);
                match in_transaction(|| batch(oid, target, fork, blocks, &self.ring)) {
                    Batch::Replaced => return Rewritten::Replaced,
                    Batch::End => break,
                    Batch::Done(looked_at, rewritten) => {
                        fault::point("rekey.batch_done");
                        next += looked_at;
                        if self.pause_after(oid, looked_at, rewritten) == Flow::Stop {
                            return Rewritten::Stopped;
                        }
                    }
                }
            }
        }
        Rewritten::All
    }

    /// Between batches: counts, waits to keep the rate, and asks whether to go on.
    fn pause_after(&mut self, oid: Oid, looked_at: u32, rewritten: u32) -> Flow {
        let bytes = f64::from(rewritten) * PAGE_SIZE as f64;
        self.progress.pages_done += i64::from(looked_at);
        self.bytes_since_noted += f64::from(looked_at) * PAGE_SIZE as f64;
        let now = Instant::now();
        if let Some(rate) = guc::rekey_rate() {
            self.due = self.due.max(now) + Duration::from_secs_f64(bytes / rate);
        } else {
            self.due = now;
        }
        process::wait_in_worker(self.due.saturating_duration_since(now));
        if self.noted.elapsed() < NOTE_EVERY {
            return self.ask();
        }
        self.asked = Instant::now();
        self.progress.bytes_per_second =
            self.bytes_since_noted / self.noted.elapsed().as_secs_f64();
        (self.noted, self.bytes_since_noted) = (Instant::now(), 0.0);
        self.progress.pages_total = self.progress.pages_total.max(self.progress.pages_done);
        let Progress { pages_done, pages_total, .. } = self.progress;
        self.show(oid, &format!("{pages_done} of {pages_total} pages"));
        self.note()
    }

    /// Says in `pg_stat_activity` what the worker is at.
    fn show(&self, oid: Oid, what: &str) {
        let Job { id, kind, .. } = self.job;
        let (kind, oid) = (kind.name(), oid.to_u32());
        let text = format!("pagevault: {kind} job {id}, relation {oid}: {what}");
        process::show_activity(Some(&text));
    }

    /// Whether the job is to go on; asked now and then.
    fn ask(&mut self) -> Flow {
        if self.asked.elapsed() < ASK_EVERY {
            return Flow::GoOn;
        }
        self.asked = Instant::now();
        let goes_on = in_transaction(|| jobs::goes_on(self.job));
        if goes_on { Flow::GoOn } else { Flow::Stop }
    }

    fn note(&self) -> Flow {
        if in_transaction(|| jobs::note(self.job, &self.progress)) {
            Flow::GoOn
        } else {
            Flow::Stop
        }
    }
}

/// How rewriting a file went.
enum Rewritten {
    All,
    Replaced,
    Stopped,
}

/// How a file comes to be written as the job wants.
enum Switched {
    To(Target),
    /// There is nothing to do.
    Nothing,
    Stopped,
}

/// One step to that.
enum Begun {
    /// Another transaction may change what is wanted.
    NotYet,
    With(Target),
    Nothing,
    /// This file has to be looked at first.
    WantsLook(RelFile),
}

/// What the disk says of a file that was rewritten.
enum Proof {
    Whole,
    Stale,
    /// The relation has another file, or the file another key.
    Replaced,
    Stopped,
}

fn wanted_cipher(job: &Job, facts: &Facts, current: Option<CipherId>) -> Result<CipherId> {
    match job.cipher.or(current) {
        Some(cipher) => Ok(cipher),
        None => policy::cipher_wanted_of(facts),
    }
}

/// True if the relation still has the file that the target is for, and that is written so.
fn is_present(oid: Oid, target: Target) -> bool {
    held_for(oid, target).is_some() && target == Target::present(target.file)
}

/// The relation, if it still has the file that the target is for.
fn held_for(oid: Oid, target: Target) -> Option<Held> {
    Held::open(oid).filter(|held| held.file() == target.file)
}

fn batch(
    oid: Oid,
    target: Target,
    fork: ForkNumber::Type,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<Batch> {
    let Some(held) = held_for(oid, target) else { return Ok(Batch::Replaced) };
    let forks = held.forks();
    let length = forks.iter().find(|(known, _)| *known == fork).map_or(0, |(_, blocks)| *blocks);
    let blocks = blocks.start..blocks.end.min(length);
    if blocks.is_empty() {
        return Ok(Batch::End);
    }
    // While these are rewritten the next ones come.
    held.prefetch(fork, blocks.end..blocks.end.saturating_add(BATCH).min(length));
    let rewritten = file::rewrite(&held, target, fork, blocks.clone(), ring)?;
    Ok(Batch::Done(blocks.end - blocks.start, rewritten))
}
