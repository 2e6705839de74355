//! Reading and writing ranges of any start and length.

use libc::ssize_t;
use pagevault_keystore::wal_segments;

use super::fault::Fault;
use super::{PAGE, SCRATCH, Scratch};
use crate::hooks::files::File;
use crate::keys::usage::wal::ServerKeys;

/// `pread` of a range, through the pages that cover it.
///
/// # Safety
/// `to` has room for `length` bytes.
pub(super) unsafe fn read_range(
    file: File,
    to: *mut u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: the caller guarantees the memory; it does not overlap ours.
    let to = unsafe { std::slice::from_raw_parts_mut(to, length) };
    SCRATCH.with(|Scratch(scratch)| wal_segments::read(&ServerKeys, &file, scratch, PAGE, to, at))
}

/// `pwrite` of a range. A page that already exists keeps its key.
///
/// # Safety
/// `from` contains `length` bytes, and no other process writes WAL.
pub(super) unsafe fn write_range(
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: the caller's memory, of the length that it guarantees; received WAL no longer
    // changes.
    let from = unsafe { std::slice::from_raw_parts(from, length) };
    SCRATCH
        .with(|Scratch(scratch)| wal_segments::write(&ServerKeys, &file, scratch, PAGE, from, at))
}
