//! `aws_kms`: master keys in AWS Key Management Service, which they never leave.
//!
//! Options, all of them optional (`docs/aws-kms.md`):
//!
//! | option | meaning |
//! |---|---|
//! | `region` | the region; else that of the environment, the profile or the instance |
//! | `endpoint` | another https address than AWS's own |
//! | `insecure_loopback_http` | accept http to this machine, where any user may listen; for tests |
//! | `ca_file` | PEM file of trusted authorities, instead of the system's |
//! | `profile` | the only profile of the shared configuration to use |
//! | `credentials_file` | the only shared credentials file to use, instead of that in `~/.aws` |
//!
//! A key is given by its id, its ARN, or an alias (name or ARN). Each wrapped key contains the ARN
//! of the key that wrapped it, so that it can be unwrapped after an alias has moved, and with no
//! other key.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the options |
//! | `session` | the client and its requests |
//! | `key` | a key's state and version |
//! | `rotation` | new key material |
//! | `wrapping` | the format of wrapped keys |
//! | `failure` | the meaning of AWS's errors |
//!
//! This code wipes its own copies of plaintext. The SDK's copies in request and response bodies
//! cannot be wiped. The process serves one request only, so its memory is soon returned to the
//! system.

mod failure;
mod key;
mod rotation;
mod session;
mod settings;
mod wrapping;

use std::cell::OnceCell;
use std::time::Instant;

use aws_sdk_kms::primitives::Blob;
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use crate::aws::config::AwsConfig;
use crate::aws::credentials;
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{INSECURE_HTTP, Options};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};
use failure::is_unsupported;
use session::Session;
use settings::Settings;
use wrapping::Wrapping;

/// Names of all options.
pub const OPTIONS: &[&str] =
    &["region", "endpoint", INSECURE_HTTP, "ca_file", "profile", "credentials_file"];
/// Options that decide which credentials are read, and where they are sent.
pub(super) const CREDENTIAL_OPTIONS: &[&str] = &["endpoint", INSECURE_HTTP, "credentials_file"];

/// Name of the only entry in the encryption context.
const CONTEXT: &str = "pagevault";

struct AwsKms {
    settings: Settings,
    deadline: Option<Instant>,
    session: OnceCell<Session>,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let settings = Settings::read(options, environment.programs)?;
    Ok(Box::new(AwsKms { settings, deadline: environment.deadline, session: OnceCell::new() }))
}

impl AwsKms {
    /// The session for all operations of a request. After a failure the next operation tries again.
    fn session(&self) -> Result<&Session, Failure> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let ambient = AwsConfig::find(&self.settings.source, self.deadline)?;
        let credentials = ambient.credentials(&self.settings.source)?;
        let session = Session::connect(ambient, &self.settings, credentials)?;
        Ok(self.session.get_or_init(|| session))
    }
}

impl Provider for AwsKms {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let session = self.session()?;
        let plaintext = Blob::new(plaintext);
        session.run(async {
            // Looked up before the request: if the key material changes in between, the older
            // version is recorded, and the next rotation finds a newer one.
            let key = session.key(key).await?;
            let request = session.client.encrypt().key_id(&key.arn);
            let request = request.encryption_context(CONTEXT, context).plaintext(plaintext);
            let reply = session.ask("Encrypt", &key.arn, request.send()).await?;
            session.same(reply.key_id(), &key.arn)?;
            session.wrapped(reply.key_id(), reply.ciphertext_blob(), key.version)
        })
    }

    fn unwrap(&self, _: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let wrapping = Wrapping::parse(wrapped)?;
        let session = self.session()?;
        session.run(async {
            let arn = session.local(wrapping.arn)?;
            let request = session.client.decrypt().key_id(arn.as_ref());
            let request = request.encryption_context(CONTEXT, context);
            let request = request.ciphertext_blob(Blob::new(wrapping.ciphertext));
            let reply = session.ask("Decrypt", &arn, request.send()).await?;
            session.same(reply.key_id(), &arn)?;
            let Some(plaintext) = reply.plaintext else {
                return Err(session.incomplete("Decrypt"));
            };
            let plaintext = Zeroizing::new(plaintext.into_inner());
            Ok(Unwrapped { plaintext, key_version: wrapping.key_version })
        })
    }

    fn rewrap(
        &self,
        _: &str,
        key: &str,
        context: &str,
        wrapped: &[u8],
    ) -> Result<Wrapped, Failure> {
        let wrapping = Wrapping::parse(wrapped)?;
        let session = self.session()?;
        session.run(async {
            let source = session.local(wrapping.arn)?;
            let key = session.key(key).await?;
            let request = session.client.re_encrypt();
            let request = request.source_key_id(source.as_ref()).destination_key_id(&key.arn);
            let request = request
                .source_encryption_context(CONTEXT, context)
                .destination_encryption_context(CONTEXT, context)
                .ciphertext_blob(Blob::new(wrapping.ciphertext));
            let both = format!("{source} and {}", key.arn);
            let reply = session.ask("ReEncrypt", &both, request.send()).await?;
            session.same(reply.source_key_id(), &source)?;
            session.same(reply.key_id(), &key.arn)?;
            session.wrapped(reply.key_id(), reply.ciphertext_blob(), key.version)
        })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let wrapping = Wrapping::parse(wrapped)?;
        let session = self.session()?;
        session.run(rotation::rotate(session, key, &wrapping))
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let session = self.session()?;
        let key = session.run(session.key(key))?;
        let summary = format!("AWS KMS key {} in {}, {}", key.arn, session.region, key.kind);
        Ok(KeyInfo { key_version: key.version, oldest_version: Some(key.created), summary })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        // They may name the region, so they are read first; but credentials are what is missing.
        if let Err(error) = self.settings.source.profile_files() {
            return findings.note("credentials are available", Err(error), |()| String::new());
        }
        let ambient = AwsConfig::find(&self.settings.source, self.deadline);
        let ambient = findings
            .note("the AWS region is known", ambient, |ambient| ambient.region.to_string())?;
        let credentials = ambient.credentials(&self.settings.source);
        let credentials =
            findings.note("credentials are available", credentials, credentials::describe)?;
        // Later operations use this session.
        let session = Session::connect(ambient, &self.settings, credentials);
        let asked =
            session.map(|session| self.session.get_or_init(|| session)).and_then(|session| {
                let request = session.client.list_aliases().limit(1).send();
                session.run(async {
                    match session.ask("ListAliases", "any key", request).await {
                        Err(refused) if !refused.answered => Err(refused.error),
                        answered => Ok((session, answered)),
                    }
                })
            });
        let (_, answered) =
            findings.note("AWS KMS replies", asked, |(session, _)| session.place.clone())?;
        let accepted = match answered {
            Ok(_) => Ok("they may list aliases, which is not required"),
            // An answer that denies this action shows that the credentials are accepted.
            Err(refused)
                if refused.error.class == ErrorClass::Denied || is_unsupported(&refused.code) =>
            {
                Ok("they may not list aliases, which is not required")
            }
            Err(refused) => Err(refused.error),
        };
        findings.note("the credentials are accepted", accepted, |told| (*told).to_owned())?;
        Some(())
    }

    fn check_options(&self) -> Result<(), Failure> {
        self.settings.check_files()
    }
}
