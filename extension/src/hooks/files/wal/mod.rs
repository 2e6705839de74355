//! WAL segments in `pg_wal/`: pages are sealed when they are written and opened when they are read.
//!
//! Callers:
//!
//! | call | by |
//! |---|---|
//! | `pwrite` of whole pages | XLogWrite, in a critical section, under WALWriteLock |
//! | `pwrite` of any range | the WAL receiver, in no critical section |
//! | `pread` of one page | the startup process (XLogPageRead) |
//! | `pread` of any range | WALRead: WAL senders, logical decoding, two-phase commit, the |
//! | | summarizer, pg_walinspect |
//! | `pread`, raw | a WAL sender that sends a base backup |
//! | `read` | XLogFileCopy in the startup process; raw for others, which archive segments |
//! | `write` to `xlogtemp` | XLogFileCopy |
//!
//! The zeros that fill a new segment are also written to `xlogtemp`, by `pwrite` and `pwritev`.

mod fault;
mod history;
mod ranges;
mod received;
mod writing;

use std::ffi::{CStr, c_void};

use libc::{c_int, off_t, ssize_t};
use pagevault_cipher::Lsn;
use pagevault_keystore::wal_segments;
use pagevault_keystore::wal_timelines;
use pgrx::pg_sys;

use self::fault::{errno, raise};
use self::ranges::{read_range, write_range};
pub(crate) use self::received::seal_backup;
use self::writing::{write_copied, write_pages};
use super::{File, Handler, Tag, at_position, raw};
use crate::hooks::calls_seen::{self, Call};
use crate::keys::usage::wal as keys;
use crate::pg::process::{self, ProcessLocal};

const DIRECTORY: &[u8] = b"pg_wal/";
const PAGE: usize = pg_sys::XLOG_BLCKSZ as usize;
const _: () = assert!(PAGE.is_multiple_of(16) && PAGE <= 1 << 16);

/// Maximum number of pages processed at once; longer ranges are split.
const RUN: usize = 64;

/// Private copies of pages. Aligned for direct I/O (`PG_IO_ALIGN_SIZE`).
#[repr(C, align(4096))]
struct Scratch([u8; RUN * PAGE]);

static SCRATCH: ProcessLocal<Scratch> = ProcessLocal::new(Scratch([0; RUN * PAGE]));

/// The tag of a WAL segment: its first address and its timeline. `None` if the path is not a
/// segment's (`XLogFilePath`). A segment fetched from the archive first has a fixed name, which
/// contains neither.
#[inline]
pub(super) fn segment(path: &CStr) -> Option<Tag> {
    let name = path.to_bytes().strip_prefix(DIRECTORY)?;
    if name == b"RECOVERYXLOG" {
        return Some(Tag([UNKNOWN_ADDRESS, UNKNOWN_TIMELINE]));
    }
    let name = wal_segments::parse_name(name)?;
    let Lsn(base) = name.start(process::wal_segment_size());
    Some(Tag([base, u64::from(name.timeline)]))
}

/// Whether the path is that of a file that will become a segment.
#[inline]
pub(super) fn is_new_segment(path: &CStr) -> bool {
    path.to_bytes().strip_prefix(DIRECTORY).is_some_and(|name| name.starts_with(b"xlogtemp."))
}

const UNKNOWN_ADDRESS: u64 = u64::MAX;
/// Zero: no page is of an older timeline.
const UNKNOWN_TIMELINE: u64 = 0;

/// The address of a segment's first byte.
fn base_of(file: File) -> Lsn {
    Lsn(file.tag.0[0])
}

/// Reads and writes of ranges.
impl wal_segments::Segment for File {
    fn pread(&self, to: &mut [u8], at: u64) -> isize {
        // SAFETY: a slice has room for its length.
        unsafe { raw::pread(self.fd, to.as_mut_ptr().cast(), to.len(), at as off_t) }
    }

    fn pwrite(&self, from: &[u8], at: u64) -> isize {
        // SAFETY: a slice holds its length.
        unsafe { raw::pwrite(self.fd, from.as_ptr().cast(), from.len(), at as off_t) }
    }

