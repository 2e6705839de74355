//! Facts about the current process.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagevault_cipher::Lsn;
pub(crate) use pagevault_interpose::ProcessLocal;
use pgrx::pg_sys;

use super::{compat, externs, locks};

/// The data directory, absolute.
pub(crate) fn data_directory() -> PathBuf {
    // SAFETY: DataDir is set before libraries are preloaded and never changes.
    let dir = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    PathBuf::from(OsStr::from_bytes(dir.to_bytes()))
}

/// OID of the database this backend is connected to; 0 in processes without one.
pub(crate) fn my_database() -> u32 {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// True in a backend or worker that runs transactions in a database, in single-user mode too. False
/// in the startup process, auxiliary processes and the postmaster.
pub(crate) fn runs_transactions() -> bool {
    // SAFETY: plain globals; IsTransactionState reads this process's transaction state only.
    unsafe { pg_sys::MyDatabaseId != pg_sys::InvalidOid && pg_sys::IsTransactionState() }
}

/// True in a server started by pg_upgrade (`postgres -b`).
pub(crate) fn is_binary_upgrade() -> bool {
    // SAFETY: a plain global, set before libraries are loaded.
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// Identifies the current transaction and subtransaction; unique within this process.
pub(crate) fn transaction() -> (u32, u32) {
    // SAFETY: reads this process's transaction state, in a transaction.
    (compat::local_transaction(), unsafe { pg_sys::GetCurrentSubTransactionId() })
}

/// True while the script of this extension runs, which creates tables before any key exists.
pub(crate) fn creates_us() -> bool {
    // SAFETY: plain globals of this process, and a catalog look-up in a transaction.
    unsafe {
        pg_sys::creating_extension
            && pg_sys::CurrentExtensionObject
                == pg_sys::get_extension_oid(c"pagevault".as_ptr(), true)
    }
}

/// Reports to pg_stat_activity what this process does; `None` means idle.
pub(crate) fn show_activity(text: Option<&str>) {
    let text = text.and_then(|text| std::ffi::CString::new(text).ok());
    let (state, text) = match &text {
        Some(text) => (pg_sys::BackendState::STATE_RUNNING, text.as_ptr()),
        None => (pg_sys::BackendState::STATE_IDLE, std::ptr::null()),
    };
    // SAFETY: the server copies the text.
    unsafe { pg_sys::pgstat_report_activity(state, text) };
}

/// The setting `fsync`. If it is off, PostgreSQL syncs nothing.
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
    // SAFETY: reads shared state that every process that calls this is attached to.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Runs `work` to its end even if the session is cancelled or terminated; that is noticed
/// afterwards. An ERROR ends this as well (`errfinish`, elog.c).
pub(crate) fn without_interrupts<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: counters of this process, as HOLD_INTERRUPTS and RESUME_INTERRUPTS of miscadmin.h.
    unsafe { pg_sys::InterruptHoldoffCount += 1 };
    let done = work();
    // SAFETY: as before; `work` has not raised an ERROR, which would have reset the counter.
    unsafe { pg_sys::InterruptHoldoffCount -= 1 };
    done
}

/// Whether this process sends WAL, or a base backup, and reads no relations.
pub(crate) fn is_physical_walsender() -> bool {
    // SAFETY: plain globals of this process.
    unsafe { pg_sys::am_walsender && !pg_sys::am_db_walsender }
}

/// In the startup process: whether this is the recovery of a standby, or of a restored backup.
pub(crate) fn is_archive_recovery() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::ArchiveRecoveryRequested }
}

/// Whether the postmaster of this process is alive; in single-user mode there is none.
pub(crate) fn has_postmaster() -> bool {
    // SAFETY: asks the operating system whether the parent process is alive, or reads the pipe that
    // it holds open, which this process has inherited.
    is_single_user() || unsafe { pg_sys::PostmasterIsAliveInternal() }
}

/// True in the process that replays WAL (in single-user mode, the only process) until the data
/// directory is consistent. Until then pages on disk may be newer than the replayed WAL. In crash
/// recovery the data directory is consistent when all WAL is replayed.
pub(crate) fn is_not_consistent_yet() -> bool {
    // SAFETY: plain globals of this process; both false in processes that do not replay WAL.
    unsafe { pg_sys::InRecovery && !pg_sys::reachedConsistency }
}

/// True in the process that replays WAL, also in single-user mode, until all WAL is replayed.
pub(crate) fn replays_wal_now() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::InRecovery }
}

static AFTER_OWN_CRASH: ProcessLocal<bool> = ProcessLocal::new(false);

