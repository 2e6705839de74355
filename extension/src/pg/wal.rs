//! Writing our WAL records.

use pgrx::pg_sys;

use super::compat;

/// Resource manager number. Numbers from 128 on are for extensions, which reserve theirs at
/// <https://wiki.postgresql.org/wiki/CustomWALResourceManagers>; ours is to be entered there before the
/// first release. The server refuses to start if another extension took the same.
pub(crate) const RMGR_ID: u8 = 161;

/// Op code of the one record we write: keystore records added.
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

/// Where the next record will be inserted.
pub(crate) fn insert_position() -> u64 {
    // SAFETY: reads shared state; not in recovery.
    unsafe { pg_sys::GetXLogInsertRecPtr() }
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
