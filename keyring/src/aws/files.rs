//! The SDK's configuration and credentials files. They are read here, not by the SDK.
//!
//! A profile may run a program (`credential_process`), and may name another file whose content is
//! sent away (`web_identity_token_file`). So a file with such a property in any profile is refused,
//! unless the role that set the provider may have the server run programs. This applies to the file
//! in the option `credentials_file`, and to those that the environment and the home directory lead
//! to, because it is also decided in SQL that these are used.
//!
//! The SDK gets the checked text, not a path that it would open again.

use std::env;
use std::path::{Path, PathBuf};

use aws_runtime::env_config::file::{EnvConfigFileKind, EnvConfigFiles};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::source::Source;
use crate::failure::Failure;
use crate::options::bad;
use crate::trust::{FileKind, insecure, read};

/// Properties that run a program or read another file: name and description.
const RESTRICTED: [(&str, &str); 2] = [
    ("credential_process", "runs a program"),
    ("web_identity_token_file", "refers to another file"),
];

/// Variables by which the SDK finds tokens in files. The operator sets them, and must own the
/// files.
const TOKENS: [&str; 2] = ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"];

impl Source {
    /// The files with profiles.
    ///
    /// # Errors
    /// `insecure` if another user could have written one of them, or if it has a forbidden
    /// property.
    pub(crate) fn profile_files(&self) -> Result<EnvConfigFiles, Failure> {
        for path in TOKENS.iter().filter_map(env::var_os).map(PathBuf::from) {
            check_token(&path)?;
        }
        let configuration = default_path("AWS_CONFIG_FILE", ".aws/config");
        let configuration = self.optional(configuration.as_deref(), FileKind::Trusted)?;
        let credentials = match &self.credentials_file {
            Some(path) => self.read_file(path, FileKind::Credentials)?,
            None => {
                let default_path = default_path("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
                self.optional(default_path.as_deref(), FileKind::Credentials)?
            }
        };
        Ok(EnvConfigFiles::builder()
            .with_contents(EnvConfigFileKind::Config, configuration.as_str())
            .with_contents(EnvConfigFileKind::Credentials, credentials.as_str())
            .build())
    }

    /// Refuses a credentials file that other users can read or write, or that has a forbidden
    /// property. A missing file may be created later.
    pub(crate) fn check_file(&self) -> Result<(), Failure> {
        let path = self.credentials_file.as_ref();
        match path.map(|path| self.read_file(path, FileKind::Credentials)) {
            Some(Err(error)) if error.class != ErrorClass::Unreachable => Err(error),
            _ => Ok(()),
        }
    }

    /// A file that may be missing or unreadable: the SDK continues without it.
    fn optional(&self, path: Option<&Path>, what: FileKind) -> Result<Zeroizing<String>, Failure> {
        match path.map(|path| self.read_file(path, what)) {
            Some(Err(error)) if error.class != ErrorClass::Unreachable => Err(error),
            Some(Ok(text)) => Ok(text),
            _ => Ok(Zeroizing::default()),
        }
    }

    fn read_file(&self, path: &Path, what: FileKind) -> Result<Zeroizing<String>, Failure> {
        let bytes = read::read_whole(path, what)?;
        let text = str::from_utf8(&bytes).map_err(|_| {
            bad(format!("\"{}\" is not usable", path.display()))
                .with_detail("It is not a text file.")
                .with_hint("It must be an AWS configuration or credentials file.")
        })?;
        for line in text.lines() {
            for (name, does) in RESTRICTED {
                let Some(value) = value_of(line, name) else { continue };
                if !self.programs {
                    return Err(forbidden_property(path, name, does));
                }
                if name == "web_identity_token_file" {
                    check_token(Path::new(value))?;
                }
            }
        }
        Ok(Zeroizing::new(text.to_owned()))
    }
}

/// The value of a property, if the line sets it. The SDK's parser (`aws-runtime`,
/// env_config/parse.rs) accepts names in any case, surrounded by blanks. Lines that begin with a
/// blank continue another line; refusing those as well does no harm.
fn value_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (found, value) = line.split_once('=')?;
    found.trim().eq_ignore_ascii_case(name).then_some(value.trim())
}

/// Refuses a token file that other users can write, or that the SDK would read without end. The SDK
/// reports a missing file.
fn check_token(path: &Path) -> Result<(), Failure> {
    match read::read_whole(path, FileKind::ServiceAccount) {
        Err(error) if error.class != ErrorClass::Unreachable => Err(error),
        _ => Ok(()),
    }
}

/// The path where the SDK looks: that in a variable, or one below the home directory.
fn default_path(variable: &str, below_home: &str) -> Option<PathBuf> {
    let home = env::var_os("HOME").map(PathBuf::from);
    match env::var_os(variable).map(PathBuf::from) {
        Some(path) => match path.strip_prefix("~") {
            Ok(rest) => home.map(|home| home.join(rest)),
            Err(_) => std::path::absolute(path).ok(),
        },
        None => home.map(|home| home.join(below_home)),
    }
}

fn forbidden_property(path: &Path, name: &str, does: &str) -> Failure {
    insecure(format!("file \"{}\" {does}, which is not allowed for this provider", path.display()))
        .with_detail(format!("It sets {name}. The provider was configured by a role that may not execute server programs."))
        .with_hint("Have a superuser or a member of pg_execute_server_program set the provider's options again with alter_provider(), or use a file without this property. For commands of pagevault-keyring that need keys, use the option --allow-command.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_recognised_like_in_the_sdk() {
        for line in [
            "credential_process=/x y",
            "credential_process = /x y",
            "Credential_Process\t=  /x y ",
            "  credential_process = /x y",
        ] {
            assert_eq!(value_of(line, "credential_process"), Some("/x y"), "{line}");
        }
        for line in ["# credential_process = /x", "credential_process", "[credential_process]", ""]
        {
            assert_eq!(value_of(line, "credential_process"), None, "{line}");
        }
    }
}
