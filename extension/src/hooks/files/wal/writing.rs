//! Sealing what is written.

use libc::{c_int, off_t, ssize_t};
use pagevault_cipher::wal::{self, Mark};
use pagevault_keystore::wal::WalPhase;

use super::fault::Fault;
use super::reading::open_under;
use super::{PAGE, RUN, SCRATCH, Scratch, page_end, page_start};
use crate::hooks::files::{File, raw};
use crate::keys::wal as keys;
use crate::stats::{Kind, Work};

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
    keys::with_key(generation, |key| {
        let work = Work::begin();
        let mark = Mark::of_generation(generation);
        let pages = pages.chunks_exact_mut(PAGE);
        let sealed = pages.map(|page| u64::from(wal::seal(page, key, mark))).sum();
        work.sealed(Kind::Wal, sealed, sealed * PAGE as u64);
    })
    .map_err(|cause| Fault { address, generation, cause })
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
        (got == PAGE as ssize_t).then(|| phase_of(&scratch[..PAGE], address)).flatten()
    });
    let switched = keys::stretch_at(keys, address).phase;
    let kept = on_disk.filter(|phase| phase.sealed() != switched.sealed());
    keys.first_write(kept.map(|phase| (address, phase)));
}

/// How a page on disk is written; `None` if it is not the page of this address.
fn phase_of(page: &[u8], address: u64) -> Option<WalPhase> {
    if wal::address_of(page) != Some(address) {
        return None;
    }
    Some(match wal::mark_of(page) {
        None => WalPhase { generation: 0, plaintext: true },
        Some(mark) => WalPhase { generation: keys::generation_of(mark, address), plaintext: false },
    })
}

/// Writes a range that may begin and end anywhere: reads the pages, opens and completes them, seals and
/// writes them again. A page that is there already keeps its key; what is not known of a page is zero.
///
/// # Safety
/// `from` holds `length` bytes, and nobody else writes WAL.
pub(super) unsafe fn write_range(
    keys: &keys::Wal,
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
                complete(keys, page, file.tag.0[0] + start, (begin - start) as usize, bytes)?;
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

/// Puts `bytes` into the page at `address`, which is as it was on disk, and seals it.
fn complete(
    keys: &keys::Wal,
    page: &mut [u8],
    address: u64,
    offset: usize,
    bytes: &[u8],
) -> Result<(), Fault> {
    let switched = keys::stretch_at(keys, address).phase;
    let is_all = bytes.len() == PAGE;
    let on_disk = phase_of(page, address);
    let mut phase = on_disk.unwrap_or(switched);
    match on_disk.map(WalPhase::sealed) {
        Some(Some(generation)) => {
            match open_under(page, generation) {
                Ok(()) => {}
                // Nothing of it is needed.
                Err(_) if is_all => phase = switched,
                Err(cause) => return Err(Fault { address, generation, cause }),
            }
        }
        Some(None) => {}
        // Of a header that came in parts the first is there, in clear.
        None if offset < wal::HEADER_SIZE => {
            wal::clear_mark(page);
            page[offset..].fill(0);
        }
        None => page.fill(0),
    }
    page[offset..offset + bytes.len()].copy_from_slice(bytes);
    match phase.sealed() {
        Some(generation) => seal(page, generation, address),
        None => Ok(()),
    }
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
