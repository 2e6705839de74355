//! What deleted rows leave in the pages of a heap, and clearing it.
//!
//! PostgreSQL overwrites none of it. A deleted row stays until nobody's snapshot can see it any
//! more; pruning and VACUUM then only move others together (`compactify_tuples`, bufpage.c), so
//! that its bytes lie between `pd_lower` and `pd_upper`, and up to seven of them behind a row that
//! does not end at a multiple of eight.
//!
//! Here rows that were deleted lose their values at once, whoever's snapshot may still see them:
//! such a row has its columns of fixed width, and no others, as if the others had been added to the
//! table later. It stays in its place, so indexes, update chains and VACUUM find what they expect.
//! All bytes of the page that nobody uses are zero afterwards.
//!
//! Not so rows that are deleted meanwhile ([`Before`]): who has just found such a row, and fetches
//! a long value of it from the TOAST table, has its page pinned no more than until then. Of rows
//! that were deleted before, the references to long values are gone before these are.

use pagevault_cipher::{PAGE_SIZE, Page};
use pgrx::pg_sys::{self, ForkNumber, HTSV_Result};

use super::buffers::AlignedPage;
use super::pages::{Held, Ring};
use super::{compat, critical, wal};

/// What stays of a deleted row.
#[derive(Clone, Copy)]
pub(crate) enum Kept {
    /// So many columns. The first so many bytes of them stay as they are, where none is NULL; the
    /// others are zero.
    Columns { count: u16, bytes: usize },
    /// Of a row of a TOAST table: the length of its part of the value, all of which is zero. Who
    /// still looks for the value must find one.
    Lengths,
}

/// Transactions that had ended by a moment.
pub(crate) struct Before(pg_sys::Snapshot);

impl Before {
    pub(crate) fn now() -> Before {
        // SAFETY: in a transaction; registered until it is dropped, or by the server's abort.
        unsafe { Before(pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot())) }
    }

    fn has_ended(&self, transaction: pg_sys::TransactionId) -> bool {
        // SAFETY: `now` has registered the snapshot, so it is kept until this is dropped.
        unsafe { !pg_sys::XidInMVCCSnapshot(transaction, self.0) }
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // an ERROR is on its way; its abort forgets the snapshot
        }
        // SAFETY: `now` has registered it once, in this transaction.
        unsafe { pg_sys::UnregisterSnapshot(self.0) }
    }
}

/// A row in a page: from where to where.
#[derive(Clone, Copy)]
struct Row {
    start: usize,
    end: usize,
    is_deleted: bool,
}

impl Held {
    /// Clears a page of the main fork. `wait` is called while others read the page, and says
    /// whether to go on waiting: a deleted row that somebody may be reading just now keeps its
    /// values. Returns how many do. `log_always`: with an image in WAL also if there is nothing to
    /// be cleared.
    ///
    /// # Errors
    /// Raises what reading a page may raise.
    pub(crate) fn clear_page(
        &self,
        block: u32,
        kept: Kept,
        before: &Before,
        ring: &Ring,
        log_always: bool,
        wait: impl FnMut() -> bool,
    ) -> u32 {
        let relation = self.relation();
        let mut copy = AlignedPage([0; PAGE_SIZE]);
        // SAFETY: open and locked, so that the block stays; the buffer is locked exclusively from
        // `lock` on, and what is written to it is a whole page.
        unsafe {
            let main = ForkNumber::MAIN_FORKNUM;
            let mode = pg_sys::ReadBufferMode::RBM_NORMAL;
            let buffer = pg_sys::ReadBufferExtended(relation, main, block, mode, ring.strategy());
            let is_alone = lock(buffer, wait);
            let page = compat::buffer_page(buffer).cast::<Page>();
            let mut left = 0;
            if (*page.cast::<pg_sys::PageHeaderData>()).pd_upper != 0 {
                let rows = rows(relation, buffer, block, &*page, before);
                copy.0 = *page;
                left = clear(&mut copy.0, &rows, kept, is_alone);
                if log_always || copy.0 != *page {
                    replace(buffer, page, &copy.0);
                }
            }
            pg_sys::UnlockReleaseBuffer(buffer);
            left
        }
    }
}

