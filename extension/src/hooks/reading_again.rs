//! Pages that are read past shared buffers, perhaps while another process writes them.
//!
//! A page in shared buffers is read or written by one process at a time (`StartBufferIO`,
//! bufmgr.c). pg_prewarm in mode `read` calls smgrread with memory of its own, and may get the
//! first half of a page from before a write, and the second from after it. Such a mixture is not
//! authentic. It is read again before it is refused, as pg_basebackup does with a wrong checksum.

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use pgrx::pg_sys::{BlockNumber, SMgrRelation};

use super::smgr::{MDREAD, MDREADV};
use crate::fault;
use crate::page::altered;
use crate::page::io::{self, Cause, PageFault};
use crate::pg::buffers;
use crate::pg::compat::{self, SmgrFile};

type ForkNumber = i32;

/// Before each further attempt. The kernel may suspend a write between two halves of a page for up
/// to 200 ms, if there is much to write (`balance_dirty_pages`, mm/page-writeback.c).
const PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_millis(200),
];

/// Opens the page that was just read into `buffer`; see [`io::open`].
///
/// # Safety
/// The arguments are those of [`super::smgr::mdread`], after its read. The server may longjmp over
/// our callers, which have no values with destructors.
#[inline]
pub(super) unsafe fn open(
    reln: SMgrRelation,
    file: SmgrFile,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *mut c_void,
) -> Result<(), PageFault> {
    // SAFETY: `buffer` contains one page, which no other process accesses.
    let opened = unsafe { io::try_open(file, fork, block, &mut *buffer.cast()) };
    match opened {
        Ok(()) => Ok(()),
        // SAFETY: our caller's arguments, which are those of the read that has just ended.
        Err(fault) => unsafe { open_again(reln, fault, fork, block, buffer) },
    }
}

/// Reads and opens the page again, if the first reading may have been disturbed by a write.
///
/// # Safety
/// As for [`open`], after `fault` was found in the page.
#[cold]
unsafe fn open_again(
    reln: SMgrRelation,
    mut fault: PageFault,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *mut c_void,
) -> Result<(), PageFault> {
    let file = fault.file;
    let may_be_disturbed = !file.is_temporary() && !buffers::is_shared(buffer);
    for pause in PAUSES {
        if !may_be_disturbed || fault.cause != Cause::NotAuthentic {
            break;
        }
        fault::point_of("page.not_authentic", file.file.relation);
        // All pauses together are too short to look for interrupts.
        thread::sleep(pause);
        // SAFETY: the block was just read; as in `open`, and nothing here has a destructor.
        let opened = unsafe {
            read(reln, fork, block, buffer);
            io::try_open(file, fork, block, &mut *buffer.cast())
        };
        match opened {
            Ok(()) => return Ok(()),
            Err(later) => fault = later,
        }
    }
    // SAFETY: `buffer` still contains one page of this process's own.
    unsafe { altered::refuse(fault, fork, block, &mut *buffer.cast()) }
}

/// Reads a page as it is on disk.
///
/// # Safety
/// As for [`super::smgr::mdread`], of a block that exists.
pub(super) unsafe fn read(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    mut buffer: *mut c_void,
) {
    // SAFETY: the caller's own arguments, in the form of the server's function.
    unsafe {
        if compat::READS_INTO_VECTORS {
            MDREADV.get()(reln, fork, block, &raw mut buffer, 1);
        } else {
            MDREAD.get()(reln, fork, block, buffer);
        }
    }
}
