//! `pagevault-keyring audit`: the audit trail.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use super::access::AccessOptions;
use crate::audit::{self, Cluster};
use crate::failure::Failure;

#[derive(Subcommand)]
pub(super) enum Audit {
    /// Report lines of the audit trail that are missing, changed, forged or out of order; the
    /// server may be running
    ///
    /// The exit code is 0 if there are none, 2 if there are some, and 1 if the trail could not be
    /// verified.
    Verify {
        /// All server logs (text, CSV or JSON), and all files of the setting pagevault.audit_file
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// The data directory; its keystore contains the MAC keys and the end of the trail
        #[arg(short = 'D', long, value_name = "DIR")]
        data_directory: Option<PathBuf>,
        #[command(flatten)]
        access: AccessOptions,
    },
}

impl Audit {
    pub(super) fn run(self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let Self::Verify { files, data_directory, access } = self;
        let access = access.access()?;
        let cluster =
            data_directory.as_deref().map(|data_directory| Cluster { data_directory, access });
        let well = audit::verify(&files, cluster, out)?;
        Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(2) })
    }
}
