//! Rewriting the pages of a relation through shared buffers.

use std::ops::Range;

use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, ForkNumber, Oid};

use super::{compat, critical};

/// An open relation, locked in AccessShareLock mode until the end of the transaction, so that its
/// file is neither replaced nor truncated. The lock conflicts only with commands that do that.
pub(crate) struct Held {
    relation: pg_sys::Relation,
}

/// A small ring of buffers for rewritten pages (BAS_BULKWRITE: 16 MB), so that the other buffers
/// stay cached. Keep it from batch to batch: a new ring begins by evicting pages of other
/// processes.
pub(crate) struct Ring(pg_sys::BufferAccessStrategy);

impl Ring {
    pub(crate) fn new() -> Ring {
        let kind = pg_sys::BufferAccessStrategyType::BAS_BULKWRITE;
        // SAFETY: allocated in a context that outlives transactions; the current context is
        // restored at once.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            let ring = pg_sys::GetAccessStrategy(kind);
            pg_sys::MemoryContextSwitchTo(before);
            Ring(ring)
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: made by GetAccessStrategy, freed once; it pins no buffer.
        unsafe { pg_sys::FreeAccessStrategy(self.0) }
    }
}

impl Ring {
    pub(super) fn strategy(&self) -> pg_sys::BufferAccessStrategy {
        self.0
    }
}

impl Held {
    pub(super) fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    /// Opens a relation; `None` if there is none with this OID.
    pub(crate) fn open(oid: Oid) -> Option<Held> {
        Held::open_under(oid, pg_sys::AccessShareLock as pg_sys::LOCKMODE)
    }

    /// Like [`Held::open`], under a stronger lock.
    pub(crate) fn open_under(oid: Oid, lock: pg_sys::LOCKMODE) -> Option<Held> {
        // SAFETY: null if the relation is gone; the reference is counted until it is closed, or
        // released by the abort of the transaction.
        unsafe {
            let relation = pg_sys::try_relation_open(oid, lock);
            if relation.is_null() {
                return None;
            }
            Some(Held { relation })
        }
    }

    /// Its forks, with their numbers of blocks. Raises an error if it has no main fork: then its
    /// file system is not mounted, or the file was removed.
    pub(crate) fn forks(&self) -> Vec<(ForkNumber::Type, u32)> {
        let forks = ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM;
        // SAFETY: this value keeps the relation open and locked, so its storage manager object may
        // be opened and used. Before it looks for a fork, `mdexists` (md.c) closes it.
        let blocks = |fork| unsafe {
            let exists = pg_sys::smgrexists(compat::open_smgr(self.relation), fork);
            (exists || fork == ForkNumber::MAIN_FORKNUM)
                .then(|| pg_sys::RelationGetNumberOfBlocksInFork(self.relation, fork))
        };
        forks.filter_map(|fork| Some((fork, blocks(fork)?))).collect()
    }

    /// Its OID.
    pub(crate) fn oid(&self) -> Oid {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid.
        unsafe { (*self.relation).rd_id }
    }

    /// True for a catalog that all databases share.
    pub(crate) fn is_shared(&self) -> bool {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid.
        unsafe { (*(*self.relation).rd_rel).relisshared }
    }

    /// Its file.
    pub(crate) fn file(&self) -> RelFile {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid.
        compat::rel_file(unsafe { compat::relation_locator(self.relation) })
    }

    /// Whether its changes are logged in WAL.
    pub(crate) fn is_logged(&self) -> bool {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid.
        unsafe { compat::relation_needs_wal(self.relation) }
    }

    /// Whether it is an unlogged relation.
    pub(crate) fn is_unlogged(&self) -> bool {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid.
        let persistence = unsafe { (*(*self.relation).rd_rel).relpersistence };
        persistence as u8 == pg_sys::RELPERSISTENCE_UNLOGGED
    }

    /// False for an index whose build has not been committed, and for one that an interrupted
    /// command has left so (`indisready` in pg_index).
    pub(crate) fn is_ready(&self) -> bool {
        // SAFETY: this value keeps the relation open, so its relation cache entry is valid, and so
        // is its copy of the row, which only indexes have.
        unsafe { (*self.relation).rd_index.as_ref().is_none_or(|index| index.indisready) }
    }

    /// Whether it is a system catalog, its TOAST table or its index.
    pub(crate) fn is_catalog(&self) -> bool {
        self.oid().to_u32() < pg_sys::FirstNormalObjectId
    }

