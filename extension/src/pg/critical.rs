//! Critical sections.

use pgrx::pg_sys;

/// Runs `f` in a critical section: what raises in it ends the server, and WAL puts things right at
/// its next start.
pub(crate) fn section<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: START_CRIT_SECTION and END_CRIT_SECTION (miscadmin.h). Nothing can leave `f` other
    // than by returning: an ERROR is a PANIC in here (errstart, elog.c), and does not come back.
    unsafe {
        pg_sys::CritSectionCount += 1;
        let result = f();
        pg_sys::CritSectionCount -= 1;
        result
    }
}
