//! System calls without the C library's wrappers, which this library replaces. They need no symbol
//! lookup, so they work before `main`. All return -1 with the cause in `errno`, like the C library.

use std::ffi::{CStr, c_int};

use libc::{mode_t, off_t, ssize_t};

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}

pub(crate) fn openat(directory: c_int, path: &CStr, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the path is a C string.
    unsafe { libc::syscall(libc::SYS_openat, directory, path.as_ptr(), flags, mode) as c_int }
}

pub(crate) fn close(fd: c_int) -> c_int {
    // SAFETY: a number only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_close, fd) as c_int }
}

pub(crate) fn unlinkat(directory: c_int, path: &CStr, flags: c_int) -> c_int {
    // SAFETY: the path is a C string.
    unsafe { libc::syscall(libc::SYS_unlinkat, directory, path.as_ptr(), flags) as c_int }
}

/// # Safety
/// `to` has room for `length` bytes.
pub(crate) unsafe fn read(fd: c_int, to: *mut u8, length: usize) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_read, fd, to, length) as ssize_t }
}

/// # Safety
/// `from` holds `length` bytes that can be read.
pub(crate) unsafe fn write(fd: c_int, from: *const u8, length: usize) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_write, fd, from, length) as ssize_t }
}

/// # Safety
/// `to` has room for `length` bytes.
pub(crate) unsafe fn pread(fd: c_int, to: *mut u8, length: usize, at: off_t) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_pread64, fd, to, length, at) as ssize_t }
}

/// # Safety
/// `from` holds `length` bytes that can be read.
pub(crate) unsafe fn pwrite(fd: c_int, from: *const u8, length: usize, at: off_t) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_pwrite64, fd, from, length, at) as ssize_t }
}

/// The kernel takes the offset in two halves; where words have 64 bits it uses only the first.
///
/// # Safety
/// `vector` holds `count` parts, each of which is as it says.
pub(crate) unsafe fn preadv(
    fd: c_int,
    vector: *const libc::iovec,
    count: c_int,
    at: off_t,
) -> ssize_t {
    // SAFETY: the caller says that there are as many parts, and each as large as it says.
    unsafe { libc::syscall(libc::SYS_preadv, fd, vector, count as usize, at, 0) as ssize_t }
}

/// Like [`preadv`].
///
/// # Safety
/// The parts are as for [`preadv`]; they are read.
pub(crate) unsafe fn pwritev(
    fd: c_int,
    vector: *const libc::iovec,
    count: c_int,
    at: off_t,
) -> ssize_t {
    // SAFETY: the caller says that there are as many parts, and each as large as it says.
    unsafe { libc::syscall(libc::SYS_pwritev, fd, vector, count as usize, at, 0) as ssize_t }
}

pub(crate) fn position(fd: c_int) -> off_t {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }
}

pub(crate) fn seek(fd: c_int, to: off_t) -> off_t {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::lseek(fd, to, libc::SEEK_SET) }
}

/// Length of an open file, 0 if unknown.
pub(crate) fn length(fd: c_int) -> u64 {
    // SAFETY: all zero is a valid value, and fstat fills it before it is read.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        if libc::fstat(fd, &raw mut status) != 0 {
            return 0;
        }
        u64::try_from(status.st_size).unwrap_or(0)
    }
}
