//! Replacements of C library functions in the server's own calls.
//!
//! Contract of all: called by any code of the server, in any process and state, including critical
//! sections and signal handlers, and in some builds by libraries. For a descriptor without a class
//! they are equivalent to the original call, including `errno`.

use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{iovec, mode_t, off_t, size_t, ssize_t};
use pagevault_interpose::{Code, Error, Plan};
use pagevault_targets::CALLS;

use super::temporary::Opening;
use super::{Class, Tag, class_of, handler, table};
use crate::fault;
use crate::hooks::calls_seen;
use crate::hooks::forward::Forward;

type Open = unsafe extern "C" fn(*const c_char, c_int, ...) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;
type Read = unsafe extern "C" fn(c_int, *mut c_void, size_t) -> ssize_t;
type Write = unsafe extern "C" fn(c_int, *const c_void, size_t) -> ssize_t;
type PRead = unsafe extern "C" fn(c_int, *mut c_void, size_t, off_t) -> ssize_t;
type PWrite = unsafe extern "C" fn(c_int, *const c_void, size_t, off_t) -> ssize_t;
type Vectored = unsafe extern "C" fn(c_int, *const iovec, c_int, off_t) -> ssize_t;
type Truncate = unsafe extern "C" fn(c_int, off_t) -> c_int;

static OPEN: Forward<Open> = Forward::unresolved();
static CLOSE: Forward<Close> = Forward::unresolved();
static READ: Forward<Read> = Forward::unresolved();
static WRITE: Forward<Write> = Forward::unresolved();
static PREAD: Forward<PRead> = Forward::unresolved();
static PWRITE: Forward<PWrite> = Forward::unresolved();
static PREADV: Forward<Vectored> = Forward::unresolved();
static PWRITEV: Forward<Vectored> = Forward::unresolved();
static FTRUNCATE: Forward<Truncate> = Forward::unresolved();

/// The original calls, for use by handlers.
///
/// # Safety
/// All: as for the system call of that name.
pub(crate) mod raw {
    use super::*;

    pub(crate) unsafe fn pread(fd: c_int, to: *mut c_void, length: usize, at: off_t) -> ssize_t {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the call
        // requires.
        unsafe { PREAD.get()(fd, to, length, at) }
    }

    pub(crate) unsafe fn pwrite(
        fd: c_int,
        from: *const c_void,
        length: usize,
        at: off_t,
    ) -> ssize_t {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the system call
        // requires.
        unsafe { PWRITE.get()(fd, from, length, at) }
    }

    pub(crate) unsafe fn read(fd: c_int, to: *mut c_void, length: usize) -> ssize_t {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the system call
        // requires.
        unsafe { READ.get()(fd, to, length) }
    }

    pub(crate) unsafe fn write(fd: c_int, from: *const c_void, length: usize) -> ssize_t {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the system call
        // requires.
        unsafe { WRITE.get()(fd, from, length) }
    }

    pub(crate) unsafe fn pwritev(
        fd: c_int,
        vector: *const iovec,
        count: c_int,
        at: off_t,
    ) -> ssize_t {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the system call
        // requires.
        unsafe { PWRITEV.get()(fd, vector, count, at) }
    }

    pub(crate) unsafe fn ftruncate(fd: c_int, length: off_t) -> c_int {
        // SAFETY: resolved before anything was replaced; the caller guarantees what the system call
        // requires.
        unsafe { FTRUNCATE.get()(fd, length) }
    }
}

/// `open(path, flags, mode)`. In C the mode is a variadic argument. On pagevault's platforms it is
/// passed like a named one, and it is read only if the flags say that it exists.
unsafe extern "C-unwind" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's own arguments, forwarded.
    unsafe {
        let name = CStr::from_ptr(path);
        if let Some(opening) = Opening::of(name, flags) {
            return open_temporary(&opening, name, mode);
        }
        let fd = OPEN.get()(path, flags, mode);
        if fd < 0 {
            return fd;
        }
        let (class, tag) = class_of(name);
        remember(fd, class, tag)
    }
}

/// [`open`] for a temporary file. Whether it is sealed is known only when it is open.
///
/// # Safety
/// The arguments are those of [`open`]: `path` is a C string, `mode` is valid if the flags require
/// it.
/// it.
#[cold]
unsafe fn open_temporary(opening: &Opening, path: &CStr, mode: mode_t) -> c_int {
    // SAFETY: the path is the caller's C string; the descriptor belongs to this function from its
    // opening until it is returned.
    unsafe {
        let (fd, made) = opening.open(mode, |flags, mode| OPEN.get()(path.as_ptr(), flags, mode));
        if fd < 0 {
            return fd;
        }
        match opening.finish(fd, path, made) {
            Ok(None) => remember(fd, Class::None, Tag::EMPTY),
            Ok(Some(tag)) => remember(fd, Class::Temporary, tag),
            Err(errno) => refuse(fd, errno),
        }
    }
}

/// `__open_2(path, flags)`: `open` if the compiler knows that there is no mode.
unsafe extern "C-unwind" fn open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as in open(); no O_CREAT, by the contract of __open_2.
    unsafe { open(path, flags, 0) }
}

/// Stores the class of a file that has just been opened.
///
/// # Safety
/// We have just opened `fd`.
#[inline]
unsafe fn remember(fd: c_int, class: Class, tag: Tag) -> c_int {
    calls_seen::note(calls_seen::Call::Open);
    if table::opened(fd, class, tag) {
        return fd;
    }
    // Better no file than one that should be encrypted and is not.
    // SAFETY: the caller has just opened the descriptor, and no other code has it yet.
    unsafe { refuse(fd, libc::EMFILE) }
}

