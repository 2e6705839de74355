//! Base backups in progress. Programs that make them list files first, and copy of each as many
//! bytes as it had then; so what a key file must have stays where it is meanwhile.
//!
//! Those through the replication protocol can be seen in shared memory. Of others only the session
//! that has called `pg_backup_start()` knows (`sessionBackupState`, `get_backup_status()`, xlog.c),
//! so it says so in shared memory.
//!
//! The server tells our object access hook before it executes a function
//! (`InvokeFunctionExecuteHook`: execExpr.c, execSRF.c, fastpath.c). That is when a statement
//! begins, which may not get as far as the call: EXPLAIN, CASE, a cursor of which nothing is
//! fetched. And PL/pgSQL keeps expressions for a transaction and executes them again
//! (`exec_eval_simple_expr`, pl_exec.c). So a session is marked before its statement starts a
//! backup, and at the end of each transaction it is marked as `get_backup_status()` says then.
//!
//! Not seen: C functions that call `do_pg_backup_start()` themselves, and functions of another name
//! for the same code, until their transaction ends; and backups of this server's files for which
//! another server was told.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::Report;
use crate::pg::{compat, processes, session};
use crate::sync::{AtomicU32, Ordering::*, fence};
use crate::{fault, shmem};

/// `pg_backup_start` (pg_proc.dat).
const START: u32 = pg_sys::F_PG_BACKUP_START;

/// Whether this session is marked.
static MARKED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Whether a function starts a backup.
#[inline]
pub(crate) fn starts_a_backup(function: Oid) -> bool {
    function.to_u32() == START
}

/// Called before this session begins a statement that may start a backup.
pub(crate) fn may_start() {
    mark();
    // Whoever rewrites a key file now has looked before.
    drop(KeystoreLock::acquire());
}

/// Called when a transaction has ended.
pub(crate) fn transaction_ended() {
    match (session::runs_a_backup(), MARKED.get()) {
        (true, false) => mark(),
        (false, true) => {
            if let Some(mark) = own() {
                mark.store(0, Release);
            }
            MARKED.set(false);
        }
        _ => {}
    }
}

fn mark() {
    if fault::leaves_out("pg_backup_start") {
        return;
    }
    if let Some(mark) = own() {
        mark.store(std::process::id(), Release);
        fence(SeqCst);
        MARKED.set(true);
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

/// The error for what must not happen meanwhile.
pub(crate) fn in_progress() -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, "a base backup is in progress")
        .detail("What is restored from it may need these keys, to copy a database that was moved since. Nothing was destroyed.")
        .hint("Try again when it has ended: see pg_stat_progress_basebackup, and sessions that have called pg_backup_start().")
}
