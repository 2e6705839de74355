//! Waking the launcher of workers when there is something to do.

use std::sync::atomic::{AtomicU32, Ordering::*};

use pgrx::{PgXactCallbackEvent, register_xact_callback};

use crate::pg::{compat, processes};
use crate::shmem;

/// Words of shared memory: the number of the launcher's process and one.
pub(crate) const WORDS: usize = 1;

fn launcher() -> Option<&'static AtomicU32> {
    shmem::get().and_then(|shared| shared.control.rekey_wishes().first())
}

/// This process is the launcher.
pub(crate) fn attend() {
    if let Some(launcher) = launcher() {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        launcher.store(number.map_or(0, |number| number + 1), Release);
    }
}

/// Has the launcher look. Cannot fail: called when what it is to see is committed already.
pub(crate) fn wish() {
    if let Some(number) = launcher().and_then(|launcher| launcher.load(Acquire).checked_sub(1)) {
        processes::wake(number as usize);
    }
}

/// As [`wish`], once the transaction has committed. One that is prepared first is noticed by the
/// launcher itself.
pub(crate) fn at_commit() {
    register_xact_callback(PgXactCallbackEvent::Commit, wish);
}
