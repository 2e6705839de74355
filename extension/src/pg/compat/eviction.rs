//! PostgreSQL 15 and 16: one page leaves shared buffers, in two steps. From 17 on
//! `EvictUnpinnedBuffer` (bufmgr.c) does it.
//!
//! First it is written, by functions that are made for others to call. Then it is dropped, as
//! `InvalidateBuffer` (bufmgr.c, 15 and 16) drops it, which is not for others: under the exclusive
//! lock of its part of the buffer table nobody finds and pins it, and under the lock of its header
//! it is seen whether somebody has, or has changed it meanwhile. Then it stays.

use pgrx::pg_sys;

use super::files::Locator;

/// Has the page in a shared buffer leave it. False if it stays.
///
/// # Safety
/// There is such a buffer, and a resource owner; no lock of a buffer or of their table is held.
pub(super) unsafe fn evict(
    buffer: pg_sys::Buffer,
    locator_of: impl Fn(&pg_sys::BufferTag) -> Locator,
) -> bool {
    // SAFETY: both ask for what the caller has promised; buffers are counted from 1.
    unsafe { write(buffer, locator_of) && drop_if_clean(buffer as usize - 1) }
}

/// Writes the page in a shared buffer if it is to be written. False if the buffer holds none, or
/// another one by now.
///
/// # Safety
/// There is such a buffer, and a resource owner; no lock of a buffer is held.
unsafe fn write(
    buffer: pg_sys::Buffer,
    locator_of: impl Fn(&pg_sys::BufferTag) -> Locator,
) -> bool {
    // SAFETY: there is such a buffer, as the caller says. The page is pinned if it is still the one
    // that was seen.
    unsafe {
        let descriptor = descriptor(buffer as usize - 1);
        let state = pg_sys::LockBufHdr(descriptor);
        let tag = (*descriptor).tag;
        unlock(descriptor, state);
        if state & pg_sys::BM_DIRTY == 0 {
            return true;
        }
        let (fork, block) = (tag.forkNum, tag.blockNum);
        if !pg_sys::ReadRecentBuffer(locator_of(&tag), fork, block, buffer) {
            return false;
        }
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
        pg_sys::FlushOneBuffer(buffer);
        pg_sys::UnlockReleaseBuffer(buffer);
        true
    }
}

/// Drops the page in a shared buffer, unless it is to be written or somebody uses it: then false.
///
/// # Safety
/// `index` is less than `NBuffers`; no lock of the buffer table is held.
unsafe fn drop_if_clean(index: usize) -> bool {
    const BUSY: u32 = pg_sys::BUF_REFCOUNT_MASK | pg_sys::BM_DIRTY | pg_sys::BM_IO_IN_PROGRESS;
    const FORGOTTEN: u32 = pg_sys::BUF_FLAG_MASK | pg_sys::BUF_USAGECOUNT_MASK;
    // SAFETY: there is such a buffer, as the caller says. Nothing is called while a header is
    // locked.
    unsafe {
        let descriptor = descriptor(index);
        let state = pg_sys::LockBufHdr(descriptor);
        let mut tag = (*descriptor).tag;
        unlock(descriptor, state);
        let hash = pg_sys::BufTableHashCode(&raw mut tag);
        let part = pg_sys::BUFFER_MAPPING_LWLOCK_OFFSET + hash % pg_sys::NUM_BUFFER_PARTITIONS;
        let lock = &raw mut (*pg_sys::MainLWLockArray.add(part as usize)).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let state = pg_sys::LockBufHdr(descriptor);
        let is_free = state & BUSY == 0
            && state & pg_sys::BM_TAG_VALID != 0
            && bytes(&(*descriptor).tag) == bytes(&tag);
        if is_free {
            (*descriptor).tag = no_page();
            unlock(descriptor, state & !FORGOTTEN);
            pg_sys::BufTableDelete(&raw mut tag, hash);
        } else {
            unlock(descriptor, state);
        }
        pg_sys::LWLockRelease(lock);
        if is_free {
            pg_sys::StrategyFreeBuffer(descriptor);
        }
        is_free
    }
}

/// # Safety
/// `index` is less than `NBuffers`.
unsafe fn descriptor(index: usize) -> *mut pg_sys::BufferDesc {
    // SAFETY: the array has an entry for each buffer, and the caller says that this is one.
    unsafe { &raw mut (*pg_sys::BufferDescriptors.add(index)).bufferdesc }
}

/// `UnlockBufHdr` (buf_internals.h).
///
/// # Safety
/// This process has locked the header, which had this state or is to get it.
unsafe fn unlock(descriptor: *mut pg_sys::BufferDesc, state: u32) {
    use std::sync::atomic::{AtomicU32, Ordering};
    // SAFETY: the caller has locked the header; others change the word by atomic instructions.
    unsafe {
        AtomicU32::from_ptr(&raw mut (*descriptor).state.value)
            .store(state & !pg_sys::BM_LOCKED, Ordering::Release);
    }
}

/// Five words without padding in both majors: `BUFFERTAGS_EQUAL` compares them one by one.
fn bytes(tag: &pg_sys::BufferTag) -> [u8; 20] {
    // SAFETY: of that size, with no padding.
    unsafe { std::mem::transmute(*tag) }
}

/// `CLEAR_BUFFERTAG`, `ClearBufferTag` (buf_internals.h).
fn no_page() -> pg_sys::BufferTag {
    const NO_BLOCK: pg_sys::BlockNumber = pg_sys::BlockNumber::MAX; // InvalidBlockNumber
    // SAFETY: numbers, for which zero is a value.
    let mut tag: pg_sys::BufferTag = unsafe { std::mem::zeroed() };
    tag.forkNum = pg_sys::ForkNumber::InvalidForkNumber;
    tag.blockNum = NO_BLOCK;
    tag
}
