//! Sync requests to the checkpointer, syncs without it, and delaying checkpoints.

use std::sync::atomic::{Ordering, fence};

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

/// Syncs everything in the data directory, as PostgreSQL does after a crash (fd.c, 15 to 19). What
/// cannot be synced is logged.
pub(crate) fn sync_data_directory() {
    // SAFETY: not in a critical section; opens and syncs files, like the startup process itself.
    unsafe { pg_sys::SyncDataDirectory() }
}

/// While this lives, no checkpoint writes its record: none that begins meanwhile, and none that
/// has begun, unless it has passed its last look at these flags (`CreateCheckPoint`, xlog.c). In a
/// transaction. No shared buffer may be changed meanwhile, because `MarkBufferDirtyHint` (bufmgr.c)
/// sets and clears the same flag.
pub(crate) struct CheckpointDelay(());

const DELAY: i32 = (pg_sys::DELAY_CHKPT_START | pg_sys::DELAY_CHKPT_COMPLETE) as i32;

impl CheckpointDelay {
    pub(crate) fn begin() -> Self {
        // SAFETY: MyProc is set in every process that runs transactions; only this process changes
        // its flags.
        unsafe { (*pg_sys::MyProc).delayChkptFlags |= DELAY };
        fence(Ordering::SeqCst);
        Self(())
    }
}

impl Drop for CheckpointDelay {
    fn drop(&mut self) {
        fence(Ordering::SeqCst);
        // SAFETY: as in `begin`. The end of a transaction clears the flags itself.
        unsafe { (*pg_sys::MyProc).delayChkptFlags &= !DELAY };
    }
}
