//! Reading and writing from any byte to any other.

use libc::ssize_t;
use pagevault_keystore::wal_segments;

use super::fault::Fault;
use super::{PAGE, SCRATCH, Scratch};
use crate::hooks::files::File;
use crate::keys::usage::wal::ServerKeys;

/// `pread` of a range, by way of the pages that cover it.
///
/// # Safety
/// `to` has room for `length` bytes.
pub(super) unsafe fn read_range(
    file: File,
    to: *mut u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: the caller says that there is as much room; it is apart from our memory.
    let to = unsafe { std::slice::from_raw_parts_mut(to, length) };
    SCRATCH.with(|Scratch(scratch)| wal_segments::read(&ServerKeys, &file, scratch, PAGE, to, at))
}

/// `pwrite` of a range. A page that is there already keeps its key.
///
/// # Safety
/// `from` holds `length` bytes, and nobody else writes WAL.
pub(super) unsafe fn write_range(
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: the caller's memory, which holds as much as it says; WAL that was received is not
    // changed any more.
    let from = unsafe { std::slice::from_raw_parts(from, length) };
    SCRATCH
        .with(|Scratch(scratch)| wal_segments::write(&ServerKeys, &file, scratch, PAGE, from, at))
}
