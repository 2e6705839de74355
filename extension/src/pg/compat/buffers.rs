//! Buffers.

use pagevault_keystore::RelFile;
use pgrx::pg_sys;

use super::files::{Locator, rel_file};

/// Alignment of pages that are read or written without shared buffers (`PG_IO_ALIGN_SIZE`, 16+).
#[cfg(not(feature = "pg15"))]
pub(crate) const IO_ALIGNMENT: usize = pg_sys::PG_IO_ALIGN_SIZE as usize;
#[cfg(feature = "pg15")]
pub(crate) const IO_ALIGNMENT: usize = 1;

/// Address of the page in a shared or local buffer (`BufferGetBlock`).
///
/// # Safety
/// `buffer` is a valid buffer number of this server.
#[inline]
pub(crate) unsafe fn buffer_page(buffer: pg_sys::Buffer) -> *mut u8 {
    // SAFETY: BufferBlocks and LocalBufferBlockPointers are the base addresses that the macro uses.
    unsafe {
        if buffer < 0 {
            (*pg_sys::LocalBufferBlockPointers.offset((-buffer - 1) as isize)).cast()
        } else {
            pg_sys::BufferBlocks.cast::<u8>().add((buffer - 1) as usize * pg_sys::BLCKSZ as usize)
        }
    }
}

/// Flags of a shared buffer, and its numbers of pins and uses: 32 bits, from 19 on 64.
#[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
pub(crate) type BufferState = u32;
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) type BufferState = u64;

#[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
pub(crate) use pg_sys::{BM_DIRTY, BM_TAG_VALID, BM_VALID};

/// A flag by its number (the macro `BUF_DEFINE_FLAG`, buf_internals.h).
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
const fn flag(number: u32) -> BufferState {
    1 << (pg_sys::BUF_FLAG_SHIFT + number)
}
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) const BM_DIRTY: BufferState = flag(1);
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) const BM_VALID: BufferState = flag(2);
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) const BM_TAG_VALID: BufferState = flag(3);

/// Locks the contents of a buffer exclusively (`LockBuffer`).
///
/// # Safety
/// This process has pinned the buffer, and does not hold its lock.
pub(crate) unsafe fn lock_exclusively(buffer: pg_sys::Buffer) {
    // SAFETY: the caller guarantees pin and lock.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        pg_sys::LockBuffer(buffer, pg_sys::BufferLockMode::BUFFER_LOCK_EXCLUSIVE);
    }
}

/// Stores the LSN of a page (`PageSetLSN`): first its high half, then the low one. From 19 on both
/// are one field, with the same bytes.
pub(crate) fn set_page_lsn(header: &mut pg_sys::PageHeaderData, lsn: u64) {
    #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
    {
        header.pd_lsn.xlogid = (lsn >> 32) as u32;
        header.pd_lsn.xrecoff = lsn as u32;
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
    {
        header.pd_lsn.lsn = lsn.rotate_left(32);
    }
}

/// Drops all shared buffers of these files (`DropRelationsAllBuffers`, `DropRelFileNodesAllBuffers`
/// before 16).
///
/// # Safety
/// Live objects of the storage manager; no other process uses their files; not in a critical
/// section.
pub(crate) unsafe fn drop_buffers(files: &mut [pg_sys::SMgrRelation]) {
    let count = files.len() as i32;
    // SAFETY: the slice contains as many objects, which the caller guarantees are live.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::DropRelFileNodesAllBuffers(files.as_mut_ptr(), count);
        #[cfg(not(feature = "pg15"))]
        pg_sys::DropRelationsAllBuffers(files.as_mut_ptr(), count);
    }
}

/// The page in a shared buffer, if the buffer has all of these states (`BM_VALID` and the like).
/// Takes no lock, so the result may be outdated at once.
///
/// # Safety
/// `index` is less than `NBuffers`.
pub(crate) unsafe fn page_in_buffer(
    index: usize,
    states: BufferState,
) -> Option<(RelFile, i32, u32)> {
    // SAFETY: the buffer exists, as the caller guarantees; plain fields in shared memory, which
    // others may change meanwhile.
    unsafe {
        let descriptor = &raw const (*pg_sys::BufferDescriptors.add(index)).bufferdesc;
        let state = || (&raw const (*descriptor).state.value).read_volatile();
        if state() & states != states {
            return None;
        }
        let tag = (&raw const (*descriptor).tag).read_volatile();
        // A buffer loses all states before it gets another page.
        if state() & states != states {
            return None;
        }
        Some((rel_file(locator_of_tag(&tag)), tag.forkNum, tag.blockNum))
    }
}

/// The file of a page in shared buffers (`BufTagGetRelFileLocator` from 16 on; before, a field).
fn locator_of_tag(tag: &pg_sys::BufferTag) -> Locator {
    #[cfg(feature = "pg15")]
    return tag.rnode;
    #[cfg(not(feature = "pg15"))]
    return Locator { spcOid: tag.spcOid, dbOid: tag.dbOid, relNumber: tag.relNumber };
}

/// [`crate::pg::buffers::evict`] without error handling (`EvictUnpinnedBuffer`, 17+).
///
/// # Safety
/// `index` is less than `NBuffers`; there is a resource owner; no buffer lock is held.
pub(crate) unsafe fn evict_buffer(index: usize) -> bool {
    let buffer = index as pg_sys::Buffer + 1;
    // SAFETY: the requirements of all three functions are those of this one.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return super::eviction::evict(buffer, locator_of_tag);
        #[cfg(feature = "pg17")]
        return pg_sys::EvictUnpinnedBuffer(buffer);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return pg_sys::EvictUnpinnedBuffer(buffer, &mut false);
    }
}

#[cfg(feature = "pg15")] // from 16 on the resource owner aborts it
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = Some(pg_sys::AbortBufferIO);
#[cfg(not(feature = "pg15"))]
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = None;
