//! What `pagevault-keyring check-server` says about a build.

use anyhow::{Context, Result};
use pagevault_tests::Installation;
use serde::Deserialize;

/// Its report.
#[derive(Debug, Deserialize)]
pub(crate) struct Described {
    pub(crate) version: String,
    machine: String,
    pub(crate) c_library: String,
    pub(crate) compilers: Vec<String>,
    pub(crate) linking: String,
    findings: Vec<Finding>,
}

#[derive(Debug, Deserialize)]
struct Finding {
    what: String,
    met: bool,
    seen: String,
}

impl Described {
    /// Asks for that of an installation.
    pub(crate) fn of(installation: &Installation) -> Result<Described> {
        let mut check = installation.command("pagevault-keyring");
        check.args(["check-server", "--json"]).arg(installation.program("postgres"));
        let output = check.output()?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Whether it was built for another processor than this one.
    pub(crate) fn is_emulated(&self) -> bool {
        self.machine.replace('-', "_") != std::env::consts::ARCH
    }

    pub(crate) fn works(&self) -> bool {
        self.findings.iter().all(|finding| finding.met)
    }

    /// The conditions that are not met.
    pub(crate) fn unmet(&self) -> String {
        let unmet = self.findings.iter().filter(|finding| !finding.met);
        let unmet: Vec<String> = unmet.map(|f| format!("{}: {}", f.what, f.seen)).collect();
        unmet.join("; ")
    }
}