/// Locks a buffer exclusively; true if nobody else has it pinned. Others may look at rows while
/// they have a page pinned only.
///
/// # Safety
/// The buffer is pinned, once.
unsafe fn lock(buffer: pg_sys::Buffer, mut wait: impl FnMut() -> bool) -> bool {
    // SAFETY: the caller has pinned the buffer, and does not hold its lock yet.
    unsafe {
        loop {
            if pg_sys::ConditionalLockBufferForCleanup(buffer) {
                return true;
            }
            if !wait() {
                pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32);
                return false;
            }
        }
    }
}

/// The rows of a page. Deleted are those that a transaction has deleted or replaced that was
/// committed before, and those of one that was rolled back (`HeapTupleSatisfiesVacuumHorizon`,
/// heapam_visibility.c). What row pointers do not point to as they should
/// (`PageRepairFragmentation`, bufpage.c) is nobody's.
///
/// # Safety
/// The buffer of this block, and its page, exclusively locked.
unsafe fn rows(
    relation: pg_sys::Relation,
    buffer: pg_sys::Buffer,
    block: u32,
    page: *const Page,
    before: &Before,
) -> Vec<Row> {
    const NORMAL: u32 = 1; // LP_NORMAL
    // SAFETY: the caller has the page locked; row pointers stand between the header and pd_lower,
    // and point into the page (checked).
    unsafe {
        let header = &*page.cast::<pg_sys::PageHeaderData>();
        let (upper, special) = (usize::from(header.pd_upper), usize::from(header.pd_special));
        let items = usize::from(header.pd_lower).clamp(HEADER, PAGE_SIZE) - HEADER;
        let mut rows = Vec::new();
        for number in 1..=(items / ITEM) as u16 {
            let at = HEADER + usize::from(number - 1) * ITEM;
            let item = page.byte_add(at).cast::<u32>().read();
            let (start, length) = ((item & 0x7FFF) as usize, (item >> 17) as usize);
            let end = start + length;
            let is_inside = upper <= start && end <= special.min(PAGE_SIZE);
            if item >> 15 & 3 != NORMAL || !is_inside || length < ROW_HEADER || start % ALIGN != 0 {
                continue;
            }
            let mut row = pg_sys::HeapTupleData {
                t_len: length as u32,
                t_tableOid: (*relation).rd_id,
                t_data: page.cast_mut().byte_add(start).cast(),
                ..Default::default()
            };
            let [high, low] = [(block >> 16) as u16, block as u16];
            row.t_self.ip_blkid = pg_sys::BlockIdData { bi_hi: high, bi_lo: low };
            row.t_self.ip_posid = number;
            let mut deleted_by = pg_sys::InvalidTransactionId;
            let state =
                pg_sys::HeapTupleSatisfiesVacuumHorizon(&raw mut row, buffer, &raw mut deleted_by);
            let is_deleted = match state {
                HTSV_Result::HEAPTUPLE_DEAD => true,
                HTSV_Result::HEAPTUPLE_RECENTLY_DEAD => before.has_ended(deleted_by),
                _ => false,
            };
            rows.push(Row { start, end, is_deleted });
        }
        rows
    }
}

/// Puts a page in the place of one in a buffer, with an image in WAL.
///
/// # Safety
/// The buffer of that page, exclusively locked.
unsafe fn replace(buffer: pg_sys::Buffer, page: *mut Page, new: &Page) {
    // SAFETY: the caller has the buffer locked. Nothing of ours can fail in the critical section.
    critical::section(|| unsafe {
        *page = *new;
        pg_sys::MarkBufferDirty(buffer);
        let lsn = wal::insert_page(buffer);
        let header = &mut *page.cast::<pg_sys::PageHeaderData>();
        header.pd_lsn.xlogid = (lsn.0 >> 32) as u32;
        header.pd_lsn.xrecoff = lsn.0 as u32;
    });
}

