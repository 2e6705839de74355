//! Base backups in progress. Programs that make them list files first, and copy of each as many
//! bytes as it had then; so what a key file must have stays where it is meanwhile.
//!
//! Those through the replication protocol can be seen in shared memory. Of others only the session
//! that has called `pg_backup_start()` knows (`sessionBackupState`, `runningBackups`, xlog.c). The
//! server tells our object access hook before it executes a function (`InvokeFunctionExecuteHook`:
//! execExpr.c, execSRF.c, fastpath.c), so a session notes it, in shared memory, until it ends or
//! has committed a call of `pg_backup_stop()`.
//!
//! Not seen: C functions that call `do_pg_backup_start()` themselves, and backups of this server's
//! files for which another server was told.

use pgrx::pg_sys::Oid;

use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::{compat, processes};
use crate::shmem;
use crate::sync::{AtomicU32, Ordering::*, fence};

/// `pg_backup_start` and `pg_backup_stop` (pg_proc.dat).
const START: u32 = pgrx::pg_sys::F_PG_BACKUP_START;
const STOP: u32 = pgrx::pg_sys::F_PG_BACKUP_STOP;

/// Whether this transaction has called `pg_backup_stop()` since it called `pg_backup_start()`.
static STOPPED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Whether a function is one of the two.
#[inline]
pub(crate) fn is_about_backups(function: Oid) -> bool {
    matches!(function.to_u32(), START | STOP)
}

/// Called before this session executes one of the two.
pub(crate) fn called(function: Oid) {
    STOPPED.set(function.to_u32() == STOP);
    if STOPPED.get() {
        return;
    }
    if let Some(mark) = own() {
        mark.store(std::process::id(), Release);
        fence(SeqCst);
    }
    // Whoever rewrites a key file now has looked before.
    drop(KeystoreLock::acquire());
}

/// Called when a transaction has ended.
pub(crate) fn transaction_ended(committed: bool) {
    if STOPPED.get() {
        STOPPED.set(false);
        if let Some(mark) = own().filter(|_| committed) {
            mark.store(0, Release);
        }
    }
}

fn own() -> Option<&'static AtomicU32> {
    Some(&shmem::get()?.writers.slot(compat::process_number()?)?.backup)
}

/// Whether a base backup is in progress. Under the keystore lock: none begins to list files before
/// that is released.
pub(crate) fn any() -> bool {
    fence(SeqCst);
    let slots = shmem::get().map_or(&[][..], |shared| shared.writers.slots());
    processes::any_base_backup()
        || slots.iter().enumerate().any(|(process, slot)| {
            let pid = slot.backup.load(Acquire);
            pid != 0 && processes::is_there(process, pid)
        })
}
