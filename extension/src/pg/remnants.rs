//! What deleted rows leave in heap pages, and clearing it.
//!
//! PostgreSQL does not overwrite it. A deleted row stays until no snapshot can see it. Pruning and
//! VACUUM then only move the other rows together (`compactify_tuples`, bufpage.c). So the bytes of
//! the deleted row stay between `pd_lower` and `pd_upper`, and up to seven of them after a row that
//! does not end at a multiple of eight.
//!
//! Here deleted rows lose their values at once, even if a snapshot can still see them. Such a row
//! keeps its fixed-width columns only, as if the others had been added to the table later. It stays
//! at its place, so indexes, update chains and VACUUM find what they expect. Afterwards all unused
//! bytes of the page are zero.
//!
//! Rows that are deleted while clearing runs keep their values ([`Before`]). A session that has
//! just found such a row, and fetches a long value of it from the TOAST table, no longer pins its
//! page. For rows deleted earlier, the references to long values are removed before the long values
//! themselves.

use pagevault_cipher::{PAGE_SIZE, Page};
use pgrx::pg_sys::{self, ForkNumber, HTSV_Result};

use super::buffers::AlignedPage;
use super::pages::{Held, Ring};
use super::{compat, critical, wal};

/// What is kept of a deleted row.
#[derive(Clone, Copy)]
pub(crate) enum KeptBytes {
    /// The first `count` columns. If none of them is NULL, the first `bytes` bytes are kept; all
    /// other bytes are zeroed.
    Columns { count: u16, bytes: usize },
    /// For a row of a TOAST table: the length of its chunk. The chunk itself is zeroed. A session
    /// that still reads the value must find a chunk of the right length.
    Lengths,
}

/// The transactions that had ended at a certain moment.
pub(crate) struct Before(pg_sys::Snapshot);

impl Before {
    pub(crate) fn now() -> Before {
        // SAFETY: in a transaction; registered until this value is dropped, or until the server
        // aborts the transaction.
        unsafe { Before(pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot())) }
    }

    fn has_ended(&self, transaction: pg_sys::TransactionId) -> bool {
        // SAFETY: `now` has registered the snapshot, so it is valid until this value is dropped.
        unsafe { !pg_sys::XidInMVCCSnapshot(transaction, self.0) }
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // an ERROR is under way; its abort releases the snapshot
        }
        // SAFETY: `now` has registered it once, in this transaction.
        unsafe { pg_sys::UnregisterSnapshot(self.0) }
    }
}

/// Position of a row in a page.
#[derive(Clone, Copy)]
struct Row {
    start: usize,
    end: usize,
    is_deleted: bool,
}

impl Held {
    /// Clears a page of the main fork. `wait` is called while other processes have the page pinned,
    /// and returns whether to go on waiting. A deleted row that another process may be reading
    /// keeps its values. Returns the number of such rows. With `log_always`, logs an image of the
    /// page in WAL even if nothing was cleared.
    ///
    /// # Errors
    /// Raises errors of reading a page.
    pub(crate) fn clear_page(
        &self,
        block: u32,
        kept: KeptBytes,
        before: &Before,
        ring: &Ring,
        log_always: bool,
        wait: impl FnMut() -> bool,
    ) -> u32 {
        let relation = self.relation();
        let mut copy = AlignedPage([0; PAGE_SIZE]);
        // SAFETY: the relation is open and locked, so the block stays; the buffer is exclusively
        // locked after `lock`, and a whole page is written to it.
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

/// Locks a buffer exclusively; true if no other process has it pinned. A process may look at rows
/// while it only has the page pinned.
///
/// # Safety
/// The buffer is pinned, once.
unsafe fn lock(buffer: pg_sys::Buffer, mut wait: impl FnMut() -> bool) -> bool {
    // SAFETY: the caller has pinned the buffer, and does not hold its lock.
    unsafe {
        loop {
            if pg_sys::ConditionalLockBufferForCleanup(buffer) {
                return true;
            }
            if !wait() {
                compat::lock_exclusively(buffer);
                return false;
            }
        }
    }
}

/// The rows of a page. Deleted rows are those that were deleted or replaced by a transaction that
/// had committed by `before`, and those of transactions that were rolled back
/// (`HeapTupleSatisfiesVacuumHorizon`, heapam_visibility.c). Invalid line pointers (as checked in
/// `PageRepairFragmentation`, bufpage.c) are ignored.
///
/// # Safety
/// `buffer` and `page` are those of this block, exclusively locked.
unsafe fn rows(
    relation: pg_sys::Relation,
    buffer: pg_sys::Buffer,
    block: u32,
    page: *const Page,
    before: &Before,
) -> Vec<Row> {
    const NORMAL: u32 = 1; // LP_NORMAL
    // SAFETY: the caller has locked the page; line pointers are between the header and pd_lower,
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

/// Replaces the page in a buffer, and logs an image in WAL.
///
/// # Safety
/// `page` is the page in `buffer`, which is exclusively locked.
unsafe fn replace(buffer: pg_sys::Buffer, page: *mut Page, new: &Page) {
    // SAFETY: the caller has locked the buffer. Our code in the critical section cannot fail.
    critical::section(|| unsafe {
        *page = *new;
        pg_sys::MarkBufferDirty(buffer);
        let lsn = wal::insert_page(buffer);
        let header = &mut *page.cast::<pg_sys::PageHeaderData>();
        compat::set_page_lsn(header, lsn.0);
    });
}

/// Redo of [`wal::insert_page`]: restores the page under a cleanup lock, as it was cleared.
///
/// # Safety
/// `record` is such a record, being replayed.
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

/// Offsets in a row header (htup_details.h).
const INFOMASK2: usize = 18;
const INFOMASK: usize = 20;
const HOFF: usize = 22;

/// Clears deleted rows, if no other process uses the page (`is_alone`), and all unused bytes.
/// Returns the number of deleted rows that keep values.
fn clear(page: &mut Page, rows: &[Row], kept: KeptBytes, is_alone: bool) -> u32 {
    let mut left = 0;
    for row in rows.iter().filter(|row| row.is_deleted) {
        let row = &mut page[row.start..row.end];
        if is_alone {
            left += u32::from(!clear_values(row, kept));
        } else {
            let mut emptied = row.to_vec();
            left += u32::from(!clear_values(&mut emptied, kept) || emptied != row);
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

/// Clears the values of a row. False if the row is malformed.
fn clear_values(row: &mut [u8], kept: KeptBytes) -> bool {
    let has_null =
        u16::from_le_bytes([row[INFOMASK], row[INFOMASK + 1]]) & pg_sys::HEAP_HASNULL as u16 != 0;
    let data = usize::from(row[HOFF]);
    if data < ROW_HEADER || data > row.len() {
        return false;
    }
    match kept {
        KeptBytes::Lengths => {
            const CHUNK: usize = 8; // after chunk_id and chunk_seq
            let Some(chunk) = row.get_mut(data + CHUNK..) else { return false };
            let Some(&first) = chunk.first() else { return false };
            // VARATT_IS_1B, VARHDRSZ.
            let header = if first & 1 == 1 { 1 } else { 4 };
            let Some(value) = chunk.get_mut(header..) else { return false };
            value.fill(0);
            !has_null
        }
        KeptBytes::Columns { count, bytes } => {
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
