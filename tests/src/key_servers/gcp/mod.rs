//! A server after the published description of Google Cloud KMS, REST v1
//! (<https://cloud.google.com/kms/docs/reference/rest>), with services that issue tokens for it:
//! OAuth 2.0 for service accounts, the Security Token Service, IAM Credentials, and the metadata
//! service of a machine.
//!
//! Keys encrypt with AES-256-GCM, checksums are compared, tokens are verified, permissions and
//! states are required. It has never been compared with the real service, which no test can reach.

mod keys;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::sign::Signer;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::helper::Provider;
use super::rest::{Answer, Asked, RestServer, Service};
use super::write_file;
use crate::Installation;
pub use keys::CryptoKey;
use keys::page;

/// The key ring of all tests.
pub const RING: &str = "projects/db-prod/locations/europe-west3/keyRings/postgres";

/// The service account of all tests.
pub const ACCOUNT: &str = "pagevault@db-prod.iam.gserviceaccount.com";

/// The workload identity pool of all tests.
pub const POOL: &str =
    "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/k8s/providers/oidc";

/// The scope of tokens that may use keys.
const SCOPES: [&str; 2] =
    ["https://www.googleapis.com/auth/cloudkms", "https://www.googleapis.com/auth/cloud-platform"];

/// Permissions that the documentation asks for.
pub const PERMISSIONS: &[&str] = &[
    "cloudkms.cryptoKeys.get",
    "cloudkms.cryptoKeyVersions.useToEncrypt",
    "cloudkms.cryptoKeyVersions.useToDecrypt",
    "cloudkms.cryptoKeyVersions.list",
    "cloudkms.cryptoKeyVersions.get",
    "cloudkms.cryptoKeyVersions.create",
    "cloudkms.cryptoKeys.update",
];

/// Everything that the server knows.
pub struct Google {
    keys: BTreeMap<String, CryptoKey>,
    /// Permissions of the service account.
    pub granted: BTreeSet<&'static str>,
    /// Tokens and what they permit.
    tokens: BTreeMap<String, String>,
    issued: u32,
    account_key: PKey<Private>,
    issuer_key: PKey<Private>,
    /// Whether the metadata service has a service account.
    pub has_account: bool,
    /// How many requests for a new version see it without key material.
    pub pending: u32,
}

/// The server, and files with credentials for it.
pub struct Gcp {
    /// The server.
    pub server: RestServer<Google>,
    directory: TempDir,
}

