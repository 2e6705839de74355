//! The steps of rekeying one relation file, each in the caller's transaction and under its lock.
//!
//! The file is readable between and during all of them, since each page says how it is written.

use std::ops::Range;

use pagevault_cipher::{CipherId, Epoch};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{ForkNumber, Oid};

use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::pages::{Held, Ring};
use crate::pg::report::{Report, Result};
use crate::pg::{process, relation};
use crate::writers::{self, Act};
use crate::{fault, verify};

/// Pages that are looked at and rewritten in one go: 512 kB.
pub(super) const BATCH: u32 = 64;

/// Pages of which only the headers are looked at in one go: 64 MB.
pub(super) const LOOK: u32 = 8192;

/// How often a file is gone through. A page that turns up in the proof and is not as it should be
/// is possible once; not again and again.
pub(super) const MAX_ROUNDS: usize = 10;

/// How pages of a file are to be written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) file: RelFile,
    /// `None`: in plaintext.
    epoch: Option<Epoch>,
}

impl Target {
    /// What holds for new writes anyway.
    pub(crate) fn present(file: RelFile) -> Target {
        Target { file, epoch: directory::current_epoch(file) }
    }
}

/// Has a file that has pages written under a new epoch from now on. Writers may still be at work
/// that have not seen it: see [`await_writers`].
pub(crate) fn seal(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    for fork in verify::ALL_FORKS {
        for first in (0..).step_by(LOOK as usize) {
            process::check_for_interrupts();
            if !look_for_lost_epochs(file, fork, first)? {
                break;
            }
        }
    }
    seal_looked_at(held, cipher)
}

/// As [`seal`], for a file that was gone through with [`look_for_lost_epochs`].
pub(super) fn seal_looked_at(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    data_keys::next_epoch(file, cipher, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(Target::present(file))
}

/// Refuses a file with pages of which the keystore has lost the key. Looks at [`LOOK`] blocks; true
/// if there may be more.
///
/// Nobody need hold the file: whatever is written to it meanwhile is written under a key that there
/// is, and if the relation has another file by the time its key changes, that one was not looked
/// at.
pub(super) fn look_for_lost_epochs(
    file: RelFile,
    fork: ForkNumber::Type,
    first: u32,
) -> Result<bool> {
    verify::refuse_lost_epochs(file, fork, first..first.saturating_add(LOOK))
}

/// Has the file written in plaintext from now on; as [`seal`].
pub(crate) fn unseal(held: &Held) -> Result<Target> {
    let file = held.file();
    data_keys::write_plaintext(file, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(Target::present(file))
}

fn pages_of(held: &Held) -> Pages {
    if held.is_logged() { Pages::Logged } else { Pages::Unlogged }
}

/// Waits until nobody writes any more as it was before [`seal`] or [`unseal`]. Without this a page
/// that is added past shared buffers could come to the file after it was proven.
pub(crate) fn await_writers(file: RelFile) -> Result<()> {
    writers::await_others(Act::Writing, Some(file.relation))?;
    fault::point("rekey.barrier_passed");
    Ok(())
}

/// Writes those of the blocks again that on disk are not as they should be. Returns how many these
/// were.
pub(crate) fn rewrite(
    held: &Held,
    target: Target,
    fork: ForkNumber::Type,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<u32> {
    let stale = verify::stale_blocks(target.file, fork, blocks, target.epoch)?;
    for &block in &stale {
        process::check_for_interrupts();
        held.rewrite(fork, block, ring);
        fault::point("rekey.page_done");
    }
    Ok(stale.len() as u32)
}

/// True if each page of a few blocks is on disk as the target wants it; and whether there may be
/// more behind them.
pub(super) fn is_proven(
    target: Target,
    fork: ForkNumber::Type,
    first: u32,
) -> Result<(bool, bool)> {
    verify::are_fresh(target.file, fork, first..first.saturating_add(LOOK), target.epoch)
}

/// Retires the older epochs of a file that was proven, unless it is to be written otherwise by now.
pub(super) fn retire(target: Target) -> Result<bool> {
    fault::point("rekey.proved");
    let retired = data_keys::retire_older_epochs(target.file, target.epoch)?;
    fault::point("rekey.retired");
    Ok(retired)
}

/// Writes and syncs what was rewritten, and reads the header of every page. If each is as it should
/// be, the older epochs of the file are retired.
fn prove(held: &Held, target: Target) -> Result<bool> {
    held.flush();
    fault::point("rekey.flushed");
    held.sync();
    fault::point("rekey.synced");
    for (fork, blocks) in held.forks() {
        for first in (0..blocks).step_by(LOOK as usize) {
            process::check_for_interrupts();
            if !is_proven(target, fork, first)?.0 {
                return Ok(false);
            }
        }
    }
    retire(target)
}

/// All of it at once, as it is to be written now: the caller holds a lock that keeps the file from
/// being replaced or cut, and the right to rewrite it ([`crate::pg::locks::Rewriting`]).
pub(crate) fn rewrite_wholly(held: &Held) -> Result<()> {
    let ring = Ring::new();
    for _ in 0..MAX_ROUNDS {
        // Nobody else switches keys. If somebody did, what was rewritten for another key would have
        // no end.
        let target = Target::present(held.file());
        let mut rewritten = 0;
        for (fork, blocks) in held.forks() {
            for batch in batches(blocks) {
                rewritten += rewrite(held, target, fork, batch, &ring)?;
            }
        }
        // If all was well on disk already, it is so after whatever is written next.
        let done = if rewritten == 0 {
            data_keys::retire_older_epochs(target.file, target.epoch)?
        } else {
            prove(held, target)?
        };
        if done {
            return Ok(());
        }
    }
    Err(never_ends(held.oid()))
}

/// What is rewritten again and again.
pub(super) fn never_ends(oid: Oid) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("pages of {} keep being written under an old key", relation::qualified_name(oid)),
    )
    .detail(
        "They were rewritten, flushed, and read back from disk several times. No key was retired.",
    )
}

fn batches(blocks: u32) -> impl Iterator<Item = Range<u32>> {
    (0..blocks).step_by(BATCH as usize).map(move |first| first..blocks.min(first + BATCH))
}
