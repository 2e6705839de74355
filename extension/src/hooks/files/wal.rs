//! WAL segments in `pg_wal/`: pages are sealed when they are written and opened when they are read.
//!
//! Who calls:
//!
//! | call | by |
//! |---|---|
//! | `pwrite` of whole pages | XLogWrite, in a critical section, under WALWriteLock |
//! | `pwrite` of any range | the WAL receiver |
//! | `pread` of one page | the startup process (XLogPageRead) |
//! | `pread` of any range | WALRead: WAL senders, logical decoding, two-phase commit, the summarizer, pg_walinspect |
//! | `pread`, raw | a WAL sender that sends a base backup |
//! | `read` | XLogFileCopy in the startup process; raw for others, who archive the segment |
//! | `write` to `xlogtemp` | XLogFileCopy |
//!
//! Zeros with which a new segment is filled go to `xlogtemp` as well, by `pwrite` and `pwritev`.

use std::ffi::{CStr, c_void};

use libc::{c_int, off_t, ssize_t};
use pagevault_cipher::wal::{self, Mark};
use pagevault_keystore::wal::WalPhase;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::{File, Handler, Tag, at_position, raw};
use crate::keys::wal as keys;
use crate::page_io::Cause;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::Report;

const DIRECTORY: &[u8] = b"pg_wal/";
const PAGE: usize = pg_sys::XLOG_BLCKSZ as usize;
const _: () = assert!(PAGE.is_multiple_of(16) && PAGE <= 1 << 16);

/// Most pages in one go; longer ranges are cut.
const RUN: usize = 64;

/// Private copies of pages. Aligned for direct I/O (`PG_IO_ALIGN_SIZE`).
#[repr(C, align(4096))]
struct Scratch([u8; RUN * PAGE]);

static SCRATCH: ProcessLocal<Scratch> = ProcessLocal::new(Scratch([0; RUN * PAGE]));

/// If the path is that of a WAL segment, as `XLogFilePath` writes it: its first address. A segment
/// that was fetched from the archive has a fixed name first, which does not tell.
#[inline]
pub(super) fn segment(path: &CStr) -> Option<Tag> {
    let name = path.to_bytes().strip_prefix(DIRECTORY)?;
    if name == b"RECOVERYXLOG" {
        return Some(Tag([UNKNOWN_ADDRESS, 0]));
    }
    let (high, low) = segment_number(name)?;
    let base = (u64::from(high) << 32) + u64::from(low) * process::wal_segment_size();
    Some(Tag([base, 0]))
}

/// If the path is that of a file that becomes a segment.
#[inline]
pub(super) fn is_new_segment(path: &CStr) -> bool {
    path.to_bytes().strip_prefix(DIRECTORY).is_some_and(|name| name.starts_with(b"xlogtemp."))
}

const UNKNOWN_ADDRESS: u64 = u64::MAX;

/// The last two of three words of 8 hexadecimal digits: timeline, and the segment's number in two
/// parts.
fn segment_number(name: &[u8]) -> Option<(u32, u32)> {
    let [_, high, low] = name.as_chunks::<8>().0 else { return None };
    (name.len() == 24 && name.iter().all(u8::is_ascii_hexdigit))
        .then(|| (hexadecimal(high), hexadecimal(low)))
}

fn hexadecimal(digits: &[u8; 8]) -> u32 {
    digits
        .iter()
        .fold(0, |number, digit| number << 4 | char::from(*digit).to_digit(16).unwrap_or(0))
}

/// Why a page cannot be opened or sealed.
#[derive(Clone, Copy)]
struct Fault {
    address: u64,
    generation: u32,
    cause: Cause,
}

impl Fault {
    /// What the system call would say.
    fn errno() -> ssize_t {
        // SAFETY: errno belongs to this thread.
        unsafe { *libc::__errno_location() = libc::ENOKEY };
        -1
    }
}

/// A WAL segment.
pub(super) struct Segment;

impl Handler for Segment {
    unsafe fn pread(&self, file: File, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract.
        unsafe {
            let recovers = process::is_startup_process();
            if process::sends_base_backup() || (keys::active().is_none() && !recovers) {
                return raw::pread(file.fd, to, length, at);
            }
            match read(file, to.cast(), length, at as u64) {
                Ok(done) => done,
                // Taken for the end of WAL, a page that cannot be opened would lose transactions.
                Err(fault) if recovers => raise(fault),
                Err(_) => Fault::errno(),
            }
        }
    }

    unsafe fn pwrite(&self, file: File, from: *const c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract.
        unsafe {
            let is_placed = file.tag.0[0] != UNKNOWN_ADDRESS;
            let Some(keys) = keys::active().filter(|_| is_placed) else {
                return raw::pwrite(file.fd, from, length, at);
            };
            let whole = is_whole(at as u64, length) && !process::is_wal_receiver();
            let done = if whole {
                write_pages(keys, file, from.cast(), length, at as u64)
            } else {
                write_range(keys, file, from.cast(), length, at as u64)
            };
            done.unwrap_or_else(|_| Fault::errno())
        }
    }

