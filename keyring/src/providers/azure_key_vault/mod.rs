//! `azure_key_vault`: master keys in Azure Key Vault or Managed HSM, which they never leave.
//!
//! | option | meaning |
//! |---|---|
//! | `vault` | `https://<name>.vault.azure.net`, or `https://<name>.managedhsm.azure.net` |
//! | `auth` | how to get access tokens: see the module `auth`; optional |
//! | `ca_file` | PEM file of trusted authorities, instead of the system's |
//! | `insecure_loopback_http` | accept a vault of this machine, also without TLS; for tests |
//!
//! `wrapKey` of Key Vault has no associated data. So a one-time key is wrapped there, with
//! RSA-OAEP-256 or A256KW, and wraps the secret here: see the module `envelope`. The id in it is
//! the name of the version, and the context and the name of the key are bound.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the options, and where credentials may be sent |
//! | `auth` | access tokens |
//! | `session` | requests, and the checks of replies |
//! | `key` | versions: states, types, times |
//! | `failure` | the meaning of Key Vault's errors |
//!
//! The HTTP client keeps copies of requests and replies that cannot be wiped. The process serves
//! one request only.

mod auth;
mod failure;
mod key;
mod session;
mod settings;

use std::cell::OnceCell;
use std::time::Instant;

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::ErrorClass;

use self::auth::Credentials;
use self::failure::is_denial;
use self::key::{check_name, number, version_name};
use self::session::Session;
use self::settings::Settings;
use crate::envelope::{self, Parts, associated_data};
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{INSECURE_HTTP, Options};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};

/// Names of all options.
pub const OPTIONS: &[&str] = &["vault", "auth", "ca_file", INSECURE_HTTP];
/// Options that decide which credentials are read, and where they are sent.
pub(super) const CREDENTIAL_OPTIONS: &[&str] = &["vault", "auth", INSECURE_HTTP];

/// The beginning of associated data.
const BOUND: &str = "pagevault azure_key_vault provider 1";

struct KeyVault {
    settings: Settings,
    deadline: Option<Instant>,
    session: OnceCell<Session>,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let settings = Settings::read(options)?;
    Ok(Box::new(KeyVault { settings, deadline: environment.deadline, session: OnceCell::new() }))
}

impl KeyVault {
    /// The session for all operations of a request. After a failure the next operation tries again.
    fn session(&self) -> Result<&Session, Failure> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        self.connect(&self.settings.auth.read()?)
    }

    fn connect(&self, credentials: &Credentials) -> Result<&Session, Failure> {
        let session = Session::connect(&self.settings, credentials, self.deadline)?;
        Ok(self.session.get_or_init(|| session))
    }
}

impl Provider for KeyVault {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        check_name(key)?;
        let session = self.session()?;
        let by = session.usable(key, &session.key(key)?)?;
        let once = Secret32::random().map_err(|error| internal(&format!("{error}.")))?;
        let wrapped_once = session.wrap(key, &by, once.expose())?;
        let head = envelope::head(by.number, by.method, by.version.as_bytes(), &wrapped_once);
        let mut wrapped = head.ok_or_else(|| internal("Key Vault returned too much."))?;
        let bound = associated_data(BOUND, &wrapped, &bound_name(key), context);
        envelope::seal(&once, &bound, plaintext, &mut wrapped)
            .map_err(|error| internal(&format!("{error}.")))?;
        Ok(Wrapped { wrapped, key_version: by.number })
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        check_name(key)?;
        let parts = Parts::of(wrapped);
        let parts = parts.ok_or_else(|| {
            foreign(
                "It was not wrapped by a provider of kind \"azure_key_vault\", or it is damaged.",
            )
        })?;
        let version = version_name(parts.id)
            .ok_or_else(|| foreign("It does not contain the name of a version."))?;
        let once = self.session()?.unwrap(key, version, parts.method, parts.once)?;
        let bound = associated_data(BOUND, parts.head, &bound_name(key), context);
        let plaintext = envelope::open(&once, &bound, parts.body).ok_or_else(|| {
            foreign("It was wrapped for another database or under another name, or it is damaged.")
        })?;
        Ok(Unwrapped { plaintext, key_version: parts.key_version })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        check_name(key)?;
        let session = self.session()?;
        let (version, now) = session.version(key, &session.key(key)?)?;
        // The rotation policy of the key, or a person, may have made a newer one.
        if Parts::of(wrapped).is_none_or(|parts| parts.id != version.as_bytes()) {
            return Ok(now);
        }
        let (made, newest) = session.version(key, &session.rotate(key)?)?;
        if made == version {
            return Err(session.service.wrong("The newest version is still the former one."));
        }
        Ok(newest)
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        check_name(key)?;
        let session = self.session()?;
        let bundle = session.key(key)?;
        let by = session.usable(key, &bundle)?;
        // A list is for information only.
        let versions = match session.versions(key) {
            Err(error) if is_denial(&error) => Vec::new(),
            versions => versions?,
        };
        let enabled = versions.iter().filter(|item| item.attributes.enabled != Some(false));
        let oldest = enabled.filter_map(|item| number(item.attributes.created)).min();
        Ok(KeyInfo {
            key_version: by.number,
            oldest_version: oldest.map(|oldest| oldest.min(by.number)),
            summary: format!("{}keys/{key}, {}", session.vault, bundle.kind()),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        let read = self.settings.auth.read();
        let credentials = findings.note("the credentials can be read", read, Credentials::shown)?;
        let session =
            findings.note("an access token is issued", self.connect(&credentials), |_| {
                format!("for {}", self.settings.resource)
            })?;
        let found = match session.keys() {
            Err(error) if is_denial(&error) => Ok("they may not list keys, which is not required"),
            found => found.map(|()| "they may list keys"),
        };
        findings.note("Key Vault accepts the credentials", found, |seen| (*seen).to_owned())?;
        Some(())
    }

    fn check_options(&self) -> Result<(), Failure> {
        self.settings.check_files()
    }
}

/// Names of keys are not case-sensitive.
fn bound_name(key: &str) -> String {
    key.to_ascii_lowercase()
}

fn foreign(cause: &str) -> Failure {
    Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped with Key Vault")
        .with_detail(cause)
        .with_hint("Use the vault and the master key that wrapped it. If it is damaged, restore the keystore from a backup.")
}

fn internal(cause: &str) -> Failure {
    Failure::new(ErrorClass::Internal, "could not wrap the key")
        .with_detail(cause)
        .with_hint("Try again.")
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_format_is_that_of_the_golden_file() {
        let file = include_str!("../../../vectors/azure_key_vault_wrapped_1.json");
        let examples: Vec<Value> = serde_json::from_str(file).unwrap();
        assert_eq!(examples.len(), 2);
        for example in examples {
            let text = |name: &str| example[name].as_str().unwrap();
            let bytes = |name: &str| STANDARD.decode(text(name)).unwrap();
            let wrapped = bytes("wrapped");
            let parts = Parts::of(&wrapped).unwrap();
            assert_eq!(Some(parts.key_version), example["key_version"].as_u64());
            assert_eq!(Some(parts.method as u64), example["method"].as_u64());
            assert_eq!(version_name(parts.id), Some(text("version")));
            assert_eq!(parts.once, bytes("wrapped_once"));
            let name = bound_name(text("key"));
            let bound = associated_data(BOUND, parts.head, &name, text("context"));
            let plaintext = envelope::open(&bytes("once"), &bound, parts.body).unwrap();
            assert_eq!(*plaintext, bytes("plaintext"));
        }
    }
}
