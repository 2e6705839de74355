//! `pagevault-keyring give-up-key-group`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::access::AccessOptions;
use crate::failure::Failure;
use crate::give_up_key_group::{Request, give_up_key_group};

#[derive(Args)]
pub(super) struct GiveUp {
    /// The data directory; its server must be down
    #[arg(long, value_name = "DIR")]
    data_directory: PathBuf,
    /// The name of the key group
    #[arg(long, value_name = "NAME")]
    key_group: String,
    /// The name of the key group once more
    #[arg(long, value_name = "NAME", required_unless_present = "dry_run")]
    confirm: Option<String>,
    /// Print what would be destroyed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Go on although a provider gives no answer; it is asked all the same, and what it still
    /// unwraps is not destroyed
    #[arg(long)]
    without_answer: bool,
    #[command(flatten)]
    access: AccessOptions,
}

impl GiveUp {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        let request = Request {
            data_directory: &self.data_directory,
            key_group: &self.key_group,
            confirm: self.confirm.as_deref(),
            dry_run: self.dry_run,
            without_answer: self.without_answer,
        };
        give_up_key_group(&request, self.access.access()?, out).map(|()| ExitCode::SUCCESS)
    }
}
