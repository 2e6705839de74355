//! `kmip`: master keys in a key server that speaks KMIP, the protocol of OASIS: Thales CipherTrust,
//! Fortanix, Entrust, IBM, Akeyless, Cosmian, and others. Versions 1.4, 2.0 and 2.1.
//!
//! docs/kmip.md describes the options.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the options |
//! | `connection` | TLS, sizes and times |
//! | `ttlv` | the encoding |
//! | `names` | numbers of the standard |
//! | `message` | requests and replies |
//! | `attributes` | attributes of keys |
//! | `operations` | what is asked, and what answers must contain |
//! | `session` | the connection of a request, the version, `check` |
//! | `keys` | keys and their states |
//! | `versions` | master keys and their versions |
//! | `rotation` | new versions |
//! | `format` | the format of wrapped keys |
//! | `wrapping` | wrapping and unwrapping |
//! | `failure` | the meaning of refusals |
//!
//! The server encrypts and decrypts. It is never asked for the value of a key (Get). Everything
//! that it sends is examined before it is used. Requests and replies are wiped; the buffers of TLS
//! cannot be, but the process serves one request only.

mod attributes;
mod connection;
mod failure;
mod format;
mod keys;
pub mod message;
mod names;
pub mod operations;
mod rotation;
mod session;
mod settings;
pub mod ttlv;
mod versions;
mod wrapping;

use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::Options;
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};
use format::Parts;
use session::Session;
use settings::Settings;
pub use settings::{CREDENTIAL_OPTIONS, OPTIONS};
use versions::find;
use wrapping::{Use, refused};

struct Kmip(Session);

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    Ok(Box::new(Kmip(Session::new(Settings::of(options)?, environment.deadline))))
}

impl Kmip {
    fn using<'a>(&'a self, name: &'a str) -> Use<'a> {
        Use { session: &self.0, name }
    }
}

fn parts(wrapped: &[u8]) -> Result<Parts<'_>, Failure> {
    Parts::of(wrapped).ok_or_else(|| {
        refused("It was not wrapped by a provider of kind \"kmip\", or by a newer version of pagevault, or it is damaged.")
    })
}

impl Provider for Kmip {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let newest = find(&self.0, key)?.newest;
        newest.may_wrap(key)?;
        newest.stays_in_server(key, self.0.settings.allow_extractable)?;
        let wrapped = self.using(key).wrap(&newest, context, plaintext)?;
        Ok(Wrapped { wrapped, key_version: newest.version })
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let parts = parts(wrapped)?;
        let plaintext = self.using(key).unwrap(context, &parts)?;
        Ok(Unwrapped { plaintext, key_version: parts.key_version })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        rotation::rotate(&self.0, key, &parts(wrapped)?)
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let versions = find(&self.0, key)?;
        let newest = &versions.newest;
        newest.may_wrap(key)?;
        newest.stays_in_server(key, self.0.settings.allow_extractable)?;
        let version = self.0.version().map_or("", message::Version::name);
        Ok(KeyInfo {
            key_version: newest.version,
            // After Re-key, the name no longer leads to the versions before.
            oldest_version: None,
            summary: format!(
                "{}, unique identifier {}, at {}, KMIP {version}",
                newest.describe(),
                crate::options::printable(&newest.id),
                self.0.shown()
            ),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        self.0.examine(findings)
    }

    fn check_options(&self) -> Result<(), Failure> {
        self.0.check_files()
    }
}
