//! Background workers that connect to users' databases: they run no code of users.

use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;
use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys::{self, Oid};

use super::locks::ServerLock;
use super::process::{self, ProcessLocal};
use super::{compat, exit, externs, reloads};

/// Settings that a worker must not take from `postgresql.conf`, a database or the bootstrap
/// superuser: those that `AutoVacWorkerMain` sets (autovacuum.c, 15 to 18), and those that would
/// make a worker refuse its work, end in the middle of it, or accept damaged pages. With
/// `exit_on_error`, which any owner may set for a database, ERROR becomes FATAL (`errstart`,
/// elog.c).
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

/// Defines the functions that the server looks up by name as the main functions of background
/// workers. An error in one of them ends the worker.
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

/// Connects this background worker to a database, as the bootstrap superuser. If the database was
/// dropped meanwhile, or DROP DATABASE was interrupted, the worker ends, and no FATAL message is
/// logged.
///
/// The owner of a database can lock it, for ever with a prepared transaction (`RenameDatabase`,
/// dbcommands.c; `InitPostgres`, postinit.c, waits for the lock). So the worker ends if it has
/// waited for some seconds; and on SIGTERM as a backend does, because nothing else would end the
/// wait.
pub(crate) fn connect_to_database_if_exists(database: Oid) {
    const PATIENCE: &CStr = c"5s";
    // SAFETY: in a background worker that registered for a database connection, once. The hook and
    // the handlers, which are the server's own, belong to this process, which has a single thread.
    unsafe {
        pg_sys::SetConfigOption(
            c"lock_timeout".as_ptr(),
            PATIENCE.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
        compat::set_signal_handler(libc::SIGTERM, externs::die);
        if pg_sys::ShutdownRequestPending != 0 {
            pg_sys::proc_exit(1);
        }
        let others = pg_sys::emit_log_hook;
        PREVIOUS_HOOK.set(others);
        pg_sys::emit_log_hook = Some(suppress_missing_database);
        pg_sys::BackgroundWorkerInitializeConnectionByOid(database, Oid::INVALID, 0);
        pg_sys::emit_log_hook = others;
        compat::set_signal_handler(libc::SIGTERM, externs::SignalHandlerForShutdownRequest);
    }
}

/// The previous `emit_log_hook`.
static PREVIOUS_HOOK: ProcessLocal<pg_sys::emit_log_hook_type> = ProcessLocal::new(None);

/// `emit_log_hook` (elog.c): can keep a message out of the log.
unsafe extern "C-unwind" fn suppress_missing_database(message: *mut pg_sys::ErrorData) {
    // ERRCODE_UNDEFINED_DATABASE is the same number.
    let no_database = PgSqlErrorCode::ERRCODE_INVALID_CATALOG_NAME as i32;
    // An invalid database, or one that accepts no connections any more (CheckMyDatabase,
    // postinit.c).
    let not_now = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE as i32;
    // SAFETY: the message that is being reported, and the previous hook, called as the server would
    // call it.
    unsafe {
        if [no_database, not_now].contains(&(*message).sqlerrcode) {
            (*message).output_to_server = false;
        } else if let Some(hook) = PREVIOUS_HOOK.get() {
            hook(message);
        }
    }
}

/// Gives this worker settings under which it can work, whatever was set for its database, role or
/// server. Call once, after connecting.
pub(crate) fn restrict() {
    // SAFETY: outside any transaction, in a process that has just connected; the settings exist in
    // this major, and the values are valid.
    unsafe {
        for (name, value) in SETTINGS.iter().chain(compat::NEWER_SETTINGS) {
            pg_sys::SetConfigOption(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
        // No client waits for commits of workers, so they wait for no standby (as in autovacuum.c).
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
    }
}

/// Runs `work` in a transaction of this worker, as the bootstrap superuser in a restricted
/// operation. Between transactions the server allows no such operation (`StartTransaction`,
/// xact.c).
///
/// `work` leaves nothing with a destructor behind when it raises an error; then
/// [`super::process::abort_transaction`] is due.
pub(crate) fn transaction<R>(work: impl FnOnce() -> R) -> R {
    BackgroundWorker::transaction(AssertUnwindSafe(|| {
        let (mut user, mut context) = (Oid::INVALID, 0);
        // SAFETY: in a transaction; its abort restores both (AbortTransaction, xact.c).
        unsafe {
            pg_sys::GetUserIdAndSecContext(&raw mut user, &raw mut context);
            pg_sys::SetUserIdAndSecContext(
                pg_sys::BOOTSTRAP_SUPERUSERID.into(),
                context | pg_sys::SECURITY_RESTRICTED_OPERATION as i32,
            );
            let done = work();
            pg_sys::SetUserIdAndSecContext(user, context);
            done
        }
    }))
}

/// Limits how long this worker waits for a lock; after [`restrict`].
pub(crate) fn wait_for_locks_at_most(time: &CStr) {
    // SAFETY: outside any transaction; the server copies both texts.
    unsafe {
        pg_sys::SetConfigOption(
            c"lock_timeout".as_ptr(),
            time.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}

/// Makes this worker give way as autovacuum does, by the flag of autovacuum workers. Then the
/// server ends it when somebody drops its database, copies, renames or moves it
/// (`CountOtherDBBackends`, procarray.c), and cancels what it does when somebody has waited for one
/// of its locks for `deadlock_timeout` (`ProcSleep`, proc.c).
///
/// CREATE INDEX CONCURRENTLY does not wait for snapshots of a process with this flag
/// (`WaitForOlderSnapshots`, indexcmds.c), so such a worker must not look for rows of users'
/// tables. Nothing else in 15 to 18 looks at the flag.
pub(crate) fn give_way() {
    let _held = ServerLock::ProcArray.acquire();
    // SAFETY: this process is in the array while it is connected. Its own flags, and their mirror,
    // are written under the lock, as in vacuum_rel (vacuum.c).
    unsafe {
        let process = &mut *pg_sys::MyProc;
        process.statusFlags |= pg_sys::PROC_IS_AUTOVACUUM as u8;
        let mirror = (*pg_sys::ProcGlobal).statusFlags.add(process.pgxactoff as usize);
        mirror.write(process.statusFlags);
    }
}

/// Registers `work` for the exit of this process, also by FATAL. Session locks are released first.
/// `work` must not raise errors, take locks or allocate.
///
/// The server does not release session locks if a process exits between two transactions:
/// `ShutdownPostgres` (postinit.c, 15 to 18) aborts the transaction, if there is one, and releases
/// advisory locks. The next process in the same PGPROC would find the lock held by itself
/// (`SetupLockInTable`, lock.c); all other processes would wait for it forever.
pub(crate) fn at_exit(work: fn()) {
    exit::at_exit(work);
    exit::at_exit(release_session);
}

/// Before this process gives up its PGPROC. What was registered last is called first, so its
/// transaction has not ended yet.
fn release_session() {
    // SAFETY: the same calls as in ShutdownPostgres, which runs next and then has nothing left to
    // do.
    unsafe {
        pg_sys::AbortOutOfAnyTransaction();
        pg_sys::LockReleaseAll(pg_sys::DEFAULT_LOCKMETHOD as pg_sys::LOCKMETHODID, true);
    }
}

/// Makes this background worker end on SIGTERM and reload its settings on SIGHUP, in any wait; call
/// once, when it starts.
pub(crate) fn handle_worker_signals() {
    // SAFETY: handlers of the server itself, for a process with a latch; then signals are
    // unblocked.
    unsafe {
        compat::set_signal_handler(libc::SIGTERM, externs::SignalHandlerForShutdownRequest);
        compat::set_signal_handler(libc::SIGHUP, externs::SignalHandlerForConfigReload);
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Waits in a background worker: for `pause`, or until the worker is woken. Reloads changed
/// settings. Ends the process if that was requested or the postmaster is gone.
pub(crate) fn wait_in_worker(pause: Duration) {
    // Whoever has waited for something else meanwhile has reset the latch.
    if !heed_signals() {
        // Until others have heard of a reload that this process may have missed.
        process::sleep(reloads::longest_pause().map_or(pause, |longest| pause.min(longest)));
        heed_signals();
    }
}

/// As if SIGHUP had come, and somebody had reset the latch since.
#[cfg(any(test, feature = "pg_test"))]
pub(crate) fn as_after_a_reload() {
    // SAFETY: plain globals of this process.
    unsafe {
        pg_sys::ConfigReloadPending = 1;
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

/// Does what signals have asked a worker for; whether it has reloaded settings.
fn heed_signals() -> bool {
    // SAFETY: plain globals of this process; configuration is read outside of any transaction.
    unsafe {
        if pg_sys::ShutdownRequestPending != 0 {
            pg_sys::proc_exit(1); // after exit code 0 the worker would never be restarted
        }
        let is_told = pg_sys::ConfigReloadPending != 0;
        if !is_told && !reloads::one_was_missed() {
            return false;
        }
        pg_sys::ConfigReloadPending = 0;
        pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        if is_told {
            reloads::tell_others();
        }
        true
    }
}

/// Like [`wait_in_worker`], however often the worker is woken.
pub(crate) fn pause_worker(pause: Duration) {
    let end = Instant::now() + pause;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    {
        wait_in_worker(left);
    }
}
