//! Background workers: main loops, latches and signals, without other logic.

mod dropped;
mod dynamic;
mod rekey;
mod revalidate;
mod rotation;
mod self_check;
pub(crate) mod statistics;
mod unlock;
mod wal;

use crate::pg::{process, reloads, worker};

worker::entry_points! {
    pagevault_self_check_main => |_| self_check::main(),
    pagevault_unlock_main => |_| unlock::main(),
    pagevault_revalidate_main => |_| revalidate::main(),
    pagevault_rekey_launcher_main => |_| rekey::launcher_main(),
    pagevault_rekey_main => rekey::main,
    pagevault_dropped_main => dropped::main,
    pagevault_rotation_main => rotation::main,
    pagevault_statistics_main => statistics::main,
    pagevault_wal_main => |_| wal::main(),
}

/// Registers the workers; from `_PG_init`.
pub(crate) fn register() {
    reloads::prepare();
    self_check::register();
    unlock::register();
    // During pg_upgrade no other process may change the cluster.
    if process::is_binary_upgrade() {
        return;
    }
    revalidate::register();
    rekey::register();
    wal::register();
}
