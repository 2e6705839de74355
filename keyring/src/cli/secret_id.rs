//! `pagevault-keyring unwrap-secret-id`: unwraps a secret id of Vault into its file.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use nix::unistd::geteuid;

use super::check::options;
use crate::failure::{Failure, unprintable};
use crate::options::absolute_path;
use crate::provider::Environment;
use crate::providers::vault::unwrap_secret_id;

/// Time limit for all requests.
const TIME: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct UnwrapSecretId {
    /// Options of the provider, as JSON; the secret id is written to their "secret_id_file"
    #[arg(long, value_name = "JSON")]
    options: String,
    /// Absolute path of the file with the wrapping token, which is removed
    #[arg(long, value_name = "FILE")]
    wrapping_token_file: String,
    /// The server's data directory; files inside it are refused
    #[arg(long, value_name = "DIR")]
    data_directory: Option<PathBuf>,
}

impl UnwrapSecretId {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let environment = Environment {
            data_directory: self.data_directory.clone(),
            deadline: Some(Instant::now() + TIME),
            programs: false,
            repeats_programs: false,
        };
        let token_file = absolute_path(&self.wrapping_token_file)?;
        let file = unwrap_secret_id(&options(&self.options)?, &token_file, &environment)?;
        writeln!(out, "The secret id is in {}", file.display()).map_err(unprintable)?;
        if geteuid().is_root() {
            writeln!(
                out,
                "The file belongs to root. Make the user that runs the server its owner."
            )
            .map_err(unprintable)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
