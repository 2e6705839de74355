//! Error reports: SQLSTATE, message, DETAIL, HINT. The crate raises errors only through this
//! module.
//!
//! Messages follow PostgreSQL's style guide: lower case without a full stop; DETAIL and HINT are
//! whole sentences.

use pagevault_cipher::secret::RandomError;
use pagevault_keystore::directory::DirectoryError;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::{CaughtError, ErrorReport, ErrorReportWithLevel};
use pgrx::prelude::PgLogLevel;

use super::process::ProcessLocal;
use super::{compat, externs};

/// An error or a message for the log.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Report {
    code: PgSqlErrorCode,
    message: String,
    detail: Option<String>,
    hint: Option<String>,
}

/// The crate's result type.
pub(crate) type Result<T> = std::result::Result<T, Report>;

impl Report {
    /// A report with its SQLSTATE and message.
    pub(crate) fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Report {
        Report { code, message: message.into(), detail: None, hint: None }
    }

    /// Adds a DETAIL with the facts: object, provider, cause.
    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Report {
        self.detail = Some(detail.into());
        self
    }

    /// Adds a HINT: what the reader can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Report {
        self.hint = Some(hint.into());
        self
    }

    /// Adds to the HINT another thing that the reader can do.
    pub(crate) fn more_hints(self, hint: &str) -> Report {
        let hint = self.hint.iter().map(String::as_str).chain([hint]).collect::<Vec<_>>().join(" ");
        Report { hint: Some(hint), ..self }
    }

    /// Says before the message what has happened besides.
    pub(crate) fn prefixed(mut self, what: &str) -> Report {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// The message without DETAIL and HINT, for use in another sentence.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The SQLSTATE, packed into an integer as in the server.
    pub(crate) fn code(&self) -> i32 {
        self.code as i32
    }

    /// The DETAIL; empty if there is none.
    pub(crate) fn detail_text(&self) -> &str {
        self.detail.as_deref().unwrap_or("")
    }

    /// Sends the report at `level`; ERROR and above do not return.
    pub(crate) fn send(self, level: PgLogLevel) {
        let mut report = ErrorReport::new(self.code, self.message, "pagevault");
        if let Some(detail) = self.detail.filter(|detail| !detail.is_empty()) {
            report = report.set_detail(detail);
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(hint);
        }
        report.report(level);
    }

    /// Raises the report as ERROR.
    pub(crate) fn raise(self) -> ! {
        self.send(PgLogLevel::ERROR);
        unreachable!("ERROR does not return")
    }

    /// Ends the process (in the postmaster: the server) with the report.
    pub(crate) fn fatal(self) -> ! {
        self.send(PgLogLevel::FATAL);
        unreachable!("FATAL does not return")
    }
}

/// The report of a caught error, whether the server, Rust code or a panic raised it.
pub(crate) fn of_caught(error: &CaughtError) -> &ErrorReportWithLevel {
    match error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    }
}

/// A report of an unexpected state inside pagevault.
pub(crate) fn internal(message: String) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, message)
}

impl From<DirectoryError> for Report {
    fn from(error: DirectoryError) -> Report {
        internal(error.to_string())
    }
}

impl From<RandomError> for Report {
    fn from(error: RandomError) -> Report {
        Report::new(PgSqlErrorCode::ERRCODE_SYSTEM_ERROR, error.to_string())
    }
}

/// The SQLSTATE of an error of the operating system, as in `errcode_for_file_access` (elog.c) where
/// it is something that runs out.
pub(crate) fn code_of(error: &std::io::Error) -> PgSqlErrorCode {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => PgSqlErrorCode::ERRCODE_DISK_FULL,
        Some(libc::EMFILE | libc::ENFILE) => PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
        Some(libc::ENOMEM) => PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY,
        _ => PgSqlErrorCode::ERRCODE_IO_ERROR,
    }
}

/// A packed SQLSTATE as text: six bits for each character (`MAKE_SQLSTATE`, elog.h).
pub(crate) fn sqlstate(code: i32) -> String {
    (0..5).map(|at| char::from((code >> (6 * at) & 0x3f) as u8 + b'0')).collect()
}

/// Whether [`log_line`] is logging a message.
static LOGS_LINE: ProcessLocal<bool> = ProcessLocal::new(false);

/// True while a message is logged that ignores `log_min_messages`.
pub(crate) fn logs_line() -> bool {
    LOGS_LINE.get()
}

/// Writes one line to the server log at level LOG. No client gets it. The current statement is left
/// out, because it may contain secrets.
///
/// `log_min_messages` ranks LOG between ERROR and FATAL (`is_log_level_output`, elog.c), and
/// superusers can set it for their session. These lines report actions of superusers, so that
/// setting must not suppress them.
pub(crate) fn log_line(line: &str) {
    const MINIMUM: i32 = PgLogLevel::ERROR as i32;
    let Ok(line) = std::ffi::CString::new(line) else { return };
    // SAFETY: the same calls as in ereport(), in the same order; at this level they return. The
    // server copies the text. The setting is a plain global of this process, which is read only by
    // errstart() meanwhile.
    unsafe {
        let setting = compat::log_min_messages();
        let least = *setting;
        *setting = least.min(MINIMUM);
        let begun = externs::errstart(pg_sys::LOG_SERVER_ONLY as i32, std::ptr::null());
        *setting = least;
        if begun {
            pg_sys::errmsg_internal(c"%s".as_ptr(), line.as_ptr());
            pg_sys::errhidestmt(true);
            pg_sys::errhidecontext(true);
            LOGS_LINE.set(true);
            externs::errfinish(c"pagevault".as_ptr(), 0, c"log_line".as_ptr());
            LOGS_LINE.set(false);
        }
    }
}

/// Keeps backtraces out of error messages. pgrx adds a backtrace to the DETAIL of every error if
/// the environment requests one, but users need the cause, not our call stack. RUST_LIB_BACKTRACE
/// enables them. At the start of a process.
pub(crate) fn suppress_backtraces() {
    const SWITCH: &str = "RUST_LIB_BACKTRACE";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: PostgreSQL processes have one thread, so no other code reads the environment
        // meanwhile.
        unsafe { std::env::set_var(SWITCH, "0") };
    }
}

/// Converts a result to a value or an ERROR, where the server calls the crate.
pub(crate) trait OrRaise<T> {
    /// The value, or an ERROR.
    fn or_raise(self) -> T;
}

impl<T> OrRaise<T> for Result<T> {
    fn or_raise(self) -> T {
        match self {
            Ok(value) => value,
            Err(report) => report.raise(),
        }
    }
}
