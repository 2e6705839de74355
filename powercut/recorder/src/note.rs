//! Appending to the journal.

use std::ffi::c_int;

use libc::iovec;
use pagevault_powercut_disk::journal::{Kind, header};

use crate::begin::Work;
use crate::files::File;
use crate::raw;

/// One record by one `writev`, which the kernel does not mix with others' (`O_APPEND`).
pub(crate) fn note(work: &Work, kind: Kind, inode: u64, number: u64, path: &[u8], rest: &[u8]) {
    let Some(header) = header(kind, work.server, inode, number, path.len(), rest.len()) else {
        raw::give_up()
    };
    let part =
        |bytes: &[u8]| iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let parts = [part(&header), part(path), part(rest)];
    // SAFETY: the parts are slices that live until the call returns, and are only read.
    let written = unsafe { raw::writev(work.journal, parts.as_ptr(), parts.len() as c_int) };
    if written != (header.len() + path.len() + rest.len()) as isize {
        raw::give_up();
    }
}

/// Where the next record will be, at the earliest.
pub(crate) fn place(work: &Work) -> u64 {
    raw::status(work.journal).map_or_else(|| raw::give_up(), |status| status.st_size as u64)
}

/// A file's contents as they are now: for those whose writes nobody saw.
pub(crate) fn contents(work: &Work, fd: c_int, file: File) {
    let Some(status) = raw::status(fd) else { return };
    span(work, fd, file, 0, status.st_size as u64);
    note(work, Kind::Length, file.inode, status.st_size as u64, &[], &[]);
}

/// Part of a file as it is now.
pub(crate) fn span(work: &Work, fd: c_int, file: File, mut at: u64, end: u64) {
    let mut room = vec![0; 1 << 18];
    while at < end {
        let wanted = room.len().min((end - at) as usize);
        let got = raw::pread(fd, &mut room[..wanted], at as i64);
        if got == 0 {
            return;
        }
        note(work, Kind::Write, file.inode, at, &[], &room[..got]);
        at += got as u64;
    }
}
