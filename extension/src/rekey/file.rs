//! The steps of rekeying one relation file that PostgreSQL takes part in, each in the caller's
//! transaction and under its lock. Their order is said by [`pagevault_core::rekey::file`].
//!
//! The file is readable between and during all of them, since each page says how it is written.

use std::ops::Range;

use pagevault_cipher::CipherId;
use pagevault_core::page::Fork;
pub(crate) use pagevault_core::page::Target;
use pagevault_core::rekey::file::LOOK;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{ForkNumber, Oid};

use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::pages::{Held, Ring};
use crate::pg::report::{Report, Result};
use crate::pg::{process, relation};
use crate::verify;
use crate::writers::{self, Act};

/// What holds for new writes to a file anyway.
pub(super) fn present(file: RelFile) -> Target {
    Target { file, version: directory::current_version(file) }
}

/// As PostgreSQL numbers it.
pub(super) fn number_of(fork: Fork) -> ForkNumber::Type {
    fork as ForkNumber::Type
}

/// Has a file that has pages written under a new version from now on, unless the keystore has lost
/// the key of one. Writers may still be at work that have not seen it: see [`await_writers`].
pub(crate) fn seal(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    for fork in verify::ALL_FORKS {
        for first in (0..).step_by(LOOK as usize) {
            process::check_for_interrupts();
            if !verify::refuse_lost_versions(file, fork, first..first.saturating_add(LOOK))? {
                break;
            }
        }
    }
    seal_looked_at(held, cipher)
}

/// As [`seal`], for a file that was gone through.
///
/// While that was done nobody need have held it: whatever is written to it meanwhile is written
/// under a key that there is, and if the relation has another file by now, that one was not looked
/// at.
pub(super) fn seal_looked_at(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    data_keys::next_version(file, cipher, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(present(file))
}

/// Has the file written in plaintext from now on; as [`seal`].
pub(super) fn unseal(held: &Held) -> Result<Target> {
    let file = held.file();
    data_keys::write_plaintext(file, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(present(file))
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
pub(super) fn rewrite(
    held: &Held,
    target: Target,
    fork: ForkNumber::Type,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<u32> {
    let stale = verify::stale_blocks(target, fork, blocks)?;
    for &block in &stale {
        process::check_for_interrupts();
        held.rewrite(fork, block, ring);
        fault::point("rekey.page_done");
    }
    Ok(stale.len() as u32)
}

/// Writes down that no page of a file is under an older version, as was proven, unless it is to be
/// written otherwise by now.
pub(super) fn finish(target: Target) -> Result<bool> {
    fault::point("rekey.proved");
    let finished = data_keys::record_rewritten(target.file, target.version)?;
    fault::point("rekey.rewritten");
    Ok(finished)
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
