//! The system calls themselves. All answer as the C library does: -1, and the cause in `errno`.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};

use libc::{iovec, mode_t, off_t, ssize_t, stat};

/// Ends the process: a journal with a hole would accuse the innocent.
#[cold]
pub(crate) fn give_up() -> ! {
    let text = b"powercut: the journal cannot be written\n";
    // SAFETY: the bytes are a constant, passed with its length.
    unsafe {
        libc::syscall(libc::SYS_write, 2, text.as_ptr(), text.len());
        libc::abort()
    }
}

pub(crate) fn openat(directory: c_int, path: &CStr, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the path is a C string.
    unsafe { libc::syscall(libc::SYS_openat, directory, path.as_ptr(), flags, mode) as c_int }
}

/// A call that takes a path in a directory and a number.
pub(crate) fn at(call: c_long, directory: c_int, path: &CStr, number: c_uint) -> c_int {
    // SAFETY: the path is a C string; all calls for which this is used take these arguments.
    unsafe { libc::syscall(call, directory, path.as_ptr(), number) as c_int }
}

/// A call that takes two paths in directories, and flags.
pub(crate) fn two(
    call: c_long,
    (from_in, from): (c_int, &CStr),
    (to_in, to): (c_int, &CStr),
    flags: c_uint,
) -> c_int {
    // SAFETY: both are C strings; all calls for which this is used take these arguments.
    unsafe { libc::syscall(call, from_in, from.as_ptr(), to_in, to.as_ptr(), flags) as c_int }
}

pub(crate) fn symlinkat(target: &CStr, directory: c_int, path: &CStr) -> c_int {
    // SAFETY: both are C strings, which stay during the call.
    unsafe {
        libc::syscall(libc::SYS_symlinkat, target.as_ptr(), directory, path.as_ptr()) as c_int
    }
}

pub(crate) fn close(fd: c_int) -> c_int {
    // SAFETY: a number only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_close, fd) as c_int }
}

pub(crate) fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: numbers, or a pointer that the caller of the call itself vouches for.
    unsafe { libc::syscall(libc::SYS_fcntl, fd, command, argument) as c_int }
}

pub(crate) fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_dup3, old, new, flags) as c_int }
}

pub(crate) fn dup(fd: c_int) -> c_int {
    // SAFETY: a number only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_dup, fd) as c_int }
}

pub(crate) fn ftruncate(fd: c_int, length: off_t) -> c_int {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_ftruncate, fd, length) as c_int }
}

pub(crate) fn fallocate(fd: c_int, mode: c_int, at: off_t, length: off_t) -> c_int {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, at, length) as c_int }
}

pub(crate) fn position(fd: c_int) -> off_t {
    // SAFETY: numbers only; no memory is passed.
    unsafe { libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) as off_t }
}

/// What a descriptor is open on.
pub(crate) fn status(fd: c_int) -> Option<stat> {
    let mut status = std::mem::MaybeUninit::zeroed();
    // SAFETY: the kernel fills the structure when it answers 0; zeros are a valid one too.
    unsafe {
        let answer = libc::syscall(libc::SYS_fstat, fd, status.as_mut_ptr());
        (answer == 0).then(|| status.assume_init())
    }
}

/// The present directory, in `room`.
pub(crate) fn directory(room: &mut [u8]) -> Option<&[u8]> {
    // SAFETY: the room is passed with its length.
    let length = unsafe { libc::syscall(libc::SYS_getcwd, room.as_mut_ptr(), room.len()) };
    usize::try_from(length).ok()?.checked_sub(1).and_then(|length| room.get(..length))
}

/// Where a link leads, in `room`.
pub(crate) fn read_link<'r>(path: &CStr, room: &'r mut [u8]) -> Option<&'r [u8]> {
    let (path, size) = (path.as_ptr(), room.len());
    // SAFETY: a C string, and room that is passed with its length.
    let length = unsafe {
        libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, path, room.as_mut_ptr(), size)
    };
    room.get(..usize::try_from(length).ok()?)
}

/// # Safety
/// `from` holds `length` bytes that can be read.
pub(crate) unsafe fn write(fd: c_int, from: *const c_void, length: usize) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_write, fd, from, length) as ssize_t }
}

/// # Safety
/// `from` holds `length` bytes that can be read.
pub(crate) unsafe fn pwrite(fd: c_int, from: *const c_void, length: usize, at: off_t) -> ssize_t {
    // SAFETY: the caller says that the memory is as large as `length`.
    unsafe { libc::syscall(libc::SYS_pwrite64, fd, from, length, at) as ssize_t }
}

/// # Safety
/// `vector` holds `count` parts that can be read.
pub(crate) unsafe fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller says that there are as many parts.
    unsafe { libc::syscall(libc::SYS_writev, fd, vector, count) as ssize_t }
}

/// The offset goes to the kernel in two halves, of which it uses the first where words have 64
/// bits.
///
/// # Safety
/// `vector` holds `count` parts that can be read.
pub(crate) unsafe fn pwritev(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t {
    // SAFETY: the caller says that there are as many parts.
    unsafe { libc::syscall(libc::SYS_pwritev, fd, vector, count, at, 0) as ssize_t }
}

/// Part of a file, as much of `room` as there is.
pub(crate) fn pread(fd: c_int, room: &mut [u8], at: off_t) -> usize {
    // SAFETY: the room is passed with its length.
    let got = unsafe {
        libc::syscall(libc::SYS_pread64, fd, room.as_mut_ptr(), room.len(), at) as ssize_t
    };
    usize::try_from(got).unwrap_or(0)
}

/// # Safety
/// The pointers are null, or to offsets that can be read and written.
pub(crate) unsafe fn copy_file_range(
    (from, from_at): (c_int, *mut off_t),
    (to, to_at): (c_int, *mut off_t),
    length: usize,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        libc::syscall(libc::SYS_copy_file_range, from, from_at, to, to_at, length, flags) as ssize_t
    }
}

/// The next function of a name, behind ours.
pub(crate) fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast::<c_char>()) }
}