impl Gcp {
    /// Starts a server with the keys `db-kek` and `db-next`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start() -> Result<Gcp> {
        Gcp::serve(RestServer::start)
    }

    /// The same with TLS, with a certificate and its key in PEM.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_with_tls(certificate: &str, key: &str) -> Result<Gcp> {
        Gcp::serve(|google| RestServer::start_with_tls(google, certificate, key))
    }

    fn serve(start: impl FnOnce(Google) -> Result<RestServer<Google>>) -> Result<Gcp> {
        let key = || -> Result<PKey<Private>> { Ok(PKey::from_rsa(Rsa::generate(2048)?)?) };
        let google = Google {
            keys: BTreeMap::new(),
            granted: PERMISSIONS.iter().copied().collect(),
            tokens: BTreeMap::new(),
            issued: 0,
            account_key: key()?,
            issuer_key: key()?,
            has_account: true,
            pending: 0,
        };
        let directory = tempfile::Builder::new().prefix("pagevault-gcp-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let gcp = Gcp { server: start(google)?, directory };
        for name in ["db-kek", "db-next"] {
            gcp.make_key(name)?;
        }
        gcp.write("account.json", &gcp.account_file()?)?;
        Ok(gcp)
    }

    /// The complete name of a key.
    #[must_use]
    pub fn name(&self, key: &str) -> String {
        format!("{RING}/cryptoKeys/{key}")
    }

    /// Makes a key for encryption.
    ///
    /// # Errors
    /// Without random bytes.
    pub fn make_key(&self, key: &str) -> Result<()> {
        let made = CryptoKey::new()?;
        self.server.state().keys.insert(self.name(key), made);
        Ok(())
    }

    /// Changes a key.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn with_key<T>(&self, key: &str, change: impl FnOnce(&mut CryptoKey) -> T) -> Result<T> {
        let name = self.name(key);
        self.server.state().keys.get_mut(&name).map(change).context("no such key")
    }

    /// Removes a key; Google itself never does this.
    pub fn drop_key(&self, key: &str) {
        self.server.state().keys.remove(&self.name(key));
    }

    /// A file of the server user.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str) -> Result<std::path::PathBuf> {
        write_file(&self.directory.path().join(name), content, 0o600)
    }

    /// The key file of the service account.
    ///
    /// # Errors
    /// When the key cannot be written.
    pub fn account_file(&self) -> Result<String> {
        let key = self.server.state().account_key.private_key_to_pem_pkcs8()?;
        Ok(json!({"type": "service_account", "project_id": "db-prod", "private_key_id": "k1",
            "private_key": String::from_utf8(key)?, "client_email": ACCOUNT, "client_id": "1",
            "token_uri": format!("{}/token", self.server.endpoint()),
            "universe_domain": "googleapis.com"})
        .to_string())
    }

    /// A configuration of workload identity federation with the token in a file, and that token.
    ///
    /// # Errors
    /// When the token cannot be signed.
    pub fn federation(&self, impersonate: bool) -> Result<Value> {
        let token =
            self.issue(json!({"iss": "https://issuer.example.com", "aud": POOL, "sub": "pod"}))?;
        let file = self.write("subject-token", &token)?;
        let mut config = json!({"type": "external_account", "audience": POOL,
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": format!("{}/v1/token", self.server.endpoint()),
            "credential_source": {"file": file}});
        if impersonate {
            let url = format!(
                "{}/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken",
                self.server.endpoint()
            );
            config["service_account_impersonation_url"] = json!(url);
        }
        Ok(config)
    }

    /// A token that the pool's issuer has signed.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn issue(&self, claims: Value) -> Result<String> {
        let mut claims = claims;
        claims["exp"] = json!(now() + 600);
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&json!({"alg": "RS256"})), part(&claims));
        let key = self.server.state().issuer_key.clone();
        let mut signer = Signer::new(MessageDigest::sha256(), &key)?;
        let signature = signer.sign_oneshot_to_vec(signed.as_bytes())?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// Options with the service account's key file.
    #[must_use]
    pub fn options(&self) -> Value {
        json!({"endpoint": self.server.endpoint(), "insecure_loopback_http": true,
            "key_ring": RING, "credentials_file": self.directory.path().join("account.json")})
    }

    /// A provider with these options.
    #[must_use]
    pub fn provider(&self, options: Value) -> Provider {
        Provider::new("gcp_kms", options).env("GCE_METADATA_HOST", &self.server.host())
    }
}

fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

fn error(status: u16, code: &str, message: &str) -> Answer {
    Answer::new(status, json!({"error": {"code": status, "message": message, "status": code}}))
}

fn invalid(message: &str) -> Answer {
    error(400, "INVALID_ARGUMENT", message)
}

impl Service for Google {
    fn answer(&mut self, asked: &Asked) -> Answer {
        let path = asked.path.split('?').next().unwrap_or_default();
        match (asked.method.as_str(), path) {
            ("POST", "/token") => self.oauth(asked),
            ("POST", "/v1/token") => self.exchange(asked),
            ("GET", path) if path.starts_with("/computeMetadata/v1/") => self.metadata(asked, path),
            ("POST", path) if path.starts_with("/v1/projects/-/") => self.impersonate(asked, path),
            (method, path) => match path.strip_prefix("/v1/") {
                Some(name) => self.kms(method, name, asked).unwrap_or_else(|refused| refused),
                None => error(404, "NOT_FOUND", "Method not found."),
            },
        }
    }
}

