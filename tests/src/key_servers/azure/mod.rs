//! A server after the published description of Azure Key Vault and Managed HSM, REST 7.4
//! (<https://learn.microsoft.com/rest/api/keyvault/keys>), with the services that issue tokens for
//! it: Microsoft Entra ID, and the metadata service of a machine.
//!
//! Keys are RSA keys and AES keys that really wrap, tokens are verified, permissions and states are
//! required. It has never been compared with the real service, which no test can reach. As there, a
//! disabled RSA key still wraps; only unwrapping is refused.

mod keys;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result};
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::x509::X509;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::helper::Provider;
use super::rest::{Answer, Asked, RestServer, Service};
use super::write_file;
use crate::Installation;
pub use keys::Key;

/// The tenant of all tests.
pub const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

/// The application of all tests.
pub const CLIENT: &str = "11112222-bbbb-3333-cccc-4444dddd5555";

/// What tokens are issued for.
const RESOURCE: &str = "https://vault.azure.net";

/// Permissions that the documentation asks for.
pub const PERMISSIONS: &[&str] = &["get", "wrapKey", "unwrapKey", "list", "rotate"];

/// Everything that the server knows.
pub struct Azure {
    keys: BTreeMap<String, Key>,
    /// Seconds since 1970, a minute later with each version.
    clock: u64,
    /// Permissions of the application.
    pub granted: BTreeSet<&'static str>,
    tokens: BTreeSet<String>,
    secret: String,
    /// The key that is registered with the application, and its certificate.
    certificate: (PKey<Private>, X509),
    issuer: PKey<Private>,
    /// Client ids of the machine's managed identities.
    pub identities: Vec<&'static str>,
}

/// The server, and files with credentials for it.
pub struct KeyVault {
    /// The server.
    pub server: RestServer<Azure>,
    directory: TempDir,
}

impl KeyVault {
    /// Starts a server with the keys `db-kek` and `db-next`, of this type.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(kty: &'static str) -> Result<KeyVault> {
        KeyVault::serve(kty, RestServer::start)
    }

    /// The same with TLS, with a certificate and its key in PEM.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_with_tls(kty: &'static str, certificate: &str, key: &str) -> Result<KeyVault> {
        KeyVault::serve(kty, |azure| RestServer::start_with_tls(azure, certificate, key))
    }

    fn serve(
        kty: &'static str,
        start: impl FnOnce(Azure) -> Result<RestServer<Azure>>,
    ) -> Result<KeyVault> {
        let secret = "Q7x8Q~0a9b8c7d6e5f4g3h2i1j.k_l-m".to_owned();
        let certificate = tokens::certificate()?;
        let azure = Azure {
            keys: BTreeMap::new(),
            clock: 1_767_225_600,
            granted: PERMISSIONS.iter().copied().collect(),
            tokens: BTreeSet::new(),
            secret,
            certificate,
            issuer: rsa()?,
            identities: vec![CLIENT],
        };
        let directory = tempfile::Builder::new().prefix("pagevault-azure-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let vault = KeyVault { server: start(azure)?, directory };
        for name in ["db-kek", "db-next"] {
            vault.make_key(name, kty)?;
        }
        vault.write_credentials()?;
        Ok(vault)
    }

    fn write_credentials(&self) -> Result<()> {
        let (secret, certificate, key) = {
            let azure = self.server.state();
            let (key, certificate) = &azure.certificate;
            (azure.secret.clone(), certificate.to_pem()?, key.private_key_to_pem_pkcs8()?)
        };
        self.write("secret", &secret)?;
        self.write("application.pem", &String::from_utf8(certificate)?)?;
        self.write("application.key", &String::from_utf8(key)?)?;
        let token = self.issue("api://AzureADTokenExchange")?;
        self.write("token", &token)?;
        Ok(())
    }

    /// Makes a key.
    ///
    /// # Errors
    /// Without random bytes.
    pub fn make_key(&self, name: &str, kty: &'static str) -> Result<()> {
        let mut azure = self.server.state();
        let key = Key::new(kty, azure.tick())?;
        azure.keys.insert(name.to_owned(), key);
        Ok(())
    }

    /// Changes a key.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn with_key<T>(&self, name: &str, change: impl FnOnce(&mut Key) -> T) -> Result<T> {
        self.server.state().keys.get_mut(name).map(change).context("no such key")
    }

    /// Makes a version of a key, as a person or its rotation policy would.
    ///
    /// # Errors
    /// When there is no such key.
    pub fn add_version(&self, name: &str) -> Result<()> {
        let created = self.server.state().tick();
        self.with_key(name, |key| key.add_version(created))?
    }

    /// Purges a key.
    pub fn purge(&self, name: &str) {
        self.server.state().keys.remove(name);
    }

    /// A file of the server user.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str) -> Result<PathBuf> {
        write_file(&self.path(name), content, 0o600)
    }

    /// The path of a file.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A token of the issuer that the application trusts, for this audience.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn issue(&self, audience: &str) -> Result<String> {
        let issuer = self.server.state().issuer.clone();
        tokens::sign(&issuer, &json!({"sub": "system:serviceaccount:db:postgres", "aud": audience}))
    }

    /// Options with the application's secret.
    #[must_use]
    pub fn options(&self) -> Value {
        self.options_with(json!({"client_secret":
            {"tenant": TENANT, "client_id": CLIENT, "secret_file": self.path("secret")}}))
    }

    /// Options with this login.
    #[must_use]
    pub fn options_with(&self, auth: Value) -> Value {
        json!({"vault": self.server.endpoint(), "insecure_loopback_http": true, "auth": auth})
    }

    /// A provider with these options.
    #[must_use]
    pub fn provider(&self, options: Value) -> Provider {
        let provider = Provider::new("azure_key_vault", options);
        provider.env("AZURE_POD_IDENTITY_AUTHORITY_HOST", &self.server.endpoint())
    }
}

