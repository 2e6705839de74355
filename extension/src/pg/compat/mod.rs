//! Every difference between PostgreSQL 15, 16, 17 and 18 that the crate meets.
//!
//! The newest spelling wins; older majors are translated to it here and nowhere else.

mod buffers;
#[cfg(any(feature = "pg15", feature = "pg16"))]
mod eviction;
mod files;
mod process;
mod relation;
mod storage;

use std::ffi::CStr;

use pgrx::pg_sys;

pub(crate) use self::buffers::*;
pub(crate) use self::files::{
    Locator, SHARED_BACKEND, SmgrFile, database_path, keystore_of_tag, keystore_tag, rel_file,
    relation_path,
};
pub(crate) use self::process::*;
pub(crate) use self::relation::*;
pub(crate) use self::storage::*;

/// The major version this library is built for; the server refuses to load it into another.
pub(crate) const MAJOR: u32 = pg_sys::PG_VERSION_NUM / 10_000;

/// Settings that 17 and newer have besides, for background workers.
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub(crate) const NEWER_SETTINGS: &[(&CStr, &CStr)] = &[(c"transaction_timeout", c"0")];
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub(crate) const NEWER_SETTINGS: &[(&CStr, &CStr)] = &[];

/// Adds bytes to the WAL record under construction (`XLogRegisterData`).
///
/// # Safety
/// Between `XLogBeginInsert` and `XLogInsert`; `bytes` lives until then.
pub(crate) unsafe fn xlog_register_data(bytes: &[u8]) {
    // SAFETY: a record is being made and the bytes live until it is, as the caller says; the server
    // only reads them. Length limits are checked by the
    // caller.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as i32);
        #[cfg(any(feature = "pg16", feature = "pg17"))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as u32);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast(), bytes.len() as u32);
    }
}

/// The range table that ExecutorCheckPerms_hook gets to see, in 16 and later beside a list of
/// permissions.
#[cfg(feature = "pg15")]
pub(crate) type CheckPerms = unsafe extern "C-unwind" fn(*mut pg_sys::List, bool) -> bool;
/// The range table that ExecutorCheckPerms_hook gets to see, in 16 and later beside a list of
/// permissions.
#[cfg(not(feature = "pg15"))]
pub(crate) type CheckPerms =
    unsafe extern "C-unwind" fn(*mut pg_sys::List, *mut pg_sys::List, bool) -> bool;

/// Defines a function of type [`CheckPerms`] that calls `$check` with the range table, then the
/// hook that `$previous` holds.
macro_rules! check_perms_hook {
    ($name:ident, $check:path, $previous:path) => {
        #[cfg(feature = "pg15")]
        unsafe extern "C-unwind" fn $name(range_table: *mut pg_sys::List, raise: bool) -> bool {
            // SAFETY: the server's own arguments, passed on.
            unsafe {
                $check(range_table);
                $previous.get().is_none_or(|next| next(range_table, raise))
            }
        }
        #[cfg(not(feature = "pg15"))]
        unsafe extern "C-unwind" fn $name(
            range_table: *mut pg_sys::List,
            permissions: *mut pg_sys::List,
            raise: bool,
        ) -> bool {
            // SAFETY: the server's own arguments, passed on.
            unsafe {
                $check(range_table);
                let previous = $previous.get();
                previous.is_none_or(|next| next(range_table, permissions, raise))
            }
        }
    };
}
pub(crate) use check_perms_hook;
