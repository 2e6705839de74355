//! The steps of rekeying one relation file, each in the caller's transaction and under its lock.
//!
//! The file is readable between and during all of them, since each page says how it is written.

use std::ops::Range;

use pagevault_cipher::{CipherId, Epoch};
use pagevault_keystore::RelFile;
use pgrx::pg_sys::ForkNumber;

use crate::fault;
use crate::keys::data_keys::{self, Pages};
use crate::keys::shared;
use crate::pg::pages::{Held, Ring};
use crate::pg::process;
use crate::pg::report::Result;
use crate::verify;

/// Pages that are looked at in one go: 512 kB.
pub(super) const BATCH: u32 = 64;

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
        Target { file, epoch: shared::current_epoch(file) }
    }
}

/// Has a file that has pages written under a new epoch from now on. Writers may still be at work that have not seen
/// it: see [`await_writers`].
pub(crate) fn seal(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    verify::refuse_lost_epochs(file)?;
    data_keys::next_epoch(file, cipher, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(Target::present(file))
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

/// Waits until nobody writes any more as it was before [`seal`] or [`unseal`]. Without this a page that is
/// added past shared buffers could come to the file after it was proven.
pub(crate) fn await_writers() {
    process::wait_until_all_have_passed_by();
    fault::point("rekey.barrier_passed");
}

/// Writes those of the blocks again that on disk are not as they should be. Returns how many these were.
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

/// Writes and syncs what was rewritten, and reads the header of every page. If each is as it should be, the
/// older epochs of the file are retired.
pub(crate) fn prove(held: &Held, target: Target) -> Result<bool> {
    held.flush();
    fault::point("rekey.flushed");
    held.sync();
    fault::point("rekey.synced");
    for (fork, blocks) in held.forks() {
        for batch in batches(blocks) {
            process::check_for_interrupts();
            if !verify::stale_blocks(target.file, fork, batch, target.epoch)?.is_empty() {
                return Ok(false);
            }
        }
    }
    fault::point("rekey.proved");
    data_keys::retire_older_epochs(target.file)?;
    fault::point("rekey.retired");
    Ok(true)
}

/// All of it at once: the caller holds a lock that keeps the file from being replaced or cut.
pub(crate) fn rewrite_wholly(held: &Held, target: Target) -> Result<()> {
    let ring = Ring::new();
    loop {
        let mut rewritten = 0;
        for (fork, blocks) in held.forks() {
            for batch in batches(blocks) {
                rewritten += rewrite(held, target, fork, batch, &ring)?;
            }
        }
        // If all was well on disk already, it is so after whatever is written next.
        if rewritten == 0 {
            return data_keys::retire_older_epochs(target.file);
        }
        if prove(held, target)? {
            return Ok(());
        }
    }
}

fn batches(blocks: u32) -> impl Iterator<Item = Range<u32>> {
    (0..blocks).step_by(BATCH as usize).map(move |first| first..blocks.min(first + BATCH))
}
