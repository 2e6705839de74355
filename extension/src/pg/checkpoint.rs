//! Sync requests to the checkpointer.

use pagevault_keystore::Scope;
use pgrx::pg_sys;

use super::compat;

/// Makes the next checkpoint sync the key log of `scope`. Call before the WAL record is inserted,
/// so that a checkpoint whose redo pointer is after that record has the request.
pub(crate) fn request_sync(scope: Scope) {
    let tag = compat::keystore_tag(scope);
    // SAFETY: the tag is copied. With `retryOnError` the call waits for room in the checkpointer's
    // queue instead of failing; without a checkpointer, this process keeps the request.
    unsafe {
        pg_sys::RegisterSyncRequest(&raw const tag, pg_sys::SyncRequestType::SYNC_REQUEST, true)
    };
}
