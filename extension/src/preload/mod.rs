//! Startup in stages, from `shared_preload_libraries`.

mod upgrade;

use std::sync::atomic::{AtomicBool, Ordering};

use pgrx::PgSqlErrorCode;

use crate::audit::statements;
use crate::keys::load;
use crate::keys::provider::unlock;
use crate::keys::usage::{authenticated, cache, fips, temporary};
use crate::pg::report::{self, Report, Result};
use crate::pg::{guc, locks, process, shutdown};
use crate::{anchor, hooks, workers};

static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Stage 1: `_PG_init`.
pub(crate) fn start() {
    report::suppress_backtraces();
    if !process::preloads_libraries() {
        return;
    }
    if let Err(report) = guc::define(statements::setting_changed) {
        report.fatal();
    }
    if let Err(report) = fips::require_module() {
        report.fatal();
    }
    if let Err(report) = guc::page_images::watch(authenticated::page_images_are) {
        report.fatal();
    }
    guc::bound_read_ahead();
    hooks::rmgr::register();
    hooks::restart_points::install();
    hooks::access::install();
    hooks::authentication::install();
    hooks::naming::install();
    hooks::ddl::install();
    hooks::decoding::install();
    hooks::utility::install();
    hooks::audited::install();
    hooks::statistics::install();
    hooks::transaction::install();
    workers::register();
    if let Err(error) = protect_keys() {
        internal(&format!("could not keep keys out of core dumps: {error}")).fatal();
    }
    hooks::shared_memory::install(locks::request, shared_memory_ready);
    // Last, so that functions are never replaced in a server where an earlier step has failed.
    if let Err(report) = hooks::install::install() {
        report.fatal();
    }
    ACTIVE.store(true, Ordering::Release);
    // Shared memory may take its time to allocate, before keys and anchor are waited for.
    shutdown::hold();
}

fn protect_keys() -> std::io::Result<()> {
    cache::protect()?;
    temporary::protect()?;
    fips::reserve_keys()
}

/// Stage 2: shared memory is allocated; again after a crash restart.
fn shared_memory_ready() {
    locks::attach();
    // After a crash; at the first start that is done.
    shutdown::hold();
    if let Err(report) = load_and_unlock() {
        report.fatal();
    }
    shutdown::release();
}

/// Reads the keystore and unlocks it. After a crash restart the database keys are still in memory,
/// because the mapping has survived, and no provider is asked.
fn load_and_unlock() -> Result<()> {
    let loaded = load::start()?;
    if process::is_binary_upgrade() {
        upgrade::check(loaded.shared)?;
    }
    if loaded.first_start {
        anchor::at_start(loaded.shared)?;
    }
    // With a missing key pg_upgrade would fail in the middle.
    unlock::at_start(loaded.needs_keys || process::is_binary_upgrade())?;
    if loaded.first_start { hooks::files::seal_backup() } else { Ok(()) }
}

/// Refuses to work if the library was not preloaded.
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
