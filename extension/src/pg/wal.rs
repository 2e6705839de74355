//! pagevault's WAL records: writing them, and WAL addresses.

use std::ffi::CStr;

use pagevault_keystore::{Lsn, RelFile, Scope};
use pgrx::pg_sys;

use super::{compat, locks};

/// Resource manager ID. IDs from 128 on are for extensions, which reserve them at
/// <https://wiki.postgresql.org/wiki/CustomWALResourceManagers>; ours is to be entered there before
/// the first release. The server refuses to start if another extension has registered the same ID.
pub(crate) const RMGR_ID: u8 = 161;

/// Op code: keystore records added.
pub(crate) const OP_KEYS: u8 = 0x10;

/// Inserts a record "these keystore records were added to the file of `scope`". Returns the
/// record's end.
///
/// Payload: `scope` as 4 bytes little-endian, the keystore's 16-byte identity, then the batch in
/// the format of the key log.
pub(crate) fn insert_keys(scope: Scope, keystore_id: &[u8; 16], batch: &[u8]) -> Lsn {
    let scope = scope.number().to_le_bytes();
    // SAFETY: one complete record construction; all slices live until XLogInsert returns. The
    // caller is not in recovery. The keystore limits batches far below XLogRecordMaxSize (16 and
    // newer).
    unsafe {
        pg_sys::XLogBeginInsert();
        compat::xlog_register_data(&scope);
        compat::xlog_register_data(keystore_id);
        compat::xlog_register_data(batch);
        Lsn(pg_sys::XLogInsert(RMGR_ID, OP_KEYS))
    }
}

/// Op code: no effect; the record only fills space.
pub(crate) const OP_BARRIER: u8 = 0x20;

/// Maximum that recovery reads ahead of replay, in bytes of decoded records, on every server with
/// pagevault loaded ([`bound_read_ahead`](super::guc::bound_read_ahead)). Eight times PostgreSQL's
/// default. With the default `maintenance_io_concurrency`, recovery looks ahead at most 64 blocks,
/// half a megabyte of full-page images.
pub(crate) const READ_AHEAD: usize = 4 << 20;

/// The largest record that only fills space, in bytes.
const PART: usize = 1 << 20;

/// Inserts records that together do not fit into recovery's buffer for decoded records. So recovery
/// cannot read them all before the records in front of them are replayed, because those occupy the
/// buffer until then (`XLogReadRecordAlloc`, xlogreader.c, allocates outside the buffer only when
/// nothing is left to replay). Returns the end of the last record.
///
/// `between` is called after each record and may raise an error: an incomplete barrier does no
/// harm.
pub(crate) fn insert_barrier(between: impl Fn()) -> Lsn {
    // A decoded record is larger than its data.
    const PARTS: usize = READ_AHEAD.div_ceil(PART);
    let zeros = vec![0; PART];
    let mut end = Lsn::INVALID;
    for _ in 0..PARTS {
        end = insert_zeros(&zeros);
        between();
    }
    end
}

/// Extends WAL up to `lsn`, or further. Returns the new end of WAL.
pub(crate) fn fill_up_to(lsn: Lsn) -> Lsn {
    let zeros = vec![0; PART];
    loop {
        // Others may have extended it; records have data (ReserveXLogInsertLocation, xlog.c).
        let missing = (lsn.bytes_since(end()) as usize).max(1);
        let reached = insert_zeros(zeros.get(..missing).unwrap_or(&zeros));
        if reached >= lsn {
            return reached;
        }
    }
}

/// Inserts the smallest record that there is. Returns its end.
pub(crate) fn insert_little() -> Lsn {
    insert_zeros(&[0])
}

fn insert_zeros(zeros: &[u8]) -> Lsn {
    // SAFETY: as in insert_keys(); the size is far below XLogRecordMaxSize.
    unsafe {
        pg_sys::XLogBeginInsert();
        compat::xlog_register_data(zeros);
        Lsn(pg_sys::XLogInsert(RMGR_ID, OP_BARRIER))
    }
}

/// Op code: an image of the page of block 0, from which deleted rows were cleared.
pub(crate) const OP_PAGE: u8 = 0x30;

/// Inserts a record with an image of the page in a buffer. Returns the record's end, which the
/// caller stores as the page's LSN.
///
/// Not the server's own `XLOG_FPI`: its redo restores the page while others may read rows of it
/// (`xlog_redo`, xlog.c).
///
/// # Safety
/// The buffer is exclusively locked and marked dirty; in a critical section.
pub(super) unsafe fn insert_page(buffer: pg_sys::Buffer) -> Lsn {
    let flags = pg_sys::REGBUF_STANDARD | pg_sys::REGBUF_FORCE_IMAGE;
    // SAFETY: one complete record construction, of a buffer that the caller has locked and marked.
    unsafe {
        pg_sys::XLogBeginInsert();
        pg_sys::XLogRegisterBuffer(0, buffer, flags as u8);
        Lsn(pg_sys::XLogInsert(RMGR_ID, OP_PAGE))
    }
}

