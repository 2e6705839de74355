//! Relation files as the file system has them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::ForkNumber;

use super::compat::relation_path;
use super::report::{Report, Result};

/// False if a file is gone: keys of dropped relations are kept, and need not come along. One that
/// cannot be looked for may be there.
pub(crate) fn may_exist(file: RelFile) -> bool {
    exists(file).unwrap_or(true)
}

/// Whether there is such a file.
///
/// # Errors
/// When that cannot be seen: a directory may not be entered, a disk or a server of files does not
/// answer.
pub(crate) fn exists(file: RelFile) -> Result<bool> {
    let path = relation_path(file, ForkNumber::MAIN_FORKNUM);
    Path::new(&path).try_exists().map_err(|error| {
        Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not look for relation file \"{path}\": {error}"),
        )
        .detail("So it is not known whether it is gone. Nothing was changed.")
    })
}

/// Has the kernel read a part of a file early.
pub(crate) fn will_be_read(file: &File, offset: i64, length: i64) {
    // SAFETY: advice about a descriptor that is open; whatever it answers changes nothing.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_WILLNEED) };
}
