//! `vault`: master keys in the Transit engine of HashiCorp Vault or OpenBao, which they never
//! leave.
//!
//! | option | meaning |
//! |---|---|
//! | `address` | `https://host:port`, or `unix:///path` of a socket of root or the server's user |
//! | `addresses` | instead of it: `https` addresses of all servers of a cluster |
//! | `insecure_loopback_http` | accept `http` to this machine, where any user can listen; tests |
//! | `mount` | mount path of the Transit engine; `transit` if not given |
//! | `namespace` | in Vault Enterprise or OpenBao |
//! | `ca_file` | PEM file of trusted authorities, instead of the system's |
//! | `auth` | how to log in: see the module `auth` |
//!
//! A key must be created with `derived=true`. Then Vault derives the wrapping key from it and the
//! context, so that a key wrapped for one database cannot be unwrapped for another. Associated data
//! would have the same effect, but Vault cannot rewrap ciphertexts that have them.
//!
//! A wrapped key is Vault's own text, `vault:v<version>:<base64>`.
//!
//! The HTTP client keeps copies of requests and replies that cannot be wiped. The process serves
//! one request only.

mod api;
mod auth;
#[cfg(feature = "aws_kms")]
mod aws_login;
mod failure;
pub(crate) mod kv;
mod nodes;
mod secret_id;
mod session;

use std::rc::Rc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_keystore::protocol::ErrorClass;
use vaultrs::api::transit::requests::{
    DecryptDataRequest, EncryptDataRequest, ReadKeyRequest, RewrapDataRequest, RotateKeyRequest,
};
use vaultrs::api::transit::responses::{ReadKeyData, ReadKeyResponse};
use zeroize::Zeroizing;

use self::api::built;
use self::auth::Auth;
use self::nodes::Nodes;
pub(crate) use self::secret_id::unwrap_secret_id;
use self::session::{Server, Session};
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{INSECURE_HTTP, Options, bad, printable};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};

/// Names of all options.
pub const OPTIONS: &[&str] =
    &["address", "addresses", INSECURE_HTTP, "mount", "namespace", "ca_file", "auth"];
/// Options that decide which credentials are read, and where they are sent.
pub(super) const CREDENTIAL_OPTIONS: &[&str] = &["address", "addresses", INSECURE_HTTP, "auth"];

struct Vault {
    mount: String,
    session: Session,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let mount = options.text("mount")?.unwrap_or("transit");
    Ok(Box::new(Vault { mount: path("mount", mount)?, session: session(options, environment)? }))
}

/// The session that options describe.
fn session(options: &Options<'_>, environment: &Environment) -> Result<Session, Failure> {
    let server = Server {
        nodes: Rc::new(Nodes::from_options(options)?),
        namespace: options.text("namespace")?.map(header_text).transpose()?,
        ca_file: options.optional_path("ca_file")?,
    };
    let auth = Auth::from_options(options.object("auth")?, environment)?;
    Session::new(server, auth, environment.deadline)
}

/// Accepts a path such as `transit` or `team/transit`, and removes slashes around it.
pub(super) fn path(option: &str, text: &str) -> Result<String, Failure> {
    let path = text.trim_matches('/');
    if path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.chars().all(plain)) {
        return Ok(path.to_owned());
    }
    Err(bad(format!("option \"{option}\" is not a valid Vault path"))
        .with_detail("A path consists of letters, digits, \"_\", \"-\", \".\" and \"/\"."))
}

fn plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn header_text(text: &str) -> Result<String, Failure> {
    path("namespace", text)
}

/// A name that Vault cannot have counts as a missing key, and must not get into a URL.
fn check_key(key: &str) -> Result<(), Failure> {
    if !key.is_empty() && key.chars().all(plain) && !matches!(key, "." | "..") {
        return Ok(());
    }
    Err(Failure::new(
        ErrorClass::KeyMissing,
        format!("\"{}\" is not a valid name of a Vault key", printable(key)),
    )
    .with_detail("The name of a Transit key consists of letters, digits, \"_\", \"-\" and \".\".")
    .with_hint("Check the name of the master key."))
}

impl Vault {
    /// Vault's description of the key, if pagevault may use it.
    fn key(&self, key: &str) -> Result<ReadKeyResponse, Failure> {
        check_key(key)?;
        let path = format!("{}/keys/{key}", self.mount);
        let info = self.session.run("read", &path, async |api| {
            let mut request = ReadKeyRequest::builder();
            api.ask(built(request.mount(&self.mount).name(key).build())?).await
        })?;
        if info.name != key {
            return Err(failure::of_another_key(&self.session.server));
        }
        if info.derived && info.supports_decryption {
            return Ok(info);
        }
        Err(Failure::new(
            ErrorClass::Insecure,
            format!("key \"{key}\" cannot bind wrapped keys to a database"),
        )
        .with_detail("It was not created with derived=true, or does not support encryption.")
        .with_hint(format!(
            "Create another key: vault write {}/keys/<name> derived=true",
            self.mount
        )))
    }
}

/// The newest version of a key.
fn newest(info: &ReadKeyResponse) -> u64 {
    let versions = |names: &mut dyn Iterator<Item = &String>| {
        names.filter_map(|name| name.parse().ok()).max().unwrap_or(0)
    };
    match &info.keys {
        ReadKeyData::Symmetric(keys) => versions(&mut keys.keys()),
        ReadKeyData::Asymmetric(keys) => versions(&mut keys.keys()),
    }
}

