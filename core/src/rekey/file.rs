//! Rekeying the file of one relation, as a sequence of steps.
//!
//! [`FileState`] is the next step. [`FileState::step`] performs it through [`Storage`] and moves to
//! the step after it. No progress is recorded: a run may end anywhere, by a crash or on request.
//! The next run starts from the beginning and finds on disk what is left to do.
//!
//! ```text
//! Right -> Begin <-> Look
//!            |  ^
//!            v  +-------- relation has another file, or file another target ---------+
//!         Writers -> Rewrite -> Flush -> Sync -> Prove -> Finish -> Ended            |
//!                       ^          |                |        |                       |
//!                       |          +----------------|--------+-----------------------+
//!                       |                           v                                |
//!                       +------ same target ----- Stale ------ another target -------+
//! ```
//!
//! The whole file is read before its key changes, and again as proof, without a lock and in parts.
//! What was read of one part stays true while other parts are read:
//!
//! - Once the key has changed, and all writers that had looked it up before are done, everything is
//!   written to the file under the new key. (A page that changes without WAL keeps the key it has
//!   on disk as long as its LSN stays. If that is the new key, it keeps the new key.) So a page
//!   that was seen in the target state stays in it, and added blocks are in it from the start.
//! - The key does not change, because nobody else has the right to rewrite the relation. If it did,
//!   nothing would be recorded: the record is made under the keystore's lock, and only for the key
//!   that was proven.
//! - If the file is truncated, there is less to prove. Blocks that are added again are written
//!   under the new key.
//! - If the relation gets another file, the old one does not matter any more. This is checked last,
//!   with the relation locked, before the rewrite is recorded as finished.

use std::ops::Range;

use pagevault_keystore::RelFile;

use crate::page::{Fork, Place, Target};

/// Pages that one step reads and rewrites: 512 kB.
pub const BATCH: u32 = 64;

/// Pages of which one step reads only the headers: 64 MB.
pub const LOOK: u32 = 8192;

/// Maximum number of rounds over a file. That the proof finds a page in another state is possible
/// once, but not again and again.
pub const MAX_ROUNDS: u32 = 10;

/// Result of [`Storage::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeginResult {
    /// New pages have this target from now on, or had it already.
    Target(Target),
    /// There is nothing to do, or the relation is gone.
    Nothing,
    /// Another transaction may change the policy.
    Undecided,
    /// A process is writing a page of the file.
    Busy,
    /// This file has to be read by [`Storage::look`] first.
    NeedsLook(RelFile),
}

/// Result of [`Storage::rewrite`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// The batch is done.
    Done {
        /// Pages read; not 0.
        pages: u32,
        /// Pages rewritten.
        rewritten: u32,
    },
    /// The fork ends before these blocks.
    End,
    /// The relation is gone or has another file.
    Replaced,
}

/// Actions on the file of one relation. A job performs each in a transaction of its own. An error
/// ends the job: a page cannot be read, a key is locked or destroyed, the disk is full.
pub trait Storage {
    /// Why an action failed.
    type Error;

    /// [`BATCH`]; tests use a smaller one.
    const BATCH: u32 = BATCH;
    /// [`LOOK`]; tests use a smaller one.
    const LOOK: u32 = LOOK;
    /// The caller's lock prevents that the file is replaced or truncated. Then no proof is needed
    /// if no page had to be rewritten.
    const IS_LOCKED: bool = false;

    /// Takes the right to rewrite the relation. It conflicts with nothing but other rewrites of the
    /// relation. False while another process has it.
    ///
    /// # Errors
    /// If it fails, as for all methods here.
    fn take_right(&mut self) -> Result<bool, Self::Error>;

    /// Sets the target of the relation's new pages. It is durable before anybody uses it.
    /// `looked_at`: the file that was read by [`Storage::look`].
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn begin(&mut self, looked_at: Option<RelFile>) -> Result<BeginResult, Self::Error>;

    /// Reads the headers of blocks, and fails if the keystore has lost the key of one. True if the
    /// fork may continue after these blocks.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn look(&mut self, file: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool, Self::Error>;

