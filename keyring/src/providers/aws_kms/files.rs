//! The SDK's configuration and credentials files, read here instead of by the SDK.
//!
//! A profile may have a program run (`credential_process`), and may name another file whose content
//! is sent away (`web_identity_token_file`). So a file that says such a thing is refused, whatever
//! the profile, unless who set the provider may have the server run programs. That goes for the
//! file that the option `credentials_file` names, and for those that the environment and the home
//! directory lead to: which user's provider it is that makes them count is as much decided in SQL.
//!
//! What was judged is what the SDK gets: text, not a path that it would open again.

use std::env;
use std::path::{Path, PathBuf};

use aws_runtime::env_config::file::{EnvConfigFileKind, EnvConfigFiles};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::settings::Settings;
use crate::failure::Failure;
use crate::options::bad;
use crate::trust::{What, insecure, read};

/// Properties that have a program run, or another file read: name, and what it does.
const REACHING: [(&str, &str); 2] = [
    ("credential_process", "has a program run"),
    ("web_identity_token_file", "names another file"),
];

/// Variables by which the SDK finds tokens in files; they are the operator's, the files must be so
/// as well.
const TOKENS: [&str; 2] = ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"];

impl Settings {
    /// The files to read profiles from.
    ///
    /// # Errors
    /// `insecure` if one of them could be somebody else's, or reaches for more than it may.
    pub(super) fn profile_files(&self) -> Result<EnvConfigFiles, Failure> {
        for path in TOKENS.iter().filter_map(env::var_os).map(PathBuf::from) {
            check_token(&path)?;
        }
        let configuration = usual("AWS_CONFIG_FILE", ".aws/config");
        let configuration = self.optional(configuration.as_deref(), What::Trusted)?;
        let credentials = match &self.credentials_file {
            Some(path) => self.read_file(path, What::Credentials)?,
            None => {
                let usual = usual("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
                self.optional(usual.as_deref(), What::Credentials)?
            }
        };
        Ok(EnvConfigFiles::builder()
            .with_contents(EnvConfigFileKind::Config, configuration.as_str())
            .with_contents(EnvConfigFileKind::Credentials, credentials.as_str())
            .build())
    }

    /// Refuses a credentials file that others can read or write, or that reaches for more than it
    /// may.
    pub(super) fn check_credentials_file(&self) -> Result<(), Failure> {
        self.credentials_file
            .as_ref()
            .map_or(Ok(()), |path| self.read_file(path, What::Credentials).map(drop))
    }

    /// A file that need not be there, nor be for us: the SDK goes on without.
    fn optional(&self, path: Option<&Path>, what: What) -> Result<Zeroizing<String>, Failure> {
        match path.map(|path| self.read_file(path, what)) {
            Some(Err(error)) if error.class != ErrorClass::Unreachable => Err(error),
            Some(Ok(text)) => Ok(text),
            _ => Ok(Zeroizing::default()),
        }
    }

    fn read_file(&self, path: &Path, what: What) -> Result<Zeroizing<String>, Failure> {
        let bytes = read::read_whole(path, what)?;
        let text = str::from_utf8(&bytes).map_err(|_| {
            bad(format!("\"{}\" is not usable", path.display()))
                .with_detail("It holds something else than text.")
                .with_hint(
                    "It must be a configuration or credentials file as AWS's tools have them.",
                )
        })?;
        for line in text.lines() {
            for (name, does) in REACHING {
                let Some(value) = value_of(line, name) else { continue };
                if !self.programs {
                    return Err(reaches_too_far(path, name, does));
                }
                if name == "web_identity_token_file" {
                    check_token(Path::new(value))?;
                }
            }
        }
        Ok(Zeroizing::new(text.to_owned()))
    }
}

/// The value of a property, if the line sets this one. The SDK's parser (`aws-runtime`,
/// env_config/parse.rs) takes names in any case, with blanks around; lines that begin with one
/// continue another, which does no harm to refuse as well.
fn value_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (found, value) = line.split_once('=')?;
    found.trim().eq_ignore_ascii_case(name).then_some(value.trim())
}

/// Refuses a file of a token that others can write, or that the SDK would not come to an end with.
/// What is not there is for the SDK to tell.
fn check_token(path: &Path) -> Result<(), Failure> {
    match read::read_whole(path, What::ServiceAccount) {
        Err(error) if error.class != ErrorClass::Unreachable => Err(error),
        _ => Ok(()),
    }
}

/// Where the SDK looks: a variable's path, or one below the home directory.
fn usual(variable: &str, below_home: &str) -> Option<PathBuf> {
    let home = env::var_os("HOME").map(PathBuf::from);
    match env::var_os(variable).map(PathBuf::from) {
        Some(path) => match path.strip_prefix("~") {
            Ok(rest) => home.map(|home| home.join(rest)),
            Err(_) => std::path::absolute(path).ok(),
        },
        None => home.map(|home| home.join(below_home)),
    }
}

fn reaches_too_far(path: &Path, name: &str, does: &str) -> Failure {
    insecure(format!("\"{}\" {does}, which this provider may not", path.display()))
        .with_detail(format!("It sets {name}. The provider was set by a role that may not have the server run programs."))
        .with_hint("Have a superuser or a member of pg_execute_server_program set the provider's options again, with alter_provider(). Or use a file without it. Of the programs that need no server, those that ask for keys have the option --allow-command.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_found_as_the_sdk_finds_them() {
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
