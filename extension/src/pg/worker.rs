//! Background workers that are connected to databases of users: they run nothing that users have
//! made.

use std::ffi::CStr;

use pgrx::pg_sys;

use super::compat;
use super::process::ProcessLocal;

/// What must not reach a worker from `postgresql.conf`, a database or the bootstrap superuser: what
/// `AutoVacWorkerMain` sets (autovacuum.c, 15 to 18), and what would have a worker refuse its work,
/// end in the middle of it (`errstart`, elog.c, makes FATAL of ERROR where `exit_on_error` is on,
/// which anybody may set for a database of theirs), or take damaged pages for sound ones.
const SETTINGS: [(&CStr, &CStr); 13] = [
    (c"search_path", c"pg_catalog, pg_temp"),
    (c"zero_damaged_pages", c"off"),
    (c"ignore_checksum_failure", c"off"),
    (c"exit_on_error", c"off"),
    (c"statement_timeout", c"0"),
    (c"lock_timeout", c"0"),
    (c"idle_in_transaction_session_timeout", c"0"),
    (c"idle_session_timeout", c"0"),
    (c"default_transaction_isolation", c"read committed"),
    (c"default_transaction_read_only", c"off"),
    (c"default_transaction_deferrable", c"off"),
    (c"row_security", c"off"),
    (c"stats_fetch_consistency", c"none"),
];

/// Defines the functions by whose names the server finds the main functions of background workers.
/// What raises in one of these ends the worker.
macro_rules! entry_points {
    ($($name:ident => $main:expr,)*) => {
        $(
            #[pgrx::pg_guard]
            #[unsafe(no_mangle)]
            pub(crate) extern "C-unwind" fn $name(argument: pgrx::pg_sys::Datum) {
                ($main)(argument)
            }
        )*
    };
}
pub(crate) use entry_points;

/// Whoever set what for its database, role or server: this worker is the bootstrap superuser, in a
/// restricted operation, with settings under which it can work. Call once, when it is connected.
pub(crate) fn seclude() {
    // SAFETY: outside of any transaction, in a process that has just connected; the settings exist
    // in this major, and each takes its value. Transactions begin with the user and the context
    // that they find (StartTransaction, xact.c).
    unsafe {
        for (name, value) in SETTINGS.iter().chain(compat::NEWER_SETTINGS) {
            pg_sys::SetConfigOption(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
        // Nobody waits for what workers commit, so they wait for no standby (as in autovacuum.c).
        if pg_sys::synchronous_commit
            > pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32
        {
            pg_sys::SetConfigOption(
                c"synchronous_commit".as_ptr(),
                c"local".as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
        pg_sys::SetUserIdAndSecContext(
            pg_sys::BOOTSTRAP_SUPERUSERID.into(),
            pg_sys::SECURITY_RESTRICTED_OPERATION as i32,
        );
    }
}

/// Has this worker give up after a while where it meets a lock; after [`seclude`].
pub(crate) fn wait_for_locks_at_most(time: &CStr) {
    // SAFETY: outside of any transaction; the server copies both texts.
    unsafe {
        pg_sys::SetConfigOption(
            c"lock_timeout".as_ptr(),
            time.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}

static AT_EXIT: ProcessLocal<Option<fn()>> = ProcessLocal::new(None);

/// Has `work` done when this process exits, also by FATAL, and its session's locks given back. It
/// must not raise, take locks or allocate.
///
/// Locks of the session are not given back by the server where a process ends between two
/// transactions: `ShutdownPostgres` (postinit.c, 15 to 18) ends the transaction, if there is one,
/// and releases advisory locks. Whoever has the place of this process next would find the lock held
/// by itself (`SetupLockInTable`, lock.c), everybody else for ever.
pub(crate) fn at_exit(work: fn()) {
    AT_EXIT.set(Some(work));
    // SAFETY: once per process; the function lives as long as the library.
    unsafe { pg_sys::before_shmem_exit(Some(exiting), 0.into()) };
}

/// Contract: this process is about to give up its place in shared memory (`shmem_exit`, ipc.c), and
/// has not ended its transaction yet: what was registered last is called first.
unsafe extern "C-unwind" fn exiting(_code: std::ffi::c_int, _argument: pg_sys::Datum) {
    // SAFETY: as ShutdownPostgres does it in a moment, which then finds nothing left to do.
    unsafe {
        pg_sys::AbortOutOfAnyTransaction();
        pg_sys::LockReleaseAll(pg_sys::DEFAULT_LOCKMETHOD as pg_sys::LOCKMETHODID, true);
    }
    if let Some(work) = AT_EXIT.take() {
        work();
    }
}
