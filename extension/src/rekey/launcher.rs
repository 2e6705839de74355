//! Waking the launcher of rekey workers when there is something to do.

use pgrx::{PgXactCallbackEvent, register_xact_callback};

use crate::pg::{compat, processes};
use crate::shmem;

/// Registers this process as the launcher.
pub(crate) fn register() {
    if let Some(shared) = shmem::get() {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        shared.control.set_rekey_launcher(number);
    }
}

/// Wakes the launcher. Cannot fail: it is called after the commit.
pub(crate) fn wake() {
    if let Some(number) = shmem::get().and_then(|shared| shared.control.rekey_launcher()) {
        processes::wake(number as usize);
    }
}

/// Wakes the launcher when the transaction has committed. The launcher itself notices the commit of
/// prepared transactions.
pub(crate) fn wake_at_commit() {
    register_xact_callback(PgXactCallbackEvent::Commit, wake);
}
