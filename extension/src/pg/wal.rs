//! Writing our WAL records.

use std::ffi::CStr;

use pgrx::pg_sys;

use super::compat;

/// Resource manager number. Numbers from 128 on are for extensions, which reserve theirs at
/// <https://wiki.postgresql.org/wiki/CustomWALResourceManagers>; ours is to be entered there before the
/// first release. The server refuses to start if another extension took the same.
pub(crate) const RMGR_ID: u8 = 161;

/// Op code: keystore records added.
pub(crate) const OP_KEYS: u8 = 0x10;

/// Inserts a record "these keystore records were added to the file of `scope`". Returns its end.
///
/// Payload: `scope` as 4 bytes little-endian, the keystore's 16-byte identity, then the batch as it
/// stands in the keystore.
pub(crate) fn insert_keys(scope: u32, keystore_id: &[u8; 16], batch: &[u8]) -> u64 {
    let scope = scope.to_le_bytes();
    // SAFETY: a whole record construction; all slices live across XLogInsert. The caller is not in
    // recovery. Batches are limited far below XLogRecordMaxSize by the keystore.
    unsafe {
        pg_sys::XLogBeginInsert();
        compat::xlog_register_data(&scope);
        compat::xlog_register_data(keystore_id);
        compat::xlog_register_data(batch);
        pg_sys::XLogInsert(RMGR_ID, OP_KEYS)
    }
}

/// Op code: nothing; the record is only large.
pub(crate) const OP_BARRIER: u8 = 0x20;

/// Inserts records of `size` zero bytes together, or a little more. Returns the end of the last.
pub(crate) fn insert_barrier(size: usize) -> u64 {
    const LARGEST: usize = 1 << 20;
    let zeros = vec![0; size.min(LARGEST)];
    let mut end = 0;
    for _ in 0..size.div_ceil(LARGEST).max(1) {
        // SAFETY: as insert_keys(); the size is far below XLogRecordMaxSize.
        end = unsafe {
            pg_sys::XLogBeginInsert();
            compat::xlog_register_data(&zeros);
            pg_sys::XLogInsert(RMGR_ID, OP_BARRIER)
        };
    }
    end
}

/// Makes WAL at least as long as `lsn`. Returns its end.
pub(crate) fn fill_up_to(lsn: u64) -> u64 {
    insert_barrier(lsn.saturating_sub(end()) as usize)
}

/// Where the next record will be.
pub(crate) fn end() -> u64 {
    // SAFETY: reads shared state; the caller is not in recovery.
    unsafe { pg_sys::GetXLogInsertRecPtr() }
}

/// Number of WALWriteLock (lwlocklist.h; lwlocknames.txt before 17), and its name.
const WAL_WRITE_LOCK: usize = 8;
const WAL_WRITE_LOCK_NAME: &CStr = c"WALWrite";

/// Whether the server numbers and sizes things as this module takes for granted.
pub(crate) fn check_layout() -> Result<(), String> {
    // SAFETY: a table look-up; the name is a static string of the server.
    unsafe {
        let name = pg_sys::GetLWLockIdentifier(pg_sys::PG_WAIT_LWLOCK, WAL_WRITE_LOCK as u16);
        if name.is_null() || CStr::from_ptr(name) != WAL_WRITE_LOCK_NAME {
            return Err("WALWriteLock is not where it should be".to_owned());
        }
    }
    // What `configure` was told; the server's own check of modules does not compare these.
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

/// Runs `f` with the address of the first WAL page at `behind` or after it that is not begun on disk.
/// No WAL is written meanwhile, so `f` must be short, and must not raise.
pub(crate) fn at_unwritten_page<R>(behind: u64, f: impl FnOnce(u64) -> R) -> R {
    // SAFETY: the lock's place is checked at start; as with any LWLock, the server releases it should
    // anything raise. GetXLogWriteRecPtr takes a spinlock at most.
    unsafe {
        let lock = &raw mut (*pg_sys::MainLWLockArray.add(WAL_WRITE_LOCK)).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let written = pg_sys::GetXLogWriteRecPtr();
        let result = f(written.max(behind).next_multiple_of(u64::from(pg_sys::XLOG_BLCKSZ)));
        pg_sys::LWLockRelease(lock);
        result
    }
}

/// Waits until the WAL up to `lsn` is durable.
pub(crate) fn flush(lsn: u64) {
    // SAFETY: any LSN that XLogInsert returned is valid here.
    unsafe { pg_sys::XLogFlush(lsn) }
}

/// Splits a record's payload into scope, keystore identity and batch.
pub(crate) fn split_payload(payload: &[u8]) -> Option<(u32, &[u8; 16], &[u8])> {
    let (scope, rest) = payload.split_first_chunk::<4>()?;
    let (keystore_id, batch) = rest.split_first_chunk::<16>()?;
    Some((u32::from_le_bytes(*scope), keystore_id, batch))
}
