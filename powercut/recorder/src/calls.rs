//! The functions that stand in for the C library's.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};

use libc::{iovec, mode_t, off_t, size_t, ssize_t};
use pagevault_powercut_disk::journal::Kind;

use crate::begin::{Work, work};
use crate::files::{self, File, find};
use crate::names::below;
use crate::note::{contents, note, place, span};
use crate::raw;

/// Who we are and what the descriptor is open on, if it is a file of ours.
fn ours(fd: c_int) -> Option<(&'static Work, File)> {
    find(fd).and_then(|file| Some((work()?, file)))
}

/// A descriptor was opened: from now on it stands for its file, if that is one of ours.
pub(crate) fn opened_at(work: &Work, fd: c_int, directory: c_int, path: &CStr) -> Option<File> {
    files::opened(fd, None);
    let path = below(work, directory, path)?;
    let status = raw::status(fd)?;
    if !matches!(status.st_mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFDIR) {
        return None;
    }
    let file = File { inode: status.st_ino, stdio: false };
    note(work, Kind::Open, file.inode, 0, &path, &[]);
    files::opened(fd, Some(file));
    Some(file)
}

/// # Safety
/// `path` is a C string.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller says that it is a C string, which stays during the call.
    let path = unsafe { CStr::from_ptr(path) };
    let fd = raw::openat(directory, path, flags, mode);
    if let Some(work) = work().filter(|_| fd >= 0) {
        let file = opened_at(work, fd, directory, path);
        if let Some(file) = file.filter(|_| flags & libc::O_TRUNC != 0) {
            note(work, Kind::Length, file.inode, 0, &[], &[]);
        }
    }
    fd
}

macro_rules! opens {
    ($($name:ident)*) => { $(
        /// The mode is a variadic argument in C; on the platforms that this runs on it is passed as
        /// a named one would be, and the kernel looks at it only where there is one.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the program called us with a path that is a C string, as the C library asks.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )* };
}
opens!(open open64 __open_2 __open64_2);

macro_rules! opens_at {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            at: c_int, path: *const c_char, flags: c_int, mode: mode_t,
        ) -> c_int {
            // SAFETY: the program called us with a path that is a C string, as the C library asks.
            unsafe { open_at(at, path, flags, mode) }
        }
    )* };
}
opens_at!(openat openat64);

#[unsafe(no_mangle)]
extern "C" fn close(fd: c_int) -> c_int {
    files::opened(fd, None);
    raw::close(fd)
}

#[unsafe(no_mangle)]
extern "C" fn dup(fd: c_int) -> c_int {
    same(fd, raw::dup(fd))
}

#[unsafe(no_mangle)]
extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        return if raw::fcntl(old, libc::F_GETFD, 0) < 0 { -1 } else { new };
    }
    same(old, raw::dup3(old, new, 0))
}

#[unsafe(no_mangle)]
extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    same(old, raw::dup3(old, new, flags))
}

macro_rules! fcntls {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(fd: c_int, command: c_int, argument: c_long) -> c_int {
            let answer = raw::fcntl(fd, command, argument);
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => same(fd, answer),
                _ => answer,
            }
        }
    )* };
}
fcntls!(fcntl fcntl64);

fn same(old: c_int, new: c_int) -> c_int {
    if new >= 0 {
        files::opened(new, find(old));
    }
    new
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: the program called us with what the system call asks for; handed on.
    let written = unsafe { raw::write(fd, from, length) };
    if let Some((work, file)) = ours(fd).filter(|_| written > 0) {
        // SAFETY: so many bytes were read from there.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast(), written as usize) };
        note(
            work,
            Kind::Write,
            file.inode,
            (raw::position(fd) - written as i64) as u64,
            &[],
            bytes,
        );
    }
    written
}

#[unsafe(no_mangle)]
unsafe extern "C" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program called us with what the system call asks for; handed on.
    let written = unsafe { raw::writev(fd, vector, count) };
    if let Some((work, file)) = ours(fd).filter(|_| written > 0) {
        let at = (raw::position(fd) - written as i64) as u64;
        // SAFETY: so many bytes were read from these parts.
        let bytes = unsafe { joined(vector, count, written as usize) };
        note(work, Kind::Write, file.inode, at, &[], &bytes);
    }
    written
}

