//! The provider's options.

use std::path::PathBuf;

use aws_config::Region;

use pagevault_keystore::protocol::ErrorClass;

use super::session::http_client;
use crate::failure::Failure;
use crate::options::{INSECURE_HTTP, Options, bad, printable, server_address};

/// Only the form is checked; files are read when they are needed.
pub(super) struct Settings {
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) profile: Option<String>,
    pub(super) credentials_file: Option<PathBuf>,
    /// Whether a profile may run programs.
    pub(super) programs: bool,
}

impl Settings {
    /// Reads the options, without accessing files.
    pub(super) fn read(options: &Options<'_>, programs: bool) -> Result<Settings, Failure> {
        let region = options.text("region")?.map(str::to_owned);
        if let Some(region) = &region {
            check_region(region)?;
        }
        let endpoint = options.text("endpoint")?.map(str::to_owned);
        if let Some(endpoint) = &endpoint {
            server_address("endpoint", endpoint, options.flag(INSECURE_HTTP)?)?;
        }
        Ok(Settings {
            region,
            endpoint,
            ca_file: options.optional_path("ca_file")?,
            profile: options.text("profile")?.map(str::to_owned),
            credentials_file: options.optional_path("credentials_file")?,
            programs,
        })
    }

    /// Refuses files that cannot work. A missing file may be created later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        if let Some(path) = self.ca_file.as_ref().filter(|path| path.exists()) {
            http_client(Some(path.clone()))?;
        }
        match self.check_credentials_file() {
            Err(error) if error.class == ErrorClass::Unreachable => Ok(()),
            checked => checked,
        }
    }

    /// Where requests go, for messages.
    pub(super) fn place(&self, region: &Region) -> String {
        match &self.endpoint {
            Some(endpoint) => format!("AWS KMS at {endpoint} in {region}"),
            None => format!("AWS KMS in {region}"),
        }
    }

    /// The profile to which credentials are restricted, for messages.
    pub(super) fn named_profile(&self) -> Option<String> {
        let profile = self.profile.as_ref().map(|name| format!("Profile \"{}\"", printable(name)));
        let file = self.credentials_file.as_ref().map(|path| format!(" of {}", path.display()));
        if profile.is_none() && file.is_none() {
            return None;
        }
        Some(profile.unwrap_or("The profile in use".into()) + &file.unwrap_or_default())
    }
}

/// The region becomes part of a host name.
pub(super) fn check_region(region: &str) -> Result<(), Failure> {
    let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if region.len() <= 63
        && region.starts_with(|c: char| c.is_ascii_lowercase())
        && region.chars().all(is_label)
    {
        return Ok(());
    }
    Err(bad(format!("\"{}\" is not the name of an AWS region", printable(region)))
        .with_detail("A region name consists of lower-case letters, digits and hyphens.")
        .with_hint("Specify it as in {\"region\": \"eu-central-1\"}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_labels_of_host_names() {
        for good in ["eu-central-1", "us-gov-west-1", "x"] {
            assert_eq!(check_region(good), Ok(()));
        }
        for bad in ["", "-eu", "EU", "eu.example.com/", "eu central", &"x".repeat(64)] {
            assert_eq!(check_region(bad).unwrap_err().class, ErrorClass::BadOptions);
        }
    }
}
