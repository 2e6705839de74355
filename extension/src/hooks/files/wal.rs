//! WAL segments in `pg_wal/`.

use std::ffi::{CStr, c_void};

use libc::{off_t, ssize_t};

use super::{File, Handler, Tag, raw};

const DIRECTORY: &[u8] = b"pg_wal/";

/// If the path is that of a WAL segment, as `XLogFilePath` writes it.
#[inline]
pub(super) fn segment(path: &CStr) -> Option<Tag> {
    let name = path.to_bytes().strip_prefix(DIRECTORY)?;
    is_segment_name(name).then_some(Tag::EMPTY)
}

/// 24 hexadecimal digits: timeline, and two words of the segment's number.
fn is_segment_name(name: &[u8]) -> bool {
    name.len() == 24 && name.iter().all(|c| c.is_ascii_digit() || (b'A'..=b'F').contains(c))
}

/// A WAL segment.
pub(super) struct Segment;

impl Handler for Segment {
    unsafe fn pread(&self, file: File, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract.
        unsafe { raw::pread(file.fd, to, length, at) }
    }

    unsafe fn pwrite(&self, file: File, from: *const c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract.
        unsafe { raw::pwrite(file.fd, from, length, at) }
    }
}
