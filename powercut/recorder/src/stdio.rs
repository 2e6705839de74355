//! `fopen` and `fclose`. What goes through the C library's buffers reaches the kernel by calls
//! within that library; so the whole file is written down when it is synced or closed. PostgreSQL
//! writes few files that way, none of them in pieces (`AllocateFile`, fd.c).

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use libc::FILE;
use pagevault_powercut_disk::journal::Kind;

use crate::begin::work;
use crate::calls::opened_at;
use crate::files::{self, File};
use crate::note::{contents, note};
use crate::raw;

type Open = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut FILE;
type Close = unsafe extern "C" fn(*mut FILE) -> c_int;

fn next_open() -> Open {
    static NEXT: OnceLock<Open> = OnceLock::new();
    // SAFETY: a function of this name has this type in any C library.
    *NEXT.get_or_init(|| unsafe {
        std::mem::transmute::<*mut libc::c_void, Open>(raw::next(c"fopen"))
    })
}

fn next_close() -> Close {
    static NEXT: OnceLock<Close> = OnceLock::new();
    // SAFETY: a function of this name has this type in any C library.
    *NEXT.get_or_init(|| unsafe {
        std::mem::transmute::<*mut libc::c_void, Close>(raw::next(c"fclose"))
    })
}

macro_rules! opens {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            // SAFETY: the program called us with two C strings, as the C library asks; handed on.
            unsafe {
                let stream = next_open()(path, mode);
                if !stream.is_null() {
                    began(libc::fileno(stream), CStr::from_ptr(path), CStr::from_ptr(mode));
                }
                stream
            }
        }
    )* };
}
opens!(fopen fopen64);

fn began(fd: c_int, path: &CStr, mode: &CStr) {
    let mode = mode.to_bytes();
    let writes = mode.iter().any(|c| b"wa+".contains(c));
    let Some(work) = work().filter(|_| writes) else { return files::opened(fd, None) };
    let Some(file) = opened_at(work, fd, libc::AT_FDCWD, path) else { return };
    files::opened(fd, Some(File { stdio: true, ..file }));
    if mode.starts_with(b"w") {
        note(work, Kind::Length, file.inode, 0, &[], &[]);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: the program says that the stream is open; it is not used after it is closed.
    unsafe {
        let fd = libc::fileno(stream);
        if let (Some(work), Some(file)) = (work(), files::find(fd))
            && file.stdio
        {
            libc::fflush(stream);
            contents(work, fd, file);
        }
        files::opened(fd, None);
        next_close()(stream)
    }
}
