//! The one way in which the crate raises errors: SQLSTATE, message, DETAIL, HINT together.
//!
//! Messages follow PostgreSQL's style guide: lower case without a full stop; DETAIL and HINT are
//! whole sentences.

use pagevault_cipher::secret::RandomError;
use pagevault_keystore::directory::DirectoryError;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::PgLogLevel;

use super::externs;
use super::process::ProcessLocal;

/// What went wrong and what to do about it.
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

    /// Adds the facts: object, provider, cause.
    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Report {
        self.detail = Some(detail.into());
        self
    }

    /// Adds what the reader can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Report {
        self.hint = Some(hint.into());
        self
    }

    /// The message alone, for logs that stand in a sentence of their own.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The SQLSTATE, as the server packs it.
    pub(crate) fn code(&self) -> i32 {
        self.code as i32
    }

    /// The DETAIL, empty when there is none.
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

/// What an unexpected state inside pagevault is reported as.
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
        internal(error.to_string())
    }
}

/// A packed SQLSTATE as text: six bits for each character (`MAKE_SQLSTATE`, elog.h).
pub(crate) fn sqlstate(code: i32) -> String {
    (0..5).map(|at| char::from((code >> (6 * at) & 0x3f) as u8 + b'0')).collect()
}

/// Whether a message is one of [`log_line`].
static LOGS_LINE: ProcessLocal<bool> = ProcessLocal::new(false);

/// True while a message is logged that must be logged, whatever `log_min_messages` says.
pub(crate) fn logs_line() -> bool {
    LOGS_LINE.get()
}

/// Writes one line to the server log at level LOG: to no client, and without the statement that is
/// being run, which may hold what the line must not tell.
///
/// `log_min_messages` counts LOG between ERROR and FATAL (`is_log_level_output`, elog.c), and
/// superusers set it for their own session. They must not be able to do so for what is told of
/// them.
pub(crate) fn log_line(line: &str) {
    const LEAST: i32 = PgLogLevel::ERROR as i32;
    let Ok(line) = std::ffi::CString::new(line) else { return };
    // SAFETY: the calls that ereport() makes, in its order; at this level they return. The server
    // copies the text. The setting is a plain global of this process, at which only errstart()
    // looks.
    unsafe {
        let least = pg_sys::log_min_messages;
        pg_sys::log_min_messages = least.min(LEAST);
        let begun = externs::errstart(pg_sys::LOG_SERVER_ONLY as i32, std::ptr::null());
        pg_sys::log_min_messages = least;
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

/// pgrx puts a backtrace into the DETAIL of every error if the environment asks for one. Users
/// should see what went wrong, not where in our code; set RUST_LIB_BACKTRACE to see it all the
/// same. At the start of a process.
pub(crate) fn keep_backtraces_out() {
    const SWITCH: &str = "RUST_LIB_BACKTRACE";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: PostgreSQL processes have one thread, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(SWITCH, "0") };
    }
}

/// Turns a result at the edge of the crate into a value or an ERROR.
pub(crate) trait OrRaise<T> {
    /// The value, or ERROR.
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
