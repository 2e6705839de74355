//! Facts about the process we run in.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagevault_cipher::Lsn;
pub(crate) use pagevault_interpose::ProcessLocal;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::{compat, externs, locks};

/// The data directory, absolute.
pub(crate) fn data_directory() -> PathBuf {
    // SAFETY: DataDir is set before libraries are preloaded and never changes.
    let dir = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    PathBuf::from(OsStr::from_bytes(dir.to_bytes()))
}

/// The directory of the server's own binary.
pub(crate) fn server_binary_directory() -> PathBuf {
    // SAFETY: my_exec_path is a NUL-terminated array set at the very start of main().
    let path = unsafe { CStr::from_ptr((&raw const pg_sys::my_exec_path).cast()) };
    let mut path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
    path.pop();
    path
}

/// OID of the database this backend is connected to; 0 in processes that are not.
pub(crate) fn my_database() -> u32 {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// True in a backend or worker that runs transactions in a database, be it in single-user mode, as
/// opposed to the startup process, auxiliary processes and the postmaster.
pub(crate) fn runs_transactions() -> bool {
    // SAFETY: plain globals; IsTransactionState looks at this process's transaction state only.
    unsafe { pg_sys::MyDatabaseId != pg_sys::InvalidOid && pg_sys::IsTransactionState() }
}

/// True in a server that pg_upgrade has started (`postgres -b`).
pub(crate) fn is_binary_upgrade() -> bool {
    // SAFETY: a plain global, set before libraries are loaded.
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// Which transaction and subtransaction this process is in, told from all others since its start.
pub(crate) fn transaction() -> (u32, u32) {
    // SAFETY: looks at this process's transaction state, in a transaction.
    (compat::local_transaction(), unsafe { pg_sys::GetCurrentSubTransactionId() })
}

/// True while the script of this extension runs: its tables are there before there is any key.
pub(crate) fn creates_us() -> bool {
    // SAFETY: plain globals of this process, and a catalog look-up in a transaction.
    unsafe {
        pg_sys::creating_extension
            && pg_sys::CurrentExtensionObject
                == pg_sys::get_extension_oid(c"pagevault".as_ptr(), true)
    }
}

/// Tells pg_stat_activity what this process does; nothing while it is idle.
pub(crate) fn show_activity(text: Option<&str>) {
    let text = text.and_then(|text| std::ffi::CString::new(text).ok());
    let (state, text) = match &text {
        Some(text) => (pg_sys::BackendState::STATE_RUNNING, text.as_ptr()),
        None => (pg_sys::BackendState::STATE_IDLE, std::ptr::null()),
    };
    // SAFETY: the server copies the text.
    unsafe { pg_sys::pgstat_report_activity(state, text) };
}

/// The setting `fsync`: without it PostgreSQL asks nobody to sync anything.
pub(crate) fn fsync() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::enableFsync }
}

/// True while libraries are loaded from `shared_preload_libraries`.
pub(crate) fn preloads_libraries() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}

/// True in the postmaster, while it starts the server and afterwards.
pub(crate) fn is_postmaster() -> bool {
    // SAFETY: plain globals of this process.
    unsafe { pg_sys::IsPostmasterEnvironment && !pg_sys::IsUnderPostmaster }
}

/// The setting `logging_collector`.
pub(crate) fn has_logging_collector() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::Logging_collector }
}

/// True while this cluster replays WAL (crash recovery or standby).
pub(crate) fn in_recovery() -> bool {
    // SAFETY: reads shared state that exists in every process that gets here.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// True in the process that replays WAL (in single-user mode, the only one), until the data
/// directory is consistent: pages on disk may be newer than what is replayed. In crash recovery
/// that is until all WAL is replayed.
pub(crate) fn is_not_consistent_yet() -> bool {
    // SAFETY: plain globals of this process; false and false in all that do not replay.
    unsafe { pg_sys::InRecovery && !pg_sys::reachedConsistency }
}

/// Ends the statement or the session if someone asked for it. Does nothing in the postmaster, which
/// has no interrupts of this kind.
pub(crate) fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}

/// True if the statement, the session or this worker was told to end, and may.
pub(crate) fn is_told_to_stop() -> bool {
    // SAFETY: plain globals of this process; the flags are set by its signal handlers.
    unsafe {
        let told = (&raw const pg_sys::QueryCancelPending).read_volatile() != 0
            || (&raw const pg_sys::ProcDiePending).read_volatile() != 0
            || (&raw const pg_sys::ShutdownRequestPending).read_volatile() != 0;
        told && pg_sys::InterruptHoldoffCount == 0 && pg_sys::CritSectionCount == 0
    }
}

