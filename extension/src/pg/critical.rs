//! Critical sections.

use pgrx::pg_sys;

/// Runs `f` in a critical section: an error in it is a PANIC, which restarts the server, and WAL
/// replay repairs the data.
pub(crate) fn section<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: START_CRIT_SECTION and END_CRIT_SECTION (miscadmin.h). `f` can only leave by
    // returning: an ERROR in it is a PANIC (errstart, elog.c), which does not return.
    unsafe {
        pg_sys::CritSectionCount += 1;
        let result = f();
        pg_sys::CritSectionCount -= 1;
        result
    }
}
