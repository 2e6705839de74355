//! Memory for sealed copies of pages that are being written.

use std::ffi::c_void;

use pagevault_cipher::Lsn;
use pagevault_cipher::{PAGE_SIZE, Page};
use pgrx::pg_sys::BlockNumber;

use crate::page::io::{self, PageFault, SealTarget};
use crate::pg::process::ProcessLocal;

/// Maximum number of pages sealed at once; longer writes are split into runs.
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

/// Seals `count` pages into scratch memory and returns pointers to them, valid until the next call.
/// The scratch memory is not borrowed while the server's function writes it, because that may raise
/// an error.
///
/// # Safety
/// `pages` points to `count` pointers to PostgreSQL pages that do not move during the call; `count
/// <= RUN_MAX`.
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
            // SAFETY: the caller's page has the size of the copy and does not overlap it: the copy
            // belongs to this process. Other processes change only hint bits of the page meanwhile;
            // it is read once.
            unsafe {
                let page = (*pages.add(i)).cast::<u8>();
                std::ptr::copy_nonoverlapping(page, copy.as_mut_ptr(), PAGE_SIZE);
            }
        })?;
        Ok(pointers.as_ptr())
    })
}

/// The LSN of a page that is being written; no other process changes it meanwhile.
///
/// # Safety
/// `page` points to a page of PostgreSQL that this process is writing.
#[inline]
pub(super) unsafe fn lsn(page: *const c_void) -> Lsn {
    // SAFETY: a page begins with its LSN, and the caller guarantees that there is a page.
    Lsn::from_page(unsafe { page.cast::<[u8; 8]>().read() })
}

/// The page to write when extending a file: zeros if [`io::is_as_added`] is true for `page`.
///
/// # Safety
/// `page` points to a PostgreSQL page that no other process can access yet.
#[inline]
pub(super) unsafe fn as_added(page: *const c_void) -> *const c_void {
    #[repr(C, align(4096))]
    struct Zeros(Page);
    static ZEROS: Zeros = Zeros([0; PAGE_SIZE]);
    // SAFETY: the caller guarantees that there is a page, which no other process changes meanwhile.
    let is_as_added = io::is_as_added(unsafe { &*page.cast() });
    if is_as_added { ZEROS.0.as_ptr().cast() } else { page }
}

/// Memory for the version of a page on disk, read before the page is overwritten: aligned for
/// direct I/O, valid until the next call.
pub(super) fn page_from_disk() -> *mut Page {
    #[repr(C, align(4096))]
    struct OnDisk(Page);
    static ON_DISK: ProcessLocal<OnDisk> = ProcessLocal::new(OnDisk([0; PAGE_SIZE]));
    ON_DISK.with(|place| &raw mut place.0)
}
