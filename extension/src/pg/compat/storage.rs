//! The storage manager.

use pagevault_keystore::RelFile;
use pgrx::pg_sys;

use super::MAJOR;
use super::files::{SmgrFile, locator, rel_file};
use super::relation::relation_locator;
#[cfg(feature = "pg15")]
use crate::pg::buffers::AlignedPage;
use crate::pg::externs;

#[cfg(feature = "pg15")]
const PAGE: usize = pg_sys::BLCKSZ as usize;

/// Whether the storage manager reads through `mdreadv` (17+) or `mdread`.
pub(crate) const READS_INTO_VECTORS: bool = MAJOR >= 17;

/// Whether an object of the storage manager may be freed while it is in use. From 17 on such
/// objects are only released (`smgrrelease`, smgr.c).
pub(crate) const FREES_SMGR_OBJECTS: bool = MAJOR < 17;

/// The file behind an open `SMgrRelation`.
///
/// # Safety
/// `reln` is a live `SMgrRelation` of this process.
#[inline]
pub(crate) unsafe fn smgr_file(reln: pg_sys::SMgrRelation) -> SmgrFile {
    // SAFETY: the caller guarantees that the object is live; its locator never changes.
    unsafe {
        #[cfg(feature = "pg15")]
        let whose = (*reln).smgr_rnode;
        #[cfg(not(feature = "pg15"))]
        let whose = (*reln).smgr_rlocator;
        #[cfg(feature = "pg15")]
        let locator = whose.node;
        #[cfg(not(feature = "pg15"))]
        let locator = whose.locator;
        SmgrFile { file: rel_file(locator), backend: whose.backend }
    }
}

/// The storage manager object of an open relation (`RelationGetSmgr`).
///
/// # Safety
/// `relation` is open and has storage.
pub(crate) unsafe fn open_smgr(relation: pg_sys::Relation) -> pg_sys::SMgrRelation {
    // SAFETY: fields of a relation that the caller has open.
    unsafe { pg_sys::smgropen(relation_locator(relation), (*relation).rd_backend) }
}

/// The storage manager object of a file, created if necessary (`smgropen`).
///
/// # Safety
/// Not in a critical section: the object is allocated.
pub(crate) unsafe fn open_smgr_of(file: SmgrFile) -> pg_sys::SMgrRelation {
    // SAFETY: takes its arguments by value, and may allocate, which the caller guarantees is
    // allowed.
    unsafe { pg_sys::smgropen(locator(file.file), file.backend) }
}

/// Reads one block of the main fork into `page` (`smgrread`; `smgrreadv` from 17 on).
///
/// # Safety
/// `reln` is live, the block exists, and `page` has the size of a block.
pub(crate) unsafe fn smgr_read(reln: pg_sys::SMgrRelation, block: u32, page: *mut u8) {
    let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
    // SAFETY: the caller guarantees object, block and memory.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        pg_sys::smgrread(reln, fork, block, page.cast());
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        pg_sys::smgrreadv(reln, fork, block, &mut page.cast(), 1);
    }
}

/// Adds a block to the main fork (`smgrextend`), without a sync request.
///
/// # Safety
/// `reln` is live, the block is the first that does not exist, and `page` points to a page.
pub(crate) unsafe fn smgr_extend(reln: pg_sys::SMgrRelation, block: u32, page: *mut u8) {
    // SAFETY: the caller guarantees object, block and page.
    unsafe { pg_sys::smgrextend(reln, pg_sys::ForkNumber::MAIN_FORKNUM, block, page.cast(), true) }
}

/// Adds a block of zeros to the main fork (`smgrzeroextend`; `smgrextend` before 16).
///
/// # Safety
/// `reln` is live, and the block is the first that does not exist.
pub(crate) unsafe fn smgr_zero_extend(reln: pg_sys::SMgrRelation, block: u32) {
    // SAFETY: the caller guarantees object and block.
    unsafe {
        #[cfg(feature = "pg15")]
        smgr_extend(reln, block, Box::new(AlignedPage([0; PAGE])).0.as_mut_ptr());
        #[cfg(not(feature = "pg15"))]
        pg_sys::smgrzeroextend(reln, pg_sys::ForkNumber::MAIN_FORKNUM, block, 1, true);
    }
}

/// A block of the main fork in shared buffers, pinned (`ReadBufferWithoutRelcache`).
///
/// # Safety
/// The block exists; in a process with a resource owner.
pub(crate) unsafe fn read_buffer(file: RelFile, block: u32) -> pg_sys::Buffer {
    let mode = pg_sys::ReadBufferMode::RBM_NORMAL;
    let (fork, no_strategy) = (pg_sys::ForkNumber::MAIN_FORKNUM, std::ptr::null_mut());
    // SAFETY: the caller guarantees the block, and a resource owner for the pin.
    unsafe {
        pg_sys::ReadBufferWithoutRelcache(locator(file), fork, block, mode, no_strategy, true)
    }
}

/// The number of blocks of a fork (`smgrnblocks`). An ERROR of the server jumps over our frames.
///
/// # Safety
/// `reln` is live, and the fork exists; no frame that an ERROR skips has values with destructors.
pub(crate) unsafe fn smgr_blocks(reln: pg_sys::SMgrRelation, fork: i32) -> u32 {
    // SAFETY: the caller guarantees that object and fork exist, and that an ERROR may skip its
    // frames.
    unsafe { externs::smgrnblocks(reln, fork) }
}

/// Frees all objects of the storage manager (`smgrdestroyall`; `smgrcloseall` before 17).
///
/// # Safety
/// In a process that keeps no such objects, because it has no relation cache.
pub(crate) unsafe fn close_all_files() {
    // SAFETY: no code in this process keeps one of the objects that are freed, as the caller
    // guarantees.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        pg_sys::smgrcloseall();
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        pg_sys::smgrdestroyall();
    }
}

/// A block that exists in no file (`MaxBlockNumber`).
const MISSING_BLOCK: pg_sys::BlockNumber = pg_sys::InvalidBlockNumber - 1;

/// In redo, before consistency: registers a missing page of an existing file, as if a record had
/// referred to it. Unless [`forget_missing_page`] removes the entry, recovery fails at consistency.
pub(crate) fn refer_to_missing_page(file: RelFile) {
    let (fork, mode) = (pg_sys::ForkNumber::MAIN_FORKNUM, pg_sys::ReadBufferMode::RBM_NORMAL);
    let no_buffer = pg_sys::InvalidBuffer as pg_sys::Buffer;
    // SAFETY: in the startup process; nothing is read of a page beyond the end of the file
    // (xlogutils.c), and no buffer is pinned.
    unsafe {
        pg_sys::XLogReadBufferExtended(locator(file), fork, MISSING_BLOCK, mode, no_buffer);
    }
}

/// Undoes [`refer_to_missing_page`].
pub(crate) fn forget_missing_page(file: RelFile) {
    // SAFETY: in the startup process; removes entries for this block and later ones. No other block
    // has this number.
    unsafe {
        pg_sys::XLogTruncateRelation(
            locator(file),
            pg_sys::ForkNumber::MAIN_FORKNUM,
            MISSING_BLOCK,
        );
    }
}
