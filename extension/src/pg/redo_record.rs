//! Redo of hash indexes, which locks pages that it does not read, and of sequences, whose pages
//! nobody may find.
//!
//! Some records name the primary bucket page of a hash index, without an image, only to have it
//! locked: block 0 of these, if they do not change it (`_hash_squeezebucket`, `_hash_freeovflpage`,
//! hashovfl.c; `hashbucketcleanup`, hash.c; `hash_xlog_delete` and others, hash_xlog.c). If its key
//! is locked, redo gets a placeholder for the time of the record. The placeholder is evicted
//! afterwards: neither another record nor a user may find it.
//!
//! Whoever may use a sequence gets its value by `pg_sequence_last_value` (sequence.c), which is a
//! function, so that no query is refused that names the sequence. In shared buffers of a standby
//! the page of a locked one would stay until a worker has evicted it. So that is done at once.

use std::time::Duration;

use pagevault_cipher::page;
use pagevault_keystore::RelFile;
use pgrx::pg_guard;
use pgrx::pg_sys::{self, BlockNumber, ForkNumber, XLogReaderState};

use super::buffers;
use super::compat;
use super::process::{self, ProcessLocal};

type Redo = unsafe extern "C-unwind" fn(*mut XLogReaderState);

const HASH: usize = pg_sys::RmgrIds::RM_HASH_ID as usize;
const SEQUENCE: usize = pg_sys::RmgrIds::RM_SEQ_ID as usize;

/// `XLOG_HASH_MOVE_PAGE_CONTENTS`, `XLOG_HASH_SQUEEZE_PAGE`, `XLOG_HASH_DELETE` (hash_xlog.h)
const WITH_BUCKET: [u8; 3] = [0x70, 0x80, 0x90];

/// `XLR_INFO_MASK` (xlogrecord.h)
const INFO_OF_SERVER: u8 = 0x0F;

#[derive(Clone, Copy)]
struct Current {
    /// The server's functions.
    redo: Option<Redo>,
    redo_of_sequence: Option<Redo>,
    /// Whether a file is in a locked key group.
    is_locked: fn(RelFile) -> bool,
    /// The record of a hash index that is being replayed, or null.
    record: *mut XLogReaderState,
    /// Redo has got a placeholder.
    stands_in: bool,
}

static CURRENT: ProcessLocal<Current> = ProcessLocal::new(Current {
    redo: None,
    redo_of_sequence: None,
    is_locked: |_| false,
    record: std::ptr::null_mut(),
    stands_in: false,
});

/// In the process that replays WAL, before it replays any.
pub(crate) fn watch(is_locked: fn(RelFile) -> bool) {
    // SAFETY: a table of the server, in memory of this process, which custom resource managers are
    // entered in as well (`RegisterCustomRmgr`, rmgr.c). Nobody else uses it now.
    unsafe {
        let table = (&raw mut pg_sys::RmgrTable).cast::<pg_sys::RmgrData>();
        let (hash, sequence) = (table.add(HASH), table.add(SEQUENCE));
        CURRENT.with(|current| {
            (current.redo, current.redo_of_sequence) = ((*hash).rm_redo, (*sequence).rm_redo);
            current.is_locked = is_locked;
        });
        (*hash).rm_redo = Some(hash_redo);
        (*sequence).rm_redo = Some(sequence_redo);
    }
}

/// Contract: as [`hash_redo`], with a record of a sequence: of its one page, which it makes anew.
#[pg_guard]
unsafe extern "C-unwind" fn sequence_redo(record: *mut XLogReaderState) {
    let (redo, is_locked) = CURRENT.with(|current| (current.redo_of_sequence, current.is_locked));
    let Some(redo) = redo else { return };
    // SAFETY: the server's function, with its own argument; the record is decoded, and no lock is
    // held when it has been replayed.
    unsafe {
        redo(record);
        let decoded = (*record).record;
        if buffers::may_have_sessions_in_redo()
            && !decoded.is_null()
            && (*decoded).max_block_id >= 0
        {
            let page = *(*decoded).blocks.as_ptr();
            if page.in_use && is_locked(compat::file_of_block(&page)) {
                evict_if_unused(&page);
            }
        }
    }
}

