//! Opening what was read.

use libc::{off_t, ssize_t};
use pagevault_cipher::wal::{self, Mark};

use super::fault::Fault;
use super::{PAGE, RUN, SCRATCH, Scratch, UNKNOWN_ADDRESS, page_end, page_start};
use crate::hooks::files::{File, raw};
use crate::keys::wal as keys;
use crate::page_io::Cause;
use crate::pg::process;
use crate::stats::{self, Kind, Work};

/// Reads a range by way of the pages that cover it.
///
/// A page may be written again while it is read. What was asked for is the same before and after, but
/// for what stands with new bytes in one block of 16: the kernel must not copy half of that. It copies
/// no less than 16 bytes at once where source and target are aligned, as file and scratch memory are,
/// and the reader's buffer need not be.
///
/// # Safety
/// `to` has room for `length` bytes.
pub(super) unsafe fn read(
    file: File,
    to: *mut u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: by contract; the scratch memory has room for a run.
    unsafe {
        SCRATCH.with(|Scratch(scratch)| {
            let end = at + length as u64;
            let mut next = at;
            while next < end {
                let first = page_start(next);
                let run = (page_end(end) - first).min((RUN * PAGE) as u64) as usize;
                let got = raw::pread(file.fd, scratch.as_mut_ptr().cast(), run, first as off_t);
                if got < 0 {
                    return Ok(if next > at { (next - at) as ssize_t } else { got });
                }
                let whole = got as usize / PAGE * PAGE;
                open(&mut scratch[..whole], file, first)?;
                let stop = end.min(first + whole as u64);
                if stop <= next {
                    break;
                }
                let bytes = &scratch[(next - first) as usize..(stop - first) as usize];
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    to.add((next - at) as usize),
                    bytes.len(),
                );
                next = stop;
                if whole < run {
                    break;
                }
            }
            Ok((next - at) as ssize_t)
        })
    }
}

/// Opens pages that were read from `at` on.
fn open(pages: &mut [u8], file: File, at: u64) -> Result<(), Fault> {
    for (page, at) in pages.chunks_exact_mut(PAGE).zip((at..).step_by(PAGE)) {
        if let Some(mark) = wal::mark_of(page) {
            open_sealed(page, mark, file, at)?;
        }
    }
    Ok(())
}

fn open_sealed(page: &mut [u8], mark: Mark, file: File, at: u64) -> Result<(), Fault> {
    let address = wal::address_of(page).unwrap_or(0);
    if !belongs(file, at, address) {
        // Left from an earlier use of the segment. PostgreSQL refuses it by its address.
        wal::clear_mark(page);
        return Ok(());
    }
    let generation = keys::generation_of(mark, address);
    open_under(page, generation).map_err(|cause| Fault { address, generation, cause })
}

/// Opens a page under the key of a generation.
pub(super) fn open_under(page: &mut [u8], generation: u32) -> Result<(), Cause> {
    let opened = keys::with_key(generation, |key| {
        let work = Work::begin();
        wal::open(page, key);
        work.opened(Kind::Wal, 1, page.len() as u64);
    });
    opened.inspect_err(|_| stats::count_failure(Kind::Wal))
}

/// Whether a page of this address belongs at this place.
fn belongs(file: File, at: u64, address: u64) -> bool {
    match file.tag.0[0] {
        UNKNOWN_ADDRESS => address % process::wal_segment_size() == at,
        base => address == base + at,
    }
}
