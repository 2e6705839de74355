//! Waking the launcher of workers when there is something to do.

use pgrx::{PgXactCallbackEvent, register_xact_callback};

use crate::pg::{compat, processes};
use crate::shmem;

/// This process is the launcher.
pub(crate) fn register() {
    if let Some(shared) = shmem::get() {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        shared.control.set_rekey_launcher(number);
    }
}

/// Has the launcher look. Cannot fail: called when what it is to see is committed already.
pub(crate) fn wake() {
    if let Some(number) = shmem::get().and_then(|shared| shared.control.rekey_launcher()) {
        processes::wake(number as usize);
    }
}

/// As [`wake`], once the transaction has committed. One that is prepared first is noticed by the
/// launcher itself.
pub(crate) fn wake_at_commit() {
    register_xact_callback(PgXactCallbackEvent::Commit, wake);
}
