//! Calls on paths.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libc::mode_t;

use crate::calls::{Fate, fails, on_path};
use crate::descriptors;
use crate::names;
use crate::next::next;

const HERE: c_int = libc::AT_FDCWD;

/// A descriptor was opened: from now on it stands for its file.
///
/// # Safety
/// `path` is a C string.
unsafe fn opened(fd: c_int, directory: c_int, path: *const c_char) -> c_int {
    if fd >= 0 {
        // SAFETY: `path` is a C string, by the contract of this function.
        let name = names::of_path(directory, unsafe { CStr::from_ptr(path) });
        descriptors::opened(fd, name.as_ref().map(names::Name::bytes));
    }
    fd
}

/// # Safety
/// `path` is a C string.
unsafe fn fate(function: &str, directory: c_int, path: *const c_char) -> Fate {
    // SAFETY: `path` is a C string, as the one who calls this says; it stays during the call.
    on_path(function, directory, unsafe { CStr::from_ptr(path) })
}

macro_rules! opens {
    ($($name:ident $symbol:literal;)*) => { $(
        /// The mode is a variadic argument in C; on the platforms that this runs on it is passed as
        /// a named one would be.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe {
                if let Fate::Failed(cause) = fate("open", HERE, path) {
                    fails(cause);
                    return -1;
                }
                let fd = next!(
                    $symbol as (*const c_char, c_int, mode_t) -> c_int,
                    path, flags, mode,
                );
                opened(fd, HERE, path)
            }
        }
    )* };
}
opens! { open c"open"; open64 c"open64"; __open_2 c"__open_2"; __open64_2 c"__open64_2"; }

macro_rules! opens_at {
    ($($name:ident $symbol:literal;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            at: c_int, path: *const c_char, flags: c_int, mode: mode_t,
        ) -> c_int {
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe {
                if let Fate::Failed(cause) = fate("open", at, path) {
                    fails(cause);
                    return -1;
                }
                let fd = next!(
                    $symbol as (c_int, *const c_char, c_int, mode_t) -> c_int,
                    at, path, flags, mode,
                );
                opened(fd, at, path)
            }
        }
    )* };
}
opens_at! { openat c"openat"; openat64 c"openat64"; }

#[unsafe(no_mangle)]
unsafe extern "C" fn opendir(path: *const c_char) -> *mut libc::DIR {
    // SAFETY: the program called us with what the C library asks for; handed on.
    unsafe {
        if let Fate::Failed(cause) = fate("opendir", HERE, path) {
            fails(cause);
            return std::ptr::null_mut();
        }
        let directory = next!(c"opendir" as (*const c_char) -> *mut libc::DIR, path);
        if !directory.is_null() {
            opened(libc::dirfd(directory), HERE, path);
        }
        directory
    }
}

/// Calls with one path, that answer -1 when they fail.
macro_rules! on_paths {
    ($($name:ident $symbol:literal as $function:literal
        ($($before:ident: $of_before:ty,)* [$at:expr, $path:ident]
            $(, $after:ident: $of_after:ty)*);)*
    ) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($before: $of_before,)* $path: *const c_char $(, $after: $of_after)*
        ) -> c_int {
            // SAFETY: the program called us with what the C library asks for; handed on.
            unsafe {
                if let Fate::Failed(cause) = fate($function, $at, $path) {
                    fails(cause);
                    return -1;
                }
                next!(
                    $symbol as ($($of_before,)* *const c_char $(, $of_after)*) -> c_int,
                    $($before,)* $path $(, $after)*
                )
            }
        }
    )* };
}
on_paths! {
    unlink c"unlink" as "unlink" ([HERE, path]);
    unlinkat c"unlinkat" as "unlink" (at: c_int, [at, path], flags: c_int);
    rmdir c"rmdir" as "rmdir" ([HERE, path]);
    mkdir c"mkdir" as "mkdir" ([HERE, path], mode: mode_t);
    mkdirat c"mkdirat" as "mkdir" (at: c_int, [at, path], mode: mode_t);
    truncate c"truncate" as "truncate" ([HERE, path], length: i64);
    truncate64 c"truncate64" as "truncate" ([HERE, path], length: i64);
    stat c"stat" as "stat" ([HERE, path], to: *mut c_void);
    stat64 c"stat64" as "stat" ([HERE, path], to: *mut c_void);
    lstat c"lstat" as "stat" ([HERE, path], to: *mut c_void);
    lstat64 c"lstat64" as "stat" ([HERE, path], to: *mut c_void);
    // The new name counts.
    rename c"rename" as "rename" (from: *const c_char, [HERE, to]);
    link c"link" as "link" (from: *const c_char, [HERE, to]);
}

/// `stat` of a path, or of a descriptor if the path is empty.
#[unsafe(no_mangle)]
unsafe extern "C" fn statx(
    at: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    to: *mut c_void,
) -> c_int {
    // SAFETY: the program called us with what the C library asks for; handed on. The path may be
    // null: some ask so whether the call is there.
    unsafe {
        let fate = match path.is_null() {
            true => Fate::Made,
            false if *path == 0 => crate::calls::on_descriptor("fstat", at),
            false => fate("stat", at, path),
        };
        if let Fate::Failed(cause) = fate {
            fails(cause);
            return -1;
        }
        next!(
            c"statx" as (c_int, *const c_char, c_int, c_uint, *mut c_void) -> c_int,
            at, path, flags, mask, to,
        )
    }
}
