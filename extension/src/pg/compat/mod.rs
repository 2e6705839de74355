//! All differences between PostgreSQL 15, 16, 17 and 18 that concern the crate.
//!
//! Names and signatures are those of the newest major; older majors are adapted to them here.

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

/// Further settings of background workers, from 17 on.
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub(crate) const NEWER_SETTINGS: &[(&CStr, &CStr)] = &[(c"transaction_timeout", c"0")];
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub(crate) const NEWER_SETTINGS: &[(&CStr, &CStr)] = &[];

/// Adds bytes to the WAL record under construction (`XLogRegisterData`).
///
/// # Safety
/// Between `XLogBeginInsert` and `XLogInsert`; `bytes` lives until then.
pub(crate) unsafe fn xlog_register_data(bytes: &[u8]) {
    // SAFETY: a record is under construction and the bytes live until it is inserted, as the caller
    // guarantees; the server only reads them. The caller checks length limits.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as i32);
        #[cfg(any(feature = "pg16", feature = "pg17"))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as u32);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast(), bytes.len() as u32);
    }
}

/// Type of ExecutorCheckPerms_hook: gets the range table and, from 16 on, a list of permissions.
#[cfg(feature = "pg15")]
pub(crate) type CheckPerms = unsafe extern "C-unwind" fn(*mut pg_sys::List, bool) -> bool;
/// Type of ExecutorCheckPerms_hook: gets the range table and, from 16 on, a list of permissions.
#[cfg(not(feature = "pg15"))]
pub(crate) type CheckPerms =
    unsafe extern "C-unwind" fn(*mut pg_sys::List, *mut pg_sys::List, bool) -> bool;

/// Defines a function of type [`CheckPerms`] that calls `$check` with the range table, then the
/// hook in `$previous`.
macro_rules! check_perms_hook {
    ($name:ident, $check:path, $previous:path) => {
        #[cfg(feature = "pg15")]
        unsafe extern "C-unwind" fn $name(range_table: *mut pg_sys::List, raise: bool) -> bool {
            // SAFETY: the server's own arguments, passed on unchanged.
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
            // SAFETY: the server's own arguments, passed on unchanged.
            unsafe {
                $check(range_table);
                let previous = $previous.get();
                previous.is_none_or(|next| next(range_table, permissions, raise))
            }
        }
    };
}
pub(crate) use check_perms_hook;