macro_rules! pwrites {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, from: *const c_void, length: size_t, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            let written = unsafe { raw::pwrite(fd, from, length, at) };
            if let Some((work, file)) = ours(fd).filter(|_| written > 0) {
                // SAFETY: so many bytes were read from there.
                let bytes = unsafe { std::slice::from_raw_parts(from.cast(), written as usize) };
                note(work, Kind::Write, file.inode, at as u64, &[], bytes);
            }
            written
        }
    )* };
}
pwrites!(pwrite pwrite64);

macro_rules! pwritevs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            fd: c_int, vector: *const iovec, count: c_int, at: off_t,
        ) -> ssize_t {
            // SAFETY: the program called us with what the system call asks for; handed on.
            let written = unsafe { raw::pwritev(fd, vector, count, at) };
            if let Some((work, file)) = ours(fd).filter(|_| written > 0) {
                // SAFETY: so many bytes were read from these parts.
                let bytes = unsafe { joined(vector, count, written as usize) };
                note(work, Kind::Write, file.inode, at as u64, &[], &bytes);
            }
            written
        }
    )* };
}
pwritevs!(pwritev pwritev64);

/// # Safety
/// `vector` holds `count` parts, of which the first `length` bytes can be read.
unsafe fn joined(vector: *const iovec, count: c_int, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    // SAFETY: the caller says that there are as many parts.
    let parts = unsafe { std::slice::from_raw_parts(vector, count as usize) };
    for part in parts {
        let wanted = part.iov_len.min(length - bytes.len());
        if wanted > 0 {
            // SAFETY: the caller says that the part can be read so far.
            bytes.extend(unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), wanted) });
        }
    }
    bytes
}

macro_rules! ftruncates {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(fd: c_int, length: off_t) -> c_int {
            let answer = raw::ftruncate(fd, length);
            if let Some((work, file)) = ours(fd).filter(|_| answer == 0) {
                note(work, Kind::Length, file.inode, length as u64, &[], &[]);
            }
            answer
        }
    )* };
}
ftruncates!(ftruncate ftruncate64);

macro_rules! truncates {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, length: off_t) -> c_int {
            // SAFETY: the program called us with a path that is a C string, as the C library asks.
            let fd = unsafe { open_at(libc::AT_FDCWD, path, libc::O_WRONLY | libc::O_CLOEXEC, 0) };
            if fd < 0 {
                return fd;
            }
            let answer = ftruncate(fd, length);
            close(fd);
            answer
        }
    )* };
}
truncates!(truncate truncate64);

macro_rules! fallocates {
    ($($name:ident)*) => { $(
        /// Answers the cause, not -1.
        #[unsafe(no_mangle)]
        extern "C" fn $name(fd: c_int, at: off_t, length: off_t) -> c_int {
            if raw::fallocate(fd, 0, at, length) < 0 {
                // SAFETY: errno belongs to this thread.
                return unsafe { *libc::__errno_location() };
            }
            if let Some((work, file)) = ours(fd) {
                note(work, Kind::Reserve, file.inode, (at + length) as u64, &[], &[]);
            }
            0
        }
    )* };
}
fallocates!(posix_fallocate posix_fallocate64);

#[unsafe(no_mangle)]
extern "C" fn fsync(fd: c_int) -> c_int {
    let Some((work, file)) = ours(fd) else {
        // Pipes and sockets answer an error; what lies elsewhere need not be durable.
        return if raw::fcntl(fd, libc::F_GETFD, 0) < 0 { -1 } else { 0 };
    };
    if file.stdio {
        contents(work, fd, file);
    }
    let since = place(work);
    if work.sync > 0 {
        std::thread::sleep(std::time::Duration::from_micros(work.sync.into()));
    }
    note(work, Kind::Sync, file.inode, since, &[], &[]);
    0
}

#[unsafe(no_mangle)]
extern "C" fn fdatasync(fd: c_int) -> c_int {
    fsync(fd)
}

