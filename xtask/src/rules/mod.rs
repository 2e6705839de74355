//! The rules: each reads the workspace and reports violations.

pub(crate) mod arrows;
mod columns;
mod length;
mod links;
mod majors;
mod messages;
mod safety;
mod secrets;
mod unsafe_code;
mod words;

use anyhow::Result;

use crate::workspace::Workspace;

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The file.
    pub(crate) path: String,
    /// The line, from 1.
    pub(crate) line: usize,
    /// The number by which it counts against the exceptions; mostly 1.
    pub(crate) count: usize,
    /// The problem, and in parentheses the remedy.
    pub(crate) message: String,
}

/// The file of exceptions.
pub(crate) const EXCEPTIONS: &str = "xtask/exceptions.toml";

/// A rule whose violations can be excepted.
pub(crate) struct Rule {
    /// Its name in that file and in reports.
    pub(crate) name: &'static str,
    /// Finds violations.
    pub(crate) check: fn(&Workspace) -> Result<Vec<Finding>>,
}

/// All these rules. The rule `arrows` is not among them: it has a table of its own instead of
/// exceptions.
pub(crate) const RULES: &[Rule] = &[
    Rule { name: "unsafe", check: unsafe_code::check },
    Rule { name: "majors", check: majors::check },
    Rule { name: "newest", check: majors::check_newest },
    Rule { name: "messages", check: messages::check },
    Rule { name: "safety", check: safety::check },
    Rule { name: "secrets", check: secrets::check },
    Rule { name: "words", check: words::check },
    Rule { name: "links", check: links::check },
    Rule { name: "length", check: length::check },
    Rule { name: "columns", check: columns::check },
];

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, count: 1, message: message.into() }
    }
}

/// The findings of a rule in these files, as `path:line`, for tests.
#[cfg(test)]
fn places(rule: fn(&Workspace) -> Result<Vec<Finding>>, files: &[(&str, &str)]) -> Vec<String> {
    let findings = rule(&Workspace::of(files)).unwrap();
    findings.iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect()
}
