//! Self-check: proves after every start that the server really calls the functions that replaced
//! its own.
//!
//! Interposition verifies what it writes to memory. It cannot see whether a compiler turned some of
//! the server's indirect calls into direct ones. So the server is made to perform every operation
//! on relation files, on a scratch file, and to write WAL; then each replaced function must have
//! been called ([`super::calls_seen`]). This is done before redo changes the first page, before the
//! first session is admitted, by a worker ([`crate::workers`]), and before a single-user server
//! reads a command.
//!
//! On a full disk nothing can be proven. Then sessions are admitted nevertheless, so that users can
//! free space. Some file systems (copy on write, thin volumes) have no room for the server's own
//! writes to a file that was just written in the same size; hence the subtransaction.
//!
//! Not proven: `mdsyncfiletag`, which only a checkpoint calls, and the completion of reads of
//! temporary tables. If that were bypassed, pages of temporary tables would be unreadable.

use std::io::ErrorKind;

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::PgLogLevel;

use super::calls_seen::{self, Call};
use super::install;
use crate::pg::locks::SelfCheckLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{self, Report};
use crate::pg::{process, scratch, xact};

/// This process has proven it for itself.
static PROVEN_HERE: ProcessLocal<bool> = ProcessLocal::new(false);

/// Why the self-check failed.
pub(crate) enum Unproven {
    /// The server does something without calling our function.
    Bypassed(Call),
    /// The check could not be completed for this cause.
    Unknown { cause: String, disk_full: bool },
}

/// Makes the server call every replaced function, unless all have been called since the start. In a
/// transaction that is not about to end.
pub(crate) fn prove() -> Result<(), Unproven> {
    if calls_seen::missing(needs_wal()).is_none() {
        return Ok(());
    }
    xact::attempt(prove_or_raise).unwrap_or_else(|error| {
        let _exclusive = SelfCheckLock::acquire();
        scratch::remove();
        Err(Unproven::raised(&error))
    })
}

/// Like [`prove`], in any transaction, or in the startup process. Raises errors of the server.
fn prove_or_raise() -> Result<(), Unproven> {
    if calls_seen::missing(needs_wal()).is_none() {
        return Ok(());
    }
    let _exclusive = SelfCheckLock::acquire();
    // The process that held the lock may have completed the check. It is not cheap: dropping the
    // file's buffers scans all of them.
    if calls_seen::missing(needs_wal()).is_none() {
        return Ok(());
    }
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

/// A standby does not write WAL of its own.
fn needs_wal() -> bool {
    !process::in_recovery()
}

/// Requires a successful self-check before a session is admitted.
pub(super) fn require_of_session() {
    require(prove());
}

/// Requires a successful self-check before redo begins, or single-user mode reads a command. Errors
/// of the server end the process.
pub(super) fn require_of_server() {
    let proven = prove_or_raise();
    PROVEN_HERE.set(proven.is_ok());
    require(proven);
}

/// Whether that is still to be done in single-user mode.
pub(super) fn is_due_in_single_user_mode() -> bool {
    process::is_single_user() && !PROVEN_HERE.get()
}

/// Raises FATAL if the self-check has failed; a server that bypasses a function is shut down.
fn require(proven: Result<(), Unproven>) {
    match proven {
        Ok(()) => {}
        Err(unproven @ Unproven::Unknown { disk_full: true, .. }) => {
            unproven.report().send(PgLogLevel::WARNING);
        }
        Err(unproven) => {
            if let Unproven::Bypassed(_) = unproven {
                // Logged first, because the shutdown ends this process too.
                unproven.report().send(PgLogLevel::LOG);
                process::shut_server_down();
            }
            unproven.report().fatal();
        }
    }
}

impl Unproven {
    /// The server raised an error during the check.
    fn raised(error: &CaughtError) -> Unproven {
        let report = report::of_caught(error);
        let disk_full = report.sql_error_code() == PgSqlErrorCode::ERRCODE_DISK_FULL;
        Unproven::Unknown { cause: report.message().to_owned(), disk_full }
    }

    /// The message for the log.
    pub(crate) fn report(&self) -> Report {
        match self {
            Unproven::Bypassed(call) => {
                let report = Report::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    format!(
                        "pagevault: this server {} without it: {} is bypassed",
                        call.purpose(),
                        call.name()
                    ),
                );
                match install::replaced_since(call.name()) {
                    Some(library) => report
                        .detail(format!("The function was replaced by {library}, which does not call pagevault's. The server is shut down before it writes anything unencrypted."))
                        .hint("Remove one of both libraries from shared_preload_libraries."),
                    None => report
                        .detail("The server was made to do this, and pagevault did not see it. The server is shut down before it writes anything unencrypted.")
                        .hint("This build of PostgreSQL cannot be used with pagevault; remove it from shared_preload_libraries."),
                }
            }
            Unproven::Unknown { cause, disk_full } => Report::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                "pagevault: cannot find out whether this server reads and writes through it",
            )
            .detail(format!("The scratch file {} cannot be used: {cause}.", scratch::path()))
            .hint(match disk_full {
                true => "Free space. Until then sessions are admitted, and it is tried again.",
                false => "Fix the cause, and try again.",
            }),
        }
    }
}
