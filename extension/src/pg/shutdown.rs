//! The end of the server, for a process that waits for something else than its latch.

use super::{externs, process};

/// Whether the postmaster of this process has died. Until all of its processes have ended, no other
/// can start in the data directory.
pub(crate) fn has_lost_postmaster() -> bool {
    !process::is_postmaster() && !process::has_postmaster()
}

/// Ends this process, whose postmaster has died, as a wait for its latch would
/// (`WL_EXIT_ON_PM_DEATH`, `WaitEventSetWait`, latch.c).
pub(crate) fn end_without_postmaster() -> ! {
    // SAFETY: as at the end of a session by a FATAL error, which does not return either: callbacks
    // abort the transaction and release locks.
    unsafe { externs::proc_exit(1) }
}
