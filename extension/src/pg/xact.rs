//! Transactions: the number of this one, and what became of others.

use std::ffi::CStr;

pub(crate) use pagevault_core::rekey::life::Outcome;
use pgrx::pg_sys::{self, Oid};

/// The full number of the current subtransaction, which it gets now if it has none.
pub(crate) fn number() -> u64 {
    // SAFETY: in a transaction that may write.
    unsafe { pg_sys::GetCurrentFullTransactionId() }.value
}

/// Does something in a transaction of its own. In a background worker, outside of any transaction.
pub(crate) fn within<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: begun and committed here; an ERROR in between is the caller's to handle, who aborts.
    unsafe {
        pg_sys::StartTransactionCommand();
        let done = work();
        pg_sys::CommitTransactionCommand();
        done
    }
}

/// Refuses a command where the transaction is to change nothing, as any that writes rows.
pub(crate) fn require_writable(command: &CStr) {
    // SAFETY: in a transaction; raises, or does nothing.
    unsafe { pg_sys::PreventCommandIfReadOnly(command.as_ptr()) }
}

/// Whether the present transaction is to write nothing, as its user said.
pub(crate) fn is_read_only() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::XactReadOnly }
}

/// What became of the transaction or subtransaction of this full number.
///
/// As `pg_xact_status()` says (xid8funcs.c, the same in 15 to 18), which looks into pg_xact while
/// nobody cuts it off. It refuses numbers that were not given yet: of those a restore along an
/// earlier timeline may have left some.
pub(crate) fn outcome(full: u64) -> Outcome {
    // SAFETY: reads a counter in shared memory under a lock, which it takes.
    if full >= unsafe { pg_sys::ReadNextFullTransactionId() }.value {
        return Outcome::Aborted;
    }
    // SAFETY: looks at this process's transaction state only.
    if unsafe { pg_sys::TransactionIdIsCurrentTransactionId((full as u32).into()) } {
        return Outcome::Mine;
    }
    let number = Some(pg_sys::Datum::from(full));
    // SAFETY: a function of the server with its own argument, in a transaction. It returns text in
    // ASCII, or NULL for a number that is older than pg_xact.
    let status = unsafe { pgrx::direct_function_call::<String>(pg_sys::pg_xact_status, &[number]) };
    match status.as_deref() {
        Some("in progress") => Outcome::InProgress,
        Some("committed") => Outcome::Committed,
        _ => Outcome::Aborted,
    }
}

/// Waits until a transaction of another session is at its end. Can be cancelled; deadlocks are
/// noticed.
pub(crate) fn wait_for(full: u64) {
    let (no_relation, no_row) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: in a transaction, holding no lock of the lightweight kind; the number is not one of
    // ours.
    unsafe {
        pg_sys::XactLockTableWait(
            (full as u32).into(),
            no_relation,
            no_row,
            pg_sys::XLTW_Oper::XLTW_None,
        );
    }
}

/// The session user.
pub(crate) fn session_user() -> Oid {
    // SAFETY: a plain look-up of this session.
    unsafe { pg_sys::GetSessionUserId() }
}
