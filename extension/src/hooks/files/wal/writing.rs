//! Sealing what is written.

use libc::{c_int, off_t, ssize_t};
use pagevault_cipher::wal;
use pagevault_keystore::wal_pages;

use super::fault::Fault;
use super::{PAGE, RUN, SCRATCH, Scratch, page_end, page_start};
use crate::hooks::files::{File, raw};
use crate::keys::wal::{self as keys, ServerKeys};

/// Seals whole pages from WAL buffers, where others may add records meanwhile: each page is read
/// once, into the scratch copy.
///
/// # Safety
/// `from` holds `length` bytes, and nobody else writes WAL.
pub(super) unsafe fn write_pages(
    keys: &keys::Wal,
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    let base = file.tag.0[0];
    // SAFETY: by contract.
    unsafe {
        if !keys.has_written() {
            look_before_first_write(keys, file, at);
        }
        let mut done = 0;
        while done < length {
            let at = at + done as u64;
            let stretch = keys::written_at(keys, base + at, PAGE as u64);
            let left = ((length - done) as u64).min(stretch.to - (base + at)) as usize;
            let wrote = match stretch.phase.sealed() {
                None => {
                    let wrote = raw::pwrite(file.fd, from.add(done).cast(), left, at as off_t);
                    if wrote < left as ssize_t {
                        return Ok(partial(done, wrote));
                    }
                    wrote
                }
                Some(generation) => {
                    let run = left.min(RUN * PAGE);
                    let wrote = SCRATCH.with(|Scratch(scratch)| {
                        std::ptr::copy_nonoverlapping(from.add(done), scratch.as_mut_ptr(), run);
                        seal(&mut scratch[..run], generation, base + at)?;
                        Ok(write_whole(file.fd, &scratch[..run], at))
                    })?;
                    if wrote < run as ssize_t {
                        return Ok(partial(done, wrote));
                    }
                    wrote
                }
            };
            done += wrote as usize;
        }
        Ok(done as ssize_t)
    }
}

/// What a call says that did `before`, and then met a failure or did less than it should.
fn partial(before: usize, last: ssize_t) -> ssize_t {
    match (before, last) {
        (0, last) => last,
        (before, last) => before as ssize_t + last.max(0),
    }
}

fn seal(pages: &mut [u8], generation: u32, address: u64) -> Result<(), Fault> {
    wal_pages::seal(&ServerKeys, pages, PAGE, generation, address)
}

/// Writes all of it; at a failure says how much of whole pages was written, or -1 if none. A sealed page
/// cannot be written on from its middle.
///
/// # Safety
/// `fd` is open.
unsafe fn write_whole(fd: c_int, bytes: &[u8], at: u64) -> ssize_t {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        // SAFETY: by contract.
        let wrote = unsafe {
            raw::pwrite(fd, rest.as_ptr().cast(), rest.len(), at as off_t + done as off_t)
        };
        if wrote <= 0 {
            let whole = done / PAGE * PAGE;
            return if whole > 0 { whole as ssize_t } else { wrote };
        }
        done += wrote as usize;
    }
    done as ssize_t
}

/// See [`keys::Wal::first_write`].
///
/// # Safety
/// `file` is open for reading.
#[cold]
unsafe fn look_before_first_write(keys: &keys::Wal, file: File, at: u64) {
    let address = file.tag.0[0] + at;
    let on_disk = SCRATCH.with(|Scratch(scratch)| {
        // SAFETY: by contract; the scratch memory has room for a page.
        let got = unsafe { raw::pread(file.fd, scratch.as_mut_ptr().cast(), PAGE, at as off_t) };
        (got == PAGE as ssize_t)
            .then(|| wal_pages::phase_of(&ServerKeys, &scratch[..PAGE], address))
            .flatten()
    });
    let switched = keys::stretch_at(keys, address).phase;
    let kept = on_disk.filter(|phase| phase.sealed() != switched.sealed());
    keys.first_write(kept.map(|phase| (address, phase)));
}

/// Writes a range that may begin and end anywhere: reads the pages, opens and completes them, seals and
/// writes them again. A page that is there already keeps its key; what is not known of a page is zero.
///
/// # Safety
/// `from` holds `length` bytes, and nobody else writes WAL.
pub(super) unsafe fn write_range(
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    // SAFETY: by contract; the scratch memory has room for a run.
    SCRATCH.with(|Scratch(scratch)| unsafe {
        let end = at + length as u64;
        let mut next = at;
        while next < end {
            let first = page_start(next);
            let run = (page_end(end) - first).min((RUN * PAGE) as u64) as usize;
            let pages = &mut scratch[..run];
            let got = raw::pread(file.fd, pages.as_mut_ptr().cast(), run, first as off_t);
            if got < 0 {
                return Ok(partial((next - at) as usize, got));
            }
            pages[got as usize..].fill(0);
            let stop = end.min(first + run as u64);
            for (page, start) in pages.chunks_exact_mut(PAGE).zip((first..).step_by(PAGE)) {
                let begin = next.max(start);
                let bytes = std::slice::from_raw_parts(
                    from.add((begin - at) as usize),
                    (stop.min(start + PAGE as u64) - begin) as usize,
                );
                wal_pages::complete(
                    &ServerKeys,
                    page,
                    file.tag.0[0] + start,
                    (begin - start) as usize,
                    bytes,
                )?;
            }
            let wrote = write_whole(file.fd, pages, first);
            if wrote < run as ssize_t {
                let so_far = first + wrote.max(0) as u64;
                return Ok(if so_far > next {
                    (so_far - at) as ssize_t
                } else {
                    partial((next - at) as usize, wrote.min(0))
                });
            }
            next = stop;
        }
        Ok(length as ssize_t)
    })
}

/// Writes pages of a segment that is copied, each under the key of its address.
///
/// # Safety
/// `from` holds `length` bytes: whole pages.
pub(super) unsafe fn write_copied(
    keys: &keys::Wal,
    fd: c_int,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    SCRATCH.with(|Scratch(scratch)| {
        let mut done = 0;
        while done < length {
            let run = (length - done).min(RUN * PAGE);
            // SAFETY: by contract; a run fits.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), scratch.as_mut_ptr(), run) };
            for page in scratch[..run].chunks_exact_mut(PAGE) {
                let address = wal::address_of(page).unwrap_or(0);
                if let Some(generation) = keys::stretch_at(keys, address).phase.sealed() {
                    seal(page, generation, address)?;
                }
            }
            // SAFETY: the file is open.
            let wrote = unsafe { write_whole(fd, &scratch[..run], at + done as u64) };
            if wrote < run as ssize_t {
                return Ok(partial(done, wrote));
            }
            done += run;
        }
        Ok(done as ssize_t)
    })
}