    fn belongs(&self, address: Lsn, at: u64) -> bool {
        match self.tag.0[0] {
            UNKNOWN_ADDRESS => address.offset_in(process::wal_segment_size()) == at,
            base => address == Lsn(base) + at,
        }
    }

    fn is_left_over(&self, timeline: u32, address: Lsn) -> bool {
        let own = self.tag.0[1] as u32;
        wal_timelines::is_left_over(timeline, address, own, || history::begin_of_timeline(own))
    }

    fn address(&self, at: u64, _page: &[u8], _offset: usize, _bytes: &[u8]) -> Lsn {
        base_of(*self) + at
    }
}

/// A WAL segment.
pub(super) struct Segment;

impl Handler for Segment {
    unsafe fn pread(&self, file: File, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: the caller's memory has room for `length` bytes, as the trait requires; it is
        // passed on with that length.
        unsafe {
            let recovers = process::is_startup_process();
            if process::sends_base_backup() || (keys::active().is_none() && !recovers) {
                return raw::pread(file.fd, to, length, at);
            }
            match read_range(file, to.cast(), length, at as u64) {
                Ok(done) => done,
                // If recovery took a page that cannot be opened for the end of WAL, transactions
                // would be lost.
                Err(fault) if recovers => raise(fault),
                Err(_) => errno(),
            }
        }
    }

    unsafe fn pwrite(&self, file: File, from: *const c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: the caller's memory contains `length` bytes, as the trait requires; it is passed
        // on with that length. A fault is raised in a WAL receiver only, outside critical sections,
        // and this frame has no destructors.
        unsafe {
            calls_seen::note(Call::WriteWal);
            let is_placed = file.tag.0[0] != UNKNOWN_ADDRESS;
            let Some(keys) = keys::active().filter(|_| is_placed) else {
                return raw::pwrite(file.fd, from, length, at);
            };
            let receives = process::is_wal_receiver();
            let whole = is_whole(at as u64, length) && !receives;
            let done = if whole {
                write_pages(keys, file, from.cast(), length, at as u64)
            } else {
                write_range(file, from.cast(), length, at as u64)
            };
            match done {
                Ok(done) => done,
                // It is in no critical section (XLogWalRcvWrite, walreceiver.c), but takes a failed
                // write for the end of the server.
                Err(fault) if receives => raise(fault),
                Err(_) => errno(),
            }
        }
    }

    unsafe fn read(&self, file: File, to: *mut c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory has room for `length` bytes, as the trait requires; it is
        // passed on with that length.
        unsafe {
            if process::is_startup_process() {
                return at_position(file.fd, |at| self.pread(file, to, length, at));
            }
            raw::read(file.fd, to, length)
        }
    }
}

/// A file that will become a segment: filled with zeros or, at the beginning of a timeline, with
/// the first part of another segment.
pub(super) struct NewSegment;

impl Handler for NewSegment {
    unsafe fn pread(&self, file: File, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: the caller's memory, passed on with its length.
        unsafe { raw::pread(file.fd, to, length, at) }
    }

    unsafe fn pwrite(&self, file: File, from: *const c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: the caller's memory, passed on with its length. Zeros are not sealed.
        unsafe { raw::pwrite(file.fd, from, length, at) }
    }

    unsafe fn pwritev(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        at: off_t,
    ) -> ssize_t {
        // SAFETY: the caller's memory, passed on with its length. Zeros are not sealed.
        unsafe { raw::pwritev(file.fd, vector, count, at) }
    }

    /// XLogFileCopy ends the copy at any byte. It copies plaintext, so the end is cut before
    /// sealing and damages no record.
    unsafe fn write(&self, file: File, from: *const c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory contains `length` bytes, as the trait requires; it is passed
        // on with that length.
        unsafe {
            let Some(keys) = keys::active().filter(|_| length.is_multiple_of(PAGE)) else {
                return raw::write(file.fd, from, length);
            };
            at_position(file.fd, |at| {
                write_copied(keys, file, from.cast(), length, at as u64).unwrap_or_else(|_| errno())
            })
        }
    }
}

fn is_whole(at: u64, length: usize) -> bool {
    at.is_multiple_of(PAGE as u64) && length.is_multiple_of(PAGE)
}