/// Redo of [`wal::insert_page`]: the page is restored when nobody reads it, as it was cleared.
///
/// # Safety
/// `record` is such a record, under replay.
pub(crate) unsafe fn redo(record: *mut pg_sys::XLogReaderState) {
    // SAFETY: the caller's record has an image of its block 0, so the buffer is valid and locked.
    unsafe {
        let (mode, mut buffer) = (pg_sys::ReadBufferMode::RBM_NORMAL, 0);
        pg_sys::XLogReadBufferForRedoExtended(record, 0, mode, true, &raw mut buffer);
        if buffer != 0 {
            pg_sys::UnlockReleaseBuffer(buffer);
        }
    }
}

/// `SizeOfPageHeaderData`, `ItemIdData`, `SizeofHeapTupleHeader`, `MAXIMUM_ALIGNOF`.
const HEADER: usize = 24;
const ITEM: usize = 4;
const ROW_HEADER: usize = 23;
const ALIGN: usize = 8;

/// Offsets in the header of a row (htup_details.h).
const INFOMASK2: usize = 18;
const INFOMASK: usize = 20;
const HOFF: usize = 22;

/// Clears what is deleted, if nobody else looks at the page (`is_alone`), and what nobody uses.
/// Returns how many deleted rows keep values.
fn clear(page: &mut Page, rows: &[Row], kept: Kept, is_alone: bool) -> u32 {
    let mut left = 0;
    for row in rows.iter().filter(|row| row.is_deleted) {
        let row = &mut page[row.start..row.end];
        if is_alone {
            left += u32::from(!empty(row, kept));
        } else {
            let mut emptied = row.to_vec();
            left += u32::from(!empty(&mut emptied, kept) || emptied != row);
        }
    }
    let field = |at: usize| usize::from(u16::from_le_bytes([page[at], page[at + 1]]));
    let (lower, special) = (field(12), field(16).min(PAGE_SIZE));
    let mut used: Vec<_> = rows.iter().map(|row| (row.start, row.end)).collect();
    used.sort_unstable();
    let mut free = lower;
    for (start, end) in used.into_iter().chain([(special, special)]) {
        if start > free {
            page[free..start].fill(0);
        }
        free = free.max(end);
    }
    left
}

/// Takes the values from a row. False if it is not as rows are.
fn empty(row: &mut [u8], kept: Kept) -> bool {
    let has_null =
        u16::from_le_bytes([row[INFOMASK], row[INFOMASK + 1]]) & pg_sys::HEAP_HASNULL as u16 != 0;
    let data = usize::from(row[HOFF]);
    if data < ROW_HEADER || data > row.len() {
        return false;
    }
    match kept {
        Kept::Lengths => {
            const CHUNK: usize = 8; // behind chunk_id and chunk_seq
            let Some(chunk) = row.get_mut(data + CHUNK..) else { return false };
            let Some(&first) = chunk.first() else { return false };
            // VARATT_IS_1B, VARHDRSZ.
            let header = if first & 1 == 1 { 1 } else { 4 };
            let Some(value) = chunk.get_mut(header..) else { return false };
            value.fill(0);
            !has_null
        }
        Kept::Columns { count, bytes } => {
            let present = |column: u16| {
                let at = ROW_HEADER + usize::from(column / 8);
                row.get(at).is_some_and(|bits| bits >> (column % 8) & 1 == 1)
            };
            let natts = u16::from_le_bytes([row[INFOMASK2], row[INFOMASK2 + 1]]);
            let all = natts & pg_sys::HEAP_NATTS_MASK as u16;
            let whole = all >= count && (!has_null || (0..count).all(present));
            let (count, bytes) = if whole { (count, bytes) } else { (0, 0) };
            let natts = natts & !(pg_sys::HEAP_NATTS_MASK as u16) | count;
            row[INFOMASK2..][..2].copy_from_slice(&natts.to_le_bytes());
            row[INFOMASK] &= !(pg_sys::HEAP_HASEXTERNAL as u8);
            if let Some(values) = row.get_mut(data + bytes..) {
                values.fill(0);
            }
            true
        }
    }
}