    /// True if no process is writing to the file with a key that it looked up before
    /// [`Storage::begin`]. Called again until it is.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn writers_are_done(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// Rewrites the blocks that are not in the target state on disk, through shared buffers and
    /// with full-page images in WAL.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn rewrite(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<Batch, Self::Error>;

    /// Flushes the file's shared buffers. False if the relation has another file.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn flush(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// Syncs a segment of a fork. False if it does not exist.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn sync(&mut self, target: Target, fork: Fork, segment: u32) -> Result<bool, Self::Error>;

    /// Whether all these blocks are in the target state on disk, and whether the fork may continue
    /// after them.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn is_proven(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool), Self::Error>;

    /// Records that the rewrite is finished: no page is under an older key any more. False, and
    /// nothing is recorded, if the relation has another file or the file another target.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn finish(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// True if the relation still has this file, and the file this target.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn is_present(&mut self, target: Target) -> Result<bool, Self::Error>;
}

/// The next step for a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// Take the right to rewrite the relation.
    Right,
    /// Set the target of new pages.
    Begin {
        /// The file that was read by [`FileState::Look`].
        looked_at: Option<RelFile>,
    },
    /// Look for pages whose key is lost.
    Look {
        /// The file to read.
        file: RelFile,
        /// The next position.
        at: Place,
    },
    /// Wait for processes that are writing with a key that they looked up before.
    Writers {
        /// The target of the file.
        target: Target,
    },
    /// Rewrite pages that are not in the target state.
    Rewrite {
        /// The current round.
        round: Round,
        /// The next position.
        at: Place,
    },
    /// Flush shared buffers.
    Flush {
        /// The current round.
        round: Round,
    },
    /// Sync the file.
    Sync {
        /// The current round.
        round: Round,
        /// The next segment.
        at: Place,
    },
    /// Read from disk whether every page is in the target state.
    Prove {
        /// The current round.
        round: Round,
        /// The next position.
        at: Place,
    },
    /// Record that the rewrite is finished.
    Finish {
        /// The round that was proven.
        round: Round,
    },
    /// The proof found pages in another state: start another round if the target is still the same.
    Stale {
        /// The round that failed.
        round: Round,
    },
    /// Finished.
    Ended(End),
}

/// One pass over a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// The target of its pages.
    pub target: Target,
    /// Number of the pass, from 1.
    pub number: u32,
    /// At least one page was rewritten.
    pub rewritten: bool,
}

/// How the rekeying of a file ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Every page on disk is in the target state.
    Proven,
    /// There was nothing to do.
    Nothing,
    /// After [`MAX_ROUNDS`] there are still pages under an old key.
    NeverEnds,
}

/// The result of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepResult {
    /// The step is done.
    Done,
    /// The step has to be repeated when another process is done.
    Waits(WaitsFor),
    /// A batch is done.
    Rewrote {
        /// Pages read.
        pages: u32,
        /// Pages rewritten.
        rewritten: u32,
    },
    /// The relation's file is processed again from its beginning; it may be another file.
    StartedOver,
    /// The file is finished.
    Ended(End),
}

/// What a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// A command that rewrites the relation.
    Rewriter,
    /// A transaction that may change the relation's label.
    Labeller,
    /// Processes that are writing to the file.
    Writers,
}

impl FileState {
    /// The first step of every run.
    pub const START: Self = Self::Right;

