//! All differences between PostgreSQL 15, 16, 17, 18 and 19 that concern the crate.
//!
//! Names and signatures are those of the newest major; older majors are adapted to them here.

mod buffers;
#[cfg(any(feature = "pg15", feature = "pg16"))]
mod eviction;
mod files;
mod process;
mod relation;
mod statement;
mod storage;

use std::ffi::CStr;

use pgrx::pg_sys;

pub(crate) use self::buffers::*;
pub(crate) use self::files::{
    Locator, SHARED_BACKEND, SmgrFile, database_path, file_of_block, keystore_of_tag, keystore_tag,
    locator, rel_file, relation_path,
};
pub(crate) use self::process::*;
pub(crate) use self::relation::*;
pub(crate) use self::statement::*;
pub(crate) use self::storage::*;

/// The major version this library is built for; the server refuses to load it into another.
pub(crate) const MAJOR: u32 = pg_sys::PG_VERSION_NUM / 10_000;

/// The release whose headers this library was built with.
pub(crate) const BUILT_FOR: &CStr = pg_sys::PG_VERSION;

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
