//! Temporary files: sealed at any byte (stream format), under a key derived from their path.
//!
//! - `base/pgsql_tmp/**`, `pg_tblspc/*/*/pgsql_tmp/**`: sorts, hashes, materialized rows; shared
//!   between parallel workers; streamed transactions of a subscription. Accessed by fd.c for
//!   buffile.c: `pread`, `pwrite`, `ftruncate`.
//! - `pg_replslot/*/xid-*.spill`: changes of large transactions under logical decoding. Accessed by
//!   reorderbuffer.c: `write` at the end, `pread`.
//! - `pg_notify/*`: payloads of NOTIFY. Accessed by slru.c: `pread`, `pwrite` of whole pages.
//!
//! All of them are removed at server start: by `RemovePgTempFiles` (unless
//! `remove_temp_files_after_crash` is off, and then only until the next start),
//! `StartupReorderBuffer`, `AsyncShmemInit`. So their keys need not survive a start.
//!
//! **The file itself states that it is sealed**: by the sticky bit of its mode, which has no
//! meaning for files. The bit is set by the call that creates the file, and read by every other
//! process that opens it. So all processes agree, even if the setting or keys change meanwhile, and
//! a file is never partly sealed.
//!
//! The process that creates a file knows that by `O_EXCL`, and checks whether the file system has
//! kept the bit. If not, the file is removed and the server gets an error (not supported): a file
//! that should be sealed is never created without the mark. An existing file that is empty and
//! unmarked is marked if it has a single writer. A segment of the NOTIFY queue has several writers,
//! one of which may have created it with the setting off, so it stays as created.
//!
//! Other files that the server writes outside relations and WAL contain no values:
//! `pg_logical/snapshots` (transaction IDs, snapbuild.c), `pg_logical/mappings` (row positions,
//! rewriteheap.c), `pg_twophase` (locks, invalidations, relation files to drop, and the name that
//! the user gave the transaction), `pg_stat` (counters), `pg_replslot/*/state`. They survive a
//! restart and are not encrypted.

use std::ffi::{CStr, c_int, c_void};

use libc::{O_ACCMODE, O_APPEND, O_CREAT, O_EXCL, O_RDWR, O_WRONLY, mode_t, off_t, ssize_t};
use pagevault_cipher::stream::{self, SCRATCH, Scratch, Stream};

use super::{File, Handler, Tag, raw};
use crate::keys::usage::temporary::{self, FREE_BIT};
use crate::pg::process::ProcessLocal;
use crate::shmem::counters::StatsKind as Counted;
use crate::stats::{self, Timing};

/// The sticky bit: the file is sealed.
const SEALED: mode_t = libc::S_ISVTX;

/// Maximum number of attempts to create or else open a file, before the last error is returned.
const TRIES: usize = 8;

/// Bit of a tag: `write` appends. The kernel's own `O_APPEND` would prevent writes at other
/// offsets, but the last partial block must be rewritten.
const APPENDS: u64 = FREE_BIT;

/// Kinds of temporary files, where their treatment differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileKind {
    /// Exists no longer than a query or a transaction.
    Spill,
    /// A segment of a queue that was emptied when the server started.
    Queue,
}

impl FileKind {
    fn of(path: &[u8]) -> Option<FileKind> {
        if path.starts_with(b"base/pgsql_tmp/") {
            Some(FileKind::Spill)
        } else if let Some(rest) = path.strip_prefix(b"pg_tblspc/") {
            // The tablespace's OID, the version's directory, then as above.
            let mut parts = rest.splitn(4, |byte| *byte == b'/').skip(2);
            (parts.next() == Some(b"pgsql_tmp") && parts.next().is_some())
                .then_some(FileKind::Spill)
        } else if let Some(rest) = path.strip_prefix(b"pg_replslot/") {
            let mut parts = rest.split(|byte| *byte == b'/').skip(1);
            let spill = |name: &[u8]| name.starts_with(b"xid-") && name.ends_with(b".spill");
            parts.next().is_some_and(spill).then_some(FileKind::Spill)
        } else {
            path.starts_with(b"pg_notify/").then_some(FileKind::Queue)
        }
    }

    fn seal_new(self) -> bool {
        match self {
            FileKind::Spill => temporary::is_wanted(),
            FileKind::Queue => temporary::is_wanted_for_queues(),
        }
    }
}

/// A temporary file that is being opened.
pub(super) struct Opening {
    kind: FileKind,
    seal: bool,
    flags: c_int,
}

impl Opening {
    /// `None` if `path` is not that of a temporary file.
    #[inline]
    pub(super) fn of(path: &CStr, flags: c_int) -> Option<Opening> {
        let kind = FileKind::of(path.to_bytes())?;
        Some(Opening { kind, seal: flags & O_CREAT != 0 && kind.seal_new(), flags })
    }

    /// The flags for opening it: writing a part of a block requires reading it.
    fn flags(&self) -> c_int {
        match self.flags & O_ACCMODE {
            O_WRONLY => self.flags & !O_ACCMODE | O_RDWR,
            _ => self.flags,
        }
    }

