//! Asking the next checkpoint for something.

use pagevault_keystore::Scope;
use pgrx::pg_sys;

use super::compat;

/// Has the next checkpoint make the log of `scope` durable. Call before the WAL record is inserted,
/// so that a checkpoint whose redo point lies behind that record knows of it.
pub(crate) fn request_sync(scope: Scope) {
    let tag = compat::keystore_tag(scope);
    // SAFETY: the tag is copied. With retries this waits for room in the checkpointer's queue
    // rather than fail; without a checkpointer it is remembered here.
    unsafe {
        pg_sys::RegisterSyncRequest(&raw const tag, pg_sys::SyncRequestType::SYNC_REQUEST, true)
    };
}
