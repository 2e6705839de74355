//! The provider's options.

use std::path::PathBuf;

use aws_config::Region;

use crate::aws::config::http_client;
use crate::aws::source::Source;
use crate::failure::Failure;
use crate::options::{INSECURE_HTTP, Options, server_address};

/// Only the form is checked; files are read when they are needed.
pub(super) struct Settings {
    pub(super) source: Source,
    pub(super) endpoint: Option<String>,
    pub(super) ca_file: Option<PathBuf>,
}

impl Settings {
    /// Reads the options, without accessing files.
    pub(super) fn read(options: &Options<'_>, programs: bool) -> Result<Settings, Failure> {
        let source = Source::read(options, programs)?;
        let endpoint = options.text("endpoint")?.map(str::to_owned);
        if let Some(endpoint) = &endpoint {
            server_address("endpoint", endpoint, options.flag(INSECURE_HTTP)?)?;
        }
        Ok(Settings { source, endpoint, ca_file: options.optional_path("ca_file")? })
    }

    /// Refuses files that cannot work. A missing file may be created later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        if let Some(path) = self.ca_file.as_ref().filter(|path| path.exists()) {
            http_client(Some(path.clone()))?;
        }
        self.source.check_file()
    }

    /// Where requests go, for messages.
    pub(super) fn place(&self, region: &Region) -> String {
        match &self.endpoint {
            Some(endpoint) => format!("AWS KMS at {endpoint} in {region}"),
            None => format!("AWS KMS in {region}"),
        }
    }
}
