//! What is missing, risky or forgotten in a running server, and what cures it.
//!
//! The checks read one JSON document ([`crate::server`]), so that they can be tried without a
//! server. What the document does not know is no finding.

mod data;
mod host;
mod installation;
mod keys;
mod providers;
mod wal;

use serde::Serialize;
use serde_json::Value;

pub(crate) use host::look as look_at_host;
pub(crate) use installation::{preload, workers_wanted};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Worth knowing
    Notice,
    /// Data is less protected than it may seem, or will be unreadable if something else fails
    Warning,
    /// Data is unreadable or unprotected, or will be at the next restart
    Critical,
}

impl Severity {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// Something that a check has found. Texts may contain names that anybody has chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// The name of the check; it does not change.
    pub(crate) check: &'static str,
    /// The database that it is about, if it is about one.
    pub(crate) database: Option<String>,
    pub(crate) what: String,
    pub(crate) why: String,
    /// A statement or command, or what to do.
    pub(crate) cure: String,
}

impl Finding {
    fn new(severity: Severity, check: &'static str, what: impl Into<String>) -> Self {
        let (why, cure) = (String::new(), String::new());
        Self { severity, check, database: None, what: what.into(), why, cure }
    }

    fn in_database(mut self, database: &str) -> Self {
        self.database = Some(database.to_owned());
        self
    }

    fn why(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = cure.into();
        self
    }
}

type Check = fn(&Value, &mut Vec<Finding>);

/// All checks, in the order in which their findings make sense.
const CHECKS: &[Check] = &[
    installation::library,
    installation::extension,
    installation::versions,
    installation::workers,
    installation::damage,
    keys::master_key,
    keys::spare,
    keys::states,
    keys::ages,
    keys::room,
    providers::outages,
    providers::revalidation,
    providers::key_files,
    data::unreachable,
    data::drift,
    data::settings,
    data::jobs,
    data::nothing,
    wal::plaintext,
    wal::archived_twice,
    wal::failures,
    wal::anchor,
    host::memory,
];

/// The findings of all checks, the worst first.
pub(crate) fn examine(found: &Value) -> Vec<Finding> {
    let mut findings = Vec::new();
    for check in CHECKS {
        check(found, &mut findings);
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// Whether the document is that of a server with pagevault: without it most checks know nothing.
fn is_loaded(found: &Value) -> bool {
    !found["cluster"].is_null()
}

/// Whether any relation of any database is encrypted.
fn anything_encrypted(found: &Value) -> bool {
    let mut relations = crate::server::list(&found["databases"])
        .iter()
        .flat_map(|database| crate::server::list(&database["relations"]));
    relations.any(|relation| relation["encrypted"] == true)
}

/// A count with its noun.
fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The same with its verb.
fn are(number: usize, noun: &str) -> String {
    format!("{} {}", count(number, noun), if number == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests;
