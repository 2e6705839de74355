//! Background workers: loop, latch, signal; no logic.

mod rekey;
mod revalidate;
mod self_check;
mod unlock;
mod wal;

/// Registers the workers; from `_PG_init`.
pub(crate) fn register() {
    self_check::register();
    unlock::register();
    revalidate::register();
    rekey::register();
    wal::register();
}