fn rsa() -> Result<PKey<Private>> {
    Ok(PKey::from_rsa(Rsa::generate(2048)?)?)
}

fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

fn error(status: u16, code: &str, message: &str, inner: &str) -> Answer {
    let mut error = json!({"code": code, "message": message});
    if !inner.is_empty() {
        error["innererror"] = json!({"code": inner});
    }
    Answer::new(status, json!({"error": error}))
}

impl Service for Azure {
    fn answer(&mut self, asked: &Asked) -> Answer {
        let path = asked.path.split('?').next().unwrap_or_default();
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        match (asked.method.as_str(), &parts[..]) {
            ("POST", [tenant, "oauth2", "v2.0", "token"]) => self.entra(asked, tenant),
            ("GET", ["metadata", "identity", "oauth2", "token"]) => self.metadata(asked),
            (method, [collection @ ("keys" | "deletedkeys"), rest @ ..]) => {
                self.vault(method, collection, rest, asked).unwrap_or_else(|refused| refused)
            }
            _ => error(404, "ResourceNotFound", "no such path", ""),
        }
    }
}

impl Azure {
    /// The time of the next version.
    fn tick(&mut self) -> u64 {
        self.clock += 60;
        self.clock
    }

    fn allowed(&self, permission: &'static str) -> Result<(), Answer> {
        if self.granted.contains(permission) {
            return Ok(());
        }
        let text = format!(
            "The user, group or application 'appid={CLIENT}' does not have keys {permission} permission."
        );
        Err(error(403, "Forbidden", &text, "AccessDenied"))
    }

    fn vault(
        &mut self,
        method: &str,
        collection: &str,
        path: &[&str],
        asked: &Asked,
    ) -> Result<Answer, Answer> {
        if !self.tokens.contains(asked.bearer()) {
            let text = "AKV10000: Request is missing a Bearer or PoP token.";
            return Err(error(401, "Unauthorized", text, ""));
        }
        if asked.query("api-version") != "7.4" {
            return Err(error(400, "BadParameter", "api-version", ""));
        }
        let base = format!("{}/keys", asked.origin());
        let permission = match (method, path) {
            ("GET", [] | [_, "versions"]) => "list",
            ("GET", _) => "get",
            ("POST", [_, "rotate"]) => "rotate",
            ("POST", [_, _, "wrapkey"]) => "wrapKey",
            ("POST", [_, _, "unwrapkey"]) => "unwrapKey",
            _ => return Err(error(404, "ResourceNotFound", "no such path", "")),
        };
        self.allowed(permission)?;
        let Some(name) = path.first().copied() else {
            return Ok(Answer::new(200, json!({"value": []})));
        };
        let created = self.tick();
        let missing = || {
            let text =
                format!("A key with (name/id) {} was not found in this key vault.", path.join("/"));
            error(404, "KeyNotFound", &text, "")
        };
        let key = self.keys.get_mut(name).ok_or_else(missing)?;
        if (collection == "deletedkeys") != key.is_deleted {
            return Err(missing());
        }
        let address = format!("{base}/{name}");
        let body = match path {
            [_] if key.is_deleted => json!({"scheduledPurgeDate": 1_798_761_600_u64,
                "recoveryId": address.replace("/keys/", "/deletedkeys/")}),
            [_] => key.bundle(&address, key.newest()).ok_or_else(missing)?,
            [_, "versions"] => key.list(&address, asked),
            [_, "rotate"] => {
                key.add_version(created).map_err(|_| error(500, "InternalServerError", "", ""))?;
                key.bundle(&address, key.newest()).ok_or_else(missing)?
            }
            [_, version, ..] => {
                let version = key.version(version).ok_or_else(missing)?;
                key.apply(&address, version, permission, &asked.json())?
            }
            [] => Value::Null,
        };
        Ok(Answer::new(200, body))
    }
}
