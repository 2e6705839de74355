//! The operations of the provider, in the process that loads the module.

use std::path::Path;

use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass};
use cryptoki::session::Session;
use pagevault_keystore::protocol::ErrorClass;

use super::failure::{self, Doing};
use super::keys::{self, Key, Kind};
use super::module::Module;
use super::pin::{read_pin, source};
use super::settings::Settings;
use super::token::{CKF_USER_PIN_COUNT_LOW, Token};
use super::wrapping::{Use, choose, mechanism_name, refused};
use crate::envelope::Parts;
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::printable;
use crate::provider::{Environment, KeyInfo, Unwrapped, Wrapped};

/// The step in which the module gets the PIN.
pub(super) const LOGIN: &str = "the token accepts the login";

/// A token with a session that may use its keys.
pub(super) struct Opened {
    token: Token,
    session: Session,
}

impl Opened {
    /// Loads the module, finds the token and logs in. Notes each step.
    ///
    /// # Errors
    /// The first failure; it is also the last finding.
    pub(super) fn open(
        settings: &Settings,
        environment: &Environment,
        findings: &mut Findings,
    ) -> Option<Opened> {
        let data_directory = environment.data_directory.as_deref();
        let module = findings.note(
            "the module is safe to load",
            Module::open(settings, data_directory),
            |module| {
                format!(
                    "{}, writable only by root or the current user, SHA-256 {}",
                    module.path.display(),
                    module.sha256
                )
            },
        )?;
        let loaded = findings.note("the module can be loaded", module.load(), |(_, info)| {
            format!(
                "{} {} of {}, PKCS#11 {}",
                printable(info.library_description()),
                info.library_version(),
                printable(info.manufacturer_id()),
                info.cryptoki_version()
            )
        });
        let (context, _) = loaded?;
        let found = Token::find(&context, &module.loaded_path(), settings);
        let token = findings.note("the token is present", found, Token::name)?;
        let pin = read_pin(&settings.pin, environment);
        let pin = findings.note("the PIN can be read", pin, |_| source(&settings.pin))?;
        let session = token.open(pin.as_ref().map(|pin| pin.as_str()));
        let session = findings.note(LOGIN, session, |_| {
            if token.has(CKF_USER_PIN_COUNT_LOW) {
                "logged in; a wrong PIN had been used since the last login".to_owned()
            } else {
                "logged in".to_owned()
            }
        })?;
        Some(Opened { token, session })
    }

    fn with<'a>(&'a self, name: &'a str, key: &'a Key) -> Use<'a> {
        Use { token: &self.token, session: &self.session, name, key }
    }

    /// See [`Provider::wrap`](crate::provider::Provider::wrap).
    pub(super) fn wrap(
        &self,
        name: &str,
        context: &str,
        plaintext: &[u8],
    ) -> Result<Wrapped, Failure> {
        let keys = keys::find(&self.session, name)?;
        let key = keys::newest(&keys, name)?;
        key.stays_in_token(name)?;
        let wrapped = self.with(name, key).wrap(context, plaintext)?;
        Ok(Wrapped { wrapped, key_version: key.version })
    }

    /// See [`Provider::unwrap`](crate::provider::Provider::unwrap).
    pub(super) fn unwrap(
        &self,
        name: &str,
        context: &str,
        wrapped: &[u8],
    ) -> Result<Unwrapped, Failure> {
        let parts = Parts::of(wrapped).ok_or_else(|| {
            refused("It was not wrapped by a provider of kind \"pkcs11\", or it is damaged.")
        })?;
        let kind = kind_of(&parts);
        let keys = keys::find(&self.session, name)?;
        let mut failed = None;
        for key in keys::with_id(&keys, parts.id, kind, name)? {
            match self.with(name, key).unwrap(context, &parts) {
                Ok(plaintext) => {
                    return Ok(Unwrapped { plaintext, key_version: parts.key_version });
                }
                // An outage says more than that another key was the wrong one.
                Err(error) => {
                    if failed.as_ref().is_none_or(|before: &Failure| !before.retry) {
                        failed = Some(error);
                    }
                }
            }
        }
        Err(failed.unwrap_or_else(|| refused("No key has the id that it names.")))
    }

    /// See [`Provider::rotate`](crate::provider::Provider::rotate).
    pub(super) fn rotate(&self, name: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let keys = keys::find(&self.session, name)?;
        let newest = keys::newest(&keys, name)?;
        let current = Parts::of(wrapped).map_or(newest.version, |parts| parts.key_version);
        if newest.version > current {
            return Ok(newest.version);
        }
        let method = choose(&self.token, newest, name)?;
        let version = current.max(newest.version) + 1;
        let id = keys::new_id(version)?;
        let failed = |error: Failure| error.with_more_hint(&by_hand(newest, name, version));
        let session = self.token.context.open_rw_session(self.token.slot);
        let session = session.map_err(|error| failed(failure::of(&error, Doing::Generate)))?;
        generate(&session, newest, name, id.clone())
            .map_err(|error| failed(failure::of(&error, Doing::Generate)))?;
        // What the token made is used only if it is what was asked for.
        let keys = keys::find(&self.session, name)?;
        let made = keys.iter().find(|key| key.id == id);
        let made = made.ok_or_else(|| {
            Failure::new(ErrorClass::Unreachable, "token does not show the key that it has made")
                .with_detail("It returned no error.")
                .with_hint("Try again; the token may be synchronizing.")
                .transient()
        })?;
        let usable = made.stays_in_token(name).and_then(|()| {
            if choose(&self.token, made, name)? == method {
                return Ok(());
            }
            let message = "token made a key with other attributes than the one in use";
            Err(Failure::new(ErrorClass::Internal, message)
                .with_detail("It would wrap by another mechanism.")
                .with_hint(by_hand(newest, name, version)))
        });
        if usable.is_err() {
            // It must not become the newest version.
            let _ = session.destroy_object(made.handle);
        }
        usable?;
        Ok(version)
    }

    /// See [`Provider::describe`](crate::provider::Provider::describe).
    pub(super) fn describe(&self, name: &str) -> Result<KeyInfo, Failure> {
        let keys = keys::find(&self.session, name)?;
        let newest = keys::newest(&keys, name)?;
        newest.stays_in_token(name)?;
        let method = choose(&self.token, newest, name)?;
        if newest.kind == Kind::Rsa {
            keys::public_key(&self.session, newest, name)?;
        }
        Ok(KeyInfo {
            key_version: newest.version,
            oldest_version: keys.last().map(|oldest| oldest.version),
            summary: format!(
                "{}, id {}, by {}, in {}",
                newest.describe(),
                keys::hexadecimal(&newest.id),
                mechanism_name(method),
                self.token.name()
            ),
        })
    }

    /// Ends the login. Errors do not matter: the process ends, too.
    pub(super) fn close(self) {
        let _ = self.session.logout();
        drop(self.session);
        let _ = self.token.context.finalize();
    }
}

