//! `pagevault-keyring check-server`: whether pagevault will work in a server that is not started.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;
use pagevault_targets::{Report, check};

use crate::bindir;
use crate::failure::{Failure, refuse, unprintable, unreadable};

#[derive(Args)]
pub(super) struct CheckServer {
    /// The program `postgres`; by default the one beside this program, else the first on PATH
    server: Option<PathBuf>,
    /// The pg_config of the server, instead of the server itself
    #[arg(long, value_name = "FILE", conflicts_with = "server")]
    pg_config: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl CheckServer {
    /// Prints a line per condition; success if all are met.
    pub(super) fn run(&self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let server = self.server()?;
        let file = fs::read(&server).map_err(|error| unreadable(&server, &error))?;
        let report = check(&server.to_string_lossy(), file).map_err(|error| {
            refuse(format!("pagevault cannot work in this server: {error}")).with_hint(
                "pagevault works in servers that are linked dynamically, for Linux on x86-64 and \
                 aarch64.",
            )
        })?;
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &report)
                .map_err(io::Error::from)
                .and_then(|()| writeln!(out))
                .map_err(unprintable)?;
        } else {
            print(out, &report).map_err(unprintable)?;
        }
        Ok(if report.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn server(&self) -> Result<PathBuf, Failure> {
        let Some(pg_config) = &self.pg_config else {
            let server = self.server.as_deref().map_or(OsStr::new("postgres"), |p| p.as_os_str());
            return bindir::find(server);
        };
        let output = Command::new(pg_config)
            .arg("--bindir")
            .output()
            .map_err(|error| unreadable(pg_config, &error))?;
        let directory = String::from_utf8(output.stdout).unwrap_or_default();
        if !output.status.success() || directory.trim().is_empty() {
            return Err(refuse(format!(
                "\"{} --bindir\" does not name a directory",
                pg_config.display()
            )));
        }
        Ok(PathBuf::from(directory.trim()).join("postgres"))
    }
}

fn print(out: &mut impl Write, report: &Report) -> io::Result<()> {
    for (name, value) in [
        ("version", report.version.as_str()),
        ("processor", report.machine),
        ("C library", &report.c_library),
        ("compiler", &report.compilers.join(", ")),
        ("linking", &report.linking),
    ] {
        writeln!(out, "{name:<10}  {value}")?;
    }
    writeln!(out)?;
    for finding in &report.findings {
        let word = if finding.met { "ok" } else { "not ok" };
        writeln!(out, "{word:<6}  {}: {}", finding.what, finding.seen)?;
        if let Some(hint) = &finding.hint {
            writeln!(out, "        {hint}")?;
        }
    }
    let verdict = if report.works() {
        "pagevault can work in this server. When the server starts, it is tested with real calls."
    } else {
        "pagevault will refuse to start in this server."
    };
    writeln!(out, "\n{verdict}")
}
