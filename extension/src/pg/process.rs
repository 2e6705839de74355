//! Facts about the process we run in, and state that belongs to one process.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::path::PathBuf;

use pgrx::pg_sys;

/// A value of one PostgreSQL process.
///
/// PostgreSQL processes run our code on their main thread only, and signal handlers never call us,
/// so the one rule is that [`ProcessLocal::with`] is not entered again from inside itself.
pub(crate) struct ProcessLocal<T>(UnsafeCell<T>);

// SAFETY: see the type: one thread, no re-entry. The crate starts no threads.
unsafe impl<T> Sync for ProcessLocal<T> {}

impl<T> ProcessLocal<T> {
    /// A value that each process starts with (inherited from the postmaster by fork).
    pub(crate) const fn new(value: T) -> Self {
        ProcessLocal(UnsafeCell::new(value))
    }

    /// Runs `f` with the value. `f` must not raise a server ERROR by longjmp; a panic is fine.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: one thread, and no caller enters again from inside `f`.
        f(unsafe { &mut *self.0.get() })
    }

    /// Address of the value, for advice to the kernel.
    pub(crate) fn as_ptr(&self) -> *const T {
        self.0.get()
    }
}

/// The data directory, absolute.
pub(crate) fn data_directory() -> PathBuf {
    // SAFETY: DataDir is set before libraries are preloaded and never changes.
    let dir = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    PathBuf::from(dir.to_string_lossy().into_owned())
}

/// The directory of the server's own binary.
pub(crate) fn server_binary_directory() -> PathBuf {
    // SAFETY: my_exec_path is a NUL-terminated array set at the very start of main().
    let path = unsafe { CStr::from_ptr((&raw const pg_sys::my_exec_path).cast()) };
    let mut path = PathBuf::from(path.to_string_lossy().into_owned());
    path.pop();
    path
}

/// OID of the database this backend is connected to; 0 in processes that are not.
pub(crate) fn my_database() -> u32 {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// True in a backend or worker that runs transactions, as opposed to the startup process,
/// auxiliary processes and the postmaster.
pub(crate) fn runs_transactions() -> bool {
    // SAFETY: plain globals; IsTransactionState looks at this process's transaction state only.
    unsafe {
        pg_sys::IsUnderPostmaster
            && pg_sys::MyDatabaseId != pg_sys::InvalidOid
            && pg_sys::IsTransactionState()
    }
}

/// True while this cluster replays WAL (crash recovery or standby).
pub(crate) fn in_recovery() -> bool {
    // SAFETY: reads shared state that exists in every process that gets here.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Ends the statement or the session if someone asked for it. Does nothing in the postmaster, which
/// has no interrupts of this kind.
pub(crate) fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Makes this background worker a backend that sees shared catalogs only.
pub(crate) fn connect_without_database() {
    // SAFETY: in a background worker that asked for a database connection, once.
    unsafe {
        pg_sys::BackgroundWorkerUnblockSignals();
        pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0);
    }
}

/// Immediate shutdown of the whole server.
pub(crate) fn shut_server_down() {
    // SAFETY: the postmaster is our parent for as long as we run.
    unsafe { libc::kill(pg_sys::PostmasterPid, libc::SIGQUIT) };
}

/// Reads postgresql.conf again, as every process does after SIGHUP.
pub(crate) fn reload_configuration() {
    // SAFETY: outside of any transaction, in a process of ours.
    unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) }
}

/// True when pages carry checksums (`initdb --data-checksums`, `pg_checksums --enable`).
#[inline]
pub(crate) fn data_checksums() -> bool {
    // SAFETY: reads the control file's copy in shared memory; cannot raise.
    unsafe { raw::DataChecksumsEnabled() }
}

/// Calls on the page path, without pgrx's longjmp guard: none of these can raise.
mod raw {
    unsafe extern "C-unwind" {
        /// xlog.c: returns `ControlFile->data_checksum_version > 0`.
        pub(super) fn DataChecksumsEnabled() -> bool;
    }
}

/// True if pg_control says that the cluster was not shut down cleanly, or is a standby's.
pub(crate) fn was_not_shut_down() -> bool {
    use pg_sys::DBState::*;
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is palloc'd and not null.
    let state = unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        if control.is_null() { DB_IN_PRODUCTION } else { (*control).state }
    };
    // A damaged file is the server's to report; assume the worst meanwhile.
    !crc_ok || !matches!(state, DB_SHUTDOWNED | DB_SHUTDOWNED_IN_RECOVERY)
}
