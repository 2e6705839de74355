//! Background workers: loop, latch, signal; no logic.

mod unlock;

/// Registers the workers; from `_PG_init`.
pub(crate) fn register() {
    unlock::register();
}
