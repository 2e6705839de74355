//! Faults of pages, where the server may longjmp over the frames of the hooks.

use pgrx::pg_sys::{self, BlockNumber};

use crate::page;
use crate::page::io::PageFault;

/// Raises the fault as ERROR. Not inlined, to keep the hot path small.
///
/// # Safety
/// No frame between here and the server's call has values with destructors.
#[cold]
#[inline(never)]
pub(super) unsafe fn raise(fault: PageFault, block: BlockNumber) -> ! {
    // SAFETY: the server may longjmp over our callers, which have no values with destructors.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| page::errors::report(fault, block).raise()) }
}

/// Raises the fault as ERROR, unless redo has waited for the key that was missing: then the caller
/// tries again.
///
/// # Safety
/// As [`raise`]: the server may longjmp over our callers. Not in a critical section.
#[cold]
#[inline(never)]
pub(super) unsafe fn await_key(fault: PageFault, block: BlockNumber) {
    // SAFETY: our caller has no values with destructors, as `raise` requires.
    unsafe {
        if !has_awaited_key(fault) {
            raise(fault, block)
        }
    }
}

/// Whether the key that was missing is there now, because redo has waited for it.
///
/// # Safety
/// The server may longjmp over our callers, as for [`await_key`]: they have nothing to drop.
#[cold]
#[inline(never)]
pub(super) unsafe fn has_awaited_key(fault: PageFault) -> bool {
    // SAFETY: our caller has no values with destructors, as `raise` requires.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| page::awaited::has_key(fault)) }
}

/// [`raise`] for a read that is refused before it starts.
///
/// # Safety
/// As [`raise`]: the server may longjmp over our callers.
#[cold]
#[inline(never)]
pub(super) unsafe fn refuse_read(fault: PageFault, block: BlockNumber) -> ! {
    page::io::count_refusal(fault.file);
    // SAFETY: our caller has no values with destructors, as `raise` requires.
    unsafe { raise(fault, block) }
}