/// True in processes that work for users: backends, their parallel workers, autovacuum, and
/// whatever else runs queries on catalogs. Recovery, the checkpointer and other auxiliary processes
/// work for the cluster.
pub(crate) fn serves_users() -> bool {
    use pg_sys::BackendType::*;
    // SAFETY: a plain global of this process.
    let kind = unsafe { pg_sys::MyBackendType };
    matches!(kind, B_BACKEND | B_BG_WORKER | B_AUTOVAC_LAUNCHER | B_AUTOVAC_WORKER | B_WAL_SENDER)
        || compat::is_slot_sync_worker(kind)
}

/// Has this background worker end on SIGTERM and read its settings anew on SIGHUP, whatever it
/// waits for; once, at its start.
pub(crate) fn handle_worker_signals() {
    // SAFETY: handlers of the server itself, for a process with a latch; then signals are let in.
    unsafe {
        compat::set_signal_handler(libc::SIGTERM, externs::SignalHandlerForShutdownRequest);
        compat::set_signal_handler(libc::SIGHUP, externs::SignalHandlerForConfigReload);
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Waits in a background worker: for `pause`, or until its settings have changed. Ends the process
/// if it is told to, or if the server is gone.
pub(crate) fn wait_in_worker(pause: Duration) {
    sleep(pause);
    // SAFETY: plain globals of this process; configuration is read outside of any transaction.
    unsafe {
        if pg_sys::ShutdownRequestPending != 0 {
            pg_sys::proc_exit(1); // with 0 it would never be started again
        }
        if pg_sys::ConfigReloadPending != 0 {
            pg_sys::ConfigReloadPending = 0;
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
    }
}

/// Sleeps for `pause`, or until somebody wakes this process; ends what it does if it is told to.
pub(crate) fn sleep(pause: Duration) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    let timeout = std::ffi::c_long::try_from(pause.as_millis()).unwrap_or(std::ffi::c_long::MAX);
    // SAFETY: the latch of this process.
    unsafe {
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, timeout, pg_sys::PG_WAIT_EXTENSION);
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
    check_for_interrupts();
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    (now_us() / 1_000_000) as i64
}

/// Microseconds since 1970.
pub(crate) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// A moment, in microseconds since 1970, as the server writes it.
pub(crate) fn timestamp_text(us_since_1970: u64) -> String {
    let seconds = i64::from(pg_sys::POSTGRES_EPOCH_JDATE - pg_sys::UNIX_EPOCH_JDATE)
        * i64::from(pg_sys::SECS_PER_DAY);
    let moment = us_since_1970 as i64 - seconds * 1_000_000;
    // SAFETY: formats into a static buffer of this process, which is copied at once.
    let text = unsafe { CStr::from_ptr(pg_sys::timestamptz_to_str(moment)) };
    text.to_string_lossy().into_owned()
}

/// How the server takes it that data could not be synced (`data_sync_elevel`, fd.c).
pub(crate) fn level_of_failed_sync() -> pgrx::prelude::PgLogLevel {
    use pgrx::prelude::PgLogLevel;
    // SAFETY: looks at a setting of the server's and takes a number by value.
    let level = unsafe { pg_sys::data_sync_elevel(PgLogLevel::ERROR as i32) };
    if level == PgLogLevel::ERROR as i32 { PgLogLevel::ERROR } else { PgLogLevel::PANIC }
}

/// Ends whatever transaction an ERROR has left open, and gives back the locks of the session: where
/// there was no transaction, its abort has not done that.
pub(crate) fn abort_transaction() {
    // SAFETY: outside of any code that belongs to the transaction.
    unsafe { pg_sys::AbortOutOfAnyTransaction() };
    locks::release_session_locks();
}

/// Makes this background worker a backend of a database, as the bootstrap superuser. If the
/// database was dropped meanwhile, or DROP DATABASE was interrupted, the worker ends, and nobody is
/// alarmed by a FATAL in the server log.
pub(crate) fn connect_to_database_if_there(database: Oid) {
    // SAFETY: in a background worker that asked for a database connection, once. The hook is this
    // process's alone, which has one thread.
    unsafe {
        let others = pg_sys::emit_log_hook;
        OTHERS.set(others);
        pg_sys::emit_log_hook = Some(pass_over_no_database);
        pg_sys::BackgroundWorkerInitializeConnectionByOid(database, Oid::INVALID, 0);
        pg_sys::emit_log_hook = others;
    }
}

/// Who else wants to see messages before they are logged.
static OTHERS: ProcessLocal<pg_sys::emit_log_hook_type> = ProcessLocal::new(None);

/// `emit_log_hook` (elog.c), which may keep a message out of the log.
unsafe extern "C-unwind" fn pass_over_no_database(message: *mut pg_sys::ErrorData) {
    // The same number as ERRCODE_UNDEFINED_DATABASE.
    let no_database = PgSqlErrorCode::ERRCODE_INVALID_CATALOG_NAME as i32;
    // An invalid database, or one that lets nobody in any more (CheckMyDatabase, postinit.c).
    let not_now = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE as i32;
    // SAFETY: the message that is being reported, and another library's hook, called as the server
    // would.
    unsafe {
        if [no_database, not_now].contains(&(*message).sqlerrcode) {
            (*message).output_to_server = false;
        } else if let Some(hook) = OTHERS.get() {
            hook(message);
        }
    }
}

/// Has the kernel begin early to bring to disk what this background worker writes, as it does for
/// the checkpointer: so that it is not all left for the sync at the end, which others would feel.
pub(crate) fn write_back_soon() {
    const HALF_A_MEGABYTE: &std::ffi::CStr = c"64";
    // SAFETY: a setting of the server, with a value that it takes; both texts are constants.
    unsafe {
        pg_sys::SetConfigOption(
            c"backend_flush_after".as_ptr(),
            HALF_A_MEGABYTE.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
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

/// True when pages carry checksums (`initdb --data-checksums`, `pg_checksums --enable`).
#[inline]
pub(crate) fn data_checksums() -> bool {
    // SAFETY: reads the control file's copy in shared memory; cannot raise.
    unsafe { externs::DataChecksumsEnabled() }
}

/// True in the process that replays WAL, and in a server that is a single process.
#[inline]
pub(crate) fn is_startup_process() -> bool {
    // SAFETY: plain globals of this process.
    unsafe { pg_sys::MyBackendType == pg_sys::BackendType::B_STARTUP || !pg_sys::IsUnderPostmaster }
}

/// In the startup process: true while it replays WAL of an archive or of another server, on a
/// standby and in a restore; not in crash recovery.
pub(crate) fn replays_foreign_wal() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::InArchiveRecovery }
}

/// In the startup process: waits for this time, or until `done`, and does meanwhile what recovery
/// does where it is paused (`recoveryPausesHere`, xlogrecovery.c): it ends with the server, reads
/// settings, lets barriers pass.
pub(crate) fn wait_in_recovery(time: Duration, done: impl Fn() -> bool) {
    let end = Instant::now() + time;
    while !done() && Instant::now() < end {
        // SAFETY: a signal ends the sleep early. Nothing here or in our callers minds that the
        // process exits; an ERROR is FATAL in it.
        unsafe {
            pg_sys::pg_usleep(200_000);
            compat::process_startup_interrupts();
        }
    }
}

/// True in the process that writes WAL which another server sends.
#[inline]
pub(crate) fn is_wal_receiver() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyBackendType == pg_sys::BackendType::B_WAL_RECEIVER }
}

/// True in a WAL sender that carries out BASE_BACKUP: it sends files as they are.
#[inline]
pub(crate) fn sends_base_backup() -> bool {
    // SAFETY: plain globals of this process; the state is written by this process only.
    unsafe {
        pg_sys::am_walsender
            && !pg_sys::MyWalSnd.is_null()
            && (*pg_sys::MyWalSnd).state == pg_sys::WalSndState::WALSNDSTATE_BACKUP
    }
}

/// Bytes of a WAL segment.
#[inline]
pub(crate) fn wal_segment_size() -> u64 {
    // SAFETY: a plain global, set from pg_control before any segment is opened.
    unsafe { pg_sys::wal_segment_size as u64 }
}

/// Where recovery would begin to read WAL (`checkPointCopy.redo` of pg_control);
/// [`Lsn::INVALID`] if that is not known.
pub(crate) fn redo_start() -> Lsn {
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is palloc'd, and whole if there
    // is one.
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        let is_known = !control.is_null() && crc_ok;
        if is_known { Lsn((*control).checkPointCopy.redo) } else { Lsn::INVALID }
    }
}

/// True if pg_control says that the cluster was not shut down cleanly, or is a standby's.
pub(crate) fn was_not_shut_down() -> bool {
    use pg_sys::DBState::*;
    // A damaged file is the server's to report; assume the worst meanwhile.
    control_state().is_none_or(|state| !matches!(state, DB_SHUTDOWNED | DB_SHUTDOWNED_IN_RECOVERY))
}

/// True if the server replays WAL before anything else: after a crash, and on a standby also after
/// a clean shutdown, which need not have written a restart point.
pub(crate) fn replays_wal() -> bool {
    control_state() != Some(pg_sys::DBState::DB_SHUTDOWNED)
}

/// What pg_control says of how the server ended; `None` if it is damaged.
fn control_state() -> Option<pg_sys::DBState::Type> {
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is palloc'd and not null.
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        (crc_ok && !control.is_null()).then(|| (*control).state)
    }
}
