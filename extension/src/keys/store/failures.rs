//! What users are told when key files or shared memory cannot take in a change.

use std::io::ErrorKind;

use pagevault_keystore::log::{self, LogError};
use pagevault_keystore::{FormatError, Problem};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use crate::pg::report::{Report, code_of, internal};

/// What to do about a damaged key file.
pub(crate) const DAMAGED: &str = "Restore the data directory from a backup, with its pagevault/ and WAL. An older pagevault/ alone lacks newer keys.";

/// The report of a keystore failure. If it is unknown what was written to disk, the server restarts
/// (PANIC).
pub(crate) fn keystore_failure(error: &LogError) -> Report {
    let report = match error {
        LogError::Io { source, .. } => {
            let report = Report::new(code_of(source), format!("{error}"));
            let report = report.detail("Nothing was changed.");
            match source.kind() {
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => report.hint("The server must be able to write its key files: check owner and mode and attributes of the file, and whether its file system is mounted read-only."),
                _ => report,
            }
        }
        LogError::Unsettled { source, .. } => {
            Report::new(PgSqlErrorCode::ERRCODE_IO_ERROR, format!("{error}"))
                .detail(format!("The disk may have lost what was written ({source}). WAL has it."))
                .hint("Check the disk. The server restarts, and takes the keys from WAL.")
        }
        LogError::Format { error: FormatError { problem, .. }, .. }
            if problem.is_of_later_version() =>
        {
            Report::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("{error}"))
                .detail("Nothing was changed.")
                .hint("Install the version of pagevault that this data directory was used with last, or a later one.")
        }
        LogError::Record(FormatError { problem: Problem::TooLarge(_), .. }) => {
            Report::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, "key file is full")
                .detail(format!("It may have {} MiB. Nothing was changed.", log::MAX_LOG >> 20))
                .hint("Restart the server: when it starts it takes older wrappings of data keys out of key files.")
        }
        LogError::Format { .. } => {
            Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, format!("{error}"))
                .hint(DAMAGED)
        }
        _ => internal(format!("{error}")),
    };
    if matches!(error, LogError::Unsettled { .. }) {
        report.clone().send(PgLogLevel::PANIC);
    }
    report
}

/// The report if recovery has recorded more than this server has room for, because its primary was
/// started later.
pub(crate) fn recovery_needs_room(what: &str) -> Report {
    let message = format!("recovery has no room for another {what}");
    Report::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, message)
        .detail("The record is stored, and nothing is lost.")
        .hint("Start the server again: at its start it reserves more room than is in use.")
}

/// Why a log could not be settled.
pub(crate) enum SyncFailure {
    /// As after a failed fsync: it is unknown what is durable.
    Unsettled(LogError),
    /// Nothing was changed. It can be tried again.
    Refused(Report),
}

impl From<LogError> for SyncFailure {
    fn from(error: LogError) -> SyncFailure {
        match error {
            LogError::Io { .. } => SyncFailure::Refused(keystore_failure(&error)),
            _ => SyncFailure::Unsettled(error),
        }
    }
}

impl From<SyncFailure> for Report {
    fn from(failure: SyncFailure) -> Report {
        match failure {
            SyncFailure::Unsettled(error) => keystore_failure(&error),
            SyncFailure::Refused(report) => report,
        }
    }
}
