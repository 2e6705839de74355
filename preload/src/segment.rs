//! Reading and writing sealed segments, from any byte to any other.

use libc::{off_t, ssize_t};
use pagevault_cipher::wal;
use pagevault_keystore::wal_pages::{self, Fault};

use crate::begin::{NoKey, Work};
use crate::files::Segment;
use crate::{raw, say};

/// `XLOG_BLCKSZ` of all packages there are.
const PAGE: usize = 8192;
/// Most pages in one go.
const RUN: usize = 16;
/// Smallest segment there is: what is known of an address without the segment's size.
const SMALLEST: u64 = 1 << 20;

/// Aligned as files are, so that the kernel copies no less than a block of 16 bytes at once: the segment may be
/// written meanwhile.
#[repr(C, align(4096))]
struct Scratch([u8; RUN * PAGE]);

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
    let base = segment.base();
    let mut scratch = Scratch([0; RUN * PAGE]);
    let end = at + length as u64;
    let mut next = at;
    while next < end {
        let first = page_start(next);
        let run = (page_end(end) - first).min((RUN * PAGE) as u64) as usize;
        // SAFETY: a run fits.
        let got = unsafe { raw::pread(segment.fd, scratch.0.as_mut_ptr(), run, first as off_t) };
        if got < 0 {
            return if next > at { (next - at) as ssize_t } else { got };
        }
        let got = got as usize;
        for (page, start) in
            scratch.0[..got / PAGE * PAGE].chunks_exact_mut(PAGE).zip((first..).step_by(PAGE))
        {
            let belongs = |address: u64| match base {
                Some(base) => address == base + start,
                None => address % SMALLEST == start % SMALLEST,
            };
            if let Err(fault) = wal_pages::open(work, page, belongs) {
                return refuse(&fault);
            }
        }
        // Of a page of which the end is missing nothing is opened: a sealed one is told from that it ends there.
        let usable =
            if got < run { first + (got / PAGE * PAGE) as u64 } else { first + got as u64 };
        let stop = end.min(usable);
        if stop <= next {
            break;
        }
        let bytes = &scratch.0[(next - first) as usize..(stop - first) as usize];
        // SAFETY: by contract; memory of ours and of the caller's do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                to.add((next - at) as usize),
                bytes.len(),
            );
        }
        next = stop;
        if got < run {
            break;
        }
    }
    (next - at) as ssize_t
}

/// `pwrite` to a segment: reads the pages, completes them, seals and writes them again.
///
/// # Safety
/// `from` holds `length` bytes.
pub(crate) unsafe fn pwrite(
    work: &Work,
    segment: Segment,
    from: *const u8,
    length: usize,
    at: off_t,
) -> ssize_t {
    let Ok(at) = u64::try_from(at) else { return fail(libc::EINVAL) };
    // SAFETY: by contract.
    let bytes = unsafe { std::slice::from_raw_parts(from, length) };
    // New segments are filled with zeros first, which stay zeros, and give them their size.
    if at >= raw::length(segment.fd) && wal::is_zero(bytes) {
        // SAFETY: by contract.
        return unsafe { raw::pwrite(segment.fd, from, length, at as off_t) };
    }
    let base = segment.base();
    let mut scratch = Scratch([0; RUN * PAGE]);
    let end = at + length as u64;
    let mut next = at;
    while next < end {
        let first = page_start(next);
        let run = (page_end(end) - first).min((RUN * PAGE) as u64) as usize;
        let pages = &mut scratch.0[..run];
        // SAFETY: a run fits.
        let got = unsafe { raw::pread(segment.fd, pages.as_mut_ptr(), run, first as off_t) };
        if got < 0 {
            return got;
        }
        pages[got as usize..].fill(0);
        let stop = end.min(first + run as u64);
        for (page, start) in pages.chunks_exact_mut(PAGE).zip((first..).step_by(PAGE)) {
            let begin = next.max(start);
            let part = &bytes[(begin - at) as usize..(stop.min(start + PAGE as u64) - at) as usize];
            // The size of a segment that does not have it yet is told by its first page.
            let address =
                base.map_or_else(|| told_address(page, part, begin - start), |base| base + start);
            let done = wal_pages::complete(work, page, address, (begin - start) as usize, part);
            if let Err(fault) = done {
                return refuse(&fault);
            }
        }
        let mut done = 0;
        while done < run {
            // SAFETY: the bytes are there.
            let wrote = unsafe {
                raw::pwrite(
                    segment.fd,
                    pages[done..].as_ptr(),
                    run - done,
                    (first as usize + done) as off_t,
                )
            };
            if wrote <= 0 {
                // What is there of these pages is not known: to be written again, or given up.
                return if next > at { (next - at) as ssize_t } else { wrote };
            }
            done += wrote as usize;
        }
        next = stop;
    }
    length as ssize_t
}

/// The address that a page says it has, by what is there or what is written over it.
fn told_address(page: &[u8], part: &[u8], offset: u64) -> u64 {
    let told = if offset == 0 && part.len() >= wal::HEADER_SIZE { part } else { page };
    wal::address_of(told).unwrap_or(0)
}

fn page_start(at: u64) -> u64 {
    at - at % PAGE as u64
}

fn page_end(at: u64) -> u64 {
    at.next_multiple_of(PAGE as u64)
}

fn fail(errno: i32) -> ssize_t {
    raw::set_errno(errno);
    -1
}

#[cold]
fn refuse(fault: &Fault<NoKey>) -> ssize_t {
    let Fault { address, generation, .. } = fault;
    say(&format!(
        "no key of generation {generation} for the WAL page at {:X}/{:X}: the keystore does not hold it. \
         Name a newer one with --keystore.",
        address >> 32,
        address & 0xFFFF_FFFF
    ));
    fail(libc::ENOKEY)
}
