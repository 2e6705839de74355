//! Operations of users: one line before the attempt, and one with the outcome.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;

use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode as Code, PgTryBuilder};
use serde::Serialize;

use crate::pg::report::{self, Result, sqlstate};
use crate::pg::session::{self, Identity};
use crate::shmem;

/// Longest text in a line, in bytes, except for names in PostgreSQL. There is room for an excerpt
/// ([`crate::pg::text::excerpt`]).
const LONGEST: usize = 512 + "... (1073741823 bytes)".len();

/// Outcome in the line before an operation.
pub(super) const ATTEMPTED: &str = "attempted";

/// An operation and its object.
#[derive(Default, Clone)]
pub(crate) struct Operation {
    /// `shred`, `label`, `set`, ...
    pub(crate) action: &'static str,
    /// The SQL function, the statement or the worker.
    pub(crate) by: &'static str,
    pub(crate) object: Option<String>,
    pub(crate) provider: Option<String>,
    pub(crate) master_key: Option<String>,
    /// The replaced label or value.
    pub(crate) from: Option<String>,
    pub(crate) to: Option<String>,
}

impl Operation {
    /// An operation by the SQL function of this name.
    pub(crate) fn function(name: &'static str) -> Operation {
        Operation { action: name, by: name, ..Operation::default() }
    }

    /// Sets the object.
    pub(crate) fn on(mut self, object: impl Into<String>) -> Operation {
        self.object = Some(object.into());
        self
    }

    /// Writes a line.
    pub(super) fn log(&self, who: &Identity, outcome: &str, code: Option<&str>) {
        #[derive(Serialize)]
        struct Facts<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            object: Option<Cow<'a, str>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            provider: Option<Cow<'a, str>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            master_key: Option<Cow<'a, str>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            from: Option<Cow<'a, str>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            to: Option<Cow<'a, str>>,
            outcome: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            sqlstate: Option<&'a str>,
        }
        // Truncated text must be recognisable.
        fn cut(text: &Option<String>) -> Option<Cow<'_, str>> {
            let whole = text.as_deref()?;
            let text = &whole[..whole.floor_char_boundary(LONGEST)];
            Some(match text.len() == whole.len() {
                true => text.into(),
                false => format!("{text}... ({} bytes)", whole.len()).into(),
            })
        }
        let facts = Facts {
            object: cut(&self.object),
            provider: cut(&self.provider),
            master_key: cut(&self.master_key),
            from: cut(&self.from),
            to: cut(&self.to),
            outcome,
            sqlstate: code,
        };
        super::write(who, self.action, self.by, facts);
    }

    /// Writes the line of a failure with this SQLSTATE, if known.
    pub(super) fn log_failure(&self, who: &Identity, code: Option<i32>) {
        self.log(who, outcome_of(code), code.map(sqlstate).as_deref());
    }
}

/// Outcome of an operation that failed with this SQLSTATE.
fn outcome_of(code: Option<i32>) -> &'static str {
    match code {
        Some(code) if code == Code::ERRCODE_INSUFFICIENT_PRIVILEGE as i32 => "denied",
        Some(code) if code == Code::ERRCODE_QUERY_CANCELED as i32 => "cancelled",
        _ => "failed",
    }
}

/// Runs an operation of a user between two lines of the trail.
pub(crate) fn audited<T>(operation: Operation, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if shmem::get().is_none() {
        return work(); // not loaded: `work` raises the error
    }
    let who = session::identity();
    operation.log(&who, ATTEMPTED, None);
    let failed = |error: CaughtError| -> Result<T> {
        let code = report::of_caught(&error).sql_error_code() as i32;
        operation.log_failure(&who, Some(code));
        error.rethrow()
    };
    let done = PgTryBuilder::new(AssertUnwindSafe(work))
        .catch_others(failed)
        .catch_rust_panic(failed)
        .execute();
    match &done {
        Ok(_) => operation.log(&who, "ok", None),
        Err(report) => operation.log_failure(&who, Some(report.code())),
    }
    done
}

/// Writes the line of something that the server does by itself, or detects.
pub(crate) fn log(operation: &Operation, outcome: &str) {
    operation.log(&Identity::default(), outcome, None);
}
