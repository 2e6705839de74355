//! `vault`: master keys in the Transit engine of HashiCorp Vault or OpenBao. They never leave it.
//!
//! | option | meaning |
//! |---|---|
//! | `address` | `https://host:port`, or `unix:///path` of a socket at which root or the server's user listens |
//! | `insecure_loopback_http` | accept `http` to this machine, where any user may listen; for tests |
//! | `mount` | where the Transit engine is mounted; `transit` if not given |
//! | `namespace` | of Vault Enterprise or OpenBao |
//! | `ca_file` | PEM file of the authorities to trust instead of the system's |
//! | `auth` | how to log in: see the module `auth` |
//!
//! A key must be made with `derived=true`. Vault then derives from it, for each context, the key
//! that really wraps, so that what was wrapped for one database does not open for another.
//! Associated data would bind as well, but Vault cannot rewrap what was wrapped with them.
//!
//! What it wraps is Vault's own text, `vault:v<version>:<base64>`.
//!
//! The client keeps copies of what it sends and receives that nobody wipes. The process lives for
//! one request.

mod api;
mod auth;
mod failure;
mod session;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_keystore::protocol::ErrorClass;
use vaultrs::api::transit::requests::{
    DecryptDataRequest, EncryptDataRequest, ReadKeyRequest, RewrapDataRequest, RotateKeyRequest,
};
use vaultrs::api::transit::responses::{ReadKeyData, ReadKeyResponse};
use zeroize::Zeroizing;

use self::api::formed;
use self::auth::Auth;
use self::session::{Server, Session};
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{CLEAR, Options, absolute_path, bad, printable, server_address};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};

/// The options it knows.
pub const OPTIONS: &[&str] = &["address", CLEAR, "mount", "namespace", "ca_file", "auth"];
/// Those of them that say which credentials are read, and where they are sent.
pub(super) const REACHING: &[&str] = &["address", CLEAR, "auth"];

struct Vault {
    mount: String,
    session: Session,
}

/// Makes the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let mount = options.text("mount")?.unwrap_or("transit");
    let (address, clear) = (options.required_text("address")?, options.flag(CLEAR)?);
    let socket = address.strip_prefix("unix://").map(absolute_path).transpose()?;
    let server = Server {
        address: match &socket {
            // What stands in the request's header.
            Some(_) => server_address("address", "http://localhost", true)?,
            None => server_address("address", address, clear)?,
        },
        shown: address.trim_end_matches('/').to_owned(),
        socket,
        namespace: options.text("namespace")?.map(header_text).transpose()?,
        ca_file: options.optional_path("ca_file")?,
    };
    let auth = Auth::from_options(options.object("auth")?)?;
    Ok(Box::new(Vault {
        mount: path("mount", mount)?,
        session: Session::new(server, auth, environment.deadline)?,
    }))
}

/// Accepts a path such as `transit` or `team/transit`, without slashes around it.
pub(super) fn path(option: &str, text: &str) -> Result<String, Failure> {
    let path = text.trim_matches('/');
    if path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.chars().all(plain)) {
        return Ok(path.to_owned());
    }
    Err(bad(format!("option \"{option}\" is not a path in Vault"))
        .with_detail("A path has letters, digits, \"_\", \"-\", \".\" and \"/\"."))
}

fn plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn header_text(text: &str) -> Result<String, Failure> {
    path("namespace", text)
}

/// Keys that Vault cannot have are missing, and must not get into a URL.
fn check_key(key: &str) -> Result<(), Failure> {
    if !key.is_empty() && key.chars().all(plain) && !matches!(key, "." | "..") {
        return Ok(());
    }
    Err(Failure::new(
        ErrorClass::KeyMissing,
        format!("Vault can have no key \"{}\"", printable(key)),
    )
    .with_detail("The name of a Transit key has letters, digits, \"_\", \"-\" and \".\".")
    .with_hint("Check the name of the master key."))
}

impl Vault {
    /// The key as Vault describes it, if it is one that pagevault may use.
    fn key(&self, key: &str) -> Result<ReadKeyResponse, Failure> {
        check_key(key)?;
        let path = format!("{}/keys/{key}", self.mount);
        let info = self.session.run("read", &path, async |api| {
            let mut request = ReadKeyRequest::builder();
            api.ask(formed(request.mount(&self.mount).name(key).build())?).await
        })?;
        if info.derived && info.supports_decryption {
            return Ok(info);
        }
        Err(Failure::new(
            ErrorClass::Insecure,
            format!("key \"{key}\" cannot bind what it wraps to a database"),
        )
        .with_detail("It was not made with derived=true, or is not for encryption.")
        .with_hint(format!(
            "Make another key: vault write {}/keys/<name> derived=true",
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

/// Vault's text, if this is one.
fn ciphertext(wrapped: &[u8]) -> Result<(&str, u64), Failure> {
    let text = std::str::from_utf8(wrapped).ok().filter(|text| text.is_ascii());
    text.and_then(|text| Some((text, version_of(text)?))).ok_or_else(|| {
        Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped with Vault")
            .with_detail("It was not made by a provider of kind \"vault\".")
            .with_hint("Restore the directory pagevault/ of the data directory from a backup.")
    })
}

fn wrapped(ciphertext: String) -> Result<Wrapped, Failure> {
    let key_version = version_of(&ciphertext).ok_or_else(|| {
        Failure::new(ErrorClass::Internal, "Vault answered with an unknown kind of text")
    })?;
    Ok(Wrapped { wrapped: ciphertext.into_bytes(), key_version })
}

impl Provider for Vault {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        // Vault ignores the context where the key is not derived; and to encrypt with a key that is
        // not there makes one, if the token may.
        self.key(key)?;
        let text = Zeroizing::new(STANDARD.encode(plaintext));
        let path = format!("{}/encrypt/{key}", self.mount);
        let reply = self.session.run("update", &path, async |api| {
            let mut request = EncryptDataRequest::builder();
            request.mount(&self.mount).name(key).plaintext(text.as_str());
            api.ask(formed(request.context(STANDARD.encode(context)).build())?).await
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
            api.ask(formed(request.context(STANDARD.encode(context)).build())?).await
        })?;
        let encoded = Zeroizing::new(reply.plaintext);
        let plaintext = STANDARD.decode(encoded.as_bytes()).map(Zeroizing::new).map_err(|_| {
            Failure::new(ErrorClass::Internal, "Vault answered with something else than base64")
        })?;
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
            api.ask(formed(request.context(STANDARD.encode(context)).build())?).await
        })?;
        self::wrapped(reply.ciphertext)
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let now = newest(&self.key(key)?);
        // Vault may rotate by itself (auto_rotate_period), or somebody else may be in charge of it.
        if ciphertext(wrapped).is_ok_and(|(_, version)| version < now) {
            return Ok(now);
        }
        let path = format!("{}/keys/{key}/rotate", self.mount);
        self.session.run("update", &path, async |api| {
            let mut request = RotateKeyRequest::builder();
            api.tell(formed(request.mount(&self.mount).name(key).build())?).await
        })?;
        Ok(newest(&self.key(key)?))
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let info = self.key(key)?;
        let leaves = if info.exportable || info.allow_plaintext_backup {
            "it may be exported or backed up in clear"
        } else {
            "it cannot leave Vault"
        };
        Ok(KeyInfo {
            key_version: newest(&info),
            oldest_version: info.min_decryption_version.max(1),
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
    fn names_cannot_leave_their_path() {
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
