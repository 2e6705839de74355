//! Files that no storage manager stands above: WAL, and whatever else the server opens by itself.
//!
//! The calls `open`, `read`, `pwrite` and so on that the server itself makes are pointed at
//! [`calls`]. A file is told by its path when it is opened ([`class_of`]); the descriptor remembers
//! its class ([`table`]) until it is closed. Calls on a descriptor without a class cost one look-up
//! and are forwarded as they are; calls on others go to the [`Handler`] of the class.
//!
//! To add a class: a variant of [`Class`], a rule in [`class_of`], a handler in [`handler`].
//!
//! Other libraries can arrive here too (see `got` in interpose's plan.rs), and so can signal
//! handlers: nothing here takes a lock, allocates, or touches `errno` but to report a failure.

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

/// What kind of file a descriptor is open on. The numbers are those in the table of descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Class {
    /// Nothing to us: every call is forwarded.
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

/// The class of the file at `path`, as the server spells it: relative to the data directory. What
/// the class wants to remember about the file goes into the tag.
///
/// Temporary files are not asked for here: see [`temporary::Opening`].
///
/// Asked for each file that is opened, whether anything is encrypted or not: that may change while
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

/// Who serves a class.
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

/// What is done instead of the system calls on files of one class.
///
/// Contract of all methods: they answer as the system call does, with -1 and `errno` for failures,
/// and with fewer bytes where fewer were transferred; they use [`raw`] for the calls they make.
/// They run wherever the server does I/O, in critical sections too, so they do not allocate, wait
/// for locks, or raise, unless it is known who calls for files of that class.
///
/// # Safety
/// All: `file` is open, and the memory that is passed is valid for the length that is passed.
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
        // SAFETY: no memory is passed; the file is open, as the trait says.
        unsafe { raw::ftruncate(file.fd, length) }
    }

    /// `read`: [`Handler::pread`] at the position of the descriptor.
    unsafe fn read(&self, file: File, buffer: *mut c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory, handed on with its length.
        unsafe { at_position(file.fd, |position| self.pread(file, buffer, length, position)) }
    }

    /// `write`: [`Handler::pwrite`] at the position of the descriptor.
    unsafe fn write(&self, file: File, buffer: *const c_void, length: usize) -> ssize_t {
        // SAFETY: the caller's memory, handed on with its length.
        unsafe { at_position(file.fd, |position| self.pwrite(file, buffer, length, position)) }
    }

    /// `preadv`: one [`Handler::pread`] after the other.
    unsafe fn preadv(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        offset: off_t,
    ) -> ssize_t {
        // SAFETY: each part is as valid as the caller says of the whole.
        unsafe {
            transfer::each_part(
                parts(vector, count),
                |part| part.iov_len,
                |part, done| self.pread(file, part.iov_base, part.iov_len, offset + done as off_t),
            )
        }
    }

    /// `pwritev`: one [`Handler::pwrite`] after the other.
    unsafe fn pwritev(
        &self,
        file: File,
        vector: *const libc::iovec,
        count: c_int,
        offset: off_t,
    ) -> ssize_t {
        // SAFETY: each part is as valid as the caller says of the whole.
        unsafe {
            transfer::each_part(
                parts(vector, count),
                |part| part.iov_len,
                |part, done| self.pwrite(file, part.iov_base, part.iov_len, offset + done as off_t),
            )
        }
    }
}

/// Transfers at the position of the descriptor, and moves it behind what was transferred.
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
/// `vector` holds `count` parts, valid for `'a`.
unsafe fn parts<'a>(vector: *const libc::iovec, count: c_int) -> &'a [libc::iovec] {
    match usize::try_from(count) {
        // SAFETY: the caller says that there are as many parts.
        Ok(count @ 1..) => unsafe { std::slice::from_raw_parts(vector, count) },
        _ => &[],
    }
}

/// Adds the calls to what is to be replaced.
///
/// # Errors
/// When the server does not import one of them under any of its names.
pub(super) fn plan(plan: &mut Plan<'_>) -> Result<(), Error> {
    calls::plan(plan)
}