/// True in the process that replays WAL, if this server has crashed and repeats its own WAL. Then
/// the data directory is neither a base backup, nor a standby's, nor that of a standby whose
/// promotion no checkpoint has followed: keystore and pages are as one server has left them.
pub(crate) fn is_after_own_crash() -> bool {
    AFTER_OWN_CRASH.get()
}

/// Finds out about [`is_after_own_crash`]; in the process that replays WAL, before it does. By then
/// `InitWalRecovery` (xlogrecovery.c) has decided, and `StartupXLOG` has written to pg_control. For
/// a backup, also one that was interrupted while it was restored, pg_control has
/// `backupStartPoint`; for a standby, and until the first checkpoint after its promotion
/// (`CreateEndOfRecoveryRecord`, xlog.c), `minRecoveryPoint`.
///
/// With the setting `ignore_invalid_pages` the user has asked to go on whatever pages are missing.
pub(crate) fn note_recovery() {
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is null or a whole palloc'd
    // structure.
    let is_own = unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        crc_ok
            && !control.is_null()
            && (*control).state == pg_sys::DBState::DB_IN_CRASH_RECOVERY
            && (*control).minRecoveryPoint == 0
            && (*control).backupStartPoint == 0
            && (*control).backupEndPoint == 0
            && !(*control).backupEndRequired
            && !ignores_invalid_pages()
    };
    AFTER_OWN_CRASH.set(is_own);
}

/// The setting `ignore_invalid_pages`: the user has asked to go on whatever pages are missing.
pub(crate) fn ignores_invalid_pages() -> bool {
    // SAFETY: the setting exists in all majors; its value is a static text.
    unsafe {
        let ignores = pg_sys::GetConfigOption(c"ignore_invalid_pages".as_ptr(), true, false);
        !ignores.is_null() && std::ffi::CStr::from_ptr(ignores) == c"on"
    }
}

/// Ends the statement or the session if that was requested. Does nothing in the postmaster, which
/// has no such interrupts.
pub(crate) fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}

/// True if the statement, the session or this worker was told to end, and may end now.
pub(crate) fn is_told_to_stop() -> bool {
    // SAFETY: plain globals of this process; the flags are set by its signal handlers.
    unsafe {
        let told = (&raw const pg_sys::QueryCancelPending).read_volatile() != 0
            || (&raw const pg_sys::ProcDiePending).read_volatile() != 0
            || (&raw const pg_sys::ShutdownRequestPending).read_volatile() != 0;
        told && may_end()
    }
}

/// True if this is a process of the server, which an interrupt may end now: it holds no lock on
/// shared memory (`LWLockAcquire`, lwlock.c), and is in no critical section.
pub(crate) fn may_end() -> bool {
    // SAFETY: plain globals of this process, which are 0 before it is one of the server.
    unsafe {
        pg_sys::MyProcPid == std::process::id().cast_signed()
            && pg_sys::InterruptHoldoffCount == 0
            && pg_sys::CritSectionCount == 0
    }
}

/// True in processes that work for users: backends, their parallel workers, autovacuum, others that
/// query catalogs, and a process in single-user mode when recovery has ended. Recovery, the
/// checkpointer and other auxiliary processes work for the cluster.
pub(crate) fn serves_users() -> bool {
    use pg_sys::BackendType::*;
    // SAFETY: plain globals of this process.
    let (kind, is_alone) =
        unsafe { (pg_sys::MyBackendType, !pg_sys::IsPostmasterEnvironment && !pg_sys::InRecovery) };
    is_alone
        || matches!(
            kind,
            B_BACKEND | B_BG_WORKER | B_AUTOVAC_LAUNCHER | B_AUTOVAC_WORKER | B_WAL_SENDER
        )
        || compat::is_slot_sync_worker(kind)
}

/// Sleeps for `pause`, or until this process is woken. Raises an error if the process is to end.
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

/// Closes all relation and temporary files of this process that are open only so that they need
/// not be opened again (`closeAllVfds`, fd.c), as the server does when there are too many.
pub(crate) fn close_idle_files() {
    // SAFETY: files that are in use are opened again by the server's functions.
    unsafe { pg_sys::closeAllVfds() }
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    (now_us() / 1_000_000) as i64
}

/// Microseconds since 1970.
pub(crate) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// A time, in microseconds since 1970, in the server's text format.
pub(crate) fn timestamp_text(us_since_1970: u64) -> String {
    let seconds = i64::from(pg_sys::POSTGRES_EPOCH_JDATE - pg_sys::UNIX_EPOCH_JDATE)
        * i64::from(pg_sys::SECS_PER_DAY);
    let moment = us_since_1970 as i64 - seconds * 1_000_000;
    // SAFETY: formats into a static buffer of this process, which is copied at once.
    let text = unsafe { CStr::from_ptr(pg_sys::timestamptz_to_str(moment)) };
    text.to_string_lossy().into_owned()
}

