//! Programs that try scenarios, each on a server of its own: which scenarios, and how they end.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

/// What a program has a list of.
pub trait Named {
    /// The name on the command line.
    fn name(&self) -> &'static str;
}

/// Arguments of such a program.
#[derive(Debug, Args)]
pub struct Choice {
    /// Scenarios; all if none is named
    scenarios: Vec<String>,
    /// Lists the scenarios
    #[arg(long)]
    list: bool,
}

impl Choice {
    /// The scenarios to try. None if they were listed instead.
    ///
    /// # Errors
    /// When there is no scenario of a name.
    pub fn of<S: Named>(&self, all: &'static [S]) -> Result<Vec<&'static S>> {
        if self.list {
            all.iter().for_each(|scenario| eprintln!("{}", scenario.name()));
            return Ok(Vec::new());
        }
        if self.scenarios.is_empty() {
            return Ok(all.iter().collect());
        }
        self.scenarios.iter().map(|name| named(all, name)).collect()
    }
}

/// The scenario of a name.
///
/// # Errors
/// When there is none.
pub fn named<S: Named>(all: &'static [S], name: &str) -> Result<&'static S> {
    let found = all.iter().find(|scenario| scenario.name() == name);
    found.with_context(|| format!("no scenario {name}"))
}

/// The end of such a program; `what` is what some of have failed.
#[must_use]
pub fn end(program: &str, what: &str, failures: Result<usize>) -> ExitCode {
    match failures {
        Ok(0) => return ExitCode::SUCCESS,
        Ok(failures) => eprintln!("{failures} {what} failed"),
        Err(error) => eprintln!("{program}: {error:#}"),
    }
    ExitCode::FAILURE
}
