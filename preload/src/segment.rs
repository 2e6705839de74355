//! Reading and writing any byte range of sealed segments.

use std::cell::UnsafeCell;
use std::ops::Range;

use libc::{off_t, ssize_t};
use pagevault_cipher::{Lsn, wal};
use pagevault_keystore::briefing::Role;
use pagevault_keystore::wal_pages::{Cause, Fault};
use pagevault_keystore::wal_segments;

use crate::begin::{NoKey, Work};
use crate::files::Segment;
use crate::{raw, say};

/// `XLOG_BLCKSZ` in all known packages of PostgreSQL.
const PAGE: usize = 8192;
/// Largest number of pages transferred at once.
const RUN: usize = 64;
/// Smallest segment size. Where the size is unknown, the address is known modulo this.
const SMALLEST: u64 = 1 << 20;
/// `xlp_seg_size` of `XLogLongPageHeaderData` (src/include/access/xlog_internal.h).
const SEGMENT_SIZE: Range<usize> = 32..36;

/// Private copies of pages, aligned like files.
#[repr(C, align(4096))]
struct Scratch(UnsafeCell<[u8; RUN * PAGE]>);

// SAFETY: PostgreSQL's programs transfer segments in one thread (that of `pg_basebackup` for WAL is
// a process).
unsafe impl Sync for Scratch {}

static SCRATCH: Scratch = Scratch(UnsafeCell::new([0; RUN * PAGE]));

impl wal_segments::Segment for Segment {
    fn pread(&self, to: &mut [u8], at: u64) -> isize {
        // SAFETY: a slice has room for its length.
        unsafe { raw::pread(self.fd, to.as_mut_ptr(), to.len(), at as off_t) }
    }

    fn pwrite(&self, from: &[u8], at: u64) -> isize {
        // SAFETY: a slice holds its length.
        unsafe { raw::pwrite(self.fd, from.as_ptr(), from.len(), at as off_t) }
    }

    fn belongs(&self, address: Lsn, at: u64) -> bool {
        match self.base() {
            Some(base) => address == base + at,
            None => address.offset_in(SMALLEST) == at % SMALLEST,
        }
    }

    fn is_left_over(&self, timeline: u32, address: Lsn) -> bool {
        self.has_left_over(timeline, address)
    }

    /// The address of page `at`. While the file does not have its full size, the first page gives
    /// it.
    fn address(&self, at: u64, page: &[u8], offset: usize, bytes: &[u8]) -> Lsn {
        self.base().map_or_else(
            || {
                let told =
                    if offset == 0 && bytes.len() >= wal::HEADER_SIZE { bytes } else { page };
                wal::address_of(told).unwrap_or(Lsn::INVALID)
            },
            |base| base + at,
        )
    }
}

/// `pread` of a segment.
///
/// # Safety
/// `to` has room for `length` bytes.
pub(crate) unsafe fn pread(
    work: &Work,
    segment: Segment,
    to: *mut u8,
    length: usize,
    at: off_t,
) -> ssize_t {
    let Ok(at) = u64::try_from(at) else { return fail(libc::EINVAL) };
    // SAFETY: the caller promises that much memory, and nothing else uses the scratch memory,
    // because there is one thread.
    let (to, scratch) =
        unsafe { (std::slice::from_raw_parts_mut(to, length), &mut *SCRATCH.0.get()) };
    match wal_segments::read(work, &segment, scratch, PAGE, to, at) {
        Ok(count) => {
            let read = usize::try_from(count).unwrap_or(0);
            if at == 0 && matches!(work.role, Role::Read) {
                tell_size(segment, &mut to[..read]);
            }
            count
        }
        Err(fault) => refuse(&fault),
    }
}

/// A segment that was renamed for later use begins with a page of its former use, which stays
/// sealed. `pg_waldump` takes the size of all segments from the first one that it finds
/// (`search_directory`, pg_waldump.c): it is put where that page would say it in plaintext.
fn tell_size(segment: Segment, first: &mut [u8]) {
    let mut header = [0; wal::HEADER_SIZE];
    // SAFETY: the memory has room for as many bytes.
    let got = unsafe { raw::pread(segment.fd, header.as_mut_ptr(), header.len(), 0) };
    if got != header.len() as ssize_t || wal::mark_of(&header).is_none() {
        return;
    }
    let (address, timeline) = (wal::address_of(&header), wal::timeline_of(&header));
    let (Some(base), Some(address), Some(timeline)) = (segment.base(), address, timeline) else {
        return;
    };
    let is_sealed = address != base || segment.has_left_over(timeline, address);
    let place = first.get_mut(SEGMENT_SIZE);
    if let (true, Some(place), Ok(size)) =
        (is_sealed, place, u32::try_from(raw::length(segment.fd)))
    {
        place.copy_from_slice(&size.to_ne_bytes());
    }
}

/// `pwrite` to a segment.
///
/// # Safety
/// `from` holds `length` bytes that can be read.
pub(crate) unsafe fn pwrite(
    work: &Work,
    segment: Segment,
    from: *const u8,
    length: usize,
    at: off_t,
) -> ssize_t {
    let Ok(at) = u64::try_from(at) else { return fail(libc::EINVAL) };
    // SAFETY: the caller promises that much memory, and nothing else uses the scratch memory,
    // because there is one thread.
    let (bytes, scratch) =
        unsafe { (std::slice::from_raw_parts(from, length), &mut *SCRATCH.0.get()) };
    // New segments are first filled with zeros, which stay zeros and give the file its size.
    if at >= raw::length(segment.fd) && wal::is_zero(bytes) {
        // SAFETY: the caller says that as many bytes are there.
        return unsafe { raw::pwrite(segment.fd, from, length, at as off_t) };
    }
    wal_segments::write(work, &segment, scratch, PAGE, bytes, at)
        .unwrap_or_else(|fault| refuse(&fault))
}

fn fail(errno: i32) -> ssize_t {
    raw::set_errno(errno);
    -1
}

#[cold]
fn refuse(fault: &Fault<NoKey>) -> ssize_t {
    let Fault { address, version, cause } = fault;
    say(&match cause {
        Cause::Key(NoKey) => format!(
            "no WAL key of version {version} for the WAL page at {address}: the keystore does not hold it. \
             Name a newer one with --keystore."
        ),
        Cause::OtherKey => format!(
            "wrong WAL key of version {version} for the WAL page at {address}: the keystore is of another \
             history, before or after a failover or a restore, or the page is damaged. Name the keystore that \
             it was written with by --keystore."
        ),
    });
    fail(libc::ENOKEY)
}
