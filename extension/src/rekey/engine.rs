//! Doing one job, in a background worker: every file of the relation and of what follows it.
//!
//! A batch of pages is one transaction, which holds an AccessShareLock on the one relation. Between batches
//! nothing is held: that is where the worker waits to keep its rate, where settings change, and where jobs are
//! paused and cancelled.

use std::ops::Range;
use std::time::{Duration, Instant};

use pagevault_cipher::{CipherId, PAGE_SIZE};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys::{self, ForkNumber, Oid};

use super::file::{self, BATCH, Target};
use super::jobs::{self, Progress};
use super::{Job, Kind};
use crate::fault;
use crate::keys::shared;
use crate::pg::pages::{Held, Ring};
use crate::pg::relation::{self, Facts};
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::{guc, process};
use crate::policy;
use crate::verify;

/// How often progress is written down.
const NOTE_EVERY: Duration = Duration::from_secs(1);

/// How often it is asked whether the job goes on: not for each batch, since at full speed there are hundreds in a
/// second.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How often a file is gone through. A page that turns up in the proof and is not as it should be is
/// possible once; not again and again.
const MAX_ROUNDS: usize = 10;

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    GoOn,
    /// The job was paused or cancelled, or its row is gone.
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

/// Everything with files that belongs to the job's relation, partitions included; nothing if it is gone.
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
        loop {
            self.progress.pages_done = before;
            let Some(target) = in_transaction(|| self.begin(oid)) else { return Flow::GoOn };
            // Also where nothing was switched now: whoever did may not have waited to the end.
            in_transaction(|| {
                file::await_writers();
                Ok(())
            });
            for _ in 0..MAX_ROUNDS {
                match self.rewrite(oid, target) {
                    Rewritten::Stopped => return Flow::Stop,
                    Rewritten::Replaced => break,
                    Rewritten::All => {}
                }
                match in_transaction(|| prove(oid, target)) {
                    Proof::Whole => return Flow::GoOn,
                    Proof::Replaced => break,
                    Proof::Stale => self.progress.pages_done = before,
                }
            }
            if in_transaction(|| Ok(file_of(oid))) == Some(target.file) {
                in_transaction(|| Err::<(), _>(never_ends(oid)));
            }
        }
    }

    /// Has the relation's file written as the job wants from now on; `None` if there is nothing to do.
    fn begin(&self, oid: Oid) -> Result<Option<Target>> {
        let Some(held) = Held::open(oid) else { return Ok(None) };
        let file = held.file();
        verify::refuse_destroyed(file)?;
        let current = shared::current_cipher(file);
        Ok(Some(match self.job.kind {
            Kind::Encrypt => {
                let wanted = wanted_cipher(self.job, &relation::require(oid)?, current)?;
                if current == Some(wanted) {
                    Target::present(file)
                } else {
                    file::seal(&held, wanted)?
                }
            }
            Kind::Rotate => {
                let Some(cipher) = current else { return Ok(None) };
                // Of a file that came later than the job the key is new enough.
                if jobs::has_begun(self.job, oid)? {
                    Target::present(file)
                } else {
                    let target = file::seal(&held, cipher)?;
                    jobs::note_begun(self.job, oid, file.relation)?;
                    fault::point("rekey.begun");
                    target
                }
            }
            Kind::Decrypt if current.is_none() => Target::present(file),
            Kind::Decrypt => file::unseal(&held)?,
        }))
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
        if self.asked.elapsed() < ASK_EVERY {
            return Flow::GoOn;
        }
        self.asked = Instant::now();
        if self.noted.elapsed() < NOTE_EVERY {
            let goes_on = in_transaction(|| jobs::goes_on(self.job));
            return if goes_on { Flow::GoOn } else { Flow::Stop };
        }
        self.progress.bytes_per_second =
            self.bytes_since_noted / self.noted.elapsed().as_secs_f64();
        (self.noted, self.bytes_since_noted) = (Instant::now(), 0.0);
        self.progress.pages_total = self.progress.pages_total.max(self.progress.pages_done);
        process::show_activity(Some(&format!(
            "pagevault: {} job {}, relation {}: {} of {} pages",
            self.job.kind.name(),
            self.job.id,
            oid.to_u32(),
            self.progress.pages_done,
            self.progress.pages_total
        )));
        self.note()
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

/// What the disk says of a file that was rewritten.
enum Proof {
    Whole,
    Stale,
    Replaced,
}

fn wanted_cipher(job: &Job, facts: &Facts, current: Option<CipherId>) -> Result<CipherId> {
    match job.cipher.or(current) {
        Some(cipher) => Ok(cipher),
        None => policy::cipher_wanted_of(facts),
    }
}

fn file_of(oid: Oid) -> Option<RelFile> {
    Held::open(oid).map(|held| held.file())
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

fn prove(oid: Oid, target: Target) -> Result<Proof> {
    let Some(held) = held_for(oid, target) else { return Ok(Proof::Replaced) };
    Ok(if file::prove(&held, target)? { Proof::Whole } else { Proof::Stale })
}

fn never_ends(oid: Oid) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("pages of {} keep being written under an old key", relation::qualified_name(oid)),
    )
    .detail(
        "They were rewritten, flushed, and read back from disk several times. No key was retired.",
    )
}