/// A call that changes names, and its record.
///
/// # Safety
/// The path is a C string.
unsafe fn changes(
    kind: Kind,
    (call, directory, path, number): (c_long, c_int, *const c_char, c_uint),
) -> c_int {
    // SAFETY: the caller says that it is a C string, which stays during the call.
    let path = unsafe { CStr::from_ptr(path) };
    let answer = raw::at(call, directory, path, number);
    if let Some(work) = work().filter(|_| answer == 0)
        && let Some(path) = below(work, directory, path)
    {
        note(work, kind, 0, 0, &path, &[]);
    }
    answer
}

/// As [`changes`], with two names. What comes from elsewhere or goes there is not recorded.
///
/// # Safety
/// Both paths are C strings.
unsafe fn changes_two(
    kind: Kind,
    call: c_long,
    (from_in, from): (c_int, *const c_char),
    (to_in, to): (c_int, *const c_char),
    flags: c_uint,
) -> c_int {
    // SAFETY: the caller says that they are C strings, which stay during the call.
    let (from, to) = unsafe { (CStr::from_ptr(from), CStr::from_ptr(to)) };
    let answer = raw::two(call, (from_in, from), (to_in, to), flags);
    if let Some(work) = work().filter(|_| answer == 0) {
        match (below(work, from_in, from), below(work, to_in, to)) {
            (Some(from), Some(to)) => note(work, kind, 0, 0, &from, &to),
            (None, None) => {}
            _ => raw::give_up(),
        }
    }
    answer
}

macro_rules! forwards {
    ($($name:ident($($argument:ident: $type:ty),*) => $to:ident($($with:expr),*);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the program called us with paths that are C strings, as the C library asks.
            unsafe { $to($($with),*) }
        }
    )* };
}
const HERE: c_int = libc::AT_FDCWD;
const DIRECTORY: c_uint = libc::AT_REMOVEDIR as c_uint;
forwards! {
    unlink(path: *const c_char) => changes(Kind::Unlink, (libc::SYS_unlinkat, HERE, path, 0));
    rmdir(path: *const c_char) =>
        changes(Kind::RemoveDirectory, (libc::SYS_unlinkat, HERE, path, DIRECTORY));
    unlinkat(at: c_int, path: *const c_char, flags: c_int) =>
        changes(Kind::Unlink, (libc::SYS_unlinkat, at, path, flags as c_uint));
    mkdir(path: *const c_char, mode: mode_t) =>
        changes(Kind::MakeDirectory, (libc::SYS_mkdirat, HERE, path, mode));
    mkdirat(at: c_int, path: *const c_char, mode: mode_t) =>
        changes(Kind::MakeDirectory, (libc::SYS_mkdirat, at, path, mode));
    rename(from: *const c_char, to: *const c_char) =>
        changes_two(Kind::Rename, libc::SYS_renameat2, (HERE, from), (HERE, to), 0);
    renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) =>
        changes_two(Kind::Rename, libc::SYS_renameat2, (a, from), (b, to), 0);
    renameat2(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_uint) =>
        changes_two(Kind::Rename, libc::SYS_renameat2, (a, from), (b, to), flags);
    link(from: *const c_char, to: *const c_char) =>
        changes_two(Kind::Link, libc::SYS_linkat, (HERE, from), (HERE, to), 0);
    linkat(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_int) =>
        changes_two(Kind::Link, libc::SYS_linkat, (a, from), (b, to), flags as c_uint);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn symlink(target: *const c_char, path: *const c_char) -> c_int {
    // SAFETY: the program called us with two C strings, as the C library asks.
    let (target, path) = unsafe { (CStr::from_ptr(target), CStr::from_ptr(path)) };
    let answer = raw::symlinkat(target, HERE, path);
    if let Some(work) = work().filter(|_| answer == 0)
        && let Some(path) = below(work, HERE, path)
    {
        note(work, Kind::Symlink, 0, 0, &path, target.to_bytes());
    }
    answer
}

#[unsafe(no_mangle)]
unsafe extern "C" fn copy_file_range(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the program called us with what the system call asks for; handed on.
    let copied = unsafe { raw::copy_file_range((from, from_at), (to, to_at), length, flags) };
    if let Some((work, file)) = ours(to).filter(|_| copied > 0) {
        // SAFETY: the kernel has just written to it, if it is not null.
        let end = if to_at.is_null() { raw::position(to) } else { unsafe { *to_at } };
        span(work, to, file, (end - copied as i64) as u64, end as u64);
    }
    copied
}
