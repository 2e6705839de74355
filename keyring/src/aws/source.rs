//! The options that say where credentials come from.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::options::{Options, bad, printable};

/// Only the form is checked; files are read when they are needed.
pub(crate) struct Source {
    pub(crate) region: Option<String>,
    pub(crate) profile: Option<String>,
    pub(crate) credentials_file: Option<PathBuf>,
    /// Whether a profile may run programs.
    pub(crate) programs: bool,
}

impl Source {
    /// Reads the options, without accessing files.
    pub(crate) fn read(options: &Options<'_>, programs: bool) -> Result<Source, Failure> {
        let region = options.text("region")?.map(str::to_owned);
        if let Some(region) = &region {
            check_region(region)?;
        }
        Ok(Source {
            region,
            profile: options.text("profile")?.map(str::to_owned),
            credentials_file: options.optional_path("credentials_file")?,
            programs,
        })
    }

    /// The profile to which credentials are restricted, for messages.
    pub(crate) fn named_profile(&self) -> Option<String> {
        let profile = self.profile.as_ref().map(|name| format!("Profile \"{}\"", printable(name)));
        let file = self.credentials_file.as_ref().map(|path| format!(" of {}", path.display()));
        if profile.is_none() && file.is_none() {
            return None;
        }
        Some(profile.unwrap_or("The profile in use".into()) + &file.unwrap_or_default())
    }
}

/// The region becomes part of a host name.
pub(crate) fn check_region(region: &str) -> Result<(), Failure> {
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
    use pagevault_keystore::protocol::ErrorClass;

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
