//! Background workers: loop, latch, signal; no logic.

mod rekey;
mod revalidate;
mod self_check;
pub(crate) mod statistics;
mod unlock;
mod wal;

use crate::pg::process;

/// Registers the workers; from `_PG_init`.
pub(crate) fn register() {
    self_check::register();
    unlock::register();
    // Nothing but pg_upgrade changes a cluster while it is at work.
    if process::is_binary_upgrade() {
        return;
    }
    revalidate::register();
    rekey::register();
    wal::register();
}
