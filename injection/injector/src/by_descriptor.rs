//! Calls on descriptors, and on nothing.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{iovec, off_t, size_t, ssize_t, timespec, timeval};

use crate::calls::{Fate, fails, on_descriptor, on_nothing, shift};
use crate::descriptors::{self, find};
use crate::next::next;

/// Calls that transfer bytes.
macro_rules! transfers {
    ($($name:ident $symbol:literal as $function:literal
        ($buffer:ty $(, $at:ident: $of_at:ty)*);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, buffer: $buffer, length: size_t $(, $at: $of_at)*
        ) -> ssize_t {
            let length = match on_descriptor($function, fd) {
                Fate::Made => length,
                // Nothing at all would mean the end of the file.
                Fate::Shortened => length.div_ceil(2),
                Fate::Failed(cause) => {
                    fails(cause);
                    return -1;
                }
            };
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe {
                next!($symbol as (c_int, $buffer, size_t $(, $of_at)*) -> ssize_t,
                    fd, buffer, length $(, $at)*)
            }
        }
    )* };
}
transfers! {
    read c"read" as "read" (*mut c_void);
    pread c"pread" as "read" (*mut c_void, at: off_t);
    pread64 c"pread64" as "read" (*mut c_void, at: off_t);
    write c"write" as "write" (*const c_void);
    pwrite c"pwrite" as "write" (*const c_void, at: off_t);
    pwrite64 c"pwrite64" as "write" (*const c_void, at: off_t);
    __read_chk c"__read_chk" as "read" (*mut c_void, size: size_t);
    __pread_chk c"__pread_chk" as "read" (*mut c_void, at: off_t, size: size_t);
    __pread64_chk c"__pread64_chk" as "read" (*mut c_void, at: off_t, size: size_t);
}

/// Calls that transfer several parts. Half of them: of the first part.
macro_rules! vectored {
    ($($name:ident $symbol:literal as $function:literal;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, vector: *const iovec, count: c_int, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe {
                let mut first = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
                let (vector, count) = match on_descriptor($function, fd) {
                    Fate::Shortened if count > 0 => {
                        first = *vector;
                        first.iov_len = first.iov_len.div_ceil(2);
                        (&raw const first, 1)
                    }
                    Fate::Failed(cause) => {
                        fails(cause);
                        return -1;
                    }
                    _ => (vector, count),
                };
                let done = next!($symbol as (c_int, *const iovec, c_int, off_t) -> ssize_t,
                    fd, vector, count, at);
                let _ = first;
                done
            }
        }
    )* };
}
vectored! {
    preadv c"preadv" as "read";
    preadv64 c"preadv64" as "read";
    pwritev c"pwritev" as "write";
    pwritev64 c"pwritev64" as "write";
}

/// Calls that answer -1 when they fail.
macro_rules! on_descriptors {
    ($($name:ident $symbol:literal as $function:literal ($($argument:ident: $type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int $(, $argument: $type)*) -> c_int {
            if let Fate::Failed(cause) = on_descriptor($function, fd) {
                fails(cause);
                return -1;
            }
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe { next!($symbol as (c_int $(, $type)*) -> c_int, fd $(, $argument)*) }
        }
    )* };
}
on_descriptors! {
    ftruncate c"ftruncate" as "ftruncate" (length: off_t);
    ftruncate64 c"ftruncate64" as "ftruncate" (length: off_t);
    fchmod c"fchmod" as "fchmod" (mode: libc::mode_t);
    fstat c"fstat" as "fstat" (to: *mut c_void);
    fstat64 c"fstat64" as "fstat" (to: *mut c_void);
}

macro_rules! seeks {
    ($($name:ident $symbol:literal;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, to: off_t, whence: c_int) -> off_t {
            if let Fate::Failed(cause) = on_descriptor("lseek", fd) {
                fails(cause);
                return -1;
            }
            // SAFETY: the call takes three numbers, and no memory of the program.
            unsafe { next!($symbol as (c_int, off_t, c_int) -> off_t, fd, to, whence) }
        }
    )* };
}
seeks! { lseek c"lseek"; lseek64 c"lseek64"; }

macro_rules! syncs {
    ($($name:ident $symbol:literal;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int) -> c_int {
            if let Fate::Failed(cause) = on_descriptor("fsync", fd) {
                fails(cause);
                return -1;
            }
            if find(fd, &mut descriptors::ROOM.clone()).is_some() {
                return 0;
            }
            // SAFETY: a number only, handed on.
            unsafe { next!($symbol as (c_int) -> c_int, fd) }
        }
    )* };
}
syncs! { fsync c"fsync"; fdatasync c"fdatasync"; }

macro_rules! reserves {
    ($($name:ident $symbol:literal;)*) => { $(
        /// Answers the cause, not -1.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, at: off_t, length: off_t) -> c_int {
            if let Fate::Failed(cause) = on_descriptor("fallocate", fd) {
                return cause;
            }
            // SAFETY: the call takes a descriptor and a range, and no memory of the program.
            unsafe { next!($symbol as (c_int, off_t, off_t) -> c_int, fd, at, length) }
        }
    )* };
}
reserves! { posix_fallocate c"posix_fallocate"; posix_fallocate64 c"posix_fallocate64"; }

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    let fate = on_descriptor("close", fd);
    descriptors::opened(fd, None);
    // SAFETY: a number only, handed on. The descriptor is closed even if the call fails.
    let done = unsafe { next!(c"close" as (c_int) -> c_int, fd) };
    match fate {
        Fate::Failed(cause) => {
            fails(cause);
            -1
        }
        _ => done,
    }
}

