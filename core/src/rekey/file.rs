//! Rekeying the file of one relation: what is done, one step after the other.
//!
//! [`FileState`] says what comes next, [`FileState::step`] has it done through [`Storage`] and says
//! where that leads. Nothing else is remembered: a run may end anywhere, with the server or by
//! order, and the next one begins at the start and finds on disk what is left to do.
//!
//! ```text
//! Right -> Begin <-> Look
//!            |  ^
//!            v  +---------- another file, or to be written otherwise by now ---------+
//!         Writers -> Rewrite -> Flush -> Sync -> Prove -> Finish -> Over             |
//!                       ^          |                |        |                       |
//!                       |          +----------------|--------+-----------------------+
//!                       |                           v                                |
//!                       +--------- still ------- Stale -------- not any more --------+
//! ```
//!
//! Looking at the whole file, before its key changes and when it is proven, takes no lock, and is
//! done in parts. What was seen of one part stays true while others are looked at:
//!
//! - Once the key has changed and everybody who had looked it up before is done, whatever is
//!   written to the file is written under the new key. (A page that changes without WAL may keep
//!   the key that it has on disk while its LSN stays: one that was seen with the new key keeps
//!   that.) So a page that was seen as it should be stays so, and blocks that are added are so from
//!   the start.
//! - The key does not change, for nobody else has the right to rewrite the relation; and if it does
//!   nevertheless, nothing is written down, since that is done under the keystore's lock, and only
//!   for the key that was proven.
//! - If the file is cut, there is less to be proven. What is added again behind the cut is written
//!   under the new key.
//! - If the relation gets another file, the old one does not matter any more. Whether it has is
//!   asked last, with the relation locked, before it is written down that the file is finished.

use std::ops::Range;

use pagevault_keystore::RelFile;

use crate::page::{Fork, Place, Target};

/// Pages that are looked at and rewritten in one step: 512 kB.
pub const BATCH: u32 = 64;

/// Pages of which only the headers are looked at in one step: 64 MB.
pub const LOOK: u32 = 8192;

/// How often a file is gone through. A page that turns up in the proof and is not as it should be
/// is possible once; not again and again.
pub const MAX_ROUNDS: u32 = 10;

/// How a file comes to be written as the job wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// It is so from now on, or was already.
    With(Target),
    /// There is nothing to do, or no relation.
    Nothing,
    /// Another transaction may change what is wanted.
    NotYet,
    /// This file has to be looked at first.
    WantsLook(RelFile),
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// So many pages were looked at, so many of them rewritten.
    Done {
        /// Looked at; not 0.
        pages: u32,
        /// Rewritten.
        rewritten: u32,
    },
    /// The fork ends before it.
    End,
    /// The relation is gone or has another file.
    Replaced,
}

/// What is done to a file, each in a transaction of its own where a job does it. `Err` is what ends
/// the job: a page cannot be read, a key is locked or destroyed, the disk is full.
pub trait Storage {
    /// Why something could not be done.
    type Error;

    /// [`BATCH`], for files of a handy size.
    const BATCH: u32 = BATCH;
    /// [`LOOK`], for these.
    const LOOK: u32 = LOOK;
    /// The file can be neither replaced nor cut meanwhile. Then what was found as it is to be need
    /// not be proven.
    const IS_LOCKED: bool = false;

    /// Takes the right to rewrite the relation, which only those want who would rewrite it as well.
    /// False while somebody else has it.
    ///
    /// # Errors
    /// As all these, when it cannot be done.
    fn take_right(&mut self) -> Result<bool, Self::Error>;

    /// Has the relation's file written as is wanted from now on. It is durable before anybody uses
    /// it. `looked_at`: this file was gone through with [`Storage::look`].
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn begin(&mut self, looked_at: Option<RelFile>) -> Result<Begun, Self::Error>;

    /// Refuses a file with pages of which the keystore has lost the key. True if there may be more
    /// of the fork behind these blocks.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn look(&mut self, file: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool, Self::Error>;