impl Google {
    fn allowed(&self, permission: &'static str, on: &str) -> Result<(), Answer> {
        if self.granted.contains(permission) {
            return Ok(());
        }
        let text =
            format!("Permission '{permission}' denied on resource '{on}' (or it may not exist).");
        Err(error(403, "PERMISSION_DENIED", &text))
    }

    fn kms(&mut self, method: &str, name: &str, asked: &Asked) -> Result<Answer, Answer> {
        let scope = self.tokens.get(asked.bearer()).map(String::as_str);
        if !scope.is_some_and(|scope| SCOPES.contains(&scope)) {
            let text =
                "Request had invalid authentication credentials. Expected OAuth 2 access token.";
            return Err(error(401, "UNAUTHENTICATED", text));
        }
        if method == "GET" && name == RING {
            self.allowed("cloudkms.keyRings.get", name)?;
            return Ok(Answer::new(200, json!({"name": name})));
        }
        let (name, action) = name.split_once(':').unwrap_or((name, ""));
        let (key_name, version) = match name.split_once("/cryptoKeyVersions") {
            Some((key, version)) => (key, Some(version.trim_start_matches('/'))),
            None => (name, None),
        };
        let missing = |what: &str| error(404, "NOT_FOUND", &format!("{what} {name} not found."));
        if !key_name.starts_with(&format!("{RING}/cryptoKeys/")) {
            return Err(missing("KeyRing"));
        }
        let permission = match (method, version, action) {
            ("GET", None, "") => "cloudkms.cryptoKeys.get",
            ("GET", Some(""), "") => "cloudkms.cryptoKeyVersions.list",
            ("GET", Some(_), "") => "cloudkms.cryptoKeyVersions.get",
            ("POST", Some(""), "") => "cloudkms.cryptoKeyVersions.create",
            ("POST", None, "updatePrimaryVersion") => "cloudkms.cryptoKeys.update",
            ("POST", _, "encrypt") => "cloudkms.cryptoKeyVersions.useToEncrypt",
            ("POST", None, "decrypt") => "cloudkms.cryptoKeyVersions.useToDecrypt",
            _ => return Err(error(404, "NOT_FOUND", "Method not found.")),
        };
        self.allowed(permission, key_name)?;
        let pending = self.pending;
        let key = self.keys.get_mut(key_name).ok_or_else(|| missing("CryptoKey"))?;
        let number = version.and_then(|version| version.parse::<u64>().ok());
        let body = match (method, version, action) {
            ("GET", None, _) => key.resource(key_name),
            ("GET", Some(""), _) => {
                let all: Vec<Value> =
                    key.versions.keys().map(|number| key.shown(key_name, *number)).collect();
                page(&all, asked)
            }
            ("GET", ..) => {
                let number = number.ok_or_else(|| missing("CryptoKeyVersion"))?;
                let version = key.versions.get_mut(&number);
                let version = version.ok_or_else(|| missing("CryptoKeyVersion"))?;
                version.pending = version.pending.saturating_sub(1);
                if version.pending == 0 && version.state == "PENDING_GENERATION" {
                    version.state = "ENABLED";
                }
                key.shown(key_name, number)
            }
            (_, Some(""), "") => {
                let number = key.add_version(pending);
                key.shown(key_name, number.map_err(|_| error(500, "INTERNAL", "random"))?)
            }
            (_, _, "updatePrimaryVersion") => {
                let number =
                    asked.json()["cryptoKeyVersionId"].as_str().and_then(|n| n.parse().ok());
                let number = number.filter(|number| key.versions.contains_key(number));
                key.primary = Some(number.ok_or_else(|| missing("CryptoKeyVersion"))?);
                key.resource(key_name)
            }
            (_, _, "encrypt") => key.encrypt(key_name, number, &asked.json())?,
            _ => key.decrypt(key_name, &asked.json())?,
        };
        Ok(Answer::new(200, body))
    }
}
