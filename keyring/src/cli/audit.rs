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
    /// Tell which lines of the audit trail are missing, changed, forged or out of order; the server
    /// may be running
    ///
    /// Ends with 0 if there are none, with 2 if there are, with 1 if it could not be looked at.
    Verify {
        /// Server logs (as text, CSV or JSON) and files of pagevault.audit_file; all that there are
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// The data directory: its keystore has the keys of MACs, and knows where the trail ends
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