/// Writes a page and evicts it, unless somebody has pinned it for long: then a worker does that.
///
/// # Safety
/// The page exists, and is in shared buffers; the caller has not locked it.
unsafe fn evict_if_unused(block: &pg_sys::DecodedBkpBlock) {
    // SAFETY: redo has just read or made the page, so it exists; the startup process has a resource
    // owner, and holds no lock of a buffer between two records.
    unsafe {
        let buffer = pg_sys::XLogReadBufferExtended(
            compat::locator(compat::file_of_block(block)),
            block.forknum,
            block.blkno,
            pg_sys::ReadBufferMode::RBM_NORMAL,
            0,
        );
        if buffer != 0 {
            pg_sys::ReleaseBuffer(buffer);
            for _ in 0..20 {
                if compat::evict_buffer(buffer as usize - 1) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Contract: called by ApplyWalRecord with a record of a hash index, as the server's function.
#[pg_guard]
unsafe extern "C-unwind" fn hash_redo(record: *mut XLogReaderState) {
    let redo = CURRENT.with(|current| {
        (current.record, current.stands_in) = (record, false);
        current.redo
    });
    if let Some(redo) = redo {
        // SAFETY: the server's function, with its own argument.
        unsafe { redo(record) };
    }
    if CURRENT.with(|current| current.stands_in) {
        // SAFETY: the record is still the one that was replayed.
        unsafe { evict_bucket(record) };
    }
    CURRENT.with(|current| current.record = std::ptr::null_mut());
}

/// Block 0 of the record, if that only locks it.
///
/// # Safety
/// The record is decoded, and is being replayed.
unsafe fn bucket_of(record: *mut XLogReaderState) -> Option<pg_sys::DecodedBkpBlock> {
    // SAFETY: a decoded record has `max_block_id + 1` blocks.
    unsafe {
        let decoded = (*record).record;
        if decoded.is_null() || (*decoded).max_block_id < 0 {
            return None;
        }
        let info = (*decoded).header.xl_info & !INFO_OF_SERVER;
        let first = *(*decoded).blocks.as_ptr();
        let is_bucket = WITH_BUCKET.contains(&info)
            && first.in_use
            && !first.has_image
            && first.forknum == ForkNumber::MAIN_FORKNUM;
        is_bucket.then_some(first)
    }
}

/// Whether the record under replay names this page of a main fork only to have it locked. If so,
/// redo gets a placeholder for it ([`crate::page::io::open`]).
pub(crate) fn only_locks(file: RelFile, block: BlockNumber) -> bool {
    CURRENT.with(|current| {
        if current.record.is_null() {
            return false;
        }
        // SAFETY: `hash_redo` sets the record for the time in which the server replays it.
        let bucket = unsafe { bucket_of(current.record) };
        let is_it = bucket
            .is_some_and(|first| first.blkno == block && compat::file_of_block(&first) == file);
        current.stands_in |= is_it;
        is_it
    })
}

/// Evicts the placeholder.
///
/// # Safety
/// As [`bucket_of`]; the page was read for this record.
unsafe fn evict_bucket(record: *mut XLogReaderState) {
    // SAFETY: as our caller guarantees. The page exists, and is in shared buffers, or read again as
    // a placeholder. No lock is held when the record has been replayed.
    unsafe {
        let Some(bucket) = bucket_of(record) else { return };
        let locator = compat::locator(compat::file_of_block(&bucket));
        loop {
            let buffer = pg_sys::XLogReadBufferExtended(
                locator,
                ForkNumber::MAIN_FORKNUM,
                bucket.blkno,
                pg_sys::ReadBufferMode::RBM_NORMAL,
                0,
            );
            if buffer == 0 {
                return;
            }
            let held = &*compat::buffer_page(buffer).cast::<page::Page>();
            let is_placeholder = page::is_placeholder(page::lsn_of(held));
            pg_sys::ReleaseBuffer(buffer);
            if !is_placeholder || compat::evict_buffer(buffer as usize - 1) {
                return;
            }
            // Somebody has pinned it, but cannot read it: its key group is locked.
            process::wait_in_recovery(Duration::from_millis(10), || false);
        }
    }
}