fn kind_of(parts: &Parts<'_>) -> Kind {
    match parts.method {
        crate::envelope::Method::Oaep => Kind::Rsa,
        _ => Kind::Aes,
    }
}

/// Makes a key, or a key pair, with the uses of `like`. It can never leave the token.
fn generate(session: &Session, like: &Key, name: &str, id: Vec<u8>) -> cryptoki::error::Result<()> {
    let common = || {
        [
            Attribute::Token(true),
            Attribute::Label(name.as_bytes().to_vec()),
            Attribute::Id(id.clone()),
        ]
    };
    let protected =
        [Attribute::Private(true), Attribute::Sensitive(true), Attribute::Extractable(false)];
    match like.kind {
        Kind::Aes => {
            let bytes = like.bits.map_or(32, |bits| bits as u64 / 8);
            let mut template = vec![
                Attribute::Class(ObjectClass::SECRET_KEY),
                Attribute::KeyType(KeyType::AES),
                Attribute::ValueLen(bytes.into()),
                Attribute::Encrypt(like.may(AttributeType::Encrypt)),
                Attribute::Decrypt(like.may(AttributeType::Decrypt)),
                Attribute::Wrap(like.may(AttributeType::Wrap)),
                Attribute::Unwrap(like.may(AttributeType::Unwrap)),
            ];
            template.extend(common());
            template.extend(protected);
            session.generate_key(&Mechanism::AesKeyGen, &template).map(drop)
        }
        Kind::Rsa => {
            let bits = like.bits.unwrap_or(3072) as u64;
            let mut public = vec![
                Attribute::ModulusBits(bits.into()),
                Attribute::PublicExponent(vec![1, 0, 1]),
                Attribute::Encrypt(true),
            ];
            public.extend(common());
            let mut private = vec![Attribute::Decrypt(true)];
            private.extend(common());
            private.extend(protected);
            let mechanism = Mechanism::RsaPkcsKeyPairGen;
            session.generate_key_pair(&mechanism, &public, &private).map(drop)
        }
    }
}

/// How an operator makes the next version.
fn by_hand(like: &Key, name: &str, version: u64) -> String {
    let kind = match (like.kind, like.bits) {
        (Kind::Aes, bits) => format!("--keygen --key-type AES:{}", bits.unwrap_or(256) / 8),
        (Kind::Rsa, bits) => format!("--keypairgen --key-type RSA:{}", bits.unwrap_or(3072)),
    };
    format!(
        "The next version can be made by other tools: pkcs11-tool --module MODULE --token-label TOKEN --login {kind} --sensitive --label '{}' --id {version:08x}. Then rotate again.",
        printable(name)
    )
}

/// More advice after that which a failure has.
trait MoreHint {
    fn with_more_hint(self, more: &str) -> Self;
}

impl MoreHint for Failure {
    fn with_more_hint(self, more: &str) -> Self {
        let hint = format!("{} {more}", self.hint());
        self.with_hint(hint.trim())
    }
}

/// The data directory as an environment has it.
pub(super) fn environment(
    data_directory: Option<&str>,
    deadline: std::time::Instant,
) -> Environment {
    Environment {
        data_directory: data_directory.map(|path| Path::new(path).to_owned()),
        deadline: Some(deadline),
        programs: true,
        repeats_programs: false,
    }
}