macro_rules! lists {
    ($($name:ident $symbol:literal;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(directory: *mut libc::DIR) -> *mut c_void {
            // SAFETY: the program says that the directory is open; handed on.
            unsafe {
                if let Fate::Failed(cause) = on_descriptor("readdir", libc::dirfd(directory)) {
                    fails(cause);
                    return std::ptr::null_mut();
                }
                next!($symbol as (*mut libc::DIR) -> *mut c_void, directory)
            }
        }
    )* };
}
lists! { readdir c"readdir"; readdir64 c"readdir64"; }

#[unsafe(no_mangle)]
unsafe extern "C" fn closedir(directory: *mut libc::DIR) -> c_int {
    // SAFETY: the program says that the directory is open; handed on.
    unsafe {
        descriptors::opened(libc::dirfd(directory), None);
        next!(c"closedir" as (*mut libc::DIR) -> c_int, directory)
    }
}

/// Calls on nothing that has a name.
macro_rules! on_nothings {
    ($($name:ident $symbol:literal ($($argument:ident: $type:ty),*) -> $result:ty;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            if let Fate::Failed(cause) = on_nothing(stringify!($name)) {
                fails(cause);
                return -1;
            }
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe { next!($symbol as ($($type),*) -> $result, $($argument),*) }
        }
    )* };
}
on_nothings! {
    fork c"fork" () -> c_int;
    execvp c"execvp" (file: *const c_char, arguments: *const *const c_char) -> c_int;
    execve c"execve" (
        file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char
    ) -> c_int;
    mlock c"mlock" (start: *const c_void, length: size_t) -> c_int;
    madvise c"madvise" (start: *mut c_void, length: size_t, advice: c_int) -> c_int;
    memfd_create c"memfd_create" (name: *const c_char, flags: c_uint) -> c_int;
    prctl c"prctl" (option: c_int, a: u64, b: u64, c: u64, d: u64) -> c_int;
    socket c"socket" (domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    getrandom c"getrandom" (buffer: *mut c_void, length: size_t, flags: c_uint) -> ssize_t;
}

/// For a process of its own. That for any child is the postmaster's, which would never hear of it
/// again.
#[unsafe(no_mangle)]
unsafe extern "C" fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int {
    if process > 0
        && let Fate::Failed(cause) = on_nothing("waitpid")
    {
        fails(cause);
        return -1;
    }
    // SAFETY: the program called us with what the C library asks for; handed on.
    unsafe { next!(c"waitpid" as (c_int, *mut c_int, c_int) -> c_int, process, status, options) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if let Fate::Failed(cause) = on_nothing("mmap") {
        fails(cause);
        return libc::MAP_FAILED;
    }
    // SAFETY: the program called us with what the C library asks for; handed on.
    unsafe {
        next!(
            c"mmap" as (*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void,
            at, length, protection, flags, fd, offset,
        )
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pipe2(ends: *mut c_int, flags: c_int) -> c_int {
    if let Fate::Failed(cause) = on_nothing("pipe") {
        fails(cause);
        return -1;
    }
    // SAFETY: the program has room for two descriptors there; handed on.
    unsafe {
        let done = next!(c"pipe2" as (*mut c_int, c_int) -> c_int, ends, flags);
        if done == 0 {
            descriptors::opened(*ends, Some(b"pipe"));
            descriptors::opened(*ends.add(1), Some(b"pipe"));
        }
        done
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn poll(list: *mut libc::pollfd, count: libc::nfds_t, wait: c_int) -> c_int {
    // SAFETY: the program called us with what the C library asks for; handed on.
    unsafe {
        if count == 1
            && let Fate::Failed(cause) = on_descriptor("poll", (*list).fd)
        {
            fails(cause);
            return -1;
        }
        next!(c"poll" as (*mut libc::pollfd, libc::nfds_t, c_int) -> c_int, list, count, wait)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, to: *mut timespec) -> c_int {
    // SAFETY: the program has room for the time there; handed on.
    unsafe {
        let done = next!(c"clock_gettime" as (libc::clockid_t, *mut timespec) -> c_int, clock, to);
        if done == 0 && clock == libc::CLOCK_REALTIME {
            (*to).tv_sec += shift();
        }
        done
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gettimeofday(to: *mut timeval, zone: *mut c_void) -> c_int {
    // SAFETY: the program has room for the time there; handed on.
    unsafe {
        let done = next!(c"gettimeofday" as (*mut timeval, *mut c_void) -> c_int, to, zone);
        if done == 0 && !to.is_null() {
            (*to).tv_sec += shift();
        }
        done
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn time(to: *mut libc::time_t) -> libc::time_t {
    // SAFETY: the program has room for the time there, or passes null; handed on.
    unsafe {
        let now = next!(c"time" as (*mut libc::time_t) -> libc::time_t, std::ptr::null_mut());
        let now = now + shift();
        if !to.is_null() {
            *to = now;
        }
        now
    }
}
