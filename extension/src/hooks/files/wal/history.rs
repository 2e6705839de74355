//! Start addresses of timelines, from their history files. Needed only if a segment contains a page
//! of an older timeline than its own: in the segment in which a timeline began, and where a parent
//! timeline left pages behind.
//!
//! The history file exists in time: a server writes it before the first page of a timeline
//! (`StartupXLOG`, xlog.c), and a WAL receiver fetches it before it receives one
//! (`WalRcvFetchTimeLineHistoryFiles`, walreceiver.c).

use std::ffi::CStr;

use pagevault_cipher::Lsn;
use pagevault_keystore::wal_timelines::{HISTORY_TAIL, begin_of, history_name};

use super::DIRECTORY;
use crate::hooks::files::raw;
use crate::pg::process::ProcessLocal;

/// The timeline of the last query, and its start address.
static LAST: ProcessLocal<(u32, Lsn)> = ProcessLocal::new((0, Lsn::INVALID));

/// The start address of a timeline. Also called in critical sections: does not allocate, and
/// preserves `errno`.
pub(super) fn begin_of_timeline(timeline: u32) -> Option<Lsn> {
    LAST.with(|last| {
        if last.0 != timeline {
            *last = (timeline, read(timeline)?);
        }
        Some(last.1)
    })
}

#[cold]
fn read(timeline: u32) -> Option<Lsn> {
    let mut path = [0; DIRECTORY.len() + 16 + 1];
    path[..DIRECTORY.len()].copy_from_slice(DIRECTORY);
    path[DIRECTORY.len()..DIRECTORY.len() + 16].copy_from_slice(&history_name(timeline));
    let path = CStr::from_bytes_with_nul(&path).ok()?;
    let mut tail = [0; HISTORY_TAIL];
    // SAFETY: errno belongs to this thread; the path is a C string; the memory has the size that is
    // read; the descriptor belongs to this function from opening to closing.
    let got = unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let mut got = -1;
        if fd >= 0 {
            let length = libc::lseek(fd, 0, libc::SEEK_END);
            let from = (length - HISTORY_TAIL as libc::off_t).max(0);
            got = raw::pread(fd, tail.as_mut_ptr().cast(), HISTORY_TAIL, from);
            libc::close(fd);
        }
        *errno = before;
        got
    };
    begin_of(tail.get(..usize::try_from(got).ok()?)?)
}
