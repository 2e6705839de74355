//! PostgreSQL 15 and 16: evicting a page from shared buffers. From 17 on `EvictUnpinnedBuffer`
//! (bufmgr.c) does this.
//!
//! First the page is written, by public functions. Then it is dropped in the same way as by
//! `InvalidateBuffer` (bufmgr.c, 15 and 16), which is static. Under the exclusive lock of its
//! partition of the buffer table no process can find and pin the buffer. Under the lock of the
//! buffer header we check whether it was pinned or changed meanwhile; then it stays.

use pgrx::pg_sys;

use super::files::Locator;

/// Evicts the page in a shared buffer. False if it stays.
///
/// # Safety
/// The buffer exists; there is a resource owner; no buffer lock or buffer mapping lock is held.
pub(super) unsafe fn evict(
    buffer: pg_sys::Buffer,
    locator_of: impl Fn(&pg_sys::BufferTag) -> Locator,
) -> bool {
    // SAFETY: the caller guarantees what both require; buffers are numbered from 1.
    unsafe { write(buffer, locator_of) && drop_if_clean(buffer as usize - 1) }
}

/// Writes the page in a shared buffer if it is dirty. False if the buffer is empty, or has another
/// page by now.
///
/// # Safety
/// The buffer exists; there is a resource owner; no buffer lock is held.
unsafe fn write(
    buffer: pg_sys::Buffer,
    locator_of: impl Fn(&pg_sys::BufferTag) -> Locator,
) -> bool {
    // SAFETY: the buffer exists, as the caller guarantees. ReadRecentBuffer pins it only if it
    // still contains the same page.
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

/// Drops the page in a shared buffer. False if the page is dirty or in use, so that it stays.
///
/// # Safety
/// `index` is less than `NBuffers`; no buffer mapping lock is held.
unsafe fn drop_if_clean(index: usize) -> bool {
    const BUSY: u32 = pg_sys::BUF_REFCOUNT_MASK | pg_sys::BM_DIRTY | pg_sys::BM_IO_IN_PROGRESS;
    const CLEARED: u32 = pg_sys::BUF_FLAG_MASK | pg_sys::BUF_USAGECOUNT_MASK;
    // SAFETY: the buffer exists, as the caller guarantees. No function that can raise an error or
    // wait is called while the header is locked.
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
            unlock(descriptor, state & !CLEARED);
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
    // SAFETY: the array has an entry for each buffer, and the caller guarantees that this is one.
    unsafe { &raw mut (*pg_sys::BufferDescriptors.add(index)).bufferdesc }
}

/// `UnlockBufHdr` (buf_internals.h).
///
/// # Safety
/// This process has locked the header; `state` is its state, or the new one.
unsafe fn unlock(descriptor: *mut pg_sys::BufferDesc, state: u32) {
    use std::sync::atomic::{AtomicU32, Ordering};
    // SAFETY: the caller has locked the header; other processes change the word by atomic
    // instructions.
    unsafe {
        AtomicU32::from_ptr(&raw mut (*descriptor).state.value)
            .store(state & !pg_sys::BM_LOCKED, Ordering::Release);
    }
}

/// The tag's bytes: five words without padding in both majors, which `BUFFERTAGS_EQUAL` compares
/// one by one.
fn bytes(tag: &pg_sys::BufferTag) -> [u8; 20] {
    // SAFETY: the type has this size, with no padding.
    unsafe { std::mem::transmute(*tag) }
}

/// An empty tag (`CLEAR_BUFFERTAG`, `ClearBufferTag`, buf_internals.h).
fn no_page() -> pg_sys::BufferTag {
    const NO_BLOCK: pg_sys::BlockNumber = pg_sys::BlockNumber::MAX; // InvalidBlockNumber
    // SAFETY: all fields are numbers, for which zero is a value.
    let mut tag: pg_sys::BufferTag = unsafe { std::mem::zeroed() };
    tag.forkNum = pg_sys::ForkNumber::InvalidForkNumber;
    tag.blockNum = NO_BLOCK;
    tag
}