/// Logs an empty page as the image of this block, as `log_newpage` does.
pub(crate) fn log_empty_page(file: RelFile, fork: pg_sys::ForkNumber::Type, block: u32) {
    #[repr(align(8))]
    struct Empty([u8; pg_sys::BLCKSZ as usize]);
    let mut page = Empty([0; pg_sys::BLCKSZ as usize]);
    let mut locator = compat::locator(file);
    // SAFETY: inserts a record; the caller is not in recovery. The server reads the page, and sets
    // no LSN in an empty one.
    unsafe {
        pg_sys::log_newpage(&raw mut locator, fork, block, page.0.as_mut_ptr().cast(), false)
    };
}

/// What is logged from now on is in a segment of its own, as after `pg_switch_wal()`
/// (`RequestXLogSwitch`, xlog.c).
pub(crate) fn begin_segment() {
    // SAFETY: inserts a record; the caller is not in recovery.
    unsafe { pg_sys::RequestXLogSwitch(false) };
}

/// Address of the next record.
pub(crate) fn end() -> Lsn {
    // SAFETY: reads shared state; the caller is not in recovery.
    Lsn(unsafe { pg_sys::GetXLogInsertRecPtr() })
}

/// Bytes that this process has written to WAL.
pub(crate) fn written_by_this_process() -> u64 {
    // SAFETY: counters of this process (instrument.c), which only grow.
    unsafe { pg_sys::pgWalUsage.wal_bytes }
}

/// The end of what was replayed, in recovery; [`Lsn::INVALID`] before it begins. By then pg_control
/// says from where (`StartupXLOG`, xlog.c, updates it before `PerformWalRecovery`).
pub(crate) fn replayed() -> Lsn {
    // SAFETY: reads shared state under a spinlock; a null pointer means that no further result is
    // wanted.
    Lsn(unsafe { pg_sys::GetXLogReplayRecPtr(std::ptr::null_mut()) })
}

/// In recovery: whether no record is being replayed (`ApplyWalRecord`, xlogrecovery.c, sets one
/// address before and the other one afterwards).
pub(crate) fn is_between_records() -> bool {
    // SAFETY: reads shared state under a spinlock; a null pointer means that no further result is
    // wanted.
    let begun = unsafe { pg_sys::GetCurrentReplayRecPtr(std::ptr::null_mut()) };
    Lsn(begun) == replayed()
}

/// The end of the WAL that this server has: the address of the next record or, in recovery, the end
/// of what was received or replayed.
pub(crate) fn reached() -> Lsn {
    if !super::process::in_recovery() {
        return end();
    }
    // SAFETY: both read shared state under a spinlock; null pointers mean that no further result is
    // wanted.
    unsafe {
        let received = pg_sys::GetWalRcvFlushRecPtr(std::ptr::null_mut(), std::ptr::null_mut());
        Lsn(received.max(pg_sys::GetXLogReplayRecPtr(std::ptr::null_mut())))
    }
}

/// Whether the server has the lock numbers and sizes that this crate was built for.
pub(crate) fn check_layout() -> Result<(), String> {
    locks::check_layout()?;
    // Options of `configure`; the server's check of a module's magic block does not compare these.
    for (setting, ours) in [
        (c"block_size", pg_sys::BLCKSZ),
        (c"segment_size", pg_sys::RELSEG_SIZE),
        (c"wal_block_size", pg_sys::XLOG_BLCKSZ),
    ] {
        // SAFETY: the settings exist in every server; the text lives until the next call.
        let theirs = unsafe {
            CStr::from_ptr(pg_sys::GetConfigOption(setting.as_ptr(), false, false))
                .to_string_lossy()
        };
        if *theirs != *ours.to_string() {
            let setting = setting.to_string_lossy();
            return Err(format!("its {setting} is {theirs}, pagevault was built for {ours}"));
        }
    }
    Ok(())
}

/// Calls `f` with the end of the WAL written so far, and with the address of the first page, at
/// `behind` or later, of which nothing has been written. No WAL is written meanwhile, so `f` must
/// be short and must not raise an error.
pub(crate) fn at_unwritten_page<R>(behind: Lsn, f: impl FnOnce(Lsn, Lsn) -> R) -> R {
    let _held = locks::ServerLock::WalWrite.acquire();
    // SAFETY: takes a spinlock at most.
    let written = unsafe { pg_sys::GetXLogWriteRecPtr() };
    let page = written.max(behind.0).next_multiple_of(u64::from(pg_sys::XLOG_BLCKSZ));
    f(Lsn(written), Lsn(page))
}

/// Waits until the WAL up to `lsn` is durable.
pub(crate) fn flush(lsn: Lsn) {
    // SAFETY: any LSN that XLogInsert returned is valid here.
    unsafe { pg_sys::XLogFlush(lsn.0) }
}

/// Splits a record's payload into scope, keystore identity and batch.
pub(crate) fn split_payload(payload: &[u8]) -> Option<(Scope, &[u8; 16], &[u8])> {
    let (scope, rest) = payload.split_first_chunk::<4>()?;
    let (keystore_id, batch) = rest.split_first_chunk::<16>()?;
    Some((Scope::database(u32::from_le_bytes(*scope)), keystore_id, batch))
}
