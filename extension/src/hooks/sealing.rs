//! The memory that pages pass through on their way to disk.

use std::ffi::c_void;

use pagevault_cipher::Lsn;
use pagevault_cipher::{PAGE_SIZE, Page};
use pgrx::pg_sys::BlockNumber;

use crate::page::io::{self, PageFault, SealTarget};
use crate::pg::process::ProcessLocal;

/// Most pages sealed in one go; longer writes are cut into runs.
pub(super) const RUN_MAX: u32 = 16;

/// Private copies of the pages being written. Aligned for direct I/O (`PG_IO_ALIGN_SIZE`).
#[repr(C, align(4096))]
struct Scratch {
    pages: [Page; RUN_MAX as usize],
    pointers: [*const c_void; RUN_MAX as usize],
}

static SCRATCH: ProcessLocal<Scratch> = ProcessLocal::new(Scratch {
    pages: [[0; PAGE_SIZE]; RUN_MAX as usize],
    pointers: [std::ptr::null(); RUN_MAX as usize],
});

/// Seals `count` pages into scratch memory and returns pointers to them, good until the next call.
/// (The server's function that writes them may raise, so the memory is not held meanwhile.)
///
/// # Safety
/// `pages` points to `count` pointers to pages of PostgreSQL that stay where they are during the
/// call; `count <= RUN_MAX`.
pub(super) unsafe fn seal(
    target: SealTarget,
    fork: i32,
    first_block: BlockNumber,
    pages: *const *const c_void,
    count: u32,
) -> Result<*const *const c_void, PageFault> {
    SCRATCH.with(|Scratch { pages: copies, pointers }| {
        let copies = &mut copies[..count as usize];
        io::seal(target, fork, first_block, copies, |i, copy| {
            pointers[i] = copy.as_ptr().cast();
            // SAFETY: the caller's page, which is as large as the copy, and apart from it: that is
            // ours alone. What others change of the page meanwhile are hint bits; it is read once.
            unsafe {
                let page = (*pages.add(i)).cast::<u8>();
                std::ptr::copy_nonoverlapping(page, copy.as_mut_ptr(), PAGE_SIZE);
            }
        })?;
        Ok(pointers.as_ptr())
    })
}

/// The LSN of a page that is being written; others do not change it meanwhile.
///
/// # Safety
/// `page` points to a page of PostgreSQL that this process is writing.
#[inline]
pub(super) unsafe fn lsn(page: *const c_void) -> Lsn {
    // SAFETY: a page begins with its LSN, and the caller says that there is one.
    Lsn::from_page(unsafe { page.cast::<[u8; 8]>().read() })
}

/// What is written for a page that is added: zeros for one of which [`io::is_as_added`] is true.
///
/// # Safety
/// `page` points to a page of PostgreSQL that nobody else has yet.
#[inline]
pub(super) unsafe fn as_added(page: *const c_void) -> *const c_void {
    #[repr(C, align(4096))]
    struct Zeros(Page);
    static ZEROS: Zeros = Zeros([0; PAGE_SIZE]);
    // SAFETY: the caller says that there is a page, which nobody changes as long as we look.
    let is_as_added = io::is_as_added(unsafe { &*page.cast() });
    if is_as_added { ZEROS.0.as_ptr().cast() } else { page }
}

/// Where a page is read to that is on disk, before it is written over: aligned for direct I/O, good
/// until the next call.
pub(super) fn place_for_disk() -> *mut Page {
    #[repr(C, align(4096))]
    struct OnDisk(Page);
    static ON_DISK: ProcessLocal<OnDisk> = ProcessLocal::new(OnDisk([0; PAGE_SIZE]));
    ON_DISK.with(|place| &raw mut place.0)
}
