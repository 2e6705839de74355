//! Replacements of the C library's functions. In programs that the briefing does not name, and for
//! files without a role here, they are plain system calls.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use libc::{iovec, mode_t, off_t, size_t, ssize_t};
use pagevault_keystore::briefing::Role;
use pagevault_keystore::transfer;

use crate::begin::{Work, work};
use crate::files::{self, Opening, Segment};
use crate::{keystore, raw, say, segment};

/// The descriptor by which `pg_rewind` writes the control file; -1 if it is not open.
static CONTROL: AtomicI32 = AtomicI32::new(-1);

/// The common part of all functions that open a file.
///
/// # Safety
/// `path` is a C string.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    if path.is_null() {
        return bad_address();
    }
    // SAFETY: the caller promises a C string, which is valid during the call.
    let path = unsafe { CStr::from_ptr(path) };
    let Some(work) = work().filter(|_| directory == libc::AT_FDCWD) else {
        return raw::openat(directory, path, flags, mode);
    };
    match files::opening(work, path, flags) {
        Opening::Other => raw::openat(directory, path, flags, mode),
        Opening::Segment => open_segment(path, flags, mode),
        Opening::Refused(reason) => refuse(reason),
        Opening::Keystore => match keystore::replace(path.to_bytes()) {
            Some(path) => raw::openat(directory, &path, flags, mode),
            None => refuse("a file of the keystore has no name"),
        },
        Opening::Control => match finish(work) {
            Ok(()) => {
                let fd = raw::openat(directory, path, flags, mode);
                CONTROL.store(fd, Relaxed);
                fd
            }
            Err(reason) => refuse(&reason),
        },
    }
}

/// Opens a segment. One that is opened for writing is opened for reading too.
fn open_segment(path: &CStr, flags: c_int, mode: mode_t) -> c_int {
    let access = if flags & libc::O_ACCMODE == libc::O_WRONLY {
        libc::O_RDWR
    } else {
        flags & libc::O_ACCMODE
    };
    let fd = raw::openat(libc::AT_FDCWD, path, flags & !libc::O_ACCMODE | access, mode);
    if fd < 0 || files::opened(fd, path) {
        return fd;
    }
    // Never write a segment as plaintext that should be sealed.
    raw::close(fd);
    raw::set_errno(libc::EMFILE);
    -1
}

fn finish(work: &Work) -> Result<(), String> {
    match &work.role {
        Role::Rewind { target } => keystore::commit(Path::new(OsStr::from_bytes(target))),
        _ => Ok(()),
    }
}

/// What the kernel says to a null pointer.
#[cold]
fn bad_address() -> c_int {
    raw::set_errno(libc::EFAULT);
    -1
}

#[cold]
fn refuse(reason: &str) -> c_int {
    say(reason);
    raw::set_errno(libc::EPERM);
    -1
}

/// The mode, which is a variadic argument in C. On the platforms of pagevault it is passed like a
/// named one. It is read only if the flags say that it is present.
fn mode_of(flags: c_int, mode: mode_t) -> mode_t {
    let has_mode = flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE;
    if has_mode { mode } else { 0 }
}

macro_rules! opens {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the program called us with a path that is a C string, as the C library asks.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode_of(flags, mode)) }
        }
    )* };
}
opens!(open open64);

macro_rules! opens_at {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            at: c_int, path: *const c_char, flags: c_int, mode: mode_t,
        ) -> c_int {
            // SAFETY: the program called us with a path that is a C string, as the C library asks.
            unsafe { open_at(at, path, flags, mode_of(flags, mode)) }
        }
    )* };
}
opens_at!(openat openat64);

/// `open` without a mode, as known at compile time.
#[unsafe(no_mangle)]
unsafe extern "C" fn __open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program called us with a path that is a C string, as the C library asks.
    unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
}

/// As [`__open_2`].
#[unsafe(no_mangle)]
unsafe extern "C" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program called us with a path that is a C string, as the C library asks.
    unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
}

#[unsafe(no_mangle)]
extern "C" fn close(fd: c_int) -> c_int {
    files::forget(fd);
    let closed = raw::close(fd);
    if fd >= 0
        && CONTROL.compare_exchange(fd, -1, Relaxed, Relaxed).is_ok()
        && let Some(Work { role: Role::Rewind { target }, .. }) = work()
    {
        keystore::settle(Path::new(OsStr::from_bytes(target)));
    }
    closed
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    if path.is_null() {
        return bad_address();
    }
    // SAFETY: the program called us with a path that is a C string, as the C library asks.
    let path = unsafe { CStr::from_ptr(path) };
    if let Some(Work { role: Role::Rewind { target }, .. }) = work() {
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        let keystore = Path::new(OsStr::from_bytes(target)).join("pagevault");
        if files::is_in(path, &keystore) {
            return match keystore::remove(path) {
                Ok(()) => 0,
                Err(error) => {
                    raw::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
                    -1
                }
            };
        }
    }
    raw::unlinkat(libc::AT_FDCWD, path, 0)
}