    /// True when nobody writes the file any more by a key that was looked up before
    /// [`Storage::begin`]. Asked again until it is.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn writers_are_done(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// Writes those of the blocks again, through shared buffers and with an image in WAL, that on
    /// disk are not as the target wants them.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn rewrite(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<Batch, Self::Error>;

    /// Writes what of the file is in shared buffers. False if the relation has another file.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn flush(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// Syncs a segment of a fork. False if there is none.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn sync(&mut self, target: Target, fork: Fork, segment: u32) -> Result<bool, Self::Error>;

    /// Whether each of these blocks is on disk as the target wants it; and whether there may be
    /// more of the fork behind them.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn is_proven(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool), Self::Error>;

    /// Writes down that the rewriting is finished: no page is under an older key any more. False,
    /// and nothing is done, if the relation has another file, or it is to be written otherwise by
    /// now.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn finish(&mut self, target: Target) -> Result<bool, Self::Error>;

    /// True if the relation still has this file, and it is to be written so.
    ///
    /// # Errors
    /// See [`Storage::take_right`].
    fn is_present(&mut self, target: Target) -> Result<bool, Self::Error>;
}

/// What a step is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// Take the right to rewrite the relation.
    Right,
    /// Have the file written as wanted from now on.
    Begin {
        /// This one was gone through.
        looked_at: Option<RelFile>,
    },
    /// Look for pages of which the key is lost.
    Look {
        /// In this file.
        file: RelFile,
        /// From here on.
        at: Place,
    },
    /// Wait for those who write under a key that they have looked up before.
    Writers {
        /// How the file is written now.
        target: Target,
    },
    /// Rewrite what is not as it is to be.
    Rewrite {
        /// How it is to be.
        round: Round,
        /// From here on.
        at: Place,
    },
    /// Write what is in shared buffers.
    Flush {
        /// As rewritten.
        round: Round,
    },
    /// Bring it to disk.
    Sync {
        /// As rewritten.
        round: Round,
        /// This segment.
        at: Place,
    },
    /// Read on disk whether every page is as it is to be.
    Prove {
        /// As rewritten.
        round: Round,
        /// From here on.
        at: Place,
    },
    /// Write down that it is finished.
    Finish {
        /// As proven.
        round: Round,
    },
    /// Pages are not as they should be: once more, if they are still to be so.
    Stale {
        /// In which they were rewritten.
        round: Round,
    },
    /// Nothing is left to do.
    Over(End),
}

/// Going through a file once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// How its pages are to be.
    pub target: Target,
    /// From 1.
    pub number: u32,
    /// Some page was rewritten.
    pub rewritten: bool,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Every page on disk is as wanted.
    Proven,
    /// There was nothing to do.
    Nothing,
    /// Pages keep being written under an old key.
    NeverEnds,
}

/// What a step has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Went {
    /// It is done.
    On,
    /// It is to be tried again when somebody else is done.
    Waits(For),
    /// A batch is done: so many pages looked at, so many of them rewritten.
    Through {
        /// Looked at.
        pages: u32,
        /// Rewritten.
        rewritten: u32,
    },
    /// The file, or another one of the relation, is gone through once more from its beginning.
    Again,
    /// Nothing is left to do.
    Over(End),
}

/// Whom a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// A command that rewrites the relation.
    Rewriter,
    /// Who may change its label.
    Labeller,
    /// Processes that write the file.
    Writers,
}

impl FileState {
    /// Where every run begins.
    pub const START: Self = Self::Right;