/// Closes the descriptor, and makes `open` fail with `errno`.
///
/// # Safety
/// We have just opened `fd`.
#[cold]
unsafe fn refuse(fd: c_int, errno: c_int) -> c_int {
    // SAFETY: the descriptor is ours to close; errno belongs to this thread.
    unsafe {
        CLOSE.get()(fd);
        *libc::__errno_location() = errno;
    }
    -1
}

unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    table::closing(fd);
    // SAFETY: the caller's own argument, forwarded.
    unsafe { CLOSE.get()(fd) }
}

unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the caller's own arguments, forwarded or handled.
    unsafe {
        match handler(class) {
            None => READ.get()(fd, buffer, length),
            Some(handler) => handler.read(file, buffer, length),
        }
    }
}

unsafe extern "C-unwind" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => WRITE.get()(fd, buffer, length),
            Some(handler) => handler.write(file, buffer, length),
        }
    }
}

unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => PREAD.get()(fd, buffer, length, offset),
            Some(handler) => handler.pread(file, buffer, length, offset),
        }
    }
}

unsafe extern "C-unwind" fn pwrite(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => PWRITE.get()(fd, buffer, length, offset),
            Some(handler) => handler.pwrite(file, buffer, length, offset),
        }
    }
}

unsafe extern "C-unwind" fn preadv(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => PREADV.get()(fd, vector, count, offset),
            Some(handler) => handler.preadv(file, vector, count, offset),
        }
    }
}

unsafe extern "C-unwind" fn pwritev(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => PWRITEV.get()(fd, vector, count, offset),
            Some(handler) => handler.pwritev(file, vector, count, offset),
        }
    }
}

unsafe extern "C-unwind" fn ftruncate(fd: c_int, length: off_t) -> c_int {
    let (class, file) = table::look_up(fd);
    // SAFETY: the server's arguments are valid for the system call; passed on to it or to the
    // handler.
    unsafe {
        match handler(class) {
            None => FTRUNCATE.get()(fd, length),
            Some(handler) => handler.truncate(file, length),
        }
    }
}

/// `__read_chk(fd, buffer, length, size)`: `read` into memory of a size known to the compiler.
unsafe extern "C-unwind" fn read_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    size: size_t,
) -> ssize_t {
    check_size(length, size);
    // SAFETY: the caller's own arguments; the length has been compared with `size`.
    unsafe { read(fd, buffer, length) }
}

/// `__pread_chk(fd, buffer, length, offset, size)`
unsafe extern "C-unwind" fn pread_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    offset: off_t,
    size: size_t,
) -> ssize_t {
    check_size(length, size);
    // SAFETY: the caller's own arguments; the length has been compared with `size`.
    unsafe { pread(fd, buffer, length, offset) }
}

/// Like `__chk_fail`: ends the process if `length` exceeds `size`.
fn check_size(length: size_t, size: size_t) {
    if length > size {
        // SAFETY: has no arguments, and ends the process.
        unsafe { libc::abort() }
    }
}

/// The replacement of a call, and where the original is stored.
struct Replacement {
    ours: *const (),
    /// That of the variants with other arguments.
    checked: *const (),
    keep: fn(Code),
}

/// Adds every call to the plan, under each name that this server imports.
///
/// # Errors
/// If a required call is not imported under any name, or its names resolve to different functions.
pub(super) fn plan(plan: &mut Plan<'_>) -> Result<(), Error> {
    const { assert!(size_of::<off_t>() == 8, "pagevault is for 64-bit platforms") };
    for call in CALLS.iter().filter(|call| !fault::leaves_out(call.names[0])) {
        let Replacement { ours, checked, keep } = replacement(call.names[0])
            .ok_or_else(|| Error::BadReplacement { what: call.names[0].to_owned() })?;
        let mut original = None;
        for name in call.names {
            if let Some(code) = plan.got_if_imported(name, ours)? {
                original.get_or_insert(code);
            }
        }
        for name in call.checked {
            plan.got_if_imported(name, checked)?;
        }
        match original {
            Some(code) => keep(code),
            None if call.required => {
                plan.got(call.names[0], ours)?;
            }
            None => {}
        }
    }
    Ok(())
}

fn replacement(call: &str) -> Option<Replacement> {
    let replaced = |ours, keep| Some(Replacement { ours, checked: std::ptr::null(), keep });
    match call {
        "open" => Some(Replacement {
            ours: open as *const (),
            checked: open_2 as *const (),
            keep: |code| OPEN.resolve(code.as_ptr()),
        }),
        "close" => replaced(close as *const (), |code| CLOSE.resolve(code.as_ptr())),
        "read" => Some(Replacement {
            ours: read as *const (),
            checked: read_chk as *const (),
            keep: |code| READ.resolve(code.as_ptr()),
        }),
        "write" => replaced(write as *const (), |code| WRITE.resolve(code.as_ptr())),
        "pread" => Some(Replacement {
            ours: pread as *const (),
            checked: pread_chk as *const (),
            keep: |code| PREAD.resolve(code.as_ptr()),
        }),
        "pwrite" => replaced(pwrite as *const (), |code| PWRITE.resolve(code.as_ptr())),
        "preadv" => replaced(preadv as *const (), |code| PREADV.resolve(code.as_ptr())),
        "pwritev" => replaced(pwritev as *const (), |code| PWRITEV.resolve(code.as_ptr())),
        "ftruncate" => replaced(ftruncate as *const (), |code| FTRUNCATE.resolve(code.as_ptr())),
        _ => None,
    }
}
