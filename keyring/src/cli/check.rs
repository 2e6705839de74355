//! `pagevault-keyring check`: tests a provider and prints what works.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use pagevault_keystore::protocol::{ErrorClass, Finding};
use serde_json::{Map, Value};

use crate::access::Access;
use crate::failure::{Failure, of_command, unprintable};
use crate::findings::Findings;
use crate::offline::{Keystore, has_keystore};
use crate::provider::{Environment, Provider};
use crate::{check, providers};

/// Time limit for all requests to the provider.
const TIME: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct Check {
    /// Kind of the provider, such as "file"
    #[arg(long, value_name = "KIND")]
    provider_kind: String,
    /// Options of the provider, as JSON, such as '{"path": "/etc/pagevault/keys"}'
    #[arg(long, value_name = "JSON")]
    options: String,
    /// Name of the master key
    #[arg(long, value_name = "NAME")]
    key: String,
    /// The server's data directory: files with keys or credentials inside it are refused, and the
    /// keys in use there are unwrapped, if the provider has wrapped them
    #[arg(long, value_name = "DIR")]
    data_directory: Option<PathBuf>,
    /// Time limit for all requests to the provider, and for unwrapping all keys in use; 10, and 30,
    /// if it is not given
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..=86400))]
    timeout: Option<u64>,
}

impl Check {
    /// Prints a line per finding; success if none is a failure.
    pub(super) fn run(&self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let mut findings = Findings::default();
        let provider = findings.note("the options are valid", self.provider(), |_| {
            format!("kind {}", self.provider_kind)
        });
        let mut findings = findings.into_vec();
        if let Some(provider) = provider {
            findings.extend(check::check(provider.as_ref(), Some(&self.key)));
            if findings.iter().all(|finding| finding.failure.is_none()) {
                findings.extend(self.in_use());
            }
        }
        for finding in &findings {
            print(out, finding).map_err(unprintable)?;
        }
        let well = findings.iter().all(|finding| finding.failure.is_none());
        let verdict = if well {
            "All checks passed."
        } else {
            "A check failed; the checks after it were skipped."
        };
        writeln!(out, "\n{verdict}").map_err(unprintable)?;
        Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Whether the key unwraps what it has wrapped in the data directory, if this has the same
    /// provider.
    fn in_use(&self) -> Option<Finding> {
        let directory = self.data_directory.as_deref().filter(|path| has_keystore(path))?;
        let unwrapped = options(&self.options).and_then(|options| {
            // As for the provider: whoever gives these options has chosen them.
            let keystore = Keystore::read(directory, self.access()?)?;
            keystore.unwrap_by(&self.provider_kind, &options, &self.key)
        });
        let mut findings = Findings::default();
        match unwrapped {
            Ok(0) => return None,
            other => findings.note("the keys in use can be unwrapped", other, |count| {
                format!("database keys that were unwrapped: {count}")
            }),
        };
        findings.into_vec().pop()
    }

    fn access(&self) -> Result<Access, Failure> {
        let access = Access::new(true, true, None)?;
        Ok(match self.timeout {
            Some(seconds) => access.within(Duration::from_secs(seconds)),
            None => access,
        })
    }

    fn provider(&self) -> Result<Box<dyn Provider>, Failure> {
        let options = options(&self.options)?;
        let deadline = Instant::now() + self.timeout.map_or(TIME, Duration::from_secs);
        let environment = Environment {
            data_directory: self.data_directory.clone(),
            deadline: Some(deadline),
            // Whoever gives the options here can run programs without this one.
            programs: true,
            repeats_programs: true,
        };
        providers::build(&self.provider_kind, &options, &environment)
    }
}

/// Options of a provider from a command line.
pub(super) fn options(text: &str) -> Result<Map<String, Value>, Failure> {
    serde_json::from_str(text).map_err(|error| {
        // The text is not repeated: it may contain a credential by mistake.
        Failure::new(ErrorClass::BadOptions, "options are not a JSON object")
            .with_detail(format!("The error is at column {}.", error.column()))
            .with_hint("Specify them as in SQL, for example '{\"path\": \"/etc/pagevault/keys\"}'.")
    })
}

fn print(out: &mut impl Write, finding: &Finding) -> std::io::Result<()> {
    let Some(failure) = finding.failure.clone().map(of_command) else {
        return writeln!(out, "ok      {}: {}", finding.what, finding.seen);
    };
    writeln!(out, "not ok  {}: {}", finding.what, failure.message)?;
    for text in [&failure.detail, &failure.hint].into_iter().flatten() {
        writeln!(out, "        {text}")?;
    }
    Ok(())
}
