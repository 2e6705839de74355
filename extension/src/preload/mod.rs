//! Starting up from `shared_preload_libraries`, stage by stage.

mod upgrade;

use std::sync::atomic::{AtomicBool, Ordering};

use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};

use crate::audit::statements;
use crate::keys::load;
use crate::keys::provider::unlock;
use crate::keys::usage::{cache, temporary};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{Report, Result};
use crate::pg::{guc, locks};
use crate::{hooks, rmgr, workers};

static ACTIVE: AtomicBool = AtomicBool::new(false);

type ShmemHook = Option<unsafe extern "C-unwind" fn()>;
static PREVIOUS_REQUEST: ProcessLocal<ShmemHook> = ProcessLocal::new(None);
static PREVIOUS_STARTUP: ProcessLocal<ShmemHook> = ProcessLocal::new(None);

/// Stage 1.
pub(crate) fn start() {
    keep_backtraces_out_of_errors();
    // SAFETY: a plain global of the loading process.
    if !unsafe { pg_sys::process_shared_preload_libraries_in_progress } {
        return;
    }
    guc::define(statements::setting_changed);
    guc::bound_read_ahead();
    rmgr::register();
    hooks::restart_points::install();
    hooks::access::install();
    hooks::ddl::install();
    hooks::decoding::install();
    hooks::utility::install();
    hooks::audited::install();
    hooks::statistics::install();
    hooks::transaction::install();
    workers::register();
    if let Err(error) = cache::protect().and_then(|()| temporary::protect()) {
        internal(&format!("could not keep keys out of core dumps: {error}")).fatal();
    }
    // SAFETY: in the postmaster; hooks are chained and live as long as the library.
    unsafe {
        PREVIOUS_REQUEST.set(pg_sys::shmem_request_hook);
        pg_sys::shmem_request_hook = Some(shmem_request);
        PREVIOUS_STARTUP.set(pg_sys::shmem_startup_hook);
        pg_sys::shmem_startup_hook = Some(shmem_startup);
    }
    // Last, so that a server with half of the above never has its functions replaced.
    if let Err(report) = hooks::install::install() {
        report.fatal();
    }
    ACTIVE.store(true, Ordering::Release);
}

/// pgrx puts a backtrace into the DETAIL of every error if the environment asks for one. Users
/// should see what went wrong, not where in our code; set RUST_LIB_BACKTRACE to see it all the
/// same.
fn keep_backtraces_out_of_errors() {
    const SWITCH: &str = "RUST_LIB_BACKTRACE";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: PostgreSQL processes have one thread, and the server reads other variables only.
        unsafe { std::env::set_var(SWITCH, "0") };
    }
}

/// Stage 2.
#[pg_guard]
unsafe extern "C-unwind" fn shmem_request() {
    if let Some(previous) = PREVIOUS_REQUEST.get() {
        // SAFETY: the earlier hook of the same type.
        unsafe { previous() };
    }
    locks::request();
}

/// Stage 3, and again after a crash restart.
#[pg_guard]
unsafe extern "C-unwind" fn shmem_startup() {
    if let Some(previous) = PREVIOUS_STARTUP.get() {
        // SAFETY: the earlier hook of the same type.
        unsafe { previous() };
    }
    locks::attach();
    if let Err(report) = load_and_unlock() {
        report.fatal();
    }
}

/// Reads the keystore and unlocks it. After a crash restart the database keys are still there: the
/// mapping outlived the crash, and nobody is asked again.
fn load_and_unlock() -> Result<()> {
    let loaded = load::start()?;
    if process::is_binary_upgrade() {
        upgrade::check(loaded.shared)?;
    }
    // pg_upgrade would fail in the middle where a key is missed.
    unlock::at_start(loaded.needs_keys || process::is_binary_upgrade())
}

/// Refuses to work where the library was not preloaded.
pub(crate) fn require_active() -> Result<()> {
    if ACTIVE.load(Ordering::Acquire) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "pagevault is not loaded",
    )
    .detail("pagevault works only when the server loads it at start.")
    .hint("Add pagevault to shared_preload_libraries and restart the server."))
}

fn internal(message: &str) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_SYSTEM_ERROR, message)
}