    /// Opens the file by the server's own call. Returns the descriptor, or -1 and `errno`, and
    /// whether this call has created the file.
    ///
    /// The latter is determined only if the file is to be sealed.
    pub(super) fn open(
        &self,
        mode: mode_t,
        call: impl Fn(c_int, mode_t) -> c_int,
    ) -> (c_int, bool) {
        let flags = self.flags();
        if !self.seal {
            return (call(flags, mode), false);
        }
        // Repeated only if other processes remove the file meanwhile.
        let mut fd = -1;
        for _ in 0..TRIES {
            fd = call(flags | O_EXCL, mode | SEALED);
            if fd >= 0 || errno() != libc::EEXIST || flags & O_EXCL != 0 {
                return (fd, fd >= 0);
            }
            fd = call(flags & !O_CREAT, mode);
            if fd >= 0 || errno() != libc::ENOENT {
                break;
            }
        }
        (fd, false)
    }

    /// Examines the open file. Returns the tag if it is sealed, `None` if not. If the file was just
    /// `made` and cannot be used, it is removed.
    ///
    /// # Errors
    /// The `errno` for the server: if the state cannot be determined, the key is not available, or
    /// the file should be sealed and the file system does not keep the mark.
    pub(super) fn finish(&self, fd: c_int, path: &CStr, made: bool) -> Result<Option<Tag>, c_int> {
        let finished = self.examine(fd, path, made);
        if made && finished.is_err() {
            // SAFETY: a C string; no other process knows the file yet.
            unsafe { libc::unlink(path.as_ptr()) };
        }
        finished
    }

    fn examine(&self, fd: c_int, path: &CStr, made: bool) -> Result<Option<Tag>, c_int> {
        let status = status(fd)?;
        let mode = status.st_mode;
        if mode & libc::S_IFMT != libc::S_IFREG {
            return Ok(None);
        }
        if mode & SEALED == 0 {
            // An empty file that a crash left behind is reused.
            let is_ours = made || self.kind == FileKind::Spill && status.st_size == 0;
            if !(self.seal && is_ours) {
                return Ok(None);
            }
            mark(fd, mode)?;
        }
        let mut name = temporary::name(path.to_bytes()).ok_or(libc::EIO)?;
        if self.flags & O_APPEND != 0 {
            clear_append_flag(fd)?;
            name[0] |= APPENDS;
        }
        Ok(Some(Tag(name)))
    }
}

/// The handler of sealed temporary files. Its callers permit errors to be raised, but it neither
/// raises any nor allocates or waits.
pub(super) struct Temporary;

/// Memory for sealing and opening, and for a copy of the data to be written. The original may be in
/// shared memory and change meanwhile (slru.c writes without a lock), so it is read once.
#[repr(C, align(4096))]
struct Room {
    plaintext: [u8; SCRATCH],
    sealed: Scratch,
}

static ROOM: ProcessLocal<Room> =
    ProcessLocal::new(Room { plaintext: [0; SCRATCH], sealed: [0; size_of::<Scratch>()] });

impl Handler for Temporary {
    unsafe fn pread(
        &self,
        file: File,
        buffer: *mut c_void,
        length: usize,
        offset: off_t,
    ) -> ssize_t {
        if offset < 0 {
            return as_system_call(Err(libc::EINVAL));
        }
        // SAFETY: the caller's memory, valid for writes of `length` bytes, and not accessed by
        // others during the call.
        let into = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
        as_system_call(with_stream(file, |stream, _| stream.read(offset as u64, into)))
    }

    unsafe fn pwrite(
        &self,
        file: File,
        buffer: *const c_void,
        length: usize,
        offset: off_t,
    ) -> ssize_t {
        if offset < 0 {
            return as_system_call(Err(libc::EINVAL));
        }
        as_system_call(with_stream(file, |stream, plaintext| {
            let mut done = 0;
            while done < length {
                let at = offset as u64 + done as u64;
                // All pieces but the first begin at a unit.
                let room = SCRATCH - (at % stream::UNIT as u64) as usize;
                let piece = &mut plaintext[..room.min(length - done)];
                // SAFETY: within the caller's memory, which does not overlap ours.
                unsafe {
                    let from = buffer.cast::<u8>().add(done);
                    std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len());
                }
                match stream.write(at, piece) {
                    Err(error) if done == 0 => return Err(error),
                    Err(_) => break,
                    Ok(count) => {
                        done += count;
                        if count < piece.len() {
                            break;
                        }
                    }
                }
            }
            Ok(done)
        }))
    }

    unsafe fn write(&self, file: File, buffer: *const c_void, length: usize) -> ssize_t {
        // SAFETY: an open descriptor; the caller guarantees the rest.
        unsafe {
            if file.tag.0[0] & APPENDS != 0 && libc::lseek(file.fd, 0, libc::SEEK_END) < 0 {
                return -1;
            }
            super::at_position(file.fd, |position| self.pwrite(file, buffer, length, position))
        }
    }

    unsafe fn truncate(&self, file: File, length: off_t) -> c_int {
        if length < 0 {
            return as_system_call(Err(libc::EINVAL)) as c_int;
        }
        as_system_call(with_stream(file, |stream, _| stream.truncate(length as u64).map(|()| 0)))
            as c_int
    }
}

