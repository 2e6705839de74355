//! The keystore rides the checkpoint.
//!
//! A data key is in WAL before any page is sealed under it reaches the disk, so its record in the
//! keystore need not be durable at once: only when a checkpoint moves the redo point past it. We
//! ask for that as md.c does for relation files, with a sync request; its tag names no relation
//! that can exist.

use std::ffi::{c_char, c_int};

use pgrx::pg_sys;

use super::forward::Forward;
use crate::keys::store::persist;
use crate::pg::compat;

/// `mdsyncfiletag`
pub(super) type SyncFileTag =
    unsafe extern "C-unwind" fn(*const pg_sys::FileTag, *mut c_char) -> c_int;

pub(super) static MDSYNCFILETAG: Forward<SyncFileTag> = Forward::unresolved();

/// Contract: called by ProcessSyncRequests (sync.c) in the checkpointer, or in a standalone
/// backend, not in a critical section. Returns 0, or -1 with errno set; `path` has room for
/// `MAXPGPATH` bytes and is only for messages. The server retries, or stops as for any failed
/// fsync.
pub(super) unsafe extern "C-unwind" fn mdsyncfiletag(
    tag: *const pg_sys::FileTag,
    path: *mut c_char,
) -> c_int {
    // SAFETY: the server's own arguments, forwarded as received.
    unsafe {
        let Some(scope) = compat::keystore_of_tag(&*tag) else {
            return MDSYNCFILETAG.get()(tag, path);
        };
        pg_sys::panic::pgrx_extern_c_guard(|| match persist::settle(scope) {
            Ok(()) => 0,
            Err(failure) => {
                write_path(path, &failure.file);
                *libc::__errno_location() = failure.errno;
                -1
            }
        })
    }
}

/// # Safety
/// `path` has room for `MAXPGPATH` bytes.
unsafe fn write_path(path: *mut c_char, text: &str) {
    let length = text.len().min(pg_sys::MAXPGPATH as usize - 1);
    // SAFETY: the caller says how much room there is; one byte of it is left for the NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), path, length);
        *path.add(length) = 0;
    }
}
