//! Options of the commands that ask providers for the keys of a data directory.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, value_parser};

use crate::access::{Access, TIME};
use crate::failure::Failure;

#[derive(Args)]
pub(super) struct AccessOptions {
    /// Run programs that only the key files name: those of providers of kind "command", and the
    /// credential_process of AWS profiles
    #[arg(long)]
    allow_command: bool,
    /// Use credentials that only the key files name, and send them to key servers that only the key
    /// files name
    #[arg(long)]
    allow_credentials: bool,
    /// Accept a data directory below directories that other users can write to, as volumes of
    /// Kubernetes are
    #[arg(long)]
    allow_shared_parents: bool,
    /// File with the configuration of providers, used instead of the one in the key files:
    /// {"NAME": {"kind": "...", "options": {...}}}
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    #[command(flatten)]
    limit: TimeLimit,
}

#[derive(Args)]
pub(super) struct TimeLimit {
    /// Time limit for unwrapping all keys, or for wrapping them
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = TIME.as_secs(),
        value_parser = value_parser!(u64).range(1..=86400)
    )]
    timeout: u64,
}

impl TimeLimit {
    pub(super) fn time(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

impl AccessOptions {
    pub(super) fn access(&self) -> Result<Access, Failure> {
        Access::new(self.allow_command, self.allow_credentials, self.providers.as_deref())
            .map(|access| access.on_volume(self.allow_shared_parents).within(self.limit.time()))
    }
}
