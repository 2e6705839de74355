//! Sealing whole pages when they are written.

use libc::{off_t, ssize_t};
use pagevault_cipher::{KeyVersion, Lsn, wal};
use pagevault_keystore::wal_pages;
use pagevault_keystore::wal_segments::{Segment, partial, write_whole};

use super::fault::Fault;
use super::{PAGE, RUN, SCRATCH, Scratch, base_of};
use crate::hooks::files::{File, raw};
use crate::keys::usage::wal::{self as keys, ServerKeys};
use crate::shmem::wal::Wal;

/// Seals whole pages from WAL buffers, in which other processes may add records meanwhile: each
/// page is read once, into the scratch copy.
///
/// # Safety
/// `from` contains `length` bytes, and no other process writes WAL.
pub(super) unsafe fn write_pages(
    keys: &Wal,
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    let base = base_of(file);
    // SAFETY: all reads of `from` are within `length` bytes, which the caller guarantees; runs are
    // not longer than the scratch memory.
    unsafe {
        if !keys.has_written() {
            note_first_write(keys, file, at);
        }
        let mut done = 0;
        while done < length {
            let at = at + done as u64;
            let stretch = keys::written_at(keys, base + at, PAGE as u64);
            let left = ((length - done) as u64).min(stretch.to.bytes_since(base + at)) as usize;
            let wrote = match stretch.phase.sealed() {
                None => {
                    let wrote = raw::pwrite(file.fd, from.add(done).cast(), left, at as off_t);
                    if wrote < left as ssize_t {
                        return Ok(partial(done, wrote));
                    }
                    wrote
                }
                Some(version) => {
                    let run = left.min(RUN * PAGE);
                    let wrote = SCRATCH.with(|Scratch(scratch)| {
                        std::ptr::copy_nonoverlapping(from.add(done), scratch.as_mut_ptr(), run);
                        seal(&mut scratch[..run], version, base + at)?;
                        Ok(write_whole(&file, &scratch[..run], PAGE, at))
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

fn seal(pages: &mut [u8], version: KeyVersion, address: Lsn) -> Result<(), Fault> {
    wal_pages::seal(&ServerKeys, pages, PAGE, version, address)
}

/// See [`Wal::first_write`].
///
/// # Safety
/// `file` is open for reading.
#[cold]
unsafe fn note_first_write(keys: &Wal, file: File, at: u64) {
    let address = base_of(file) + at;
    let on_disk = SCRATCH.with(|Scratch(scratch)| {
        // SAFETY: the file is open, as the caller guarantees, and the scratch memory has room for a
        // page.
        let got = unsafe { raw::pread(file.fd, scratch.as_mut_ptr().cast(), PAGE, at as off_t) };
        (got == PAGE as ssize_t)
            .then(|| {
                let is_left_over = |timeline| file.is_left_over(timeline, address);
                wal_pages::phase_of(&ServerKeys, &scratch[..PAGE], address, is_left_over)
            })
            .flatten()
    });
    let switched = keys::stretch_at(keys, address).phase;
    let kept = on_disk.filter(|phase| phase.sealed() != switched.sealed());
    keys.first_write(address, kept);
}

/// Writes pages of a copied segment, each under the key for its address.
///
/// # Safety
/// `from` contains `length` bytes: whole pages.
pub(super) unsafe fn write_copied(
    keys: &Wal,
    file: File,
    from: *const u8,
    length: usize,
    at: u64,
) -> Result<ssize_t, Fault> {
    SCRATCH.with(|Scratch(scratch)| {
        let mut done = 0;
        while done < length {
            let run = (length - done).min(RUN * PAGE);
            // SAFETY: the caller's memory has at least `run` bytes left, and a run fits into the
            // scratch memory.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), scratch.as_mut_ptr(), run) };
            for page in scratch[..run].chunks_exact_mut(PAGE) {
                let address = wal::address_of(page).unwrap_or(Lsn::INVALID);
                if let Some(version) = keys::stretch_at(keys, address).phase.sealed() {
                    seal(page, version, address)?;
                }
            }
            let wrote = write_whole(&file, &scratch[..run], PAGE, at + done as u64);
            if wrote < run as ssize_t {
                return Ok(partial(done, wrote));
            }
            done += run;
        }
        Ok(done as ssize_t)
    })
}
