//! Transactions: the ID of the current one, the outcome of others.

use std::ffi::CStr;

pub(crate) use pagevault_core::rekey::life::Outcome;
use pgrx::PgTryBuilder;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::pg_sys::{self, Oid};

/// Runs `work` in a subtransaction, and returns an error of the server, which ends only that. In a
/// transaction that is not about to end.
///
/// As PL/pgSQL does it (`exec_stmt_block`, pl_exec.c).
pub(crate) fn attempt<R>(work: fn() -> R) -> Result<R, Box<CaughtError>> {
    // SAFETY: memory context and resource owner are those of the caller again afterwards; the
    // subtransaction begins and ends here, on either path.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        let result = PgTryBuilder::new(|| Ok(work()))
            .catch_others(|error| Err(Box::new(error)))
            .catch_rust_panic(|error| Err(Box::new(error)))
            .execute();
        match result {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::CurrentMemoryContext = context;
        pg_sys::CurrentResourceOwner = owner;
        result
    }
}

/// The full ID of the current subtransaction. Assigns one if it has none.
pub(crate) fn number() -> u64 {
    // SAFETY: in a transaction that may write.
    unsafe { pg_sys::GetCurrentFullTransactionId() }.value
}

/// Refuses a command in a read-only transaction, as the server refuses commands that write rows.
pub(crate) fn require_writable(command: &CStr) {
    // SAFETY: in a transaction; raises, or does nothing.
    unsafe { pg_sys::PreventCommandIfReadOnly(command.as_ptr()) }
}

/// Whether the current transaction is read-only.
pub(crate) fn is_read_only() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::XactReadOnly }
}

/// The outcome of the transaction or subtransaction with this full ID.
///
/// From `pg_xact_status()` (xid8funcs.c, the same in 15 to 18), which reads pg_xact while it is
/// protected from truncation. That function raises an error for IDs that were not assigned yet.
/// After a restore along an earlier timeline there may be such IDs; their transactions count as
/// aborted.
pub(crate) fn outcome(full: u64) -> Outcome {
    // SAFETY: reads a counter in shared memory, under a lock that the function takes.
    if full >= unsafe { pg_sys::ReadNextFullTransactionId() }.value {
        return Outcome::Aborted;
    }
    // SAFETY: reads this process's transaction state only.
    if unsafe { pg_sys::TransactionIdIsCurrentTransactionId((full as u32).into()) } {
        return Outcome::Mine;
    }
    let number = Some(pg_sys::Datum::from(full));
    // SAFETY: a function of the server, called with its own argument type in a transaction. It
    // returns ASCII text, or NULL for an ID that is older than pg_xact.
    let status = unsafe { pgrx::direct_function_call::<String>(pg_sys::pg_xact_status, &[number]) };
    match status.as_deref() {
        Some("in progress") => Outcome::InProgress,
        Some("committed") => Outcome::Committed,
        _ => Outcome::Aborted,
    }
}

/// Waits until a transaction of another session has ended. Can be cancelled; deadlocks are
/// detected.
pub(crate) fn wait_for(full: u64) {
    let (no_relation, no_row) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: in a transaction, with no LWLock held; the ID is not one of this session.
    unsafe {
        pg_sys::XactLockTableWait(
            (full as u32).into(),
            no_relation,
            no_row,
            pg_sys::XLTW_Oper::XLTW_None,
        );
    }
}

/// Whether the transaction has changed something, so that its commit is in WAL.
pub(crate) fn has_id() -> bool {
    // SAFETY: reads the state of this process.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// The session user.
pub(crate) fn session_user() -> Oid {
    // SAFETY: a plain look-up of this session.
    unsafe { pg_sys::GetSessionUserId() }
}

/// Transactions of other sessions in this database, at one moment; not prepared ones.
pub(crate) struct Running(Vec<pg_sys::VirtualTransactionId>);

/// Those that run now, whether or not they have written anything, but for VACUUM, which makes no
/// files (VACUUM FULL does not count as one).
pub(crate) fn running_in_database() -> Running {
    let mut count = 0;
    // SAFETY: the result is a palloc'd array of so many elements, copied at once
    // (GetCurrentVirtualXIDs, procarray.c): no limit by xmin, of this database.
    unsafe {
        let all = pg_sys::GetCurrentVirtualXIDs(
            pg_sys::InvalidTransactionId,
            false,
            false,
            pg_sys::PROC_IN_VACUUM as i32,
            &raw mut count,
        );
        let count = usize::try_from(count).unwrap_or(0);
        Running(if count == 0 {
            Vec::new()
        } else {
            std::slice::from_raw_parts(all, count).to_vec()
        })
    }
}

impl Running {
    /// Whether all of them have ended, or are prepared: such a one has the same number as the
    /// session that prepared it had (`MarkAsPreparingGuts`, twophase.c).
    pub(crate) fn have_ended(&self) -> bool {
        // SAFETY: both look without waiting whether the transaction still has its lock
        // (VirtualXactLock, lock.c), or is among those that are prepared (twophase.c).
        self.0.iter().all(|transaction| unsafe {
            let mut more = false;
            pg_sys::VirtualXactLock(*transaction, false)
                || pg_sys::TwoPhaseGetXidByVirtualXID(*transaction, &raw mut more)
                    != pg_sys::InvalidTransactionId
        })
    }
}
