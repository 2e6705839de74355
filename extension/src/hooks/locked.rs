//! Before pages are read whose key may be locked.

use std::ops::Range;

use pgrx::pg_sys::{self, BlockNumber, SMgrRelation};

use super::smgr::read_sealed;
use crate::page;
use crate::page::io::PageFault;
use crate::pg::compat::SmgrFile;
use crate::pg::process;
use crate::pg::report::OrRaise;

type ForkNumber = i32;

/// Before pages are read: see [`page::voided`].
///
/// # Safety
/// The server may longjmp over our callers: no frame between here and its call has values with
/// destructors.
#[inline]
pub(super) unsafe fn empty_map(file: SmgrFile, fork: ForkNumber, blocks: Range<BlockNumber>) {
    if fork == pg_sys::ForkNumber::VISIBILITYMAP_FORKNUM && page::access::may_be_locked(file) {
        // SAFETY: our callers have no values with destructors, so an ERROR may skip their frames.
        unsafe {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                for block in blocks {
                    page::voided::empty_if_locked(file, block).or_raise();
                }
            });
        }
    }
}

/// [`check_pages`], for redo. Other processes are refused when the page is opened.
///
/// # Safety
/// The blocks exist, and the relation is open as for [`super::smgr::mdread`].
#[inline]
pub(super) unsafe fn check_pages_of_redo(
    reln: SMgrRelation,
    file: SmgrFile,
    fork: ForkNumber,
    blocks: Range<BlockNumber>,
) -> Result<(), PageFault> {
    if process::replays_wal_now() {
        // SAFETY: our caller guarantees that the blocks exist.
        return unsafe { check_pages(reln, file, fork, blocks) };
    }
    Ok(())
}

/// Refuses a read of pages that are sealed under a locked key. The completion of the read would
/// find that, too, but could only report a failed read.
///
/// # Safety
/// As for [`super::smgr::mdread`], of blocks that exist.
#[inline]
pub(super) unsafe fn check_pages(
    reln: SMgrRelation,
    file: SmgrFile,
    fork: ForkNumber,
    blocks: Range<BlockNumber>,
) -> Result<(), PageFault> {
    if page::access::may_be_locked(file) {
        for block in blocks {
            // SAFETY: the block exists, as the caller guarantees.
            page::access::check_not_locked(file, fork, block, unsafe {
                &*read_sealed(reln, fork, block)
            })?;
        }
    }
    Ok(())
}