/// The version in `vault:v<version>:...`.
fn version_of(ciphertext: &str) -> Option<u64> {
    ciphertext.strip_prefix("vault:v")?.split_once(':')?.0.parse().ok()
}

/// Vault's text, if `wrapped` is one.
fn ciphertext(wrapped: &[u8]) -> Result<(&str, u64), Failure> {
    let text = std::str::from_utf8(wrapped).ok().filter(|text| text.is_ascii());
    text.and_then(|text| Some((text, version_of(text)?))).ok_or_else(|| {
        Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped with Vault")
            .with_detail("It was not wrapped by a provider of kind \"vault\".")
            .with_hint("Restore the directory pagevault/ of the data directory from a backup.")
    })
}

fn wrapped(ciphertext: String) -> Result<Wrapped, Failure> {
    let key_version = version_of(&ciphertext).ok_or_else(|| {
        Failure::new(ErrorClass::Internal, "Vault returned ciphertext in an unknown format")
    })?;
    Ok(Wrapped { wrapped: ciphertext.into_bytes(), key_version })
}

impl Provider for Vault {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        // Vault ignores the context if the key is not derived. And encrypting with a key that does
        // not exist creates it, if the token permits.
        self.key(key)?;
        let text = Zeroizing::new(STANDARD.encode(plaintext));
        let path = format!("{}/encrypt/{key}", self.mount);
        let reply = self.session.run("update", &path, async |api| {
            let mut request = EncryptDataRequest::builder();
            request.mount(&self.mount).name(key).plaintext(text.as_str());
            api.ask(built(request.context(STANDARD.encode(context)).build())?).await
        })?;
        wrapped(reply.ciphertext)
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        check_key(key)?;
        let (text, key_version) = ciphertext(wrapped)?;
        let path = format!("{}/decrypt/{key}", self.mount);
        let reply = self.session.run("update", &path, async |api| {
            let mut request = DecryptDataRequest::builder();
            request.mount(&self.mount).name(key).ciphertext(text);
            api.ask(built(request.context(STANDARD.encode(context)).build())?).await
        })?;
        let encoded = Zeroizing::new(reply.plaintext);
        let plaintext = STANDARD
            .decode(encoded.as_bytes())
            .map(Zeroizing::new)
            .map_err(|_| Failure::new(ErrorClass::Internal, "Vault returned invalid base64"))?;
        Ok(Unwrapped { plaintext, key_version })
    }

    fn rewrap(
        &self,
        from_key: &str,
        key: &str,
        context: &str,
        wrapped: &[u8],
    ) -> Result<Wrapped, Failure> {
        if from_key != key {
            let unwrapped = self.unwrap(from_key, context, wrapped)?;
            return self.wrap(key, context, &unwrapped.plaintext);
        }
        check_key(key)?;
        let (text, _) = ciphertext(wrapped)?;
        let path = format!("{}/rewrap/{key}", self.mount);
        let reply = self.session.run("update", &path, async |api| {
            let mut request = RewrapDataRequest::builder();
            request.mount(&self.mount).name(key).ciphertext(text);
            api.ask(built(request.context(STANDARD.encode(context)).build())?).await
        })?;
        self::wrapped(reply.ciphertext)
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let now = newest(&self.key(key)?);
        // Vault may rotate the key itself (auto_rotate_period), or an administrator of Vault does.
        if ciphertext(wrapped).is_ok_and(|(_, version)| version < now) {
            return Ok(now);
        }
        let path = format!("{}/keys/{key}/rotate", self.mount);
        self.session.run("update", &path, async |api| {
            let mut request = RotateKeyRequest::builder();
            api.send_command(built(request.mount(&self.mount).name(key).build())?).await
        })?;
        Ok(newest(&self.key(key)?))
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let info = self.key(key)?;
        let leaves = if info.exportable || info.allow_plaintext_backup {
            "it can be exported or backed up in plaintext"
        } else {
            "it cannot leave Vault"
        };
        Ok(KeyInfo {
            key_version: newest(&info),
            oldest_version: Some(info.min_decryption_version.max(1)),
            summary: format!(
                "Transit key at {}, mount {}, {leaves}",
                self.session.server.shown(),
                self.mount
            ),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        self.session.examine(findings)
    }

    fn check_options(&self) -> Result<(), Failure> {
        self.session.check_files()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_escape_from_their_path() {
        for bad in ["", ".", "..", "a/b", "a?b", "a%2fb", "a b", "ä", "a\n"] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
        assert!(check_key("db-kek_1.x").is_ok());
        for bad in ["", "/", "a/../b", "a//b", "a?b", "."] {
            assert!(path("mount", bad).is_err(), "{bad:?}");
        }
        assert_eq!(path("mount", "/team/transit/").unwrap(), "team/transit");
    }

    #[test]
    fn versions_are_read_from_ciphertexts() {
        assert_eq!(version_of("vault:v12:YWJj"), Some(12));
        for text in ["", "vault:v", "vault:v1", "vault:vx:abc", "vault:1:abc", "Vault:v1:abc"] {
            assert_eq!(version_of(text), None, "{text}");
        }
        assert!(ciphertext(&[0xFF, 0xFE]).is_err());
        assert!(ciphertext("vault:v1:ä".as_bytes()).is_err());
    }
}
