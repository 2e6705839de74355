//! Files without a storage manager: WAL, and other files that the server opens itself.
//!
//! The server's own calls of `open`, `read`, `pwrite` and so on are redirected to [`calls`]. A file
//! is classified by its path when it is opened ([`class_of`]); the class is stored for the
//! descriptor ([`table`]) until it is closed. Calls on a descriptor without a class cost one
//! look-up and are forwarded unchanged; others go to the [`Handler`] of the class.
//!
//! To add a class: a variant of [`Class`], a rule in [`class_of`], a handler in [`handler`].
//!
//! Other libraries may also call these functions (see `got` in interpose's plan.rs), and so may
//! signal handlers. So nothing here takes a lock or allocates, and `errno` is changed only to
//! report a failure.

mod calls;
mod table;
mod temporary;
mod wal;

use std::ffi::{CStr, c_int, c_void};

use libc::{off_t, ssize_t};
use pagevault_interpose::{Error, Plan};
use pagevault_keystore::transfer;

pub(crate) use calls::raw;
pub(crate) use table::Tag;
pub(crate) use wal::seal_backup;

/// The kind of file that a descriptor refers to. The numbers are used in the table of descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Class {
    /// Not relevant: every call is forwarded.
    None = 0,
    /// A WAL segment.
    WalSegment = 1,
    /// A file that becomes a WAL segment.
    NewWalSegment = 2,
    /// A sealed temporary file.
    Temporary = 3,
}

impl Class {
    /// Classes by number.
    const ALL: [Class; 4] =
        [Class::None, Class::WalSegment, Class::NewWalSegment, Class::Temporary];

    fn of(number: u8) -> Class {
        Class::ALL.get(usize::from(number)).copied().unwrap_or(Class::None)
    }
}

/// The class of the file at `path`, in the server's spelling: relative to the data directory. The
/// tag contains what the class stores about the file.
///
/// Not for temporary files: see [`temporary::Opening`].
///
/// Called for each file that is opened, even if nothing is encrypted, because that may change while
/// the file is open.
#[inline]
fn class_of(path: &CStr) -> (Class, Tag) {
    if let Some(tag) = wal::segment(path) {
        return (Class::WalSegment, tag);
    }
    if wal::is_new_segment(path) {
        return (Class::NewWalSegment, Tag::EMPTY);
    }
    (Class::None, Tag::EMPTY)
}

/// The handler of a class.
#[inline]
fn handler(class: Class) -> Option<&'static dyn Handler> {
    match class {
        Class::None => None,
        Class::WalSegment => Some(&wal::Segment),
        Class::NewWalSegment => Some(&wal::NewSegment),
        Class::Temporary => Some(&temporary::Temporary),
    }
}

/// An open file of some class.
#[derive(Clone, Copy)]
pub(crate) struct File {
    pub(crate) fd: c_int,
    pub(crate) tag: Tag,
}

/// Replacements of the system calls on files of one class.
///
/// Contract of all methods: results are those of the system call, -1 and `errno` for failures, and
/// fewer bytes if fewer were transferred; they use [`raw`] for their own calls. They run wherever
/// the server does I/O, including critical sections. So they do not allocate, wait for locks or
/// raise errors, unless all callers for files of that class permit it.
///
/// # Safety
/// All: `file` is open, and the memory is valid for the given length.
pub(crate) trait Handler: Sync {
    /// `pread`
    unsafe fn pread(
        &self,
        file: File,
        buffer: *mut c_void,
        length: usize,
        offset: off_t,
    ) -> ssize_t;

    /// `pwrite`
    unsafe fn pwrite(
        &self,
        file: File,
        buffer: *const c_void,
        length: usize,
        offset: off_t,
    ) -> ssize_t;

    /// `ftruncate`
    unsafe fn truncate(&self, file: File, length: off_t) -> c_int {
        // SAFETY: no memory is passed; the file is open, as the trait requires.
        unsafe { raw::ftruncate(file.fd, length) }
    }

    /// `read`: [`Handler::pread`] at the position of the descriptor.
    unsafe fn read(&self, file: File, buffer: *mut c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory, passed on with its length.
        unsafe { at_position(file.fd, |position| self.pread(file, buffer, length, position)) }
    }

    /// `write`: [`Handler::pwrite`] at the position of the descriptor.
    unsafe fn write(&self, file: File, buffer: *const c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory, passed on with its length.
        unsafe { at_position(file.fd, |position| self.pwrite(file, buffer, length, position)) }
    }

    /// `preadv`: one [`Handler::pread`] for each part.
    unsafe fn preadv(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        offset: off_t,
    ) -> ssize_t {
        // SAFETY: the caller guarantees that each part is valid.
        unsafe {
            transfer::each_part(
                parts(vector, count),
                |part| part.iov_len,
                |part, done| self.pread(file, part.iov_base, part.iov_len, offset + done as off_t),
            )
        }
    }

    /// `pwritev`: one [`Handler::pwrite`] for each part.
    unsafe fn pwritev(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        offset: off_t,
    ) -> ssize_t {
        // SAFETY: the caller guarantees that each part is valid.
        unsafe {
            transfer::each_part(
                parts(vector, count),
                |part| part.iov_len,
                |part, done| self.pwrite(file, part.iov_base, part.iov_len, offset + done as off_t),
            )
        }
    }
}

/// Transfers at the position of the descriptor, and advances it by what was transferred.
///
/// # Safety
/// `fd` is a descriptor that the caller has open.
unsafe fn at_position(fd: c_int, transfer: impl FnOnce(off_t) -> ssize_t) -> ssize_t {
    // SAFETY: no memory is passed, and the caller has the descriptor open.
    let seek = |to, whence| unsafe { libc::lseek(fd, to, whence) };
    transfer::at_position(|| seek(0, libc::SEEK_CUR), |to| seek(to, libc::SEEK_SET), transfer)
}

/// The parts of a vector.
///
/// # Safety
/// `vector` has `count` parts, valid for `'a`.
unsafe fn parts<'a>(vector: *const libc::iovec, count: c_int) -> &'a [libc::iovec] {
    match usize::try_from(count) {
        // SAFETY: the caller guarantees the number of parts.
        Ok(count @ 1..) => unsafe { std::slice::from_raw_parts(vector, count) },
        _ => &[],
    }
}

/// Adds the calls to the plan.
///
/// # Errors
/// If the server does not import one of them under any of its names.
pub(super) fn plan(plan: &mut Plan<'_>) -> Result<(), Error> {
    calls::plan(plan)
}
