//! Fault points: named points at which tests stop a process, to kill it or others there.
//!
//! With the feature `fault_points`, which ordinary builds do not have, a process that reaches
//! [`point`] looks for a file `pagevault.stop_at` in the data directory. If the file names the
//! point, the process writes its number to `pagevault.stopped`, logs it, and stays until the file
//! is removed or names another point. A file rather than a setting, because it reaches all
//! processes at once, at any point, also in recovery.
//!
//! A file `pagevault.leave_out` names a function that is not replaced ([`leaves_out`]), which
//! simulates a server that bypasses the replacement; or one whose calls are not seen.
//!
//! Without the feature, none of this is compiled.

#[cfg(not(feature = "fault_points"))]
#[inline(always)]
pub(crate) fn point(_name: &str) {}

/// Like [`point`], for one object: `name number`, with the number of a relation file or a database.
/// For the page path, so it cannot be cancelled.
#[cfg(not(feature = "fault_points"))]
#[inline(always)]
pub(crate) fn point_of(_name: &str, _object: u32) {}

/// Whether this function of the server is not to be replaced, or not to be seen.
#[cfg(not(feature = "fault_points"))]
#[inline(always)]
pub(crate) fn leaves_out(_function: &str) -> bool {
    false
}

#[cfg(feature = "fault_points")]
pub(crate) fn leaves_out(function: &str) -> bool {
    std::fs::read_to_string("pagevault.leave_out").is_ok_and(|name| name.trim() == function)
}

#[cfg(feature = "fault_points")]
pub(crate) use stopping::{point, point_of};

#[cfg(feature = "fault_points")]
mod stopping {
    use std::fs;
    use std::time::Duration;

    use crate::pg::process;

    const STOP_AT: &str = "pagevault.stop_at";
    const STOPPED: &str = "pagevault.stopped";

    pub(crate) fn point(name: &str) {
        if is_wanted(name, None) {
            stop(name, None, process::check_for_interrupts);
        }
    }

    pub(crate) fn point_of(name: &str, object: u32) {
        if is_wanted(name, Some(object)) {
            stop(name, Some(object), || {});
        }
    }

    /// The working directory of all processes of a server is its data directory.
    fn is_wanted(name: &str, object: Option<u32>) -> bool {
        let Ok(text) = fs::read_to_string(STOP_AT) else { return false };
        let mut words = text.split_whitespace();
        words.next() == Some(name)
            && words.next() == object.map(|number| number.to_string()).as_deref()
    }

    #[cold]
    fn stop(name: &str, object: Option<u32>, meanwhile: impl Fn()) {
        let pid = std::process::id();
        pgrx::log!("pagevault: process {pid} stops at {name}");
        // Renamed into place, so that tests never read an incomplete file.
        let written = format!("{STOPPED}.{pid}");
        let told = fs::write(&written, format!("{pid} {name}"));
        let _ = told.and_then(|()| fs::rename(&written, STOPPED));
        while is_wanted(name, object) {
            std::thread::sleep(Duration::from_millis(5));
            meanwhile();
        }
    }
}
