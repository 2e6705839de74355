//! Rewriting the pages of a relation through shared buffers.

use pgrx::pg_sys::{self, ForkNumber, Oid};

use super::compat;

/// Marks every page of every fork dirty, with a full-page image in WAL where the relation is logged,
/// so that it is written again under the key that is current now; then writes and syncs them.
/// Returns the number of pages touched. Cancellable between pages.
///
/// The caller holds ShareUpdateExclusiveLock on the relation, and on the table if it is an index, or a
/// stronger one. What others write meanwhile is written under the current key anyway.
pub(crate) fn rewrite_all(oid: Oid) -> u64 {
    let mut touched = 0;
    // SAFETY: the relation is locked by the caller, so it neither moves nor shrinks, and blocks that are
    // added need nothing once whoever adds one now is done; each buffer is
    // pinned and exclusively locked while it is touched, as log_newpage_range (xloginsert.c) does.
    unsafe {
        let relation = pg_sys::relation_open(oid, pg_sys::NoLock as pg_sys::LOCKMODE);
        let lock = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;
        pg_sys::LockRelationForExtension(relation, lock);
        pg_sys::UnlockRelationForExtension(relation, lock);
        let smgr = compat::open_smgr(relation);
        let logged = compat::relation_needs_wal(relation);
        for fork in ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM {
            if !pg_sys::smgrexists(smgr, fork) {
                continue;
            }
            // The init fork of an unlogged relation is WAL-logged although the relation is not.
            let logged = logged || fork == ForkNumber::INIT_FORKNUM;
            for block in 0..pg_sys::RelationGetNumberOfBlocksInFork(relation, fork) {
                super::process::check_for_interrupts();
                touched += u64::from(rewrite_page(relation, fork, block, logged));
            }
        }
        pg_sys::FlushRelationBuffers(relation);
        for fork in ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM {
            let smgr = compat::open_smgr(relation);
            if pg_sys::smgrexists(smgr, fork) {
                pg_sys::smgrimmedsync(smgr, fork);
            }
        }
        pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
    }
    touched
}

/// Reads block 0 of a shared catalog past shared buffers, from the file.
pub(crate) fn read_from_disk(shared_catalog: Oid) {
    let mut page = Box::new([0u64; pg_sys::BLCKSZ as usize / size_of::<u64>()]);
    // SAFETY: in a transaction; the buffer holds one page; shared catalogs are never empty.
    unsafe {
        pg_sys::StartTransactionCommand();
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let relation = pg_sys::relation_open(shared_catalog, lock);
        let smgr = compat::open_smgr(relation);
        compat::smgr_read(smgr, 0, page.as_mut_ptr().cast());
        pg_sys::relation_close(relation, lock);
        pg_sys::CommitTransactionCommand();
    }
}

/// Returns false for an all-zero page, which stays as it is.
///
/// # Safety
/// `relation` is open and locked as for [`rewrite_all`]; `block` exists in `fork`.
unsafe fn rewrite_page(
    relation: pg_sys::Relation,
    fork: ForkNumber::Type,
    block: u32,
    logged: bool,
) -> bool {
    // SAFETY: by contract. Inside the critical section nothing of ours can fail: marking a locked
    // buffer dirty and logging its image only raise what the server itself makes a PANIC.
    unsafe {
        let buffer = pg_sys::ReadBufferExtended(
            relation,
            fork,
            block,
            pg_sys::ReadBufferMode::RBM_NORMAL,
            std::ptr::null_mut(),
        );
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32);
        let page = compat::buffer_page(buffer).cast::<pg_sys::PageHeaderData>();
        let is_new = (*page).pd_upper == 0;
        if !is_new {
            pg_sys::CritSectionCount += 1;
            if (*(*relation).rd_rel).relkind as u8 == pg_sys::RELKIND_SEQUENCE {
                forget_values_in_wal(page.cast());
            }
            pg_sys::MarkBufferDirty(buffer);
            if logged {
                pg_sys::log_newpage_buffer(buffer, false);
            }
            pg_sys::CritSectionCount -= 1;
        }
        pg_sys::UnlockReleaseBuffer(buffer);
        !is_new
    }
}

/// The tuple of a sequence (`FormData_pg_sequence_data`), not among pgrx's bindings.
#[repr(C)]
struct SequenceData {
    last_value: i64,
    /// How many of the values to come are in WAL already.
    log_cnt: i64,
    is_called: bool,
}

/// WAL is ahead of a sequence's page, so that not every value is logged. An image of the page takes
/// that back: the next value has to be logged again, or a crash would give it twice.
///
/// # Safety
/// `page` is the page of a sequence, exclusively locked.
unsafe fn forget_values_in_wal(page: pg_sys::Page) {
    // SAFETY: the page holds one tuple, which is never deleted.
    unsafe {
        let item = pg_sys::PageGetItemId(page, pg_sys::FirstOffsetNumber);
        let tuple = pg_sys::PageGetItem(page, item).cast::<pg_sys::HeapTupleHeaderData>();
        let data = tuple.byte_add(usize::from((*tuple).t_hoff)).cast::<SequenceData>();
        (*data).log_cnt = 0;
    }
}
