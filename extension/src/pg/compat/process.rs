//! Process numbers, signals and settings of processes.

use pgrx::pg_sys;

use super::files::SHARED_BACKEND;
use crate::pg::externs;

/// The number of this process among all processes of the server, auxiliary ones included
/// (`MyProcNumber`; `MyProc->pgprocno` before 17). `None` in the postmaster, and in a process that
/// has no PGPROC yet or any more.
#[inline]
pub(crate) fn process_number() -> Option<usize> {
    // SAFETY: plain globals of this process; before 17, its own PGPROC.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let number = pg_sys::MyProc.as_ref().map_or(-1, |process| process.pgprocno);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let number = pg_sys::MyProcNumber;
        usize::try_from(number).ok()
    }
}

/// The PID of the process that uses a replication slot, or 0 (`active_pid`; `active_proc` since
/// 19).
///
/// # Safety
/// The slot is an entry of the server's array.
pub(crate) unsafe fn user_of(slot: *const pg_sys::ReplicationSlot) -> i32 {
    // SAFETY: an aligned word of the entry, which its owner writes.
    unsafe {
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        let pid = {
            let number = (&raw const (*slot).active_proc).read_volatile();
            usize::try_from(number).map_or(0, |number| super::super::processes::pid(number) as i32)
        };
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        let pid = (&raw const (*slot).active_pid).read_volatile();
        pid
    }
}

/// An upper bound of [`process_number`], exclusive; available when shared memory is set up.
pub(crate) fn most_processes() -> usize {
    // SAFETY: a plain global, computed before libraries ask for shared memory.
    let backends = unsafe { pg_sys::MaxBackends };
    usize::try_from(backends).unwrap_or(0) + pg_sys::NUM_AUXILIARY_PROCS as usize
}

/// The local number of this process's transaction (`MyProc->vxid.lxid`; `MyProc->lxid` before 17).
pub(crate) fn local_transaction() -> u32 {
    // SAFETY: MyProc is set in every process that runs transactions; only this process writes the
    // field.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*pg_sys::MyProc).lxid;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return (*pg_sys::MyProc).vxid.lxid;
    }
}

/// Whether this backend holds a lock in this mode (`LockHeldByMe`).
pub(crate) fn holds_lock(tag: &pg_sys::LOCKTAG, mode: i32) -> bool {
    // SAFETY: looks into a table of this process, which it has since its start.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return pg_sys::LockHeldByMe(tag, mode);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::LockHeldByMe(tag, mode, false);
    }
}

/// The backend number in the names of this session's temporary files
/// (`ProcNumberForTempRelations`, `BackendIdForTempRelations` before 17).
pub(crate) fn temporary_backend() -> i32 {
    // SAFETY: plain globals of this process.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let (own, leader) = (pg_sys::MyBackendId, pg_sys::ParallelLeaderBackendId);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let (own, leader) = (pg_sys::MyProcNumber, pg_sys::ParallelLeaderProcNumber);
        if leader == SHARED_BACKEND { own } else { leader }
    }
}

/// True for the process that synchronizes replication slots from a primary (`B_SLOTSYNC_WORKER`,
/// 17+).
#[inline]
pub(crate) fn is_slot_sync_worker(kind: pg_sys::BackendType::Type) -> bool {
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    return kind == pg_sys::BackendType::B_SLOTSYNC_WORKER;
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    return kind == pg_sys::BackendType::Type::MAX; // no process has this value
}

/// A signal handler: gets the signal and, from 19 on, who sent it.
#[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
pub(crate) type SignalHandler = unsafe extern "C-unwind" fn(std::ffi::c_int);
/// A signal handler: gets the signal and, from 19 on, who sent it.
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) type SignalHandler =
    unsafe extern "C-unwind" fn(std::ffi::c_int, *const pg_sys::pg_signal_info);

/// Sets a signal handler (`pqsignal`; in 18 the server's is named `pqsignal_be`).
///
/// # Safety
/// `handler` does only what is allowed in a signal handler.
pub(crate) unsafe fn set_signal_handler(signal: i32, handler: SignalHandler) {
    // SAFETY: the caller guarantees that the handler may run at any time.
    unsafe {
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        pg_sys::pqsignal_be(signal, Some(handler));
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        pg_sys::pqsignal(signal, Some(handler));
    }
}

/// `log_min_messages` of this process; from 19 on the server has one for each type of process.
#[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
pub(crate) fn log_min_messages() -> *mut i32 {
    &raw mut pg_sys::log_min_messages
}

/// `log_min_messages` of this process; from 19 on the server has one for each type of process.
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) fn log_min_messages() -> *mut i32 {
    // SAFETY: a plain global of this process; the array has an element for each type of process.
    let this = unsafe { pg_sys::MyBackendType } as usize;
    (&raw mut pg_sys::log_min_messages).cast::<i32>().wrapping_add(this)
}

/// `ProcessStartupProcInterrupts` (18+), `HandleStartupProcInterrupts` before.
///
/// # Safety
/// In the startup process, where it may exit.
pub(crate) unsafe fn process_startup_interrupts() {
    // SAFETY: it may end the process, which the caller permits.
    unsafe { externs::ProcessStartupProcInterrupts() }
}

/// All settings of this process, as an array of pointers and its length. The array is valid until
/// another setting is defined (`get_guc_variables`; before 16 the server's own array).
pub(crate) fn settings() -> (*mut *mut pg_sys::config_generic, usize) {
    // SAFETY: both functions read, or copy, memory of this process.
    unsafe {
        let mut count = 0;
        #[cfg(feature = "pg15")]
        let settings = {
            count += pg_sys::GetNumConfigOptions();
            pg_sys::get_guc_variables()
        };
        #[cfg(not(feature = "pg15"))]
        let settings = pg_sys::get_guc_variables(&raw mut count);
        (settings, usize::try_from(count).unwrap_or(0))
    }
}

/// The place of the assign hook of a setting with the values on and off.
///
/// # Safety
/// A setting of this process, of this type (`PGC_BOOL`).
pub(crate) unsafe fn assign_hook(
    setting: *mut pg_sys::config_generic,
) -> *mut pg_sys::GucBoolAssignHook {
    // SAFETY: the caller's setting has this type.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        return &raw mut (*setting.cast::<pg_sys::config_bool>()).assign_hook;
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        return &raw mut (*setting).__bindgen_anon_1._bool.assign_hook;
    }
}

/// In the startup process: tells the hot standby sessions of a database to end, as
/// `ResolveRecoveryConflictWithDatabase` (standby.c) does.
pub(crate) fn end_sessions_in_redo(database: pg_sys::Oid) {
    // SAFETY: signals processes under a lock of the server (procarray.c).
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        pg_sys::CancelDBBackends(
            database,
            pg_sys::ProcSignalReason::PROCSIG_RECOVERY_CONFLICT_DATABASE,
            true,
        );
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        pg_sys::SignalRecoveryConflictWithDatabase(
            database,
            pg_sys::RecoveryConflictReason::RECOVERY_CONFLICT_DATABASE,
        );
    }
}