    /// Does what is next.
    ///
    /// # Errors
    /// Those of the storage. The state stays as it is.
    pub fn step<S: Storage>(&mut self, storage: &mut S) -> Result<Went, S::Error> {
        let (next, went) = match *self {
            Self::Right => match storage.take_right()? {
                true => (Self::Begin { looked_at: None }, Went::On),
                false => (*self, Went::Waits(For::Rewriter)),
            },
            Self::Begin { looked_at } => match storage.begin(looked_at)? {
                Begun::With(target) => (Self::Writers { target }, Went::On),
                Begun::Nothing => over(End::Nothing),
                Begun::NotYet => (*self, Went::Waits(For::Labeller)),
                Begun::WantsLook(file) => (Self::Look { file, at: Place::START }, Went::On),
            },
            Self::Look { file, at } => {
                let more = storage.look(file, at.fork, at.blocks(S::LOOK))?;
                match at.next(S::LOOK, more) {
                    Some(at) => (Self::Look { file, at }, Went::On),
                    None => (Self::Begin { looked_at: Some(file) }, Went::On),
                }
            }
            // Also where nothing was switched now: whoever did may not have waited to the end.
            Self::Writers { target } => match storage.writers_are_done(target)? {
                true => (rewrite(Round { target, number: 1, rewritten: false }), Went::On),
                false => (*self, Went::Waits(For::Writers)),
            },
            Self::Rewrite { round, at } => {
                match storage.rewrite(round.target, at.fork, at.blocks(S::BATCH))? {
                    Batch::Replaced => again(),
                    Batch::Done { pages, rewritten } => {
                        let at = Place { first: at.first.saturating_add(pages), ..at };
                        let any = round.rewritten || rewritten > 0;
                        let round = Round { rewritten: any, ..round };
                        (Self::Rewrite { round, at }, Went::Through { pages, rewritten })
                    }
                    Batch::End => match at.next(S::BATCH, false) {
                        Some(at) => (Self::Rewrite { round, at }, Went::On),
                        // Every page is in the file as it is to be, and is so after each later
                        // write. But what is in the file may not be on disk.
                        None if S::IS_LOCKED && !round.rewritten => {
                            (Self::Sync { round, at: Place::START }, Went::On)
                        }
                        None => (Self::Flush { round }, Went::On),
                    },
                }
            }
            Self::Flush { round } => match storage.flush(round.target)? {
                true => (Self::Sync { round, at: Place::START }, Went::On),
                false => again(),
            },
            Self::Sync { round, at } => {
                let more = storage.sync(round.target, at.fork, at.first)?;
                match at.next(1, more) {
                    Some(at) => (Self::Sync { round, at }, Went::On),
                    None if S::IS_LOCKED && !round.rewritten => (Self::Finish { round }, Went::On),
                    None => (Self::Prove { round, at: Place::START }, Went::On),
                }
            }
            Self::Prove { round, at } => {
                let (proven, more) =
                    storage.is_proven(round.target, at.fork, at.blocks(S::LOOK))?;
                match at.next(S::LOOK, more) {
                    _ if !proven => (Self::Stale { round }, Went::On),
                    Some(at) => (Self::Prove { round, at }, Went::On),
                    None => (Self::Finish { round }, Went::On),
                }
            }
            Self::Finish { round } => match storage.finish(round.target)? {
                true => over(End::Proven),
                false => again(),
            },
            // Otherwise all would be rewritten in vain, as often as that is done at all.
            Self::Stale { round } => match storage.is_present(round.target)? {
                false => again(),
                true if round.number == MAX_ROUNDS => over(End::NeverEnds),
                true => {
                    let next = Round { number: round.number + 1, rewritten: false, ..round };
                    (rewrite(next), Went::Again)
                }
            },
            Self::Over(end) => over(end),
        };
        *self = next;
        Ok(went)
    }
}

fn rewrite(round: Round) -> FileState {
    FileState::Rewrite { round, at: Place::START }
}

fn over(end: End) -> (FileState, Went) {
    (FileState::Over(end), Went::Over(end))
}

/// The relation has another file: new storage follows the policy, but what the job wants may be
/// more.
fn again() -> (FileState, Went) {
    (FileState::Begin { looked_at: None }, Went::Again)
}
