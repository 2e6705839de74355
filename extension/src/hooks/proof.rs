//! Proves after every start that the server really calls the functions that were put in its place.
//!
//! Interposition checks its own writes to memory. It cannot see whether a compiler turned some of
//! the server's indirect calls into direct ones. So the server is made to do everything that it
//! does with relation files, on a scratch file, and to write WAL; then each function must have seen
//! a call ([`super::calls_seen`]). This is done before redo changes the first page, before the
//! first session is admitted, and by a worker ([`crate::workers`]).
//!
//! Not proven: `mdsyncfiletag`, which only a checkpoint calls, and the completion of reads of
//! temporary tables, whose pages nobody could read if they were not decrypted.

use std::io::ErrorKind;

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::PgLogLevel;

use super::calls_seen::{self, Call};
use crate::pg::locks::SelfCheckLock;
use crate::pg::report::Report;
use crate::pg::{process, scratch};

/// Why nothing is proven.
pub(crate) enum Unproven {
    /// The server does something without calling the function.
    Bypassed(Call),
    /// Something else is wrong: this cause.
    Unknown { cause: String, disk_full: bool },
}

/// Makes the server call everything, unless it has done so since the start. In a transaction, or in
/// the startup process. Raises what the server raises.
pub(crate) fn prove() -> Result<(), Unproven> {
    if calls_seen::missing(needs_wal()).is_none() {
        return Ok(());
    }
    let _one_at_a_time = SelfCheckLock::acquire();
    scratch::make_room().map_err(|error| Unproven::Unknown {
        disk_full: matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded),
        cause: error.to_string(),
    })?;
    scratch::exercise();
    if needs_wal() {
        scratch::write_wal();
    }
    calls_seen::missing(needs_wal()).map_or(Ok(()), |call| Err(Unproven::Bypassed(call)))
}

/// A standby writes no WAL of its own.
fn needs_wal() -> bool {
    !process::in_recovery()
}

/// Admits a session, or begins redo, only if the server is proven to call everything. Raises FATAL
/// otherwise; a server that bypasses a function is shut down. Where the disk is full the scratch
/// file cannot be made, and whoever wants to make room is admitted.
pub(super) fn require() {
    match prove() {
        Ok(()) | Err(Unproven::Unknown { disk_full: true, .. }) => {}
        Err(unproven) => {
            if let Unproven::Bypassed(_) = unproven {
                // First: the shutdown ends this process, too.
                unproven.report().send(PgLogLevel::LOG);
                process::shut_server_down();
            }
            unproven.report().fatal();
        }
    }
}

impl Unproven {
    /// The server has raised this.
    pub(crate) fn raised(error: &CaughtError) -> Unproven {
        let report = match error {
            CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
            CaughtError::RustPanic { ereport, .. } => ereport,
        };
        Unproven::Unknown { cause: report.message().to_owned(), disk_full: false }
    }

    /// What the log says.
    pub(crate) fn report(&self) -> Report {
        match self {
            Unproven::Bypassed(call) => Report::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!(
                    "pagevault: this server {} without it: {} is bypassed",
                    call.purpose(),
                    call.name()
                ),
            )
            .detail("The server was made to do this, and pagevault did not see it. The server is shut down before it writes anything unencrypted.")
            .hint("This build of PostgreSQL cannot be used with pagevault; remove it from shared_preload_libraries."),
            Unproven::Unknown { cause, .. } => Report::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                "pagevault: cannot find out whether this server reads and writes through it",
            )
            .detail(format!("The scratch file {} cannot be used: {cause}.", scratch::path()))
            .hint("Fix the cause, and try again."),
        }
    }
}
