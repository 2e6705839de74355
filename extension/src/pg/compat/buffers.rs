//! Buffers.

use pagevault_keystore::RelFile;
use pgrx::pg_sys;

use super::files::{Locator, rel_file};

/// How pages that are read or written past buffers are aligned (`PG_IO_ALIGN_SIZE`, 16+).
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
    // SAFETY: BufferBlocks and LocalBufferBlockPointers are the bases that the macro uses.
    unsafe {
        if buffer < 0 {
            (*pg_sys::LocalBufferBlockPointers.offset((-buffer - 1) as isize)).cast()
        } else {
            pg_sys::BufferBlocks.cast::<u8>().add((buffer - 1) as usize * pg_sys::BLCKSZ as usize)
        }
    }
}

/// Drops all shared buffers of these files (`DropRelationsAllBuffers`, `DropRelFileNodesAllBuffers`
/// before 16).
///
/// # Safety
/// Live objects of the storage manager; nobody else uses their files; not in a critical section.
pub(crate) unsafe fn drop_buffers(files: &mut [pg_sys::SMgrRelation]) {
    let count = files.len() as i32;
    // SAFETY: the slice holds as many objects, which the caller says are alive.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::DropRelFileNodesAllBuffers(files.as_mut_ptr(), count);
        #[cfg(not(feature = "pg15"))]
        pg_sys::DropRelationsAllBuffers(files.as_mut_ptr(), count);
    }
}

/// Which page a shared buffer holds, if the buffer is in all of these states (`BM_VALID` and the
/// like). What a moment later may be otherwise: no lock is taken.
///
/// # Safety
/// `index` is less than `NBuffers`.
pub(crate) unsafe fn page_in_buffer(index: usize, states: u32) -> Option<(RelFile, i32, u32)> {
    // SAFETY: there is such a buffer, as the caller says; plain fields in shared memory, which
    // others may change meanwhile.
    unsafe {
        let descriptor = &raw const (*pg_sys::BufferDescriptors.add(index)).bufferdesc;
        let state = || (&raw const (*descriptor).state.value).read_volatile();
        if state() & states != states {
            return None;
        }
        let tag = (&raw const (*descriptor).tag).read_volatile();
        // A buffer that gets another page loses all of them in between.
        if state() & states != states {
            return None;
        }
        Some((rel_file(locator_of_tag(&tag)), tag.forkNum, tag.blockNum))
    }
}

/// The file of a page in shared buffers (`BufTagGetRelFileLocator`; a field before 16).
fn locator_of_tag(tag: &pg_sys::BufferTag) -> Locator {
    #[cfg(feature = "pg15")]
    return tag.rnode;
    #[cfg(not(feature = "pg15"))]
    return Locator { spcOid: tag.spcOid, dbOid: tag.dbOid, relNumber: tag.relNumber };
}

/// What [`crate::pg::buffers::evict`] does, but for errors (`EvictUnpinnedBuffer`, 17+).
///
/// # Safety
/// `index` is less than `NBuffers`; there is a resource owner; no lock of a buffer is held.
pub(crate) unsafe fn evict_buffer(index: usize) -> bool {
    let buffer = index as pg_sys::Buffer + 1;
    // SAFETY: all three ask for what the caller has seen to.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return super::eviction::evict(buffer, locator_of_tag);
        #[cfg(feature = "pg17")]
        return pg_sys::EvictUnpinnedBuffer(buffer);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return pg_sys::EvictUnpinnedBuffer(buffer, &mut false);
    }
}

#[cfg(feature = "pg15")] // from 16 on the resource owner does it
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = Some(pg_sys::AbortBufferIO);
#[cfg(not(feature = "pg15"))]
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = None;