    /// Marks a page dirty, with a full-page image in WAL if the relation is logged, so that it is
    /// written again under the current key. An all-zero page stays as it is. But an unreadable page
    /// of a map, which is read as zero, is initialised again, as PostgreSQL does when it reads
    /// maps.
    pub(crate) fn rewrite(&self, fork: ForkNumber::Type, block: u32, ring: &Ring) {
        // SAFETY: open and locked; the block exists, as the caller has checked under the lock. The
        // init fork of an unlogged relation is logged although the relation is not.
        unsafe {
            let logged = self.is_logged() || fork == ForkNumber::INIT_FORKNUM;
            // Only heap pages are known to have nothing between pd_lower and pd_upper.
            let is_heap = (*(*self.relation).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID;
            let standard = is_heap && fork == ForkNumber::MAIN_FORKNUM;
            rewrite_page(self.relation, fork, block, logged, standard, ring.0);
        }
    }

    /// Makes the kernel read those of these blocks that are not in shared buffers.
    pub(crate) fn prefetch(&self, fork: ForkNumber::Type, blocks: Range<u32>) {
        for block in blocks {
            // SAFETY: this value keeps the relation open and locked, so the file is not truncated.
            unsafe { pg_sys::PrefetchBuffer(self.relation, fork, block) };
        }
    }

    /// Writes its dirty pages.
    pub(crate) fn flush(&self) {
        // SAFETY: this value keeps the relation open and locked, so its files stay the same.
        unsafe { pg_sys::FlushRelationBuffers(self.relation) }
    }

    /// Syncs its files.
    pub(crate) fn sync(&self) {
        // SAFETY: this value keeps the relation open and locked, so its files stay the same.
        unsafe { sync(self.relation) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // an ERROR is under way; its abort closes the relation
        }
        // SAFETY: opened once, closed once; the lock stays.
        unsafe {
            pg_sys::relation_close(self.relation, pg_sys::NoLock as pg_sys::LOCKMODE);
        }
    }
}

/// # Safety
/// `relation` is open and locked.
unsafe fn sync(relation: pg_sys::Relation) {
    // SAFETY: the caller has the relation open and locked; only forks that exist are synced.
    unsafe {
        for fork in ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM {
            let smgr = compat::open_smgr(relation);
            if pg_sys::smgrexists(smgr, fork) {
                pg_sys::smgrimmedsync(smgr, fork);
            }
        }
    }
}

/// Like log_newpage_range (xloginsert.c), for one page.
///
/// # Safety
/// `relation` is open and locked so that its file is neither replaced nor truncated; `block` exists
/// in `fork`; `standard` only if there is nothing between pd_lower and pd_upper; `ring` is a
/// strategy or null.
unsafe fn rewrite_page(
    relation: pg_sys::Relation,
    fork: ForkNumber::Type,
    block: u32,
    logged: bool,
    standard: bool,
    ring: pg_sys::BufferAccessStrategy,
) {
    // SAFETY: the caller has the relation open and locked. Our code in the critical section cannot
    // fail: marking a locked buffer dirty and logging its image raise only errors that the server
    // itself turns into PANIC.
    unsafe {
        // Like vm_readbuf and fsm_readbuf (visibilitymap.c, freespace.c): a torn page of a map is
        // no error.
        let is_map = matches!(fork, ForkNumber::FSM_FORKNUM | ForkNumber::VISIBILITYMAP_FORKNUM);
        let mode = match is_map {
            true => pg_sys::ReadBufferMode::RBM_ZERO_ON_ERROR,
            false => pg_sys::ReadBufferMode::RBM_NORMAL,
        };
        let buffer = pg_sys::ReadBufferExtended(relation, fork, block, mode, ring);
        compat::lock_exclusively(buffer);
        let page = compat::buffer_page(buffer).cast::<pg_sys::PageHeaderData>();
        let is_new = (*page).pd_upper == 0;
        if is_new && is_map {
            pg_sys::PageInit(page.cast(), pg_sys::BLCKSZ as usize, 0);
        }
        if !is_new || is_map {
            critical::section(|| {
                if (*(*relation).rd_rel).relkind as u8 == pg_sys::RELKIND_SEQUENCE {
                    reset_logged_values(page.cast());
                }
                pg_sys::MarkBufferDirty(buffer);
                if logged {
                    pg_sys::log_newpage_buffer(buffer, standard);
                }
            });
        }
        pg_sys::UnlockReleaseBuffer(buffer);
    }
}

/// The tuple of a sequence (`FormData_pg_sequence_data`), not among pgrx's bindings.
#[repr(C)]
struct SequenceData {
    last_value: i64,
    /// The number of the following values that WAL already covers.
    log_cnt: i64,
    is_called: bool,
}

/// Makes the next nextval() log again. WAL is ahead of a sequence's page, so that not every value
/// is logged. An image of the page in WAL undoes that: without a new record, values would be issued
/// again after a crash.
///
/// # Safety
/// `page` is the page of a sequence, exclusively locked.
unsafe fn reset_logged_values(page: pg_sys::Page) {
    // SAFETY: the page contains one tuple, which is never deleted.
    unsafe {
        let item = pg_sys::PageGetItemId(page, pg_sys::FirstOffsetNumber);
        let tuple = pg_sys::PageGetItem(page, item).cast::<pg_sys::HeapTupleHeaderData>();
        let data = tuple.byte_add(usize::from((*tuple).t_hoff)).cast::<SequenceData>();
        (*data).log_cnt = 0;
    }
}