/// The level at which the server reports that data could not be synced (`data_sync_elevel`, fd.c).
pub(crate) fn level_of_failed_sync() -> pgrx::prelude::PgLogLevel {
    use pgrx::prelude::PgLogLevel;
    // SAFETY: reads a setting of the server and takes a number by value.
    let level = unsafe { pg_sys::data_sync_elevel(PgLogLevel::ERROR as i32) };
    if level == PgLogLevel::ERROR as i32 { PgLogLevel::ERROR } else { PgLogLevel::PANIC }
}

/// Ends any transaction that an ERROR has left open, and releases session locks. Outside a
/// transaction, the server's cleanup after the ERROR has not released them.
pub(crate) fn abort_transaction() {
    // SAFETY: outside any code that belongs to the transaction.
    unsafe { pg_sys::AbortOutOfAnyTransaction() };
    locks::release_session_locks();
}

/// Makes the kernel write back early what this background worker writes, as it does for the
/// checkpointer. Otherwise the sync at the end would write everything at once and slow down other
/// processes.
pub(crate) fn write_back_early() {
    const HALF_A_MEGABYTE: &std::ffi::CStr = c"64";
    // SAFETY: a setting of the server, with a valid value; both texts are constants.
    unsafe {
        pg_sys::SetConfigOption(
            c"backend_flush_after".as_ptr(),
            HALF_A_MEGABYTE.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}

/// Connects this background worker to shared catalogs only.
pub(crate) fn connect_without_database() {
    // SAFETY: in a background worker that registered for a database connection, once.
    unsafe {
        pg_sys::BackgroundWorkerUnblockSignals();
        pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0);
    }
}

/// Immediate shutdown of the whole server. In single-user mode the caller's FATAL does that: there
/// is no postmaster, and signals to process 0 go to whoever called the server, too.
pub(crate) fn shut_server_down() {
    // SAFETY: the postmaster is our parent for as long as we run.
    unsafe {
        if pg_sys::IsUnderPostmaster {
            libc::kill(pg_sys::PostmasterPid, libc::SIGQUIT);
        }
    }
}

/// True in single-user mode.
pub(crate) fn is_single_user() -> bool {
    // SAFETY: plain globals of this process.
    unsafe { !pg_sys::IsPostmasterEnvironment && !pg_sys::IsUnderPostmaster }
}

/// True when pages carry checksums (`initdb --data-checksums`, `pg_checksums --enable`).
#[inline]
pub(crate) fn data_checksums() -> bool {
    // SAFETY: reads the control file's copy in shared memory; cannot raise.
    unsafe { externs::DataChecksumsEnabled() }
}

/// True if recovery restores every page that was torn: before the first change of a page after a
/// checkpoint, WAL gets an image of it, also if only hint bits change (`XLogHintBitIsNeeded`,
/// xlog.h). During pg_upgrade, which turns `full_page_writes` off: true if that is so when it is on
/// afterwards. A crash meanwhile means to begin again.
pub(crate) fn torn_pages_are_restored() -> bool {
    // SAFETY: a plain global: a setting of the server.
    let (images, hints) = unsafe { (pg_sys::fullPageWrites, pg_sys::wal_log_hints) };
    (images || is_binary_upgrade()) && logs_copied_pages() && (hints || data_checksums())
}

/// Whether the settings ask for an image of each page in WAL before its first change after a
/// checkpoint.
pub(crate) fn writes_page_images() -> bool {
    // SAFETY: a plain global: a setting of the server.
    unsafe { pg_sys::fullPageWrites && logs_copied_pages() }
}

/// With `wal_level = minimal` pages are copied with their LSN and without WAL
/// (`RelationCopyStorage`, storage.c), so the next record about one has no image either.
fn logs_copied_pages() -> bool {
    // SAFETY: a plain global: a setting of the server.
    unsafe { pg_sys::wal_level > pg_sys::WalLevel::WAL_LEVEL_MINIMAL as i32 }
}

/// True in the process that replays WAL, and in single-user mode.
#[inline]
pub(crate) fn is_startup_process() -> bool {
    // SAFETY: plain globals of this process.
    unsafe { pg_sys::MyBackendType == pg_sys::BackendType::B_STARTUP || !pg_sys::IsUnderPostmaster }
}

/// True in the checkpointer.
pub(crate) fn is_checkpointer() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyBackendType == pg_sys::BackendType::B_CHECKPOINTER }
}