    unsafe fn read(&self, file: File, to: *mut c_void, length: usize) -> ssize_t {
        // SAFETY: by contract.
        unsafe {
            if process::is_startup_process() {
                return at_position(file.fd, |at| self.pread(file, to, length, at));
            }
            raw::read(file.fd, to, length)
        }
    }
}

/// A file that becomes a segment: filled with zeros, or with the beginning of another one where a
/// timeline forks.
pub(super) struct NewSegment;

impl Handler for NewSegment {
    unsafe fn pread(&self, file: File, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract.
        unsafe { raw::pread(file.fd, to, length, at) }
    }

    unsafe fn pwrite(&self, file: File, from: *const c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: by contract. Zeros stay zeros.
        unsafe { raw::pwrite(file.fd, from, length, at) }
    }

    unsafe fn pwritev(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        at: off_t,
    ) -> ssize_t {
        // SAFETY: by contract. Zeros stay zeros.
        unsafe { raw::pwritev(file.fd, vector, count, at) }
    }

    /// The copy is cut at any byte. So the cut is made in plaintext, where it costs no record.
    unsafe fn write(&self, file: File, from: *const c_void, length: usize) -> ssize_t {
        // SAFETY: by contract.
        unsafe {
            let Some(keys) = keys::active().filter(|_| length.is_multiple_of(PAGE)) else {
                return raw::write(file.fd, from, length);
            };
            at_position(file.fd, |at| {
                write_copied(keys, file.fd, from.cast(), length, at as u64)
                    .unwrap_or_else(|_| Fault::errno())
            })
        }
    }
}

fn is_whole(at: u64, length: usize) -> bool {
    at.is_multiple_of(PAGE as u64) && length.is_multiple_of(PAGE)
}

fn page_start(at: u64) -> u64 {
    at - at % PAGE as u64
}

fn page_end(at: u64) -> u64 {
    at.next_multiple_of(PAGE as u64)
}

/// Reads a range: whole pages in place, all else by way of the pages that cover it.
///
/// A page may be written again while it is read. What was asked for is the same before and after; and
/// the kernel copies no less than a block of 16 bytes at once.
///
/// # Safety
/// `to` has room for `length` bytes.
unsafe fn read(file: File, to: *mut u8, length: usize, at: u64) -> Result<ssize_t, Fault> {
    // SAFETY: by contract; the scratch memory has room for a run.
    unsafe {
        if is_whole(at, length) {
            let done = raw::pread(file.fd, to.cast(), length, at as off_t);
            if done <= 0 {
                return Ok(done);
            }
            let whole = done as usize / PAGE * PAGE;
            open(std::slice::from_raw_parts_mut(to, whole), file, at)?;
            return Ok(whole as ssize_t);
        }
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
    keys::with_key(generation, |key| wal::open(page, key)).map_err(|cause| Fault {
        address,
        generation,
        cause,
    })
}

/// Whether a page of this address belongs at this place.
fn belongs(file: File, at: u64, address: u64) -> bool {
    match file.tag.0[0] {
        UNKNOWN_ADDRESS => address % process::wal_segment_size() == at,
        base => address == base + at,
    }
}

/// Seals whole pages from WAL buffers, where others may add records meanwhile: each page is read
/// once, into the scratch copy.
///
/// # Safety
/// `from` holds `length` bytes, and nobody else writes WAL.
unsafe fn write_pages(
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
        for page in pages.chunks_exact_mut(PAGE) {
            wal::seal(page, key, Mark::of_generation(generation));
        }
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
unsafe fn write_range(
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
            let opened = keys::with_key(generation, |key| wal::open(page, key));
            match opened {
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
unsafe fn write_copied(
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

/// Ends recovery.
///
/// # Safety
/// In the startup process, outside of any critical section; no frame between here and the server's call
/// holds anything with a destructor.
#[cold]
unsafe fn raise(fault: Fault) -> ! {
    // SAFETY: by contract the server may longjmp over our callers.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| report(fault).fatal()) }
}

fn report(fault: Fault) -> Report {
    let Fault { address, generation, cause } = fault;
    let page = format!("the WAL page at {:X}/{:X}", address >> 32, address & 0xFFFF_FFFF);
    match cause {
        Cause::Locked { .. } | Cause::Refused { .. } => Report::new(
            PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
            format!("cannot open {page}: the key of the cluster is locked"),
        )
        .detail("Its key provider did not answer or refused when the server started.")
        .hint("Make the key provider reachable and start the server again. Nothing was changed."),
        Cause::NoKey { .. } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("no key of generation {generation} for {page}"),
        )
        .detail("The page is sealed, but the keystore under pagevault/ in the data directory does not hold its key, and WAL has not brought it so far.")
        .hint("If this server's wal_decode_buffer_size is larger than that of the server that wrote this WAL, start with recovery_prefetch = off. Otherwise restore the keystore together with the data directory, or copy it from the primary. Do not reset WAL: it is intact."),
        Cause::Damaged { .. } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("the key of generation {generation} for {page} cannot be unwrapped"),
        )
        .detail("Its record in the keystore does not authenticate under the database key.")
        .hint("Restore the keystore from a backup taken together with this data directory."),
    }
}
