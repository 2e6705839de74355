//! Options of the commands that ask providers for the keys of a data directory.

use std::path::PathBuf;

use clap::Args;

use crate::access::Access;
use crate::failure::Failure;

#[derive(Args)]
pub(super) struct AccessOptions {
    /// Run the programs that the key files name: of a provider of kind "command", or in a profile
    /// of AWS
    #[arg(long)]
    allow_command: bool,
    /// Read the credentials that the key files name, and send them to the key servers that they
    /// name
    #[arg(long)]
    allow_credentials: bool,
    /// How providers are reached, in place of what the key files say: {"NAME": {"kind": "...",
    /// "options": {...}}}
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
}

impl AccessOptions {
    pub(super) fn access(&self) -> Result<Access, Failure> {
        Access::new(self.allow_command, self.allow_credentials, self.providers.as_deref())
    }
}
