//! Requests to Cloud KMS, REST API v1
//! (<https://cloud.google.com/kms/docs/reference/rest/v1/projects.locations.keyRings.cryptoKeys>),
//! and the checks of its replies.
//!
//! Data have a checksum, CRC-32C, in both directions: Cloud KMS says whether what it received has
//! the sums of the request, and sends that of what it returns. A reply without is not used.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::{RequestBuilder, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::credentials::{Credentials, base64};
use super::failure::{self, Need};
use super::key::{CryptoKey, Version, Versions};
use super::names::version_of;
use super::settings::Settings;
use crate::failure::Failure;
use crate::rest::{Reply, Rest, Service};

/// Pages of the list of versions, each of 100: enough for a key that is rotated daily for years.
const PAGES: usize = 50;

/// A client with an access token.
pub(super) struct Session {
    rest: Rest,
    token: Zeroizing<String>,
    endpoint: Url,
    pub(super) service: Service,
}

#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Encrypt<'a> {
    plaintext: &'a str,
    plaintext_crc32c: String,
    additional_authenticated_data: &'a str,
    additional_authenticated_data_crc32c: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Encrypted {
    name: String,
    ciphertext: String,
    ciphertext_crc32c: Option<Value>,
    #[serde(default)]
    verified_plaintext_crc32c: bool,
    #[serde(default)]
    verified_additional_authenticated_data_crc32c: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Decrypted {
    /// Left out if it is empty.
    #[serde(default)]
    plaintext: String,
    plaintext_crc32c: Option<Value>,
}

impl Session {
    /// Requests a token.
    pub(super) fn connect(
        settings: &Settings,
        credentials: &Credentials,
        deadline: Option<Instant>,
    ) -> Result<Session, Failure> {
        let rest = Rest::new(settings.ca_file.clone(), deadline)?;
        let token = credentials.token(&rest)?;
        let endpoint = settings.endpoint.clone();
        let place = format!("Cloud KMS at {}", endpoint.as_str().trim_end_matches('/'));
        Ok(Session { rest, token, endpoint, service: Service { whose: "a Cloud KMS", place } })
    }

    /// The reply to a request for `path` below the version of the API.
    fn reply(
        &self,
        request: impl FnOnce(&Rest, Url) -> Result<RequestBuilder, Failure>,
        path: &str,
    ) -> Result<Reply, Failure> {
        let url = self.endpoint.join(&format!("v1/{path}"));
        let url = url.map_err(|_| self.service.wrong("The name is not part of an address."))?;
        let request = request(&self.rest, url)?.bearer_auth(self.token.as_str());
        self.rest.ask(&self.service, request)
    }

    fn understood<T: DeserializeOwned>(&self, reply: &Reply, need: Need<'_>) -> Result<T, Failure> {
        if !reply.is_success() {
            return Err(failure::of(reply, &self.service, need));
        }
        reply.parse().ok_or_else(|| self.service.foreign(reply.status))
    }

    fn get<T: DeserializeOwned>(&self, path: &str, need: Need<'_>) -> Result<T, Failure> {
        let reply = self.reply(|rest, url| Ok(rest.get(url)), path)?;
        self.understood(&reply, need)
    }

    fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl serde::Serialize,
        need: Need<'_>,
    ) -> Result<T, Failure> {
        let reply = self.reply(|rest, url| rest.post(url, body), path)?;
        self.understood(&reply, need)
    }

    /// Asks for the key ring, to learn whether the credentials are accepted.
    pub(super) fn key_ring(&self, name: &str) -> Result<(), Failure> {
        self.get::<Value>(name, Need { permission: "cloudkms.keyRings.get", on: name }).map(drop)
    }

    /// A key and its primary version.
    pub(super) fn key(&self, name: &str) -> Result<CryptoKey, Failure> {
        let need = Need { permission: "cloudkms.cryptoKeys.get", on: name };
        let key: CryptoKey = self.get(name, need)?;
        self.same(&key.name, name)?;
        Ok(key)
    }

    /// All versions of a key that are, or will soon be, enabled.
    pub(super) fn versions(&self, key: &str) -> Result<Vec<Version>, Failure> {
        let need = Need { permission: "cloudkms.cryptoKeyVersions.list", on: key };
        let mut found = Vec::new();
        let mut page = String::new();
        for _ in 0..PAGES {
            let token = if page.is_empty() { String::new() } else { format!("&pageToken={page}") };
            let path = format!("{key}/cryptoKeyVersions?pageSize=100{token}");
            let Versions { crypto_key_versions, next_page_token } = self.get(&path, need)?;
            found.extend(crypto_key_versions);
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.~=%".contains(c);
            page = next_page_token.filter(|token| token.chars().all(is_plain)).unwrap_or_default();
            if page.is_empty() {
                break;
            }
        }
        Ok(found)
    }

    /// One version.
    pub(super) fn version(&self, key: &str, number: u64) -> Result<Version, Failure> {
        let need = Need { permission: "cloudkms.cryptoKeyVersions.get", on: key };
        let name = format!("{key}/cryptoKeyVersions/{number}");
        let version: Version = self.get(&name, need)?;
        self.same(&version.name, &name)?;
        Ok(version)
    }

    /// Makes a version, and returns its number.
    pub(super) fn create_version(&self, key: &str) -> Result<u64, Failure> {
        let need = Need { permission: "cloudkms.cryptoKeyVersions.create", on: key };
        let made: Version = self.post(&format!("{key}/cryptoKeyVersions"), &json!({}), need)?;
        version_of(key, &made.name).ok_or_else(|| self.other_key())
    }

    /// Makes a version the primary one.
    pub(super) fn make_primary(&self, key: &str, number: u64) -> Result<(), Failure> {
        let need = Need { permission: "cloudkms.cryptoKeys.update", on: key };
        let body = json!({"cryptoKeyVersionId": number.to_string()});
        let path = format!("{key}:updatePrimaryVersion");
        self.post::<Value>(&path, &body, need).map(drop)
    }

    /// Encrypts with this version of a key.
    pub(super) fn encrypt(
        &self,
        key: &str,
        number: u64,
        context: &str,
        plaintext: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let (data, bound) = (base64(plaintext), base64(context.as_bytes()));
        let body = Encrypt {
            plaintext: &data,
            plaintext_crc32c: sum(plaintext),
            additional_authenticated_data: &bound,
            additional_authenticated_data_crc32c: sum(context.as_bytes()),
        };
        let need = Need { permission: "cloudkms.cryptoKeyVersions.useToEncrypt", on: key };
        let name = format!("{key}/cryptoKeyVersions/{number}");
        let reply: Encrypted = self.post(&format!("{name}:encrypt"), &body, need)?;
        self.same(&reply.name, &name)?;
        if !reply.verified_plaintext_crc32c || !reply.verified_additional_authenticated_data_crc32c
        {
            return Err(self
                .service
                .wrong("It did not receive what was sent: the checksums differ."));
        }
        let ciphertext = STANDARD.decode(&reply.ciphertext).unwrap_or_default();
        self.matches(&ciphertext, reply.ciphertext_crc32c.as_ref())?;
        Ok(ciphertext)
    }

    /// Decrypts with the version of `key` that encrypted.
    pub(super) fn decrypt(
        &self,
        key: &str,
        context: &str,
        ciphertext: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let body = json!({
            "ciphertext": STANDARD.encode(ciphertext),
            "ciphertextCrc32c": sum(ciphertext),
            "additionalAuthenticatedData": STANDARD.encode(context),
            "additionalAuthenticatedDataCrc32c": sum(context.as_bytes()),
        });
        let need = Need { permission: "cloudkms.cryptoKeyVersions.useToDecrypt", on: key };
        let reply: Decrypted = self.post(&format!("{key}:decrypt"), &body, need)?;
        let encoded = Zeroizing::new(reply.plaintext);
        let plaintext = STANDARD.decode(encoded.as_bytes()).map(Zeroizing::new);
        let plaintext = plaintext.map_err(|_| self.service.wrong("It is not base64."))?;
        self.matches(&plaintext, reply.plaintext_crc32c.as_ref())?;
        Ok(plaintext)
    }

    /// Waits, at most until the deadline.
    pub(super) fn pause(&self, time: Duration) -> Result<(), Failure> {
        self.rest.pause(time)
    }

    fn matches(&self, data: &[u8], sent: Option<&Value>) -> Result<(), Failure> {
        // A 64-bit integer is text in Google's JSON; a number is accepted, too.
        let sent =
            sent.and_then(|sum| sum.as_str().map_or_else(|| sum.as_u64(), |s| s.parse().ok()));
        if sent == Some(u64::from(crc32c::crc32c(data))) {
            return Ok(());
        }
        Err(self.service.wrong("Its data and its checksum differ."))
    }

    fn same(&self, found: &str, expected: &str) -> Result<(), Failure> {
        if found == expected { Ok(()) } else { Err(self.other_key()) }
    }

    fn other_key(&self) -> Failure {
        self.service.wrong("It is about another key.")
    }
}

/// A checksum as Google's JSON has it.
fn sum(data: &[u8]) -> String {
    crc32c::crc32c(data).to_string()
}
