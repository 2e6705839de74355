//! Which descriptor is open on which file below the data directory. A child that is forked inherits
//! descriptors and table alike.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Descriptors that can be watched; PostgreSQL keeps to some thousand.
const DESCRIPTORS: usize = 1 << 16;

/// The inode, 0 if the file is nothing to us; the highest bit: opened by the C library's stdio,
/// whose writes nobody sees.
static INODES: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];

const STDIO: u64 = 1 << 63;

/// A file below the data directory.
#[derive(Clone, Copy)]
pub(crate) struct File {
    pub(crate) inode: u64,
    pub(crate) stdio: bool,
}

pub(crate) fn find(fd: c_int) -> Option<File> {
    let inode = INODES.get(usize::try_from(fd).ok()?)?.load(Relaxed);
    (inode != 0).then_some(File { inode: inode & !STDIO, stdio: inode & STDIO != 0 })
}

pub(crate) fn opened(fd: c_int, file: Option<File>) {
    let Some(entry) = usize::try_from(fd).ok().and_then(|fd| INODES.get(fd)) else { return };
    let inode = file.map_or(0, |file| file.inode | if file.stdio { STDIO } else { 0 });
    if entry.load(Relaxed) != inode {
        entry.store(inode, Relaxed);
    }
}