/// In the startup process: true during archive recovery, that is, on a standby and in a restore;
/// false in crash recovery.
pub(crate) fn replays_foreign_wal() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::InArchiveRecovery }
}

/// In the startup process: waits for `time`, or until `done`. Meanwhile does what paused recovery
/// does (`recoveryPausesHere`, xlogrecovery.c): it ends with the server, reloads settings, and
/// processes barriers.
pub(crate) fn wait_in_recovery(time: Duration, done: impl Fn() -> bool) {
    let end = Instant::now() + time;
    while !done() && Instant::now() < end {
        // SAFETY: a signal ends the sleep early. The process may exit here: neither this function
        // nor its callers hold anything that needs a destructor; an ERROR is FATAL in this process.
        unsafe {
            pg_sys::pg_usleep(200_000);
            compat::process_startup_interrupts();
        }
    }
}

/// Waits until it is so. False if that takes longer than `patience`, or this process is to end: who
/// drops a database waits for the workers in it.
pub(crate) fn is_so_within(patience: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patience;
    while !is_so() {
        if Instant::now() >= end || is_told_to_stop() {
            return false;
        }
        sleep(Duration::from_millis(100));
    }
    true
}

/// True in the process that writes WAL received from another server.
#[inline]
pub(crate) fn is_wal_receiver() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyBackendType == pg_sys::BackendType::B_WAL_RECEIVER }
}

/// True in a WAL sender that runs BASE_BACKUP: it must send files as they are on disk.
///
/// The state stays when the command has ended (`SendBaseBackup`, basebackup.c). So the command
/// counts, which `exec_replication_command` (walsender.c) and `exec_simple_query` (postgres.c) set.
/// Its scanner takes this spelling only, after spaces, which include vertical tabs since 16
/// (repl_scanner.l).
#[inline]
pub(crate) fn sends_base_backup() -> bool {
    // SAFETY: plain globals of this process; the state is written by this process only.
    let in_state = unsafe {
        pg_sys::am_walsender
            && !pg_sys::MyWalSnd.is_null()
            && (*pg_sys::MyWalSnd).state == pg_sys::WalSndState::WALSNDSTATE_BACKUP
    };
    // SAFETY: a plain global of this process: null or a NUL-terminated text.
    let command = || unsafe {
        let command = pg_sys::debug_query_string;
        (!command.is_null()).then(|| CStr::from_ptr(command).to_bytes())
    };
    let is_space = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0x0B;
    let is_one = |command: &[u8]| {
        let start = command.iter().position(|byte| !is_space(byte)).unwrap_or_default();
        command[start..].starts_with(b"BASE_BACKUP")
    };
    in_state && command().is_some_and(is_one)
}

/// Size of a WAL segment in bytes.
#[inline]
pub(crate) fn wal_segment_size() -> u64 {
    // SAFETY: a plain global, set from pg_control before any segment is opened.
    unsafe { pg_sys::wal_segment_size as u64 }
}

/// Address at which recovery would begin to read WAL (`checkPointCopy.redo` of pg_control);
/// [`Lsn::INVALID`] if it is unknown.
pub(crate) fn redo_start() -> Lsn {
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is null or a whole palloc'd
    // structure.
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        let is_known = !control.is_null() && crc_ok;
        if is_known { Lsn((*control).checkPointCopy.redo) } else { Lsn::INVALID }
    }
}

/// True if the server is about to start as a standby (`readRecoverySignalFile`, xlogrecovery.c).
pub(crate) fn starts_as_standby() -> bool {
    data_directory().join("standby.signal").exists()
}

/// True if pg_control says that the cluster was not shut down cleanly, or that it is a standby.
pub(crate) fn was_not_shut_down() -> bool {
    use pg_sys::DBState::*;
    // The server itself reports a damaged file; until then assume the worst.
    control_state().is_none_or(|state| !matches!(state, DB_SHUTDOWNED | DB_SHUTDOWNED_IN_RECOVERY))
}

/// True if the server replays WAL before it accepts sessions: after a crash, and on a standby also
/// after a clean shutdown, which need not have written a restart point.
pub(crate) fn replays_wal() -> bool {
    control_state() != Some(pg_sys::DBState::DB_SHUTDOWNED)
}

/// The state of the cluster in pg_control; `None` if the file is damaged.
fn control_state() -> Option<pg_sys::DBState::Type> {
    let mut crc_ok = false;
    // SAFETY: reads pg_control in the data directory; the result is palloc'd and not null.
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        (crc_ok && !control.is_null()).then(|| (*control).state)
    }
}
