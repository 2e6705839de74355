//! `pagevault-keyring doctor`: what is missing, risky or forgotten in a running server.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::connection::Connection;
use crate::doctor::{self, Finding, Severity};
use crate::failure::{Failure, unprintable};
use crate::server;
use crate::visible::visible;

#[derive(Args)]
pub(super) struct Doctor {
    #[command(flatten)]
    connection: Connection,
    /// Report findings of this severity, and worse ones
    #[arg(long, value_enum, value_name = "SEVERITY", default_value = "notice")]
    severity: Severity,
    /// Have the server read all files of relations, to find plaintext pages in encrypted ones
    #[arg(long)]
    check_files: bool,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Prints the findings; 1 if there are any.
    pub(super) fn run(self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let mut found = server::look(&self.connection.psql()?, self.check_files)?;
        found["host"] = doctor::look_at_host(&found);
        let mut findings = doctor::examine(&found);
        findings.retain(|finding| finding.severity >= self.severity);
        if self.json {
            let document = json!({
                "made_at": found["server"]["made_at"],
                "cluster_id": found["server"]["cluster_id"],
                "findings": findings,
            });
            serde_json::to_writer_pretty(&mut *out, &document)
                .map_err(io::Error::from)
                .and_then(|()| writeln!(out))
                .map_err(unprintable)?;
        } else {
            print(&findings, out).map_err(unprintable)?;
        }
        Ok(ExitCode::from(u8::from(!findings.is_empty())))
    }
}

fn print(findings: &[Finding], out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let database = finding.database.as_ref();
        let database = database.map_or(String::new(), |name| format!("database \"{name}\": "));
        // Each on one line, so that no name makes up a finding.
        let what = visible(&format!("{database}{}", finding.what));
        writeln!(out, "{:<8}  {what} ({})", finding.severity.name(), finding.check)?;
        if !finding.why.is_empty() {
            writeln!(out, "          {}", visible(&finding.why))?;
        }
        writeln!(out, "          Cure: {}\n", visible(&finding.cure))?;
    }
    match findings.len() {
        0 => writeln!(out, "Nothing found."),
        number => writeln!(out, "Findings: {number}."),
    }
}
