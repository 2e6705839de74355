//! Key logs are made durable by checkpoints.
//!
//! A data key is in WAL before any page sealed under it is written to disk. So its record in the
//! keystore must be durable only when a checkpoint moves the redo pointer past that WAL. We request
//! this like md.c for relation files, with a sync request; its tag is not that of any relation.

use std::ffi::{c_char, c_int};

use pagevault_keystore::log::LogError;
use pgrx::pg_sys;

use super::forward::Forward;
use crate::keys::store::failures::SyncFailure;
use crate::keys::store::{persist, presence};
use crate::pg::compat;

/// `mdsyncfiletag`
pub(super) type SyncFileTag =
    unsafe extern "C-unwind" fn(*const pg_sys::FileTag, *mut c_char) -> c_int;

pub(super) static MDSYNCFILETAG: Forward<SyncFileTag> = Forward::unresolved();

/// Contract: called by ProcessSyncRequests (sync.c) in the checkpointer or in single-user mode, not
/// in a critical section; may raise errors: as after any, the checkpoint fails, and the next one
/// handles the request again (`sync_in_progress`). Returns 0, or -1 with errno set, if a sync has
/// failed: then the server retries, or stops as after any failed fsync. `path` has room for
/// `MAXPGPATH` bytes and is only used in messages, also after a success.
pub(super) unsafe extern "C-unwind" fn mdsyncfiletag(
    tag: *const pg_sys::FileTag,
    path: *mut c_char,
) -> c_int {
    // SAFETY: the server's own arguments, forwarded unchanged.
    unsafe {
        let Some(scope) = compat::keystore_of_tag(&*tag) else {
            return MDSYNCFILETAG.get()(tag, path);
        };
        pg_sys::panic::pgrx_extern_c_guard(|| {
            write_path(path, &persist::path_of(scope));
            match persist::settle(scope) {
                Ok(logged) => {
                    presence::note_has(scope, logged);
                    0
                }
                // The server would take it for a failed fsync, and stop.
                Err(SyncFailure::Refused(report)) => report.raise(),
                Err(SyncFailure::Unsettled(error)) => {
                    let cause = match error {
                        LogError::Unsettled { source, .. } => source.raw_os_error(),
                        _ => None,
                    };
                    *libc::__errno_location() = cause.unwrap_or(libc::EIO);
                    -1
                }
            }
        })
    }
}

/// # Safety
/// `path` has room for `MAXPGPATH` bytes.
unsafe fn write_path(path: *mut c_char, text: &str) {
    let length = text.len().min(pg_sys::MAXPGPATH as usize - 1);
    // SAFETY: the caller guarantees the size of the memory; one byte is left for the NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), path, length);
        *path.add(length) = 0;
    }
}
