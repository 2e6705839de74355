//! The files that this process runs, and as whom.

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use pgrx::pg_sys;

/// The server's own binary.
pub(crate) fn server_binary() -> PathBuf {
    // SAFETY: my_exec_path is a NUL-terminated array set at the very start of main().
    let path = unsafe { CStr::from_ptr((&raw const pg_sys::my_exec_path).cast()) };
    PathBuf::from(OsStr::from_bytes(path.to_bytes()))
}

/// The file of this library, if it was loaded by an absolute path, as PostgreSQL does.
pub(crate) fn own_library() -> Option<PathBuf> {
    // SAFETY: Dl_info is a plain structure of pointers and null is a valid value for each; dladdr
    // takes any address. The name is a C string that lives as long as the library is loaded, and is
    // copied at once.
    let path = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(own_library as *const c_void, &raw mut info);
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        PathBuf::from(OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()))
    };
    path.is_absolute().then_some(path)
}

/// The effective user ID of this process.
pub(crate) fn user() -> u32 {
    // SAFETY: a system call without arguments, which cannot fail.
    unsafe { libc::geteuid() }
}