/// Calls `f` with the sealed file, and with memory for a copy.
fn with_stream<R>(
    file: File,
    f: impl FnOnce(&mut Stream<'_, Descriptor>, &mut [u8; SCRATCH]) -> Result<R, c_int>,
) -> Result<R, c_int> {
    let [low, high] = file.tag.0;
    let done = temporary::with_key([low & !APPENDS, high], |key| {
        ROOM.with(|Room { sealed: scratch, plaintext }| {
            let mut stream = Stream { key, file: Descriptor::new(file.fd), scratch };
            let done = f(&mut stream, plaintext);
            stream.file.count();
            done
        })
    });
    done.unwrap_or_else(|| {
        stats::count_failure(Counted::Temporary);
        Err(libc::EIO)
    })
}

/// The result of a system call: -1 and `errno`, or the number of bytes.
fn as_system_call(done: Result<usize, c_int>) -> ssize_t {
    match done {
        Ok(count) => count as ssize_t,
        Err(error) => {
            // SAFETY: errno belongs to this thread alone.
            unsafe { *libc::__errno_location() = error };
            -1
        }
    }
}

/// The file as it is on disk; its errors are `errno` values. Counts transferred bytes.
struct Descriptor {
    fd: c_int,
    work: Timing,
    read: usize,
    written: usize,
}

impl Descriptor {
    fn new(fd: c_int) -> Descriptor {
        Descriptor { fd, work: Timing::begin(), read: 0, written: 0 }
    }

    /// Pages and time are counted for the requested operation; a write may have read the blocks
    /// that it completes.
    fn count(&self) {
        const PAGE: usize = pgrx::pg_sys::BLCKSZ as usize;
        // Rounded to the nearest number, but at least one: a page that does not begin at a 16-byte
        // block touches one block more.
        let pages = |bytes: usize| ((bytes + PAGE / 2) / PAGE).max(usize::from(bytes > 0)) as u64;
        let [read, written] = [self.read, self.written].map(|bytes| (pages(bytes), bytes as u64));
        if written.0 == 0 {
            return self.work.opened(Counted::Temporary, read.0, read.1);
        }
        self.work.sealed(Counted::Temporary, written.0, written.1);
        Timing::none().opened(Counted::Temporary, 0, read.1);
    }
}

impl stream::File for Descriptor {
    type Error = c_int;

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, c_int> {
        let (fd, to, length) = (self.fd, into.as_mut_ptr().cast(), into.len());
        // SAFETY: an open descriptor, and a slice of ours.
        let done = self.work.pause(|| unsafe { raw::pread(fd, to, length, offset as off_t) });
        let done = usize::try_from(done).map_err(|_| errno())?;
        self.read += done;
        Ok(done)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, c_int> {
        let (fd, from, length) = (self.fd, bytes.as_ptr().cast(), bytes.len());
        // SAFETY: an open descriptor, and a slice with its length.
        let done = self.work.pause(|| unsafe { raw::pwrite(fd, from, length, offset as off_t) });
        let done = usize::try_from(done).map_err(|_| errno())?;
        self.written += done;
        Ok(done)
    }

    fn length(&mut self) -> Result<u64, c_int> {
        let fd = self.fd;
        self.work.pause(|| Ok(status(fd)?.st_size as u64))
    }

    fn set_length(&mut self, length: u64) -> Result<(), c_int> {
        let fd = self.fd;
        // SAFETY: no memory is passed; the file is open.
        self.work.pause(|| check(unsafe { raw::ftruncate(fd, length as off_t) }))
    }
}

fn errno() -> c_int {
    // SAFETY: errno belongs to this thread alone.
    unsafe { *libc::__errno_location() }
}

fn check(result: c_int) -> Result<(), c_int> {
    if result < 0 { Err(errno()) } else { Ok(()) }
}

fn status(fd: c_int) -> Result<libc::stat, c_int> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: an open descriptor, and memory for one structure, for which zero is a valid value.
    unsafe {
        check(libc::fstat(fd, status.as_mut_ptr()))?;
        Ok(status.assume_init())
    }
}

/// Sets the sealed bit of an existing file. A file system that does not keep the bit cannot be
/// used; some report that as a missing permission.
fn mark(fd: c_int, mode: mode_t) -> Result<(), c_int> {
    // SAFETY: no memory is passed; the file is open.
    match check(unsafe { libc::fchmod(fd, (mode | SEALED) & 0o7777) }) {
        Err(libc::EPERM) => return Err(libc::EOPNOTSUPP),
        marked => marked?,
    }
    if status(fd)?.st_mode & SEALED == 0 { Err(libc::EOPNOTSUPP) } else { Ok(()) }
}

fn clear_append_flag(fd: c_int) -> Result<(), c_int> {
    // SAFETY: no memory is passed; the file is open.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        check(flags)?;
        check(libc::fcntl(fd, libc::F_SETFL, flags & !O_APPEND))
    }
}