    /// Performs the next step.
    ///
    /// # Errors
    /// Those of the storage. The state does not change then.
    pub fn step<S: Storage>(&mut self, storage: &mut S) -> Result<StepResult, S::Error> {
        let (next, result) = match *self {
            Self::Right => match storage.take_right()? {
                true => (Self::Begin { looked_at: None }, StepResult::Done),
                false => (*self, StepResult::Waits(WaitsFor::Rewriter)),
            },
            Self::Begin { looked_at } => match storage.begin(looked_at)? {
                BeginResult::Target(target) => (Self::Writers { target }, StepResult::Done),
                BeginResult::Nothing => ended(End::Nothing),
                BeginResult::Undecided => (*self, StepResult::Waits(WaitsFor::Labeller)),
                BeginResult::Busy => (*self, StepResult::Waits(WaitsFor::Writers)),
                BeginResult::NeedsLook(file) => {
                    (Self::Look { file, at: Place::START }, StepResult::Done)
                }
            },
            Self::Look { file, at } => {
                let more = storage.look(file, at.fork, at.blocks(S::LOOK))?;
                match at.next(S::LOOK, more) {
                    Some(at) => (Self::Look { file, at }, StepResult::Done),
                    None => (Self::Begin { looked_at: Some(file) }, StepResult::Done),
                }
            }
            // Also if this run has not changed the key: an interrupted run may have, without
            // waiting.
            Self::Writers { target } => match storage.writers_are_done(target)? {
                true => (rewrite(Round { target, number: 1, rewritten: false }), StepResult::Done),
                false => (*self, StepResult::Waits(WaitsFor::Writers)),
            },
            Self::Rewrite { round, at } => {
                match storage.rewrite(round.target, at.fork, at.blocks(S::BATCH))? {
                    Batch::Replaced => start_over(),
                    Batch::Done { pages, rewritten } => {
                        let at = Place { first: at.first.saturating_add(pages), ..at };
                        let any = round.rewritten || rewritten > 0;
                        let round = Round { rewritten: any, ..round };
                        (Self::Rewrite { round, at }, StepResult::Rewrote { pages, rewritten })
                    }
                    Batch::End => match at.next(S::BATCH, false) {
                        Some(at) => (Self::Rewrite { round, at }, StepResult::Done),
                        // No page had to be rewritten, and all later writes use the target.
                        None if S::IS_LOCKED && !round.rewritten => {
                            (Self::Sync { round, at: Place::START }, StepResult::Done)
                        }
                        None => (Self::Flush { round }, StepResult::Done),
                    },
                }
            }
            Self::Flush { round } => match storage.flush(round.target)? {
                true => (Self::Sync { round, at: Place::START }, StepResult::Done),
                false => start_over(),
            },
            Self::Sync { round, at } => {
                let more = storage.sync(round.target, at.fork, at.first)?;
                match at.next(1, more) {
                    Some(at) => (Self::Sync { round, at }, StepResult::Done),
                    None if S::IS_LOCKED && !round.rewritten => {
                        (Self::Finish { round }, StepResult::Done)
                    }
                    None => (Self::Prove { round, at: Place::START }, StepResult::Done),
                }
            }
            Self::Prove { round, at } => {
                let (proven, more) =
                    storage.is_proven(round.target, at.fork, at.blocks(S::LOOK))?;
                match at.next(S::LOOK, more) {
                    _ if !proven => (Self::Stale { round }, StepResult::Done),
                    Some(at) => (Self::Prove { round, at }, StepResult::Done),
                    None => (Self::Finish { round }, StepResult::Done),
                }
            }
            Self::Finish { round } => match storage.finish(round.target)? {
                true => ended(End::Proven),
                false => start_over(),
            },
            // If the target was replaced, another round would only rewrite everything for nothing.
            Self::Stale { round } => match storage.is_present(round.target)? {
                false => start_over(),
                true if round.number == MAX_ROUNDS => ended(End::NeverEnds),
                true => {
                    let next = Round { number: round.number + 1, rewritten: false, ..round };
                    (rewrite(next), StepResult::StartedOver)
                }
            },
            Self::Ended(end) => ended(end),
        };
        *self = next;
        Ok(result)
    }
}

fn rewrite(round: Round) -> FileState {
    FileState::Rewrite { round, at: Place::START }
}

fn ended(end: End) -> (FileState, StepResult) {
    (FileState::Ended(end), StepResult::Ended(end))
}

/// The relation has another file. New storage follows the policy, but the job may require more.
fn start_over() -> (FileState, StepResult) {
    (FileState::Begin { looked_at: None }, StepResult::StartedOver)
}