/// The task, and the segment that the descriptor refers to, if it is a segment.
#[inline]
fn ours(fd: c_int) -> Option<(&'static Work, Segment)> {
    files::segment(fd).and_then(|segment| Some((work()?, segment)))
}

/// Transfers at the position of the descriptor, and advances it by the number of bytes.
fn at_position(fd: c_int, transfer: impl FnOnce(off_t) -> ssize_t) -> ssize_t {
    transfer::at_position(|| raw::position(fd), |to| raw::seek(fd, to), transfer)
}

/// The parts of a vector.
///
/// # Safety
/// `vector` holds `count` parts, valid for `'a`.
unsafe fn parts<'a>(vector: *const iovec, count: c_int) -> &'a [iovec] {
    match usize::try_from(count) {
        // SAFETY: the caller says that there are as many parts.
        Ok(count @ 1..) => unsafe { std::slice::from_raw_parts(vector, count) },
        _ => &[],
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn read(fd: c_int, to: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: the program called us with what the system call asks for; handed on.
    unsafe {
        match ours(fd) {
            None => raw::read(fd, to.cast(), length),
            Some((work, file)) => {
                at_position(fd, |at| segment::pread(work, file, to.cast(), length, at))
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: the program called us with what the system call asks for; handed on.
    unsafe {
        match ours(fd) {
            None => raw::write(fd, from.cast(), length),
            Some((work, file)) => {
                at_position(fd, |at| segment::pwrite(work, file, from.cast(), length, at))
            }
        }
    }
}

/// `read` into a buffer whose size was known at compile time.
#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(
    fd: c_int,
    to: *mut c_void,
    length: size_t,
    room: size_t,
) -> ssize_t {
    if length > room {
        std::process::abort();
    }
    // SAFETY: the program's own arguments, which `room` was compared with.
    unsafe { read(fd, to, length) }
}

macro_rules! preads {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, to: *mut c_void, length: size_t, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            unsafe {
                match ours(fd) {
                    None => raw::pread(fd, to.cast(), length, at),
                    Some((work, file)) => segment::pread(work, file, to.cast(), length, at),
                }
            }
        }
    )* };
}
preads!(pread pread64);

macro_rules! checked_preads {
    ($($name:ident)*) => { $(
        /// `pread` into a buffer whose size was known at compile time.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, to: *mut c_void, length: size_t, at: off_t, room: size_t,
        ) -> ssize_t {
            if length > room {
                std::process::abort();
            }
            // SAFETY: the program's own arguments, which `room` was compared with.
            unsafe { pread(fd, to, length, at) }
        }
    )* };
}
checked_preads!(__pread_chk __pread64_chk);

macro_rules! pwrites {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, from: *const c_void, length: size_t, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            unsafe {
                match ours(fd) {
                    None => raw::pwrite(fd, from.cast(), length, at),
                    Some((work, file)) => segment::pwrite(work, file, from.cast(), length, at),
                }
            }
        }
    )* };
}
pwrites!(pwrite pwrite64);

macro_rules! preadvs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, vector: *const iovec, count: c_int, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            unsafe {
                match ours(fd) {
                    None => raw::preadv(fd, vector, count, at),
                    Some((work, file)) => {
                        let length = |part: &&iovec| part.iov_len;
                        transfer::each_part(parts(vector, count), length, |part, done| {
                            let at = at + done as off_t;
                            segment::pread(work, file, part.iov_base.cast(), part.iov_len, at)
                        })
                    }
                }
            }
        }
    )* };
}
preadvs!(preadv preadv64);

macro_rules! pwritevs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, vector: *const iovec, count: c_int, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            unsafe {
                match ours(fd) {
                    None => raw::pwritev(fd, vector, count, at),
                    Some((work, file)) => {
                        let length = |part: &&iovec| part.iov_len;
                        transfer::each_part(parts(vector, count), length, |part, done| {
                            let at = at + done as off_t;
                            segment::pwrite(work, file, part.iov_base.cast(), part.iov_len, at)
                        })
                    }
                }
            }
        }
    )* };
}
pwritevs!(pwritev pwritev64);
