//! `gcp_kms`: master keys in Google Cloud Key Management Service, which they never leave.
//!
//! Options, all of them optional (`docs/gcp-kms.md`):
//!
//! | option | meaning |
//! |---|---|
//! | `key_ring` | complete name of the key ring in which keys are named by their last part |
//! | `credentials_file` | JSON of a service account or of a workload identity |
//! | `endpoint` | another address of Google for Cloud KMS |
//! | `insecure_loopback_http` | accept addresses of this machine, also without TLS; for tests |
//! | `ca_file` | PEM file of trusted authorities, instead of the system's |
//!
//! A key is given by its complete name, or by its name in `key_ring`. The context is additional
//! authenticated data of Cloud KMS. Each wrapped key contains the name of the key that wrapped it,
//! and is unwrapped with no other.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the options, and where credentials may be sent |
//! | `credentials` | access tokens: service accounts, the metadata service |
//! | `federation` | access tokens by workload identity federation |
//! | `names` | names of keys and versions |
//! | `session` | requests, and the checks of replies |
//! | `key` | versions and their states |
//! | `rotation` | new versions |
//! | `wrapping` | the format of wrapped keys |
//! | `failure` | the meaning of Google's errors |
//!
//! The HTTP client keeps copies of requests and replies that cannot be wiped. The process serves
//! one request only.

mod credentials;
mod failure;
mod federation;
mod key;
mod names;
mod rotation;
mod session;
mod settings;
pub mod wrapping;

use std::cell::OnceCell;
use std::time::Instant;

use pagevault_keystore::protocol::ErrorClass;

use self::credentials::Credentials;
use self::failure::is_denial;
use self::session::Session;
use self::settings::Settings;
use self::wrapping::Wrapping;
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{INSECURE_HTTP, Options};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};

/// Names of all options.
pub const OPTIONS: &[&str] =
    &["key_ring", "credentials_file", "endpoint", INSECURE_HTTP, "ca_file"];
/// Options that decide which credentials are read, and where they are sent.
pub(super) const CREDENTIAL_OPTIONS: &[&str] = &["credentials_file", "endpoint", INSECURE_HTTP];

struct GcpKms {
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
    Ok(Box::new(GcpKms { settings, deadline: environment.deadline, session: OnceCell::new() }))
}

impl GcpKms {
    /// The session for all operations of a request. After a failure the next operation tries again.
    fn session(&self) -> Result<&Session, Failure> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        self.connect(&Credentials::find(&self.settings)?)
    }

    fn connect(&self, credentials: &Credentials) -> Result<&Session, Failure> {
        let session = Session::connect(&self.settings, credentials, self.deadline)?;
        Ok(self.session.get_or_init(|| session))
    }

    fn complete(&self, key: &str) -> Result<String, Failure> {
        names::complete(key, self.settings.key_ring.as_deref())
    }
}

impl Provider for GcpKms {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let name = self.complete(key)?;
        let session = self.session()?;
        // With an explicit version: for some time after a rotation, a request that names only the
        // key may be served with the former version.
        let key_version = session.key(&name)?.usable()?;
        let ciphertext = session.encrypt(&name, key_version, context, plaintext)?;
        let wrapping = Wrapping { key: &name, key_version, ciphertext: &ciphertext };
        let wrapped = wrapping
            .to_bytes()
            .ok_or_else(|| session.service.wrong("The ciphertext is empty or too long."))?;
        Ok(Wrapped { wrapped, key_version })
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let name = self.complete(key)?;
        let wrapping = Wrapping::parse(wrapped)?;
        if wrapping.key != name {
            return Err(Failure::new(
                ErrorClass::WrongCiphertext,
                "wrapped key is not one of this master key",
            )
            .with_detail(format!("It was wrapped with {}, and not with {name}.", wrapping.key))
            .with_hint(
                "Check the option \"key_ring\", and that the keystore is the one of this cluster.",
            ));
        }
        let plaintext = self.session()?.decrypt(&name, context, wrapping.ciphertext)?;
        Ok(Unwrapped { plaintext, key_version: wrapping.key_version })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let name = self.complete(key)?;
        let wrapping = Wrapping::parse(wrapped)?;
        // What another key wrapped is older than any version of this one.
        let than = if wrapping.key == name { wrapping.key_version } else { 0 };
        rotation::rotate(self.session()?, &name, than)
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let name = self.complete(key)?;
        let session = self.session()?;
        let key = session.key(&name)?;
        let key_version = key.usable()?;
        // A list is for information only.
        let versions = match session.versions(&name) {
            Err(error) if is_denial(&error) => Vec::new(),
            versions => versions?,
        };
        let enabled = versions.iter().filter(|version| version.is_enabled());
        let oldest = enabled.filter_map(|version| names::version_of(&name, &version.name)).min();
        Ok(KeyInfo {
            key_version,
            oldest_version: oldest.map(|oldest| oldest.min(key_version)),
            summary: format!("{name}, {}", key.kind()),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        let found = Credentials::find(&self.settings);
        let credentials =
            findings.note("the credentials can be read", found, Credentials::shown)?;
        let session =
            findings.note("Google issues an access token", self.connect(&credentials), |_| {
                "for Cloud KMS only, where the source can restrict it".to_owned()
            })?;
        let Some(key_ring) = &self.settings.key_ring else { return Some(()) };
        let found = match session.key_ring(key_ring) {
            Err(error) if is_denial(&error) => {
                Ok("they may not read the key ring, which is not required")
            }
            found => found.map(|()| "the key ring exists"),
        };
        findings.note("Cloud KMS accepts the credentials", found, |seen| (*seen).to_owned())?;
        Some(())
    }

    fn check_options(&self) -> Result<(), Failure> {
        self.settings.check_files()?;
        Credentials::check_file(&self.settings)
    }
}
