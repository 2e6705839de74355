//! Keys, their versions, and what they encrypt.

use std::collections::BTreeMap;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use openssl::symm::{Cipher, decrypt_aead, encrypt_aead};
use serde_json::{Value, json};

use super::{error, invalid};
use crate::key_servers::rest::{Answer, Asked};

pub(super) struct Version {
    secret: [u8; 32],
    pub(super) state: &'static str,
    /// How many requests for it see it without key material.
    pub(super) pending: u32,
}

/// A key, and what makes it.
pub struct CryptoKey {
    purpose: &'static str,
    level: &'static str,
    pub(super) primary: Option<u64>,
    pub(super) versions: BTreeMap<u64, Version>,
}

impl CryptoKey {
    /// A key for encryption with one version.
    ///
    /// # Errors
    /// Without random bytes.
    pub(super) fn new() -> Result<CryptoKey> {
        let (purpose, level, versions) = ("ENCRYPT_DECRYPT", "SOFTWARE", BTreeMap::new());
        let mut key = CryptoKey { purpose, level, primary: Some(1), versions };
        key.add_version(0)?;
        Ok(key)
    }

    /// Sets the state of a version.
    pub fn set_state(&mut self, version: u64, state: &'static str) {
        if let Some(version) = self.versions.get_mut(&version) {
            version.state = state;
            if state == "DESTROYED" {
                version.secret = [0; 32];
            }
        }
    }

    /// Sets the purpose.
    pub fn set_purpose(&mut self, purpose: &'static str) {
        self.purpose = purpose;
    }

    /// Sets the primary version.
    pub fn set_primary(&mut self, version: Option<u64>) {
        self.primary = version;
    }

    /// Number of versions, in any state.
    #[must_use]
    pub fn count(&self) -> usize {
        self.versions.len()
    }

    /// Adds an enabled version, and returns its number.
    ///
    /// # Errors
    /// Without random bytes.
    pub fn add_version(&mut self, pending: u32) -> Result<u64> {
        let number = self.versions.len() as u64 + 1;
        let state = if pending > 0 { "PENDING_GENERATION" } else { "ENABLED" };
        self.versions.insert(number, Version { secret: random()?, state, pending });
        Ok(number)
    }

    pub(super) fn shown(&self, name: &str, number: u64) -> Value {
        let state = self.versions.get(&number).map_or("DESTROYED", |version| version.state);
        json!({"name": format!("{name}/cryptoKeyVersions/{number}"), "state": state,
            "protectionLevel": self.level, "algorithm": "GOOGLE_SYMMETRIC_ENCRYPTION"})
    }

    pub(super) fn resource(&self, name: &str) -> Value {
        let mut key = json!({"name": name, "purpose": self.purpose});
        if let Some(primary) = self.primary {
            key["primary"] = self.shown(name, primary);
        }
        key
    }
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    openssl::rand::rand_bytes(&mut bytes)?;
    Ok(bytes)
}

/// Two versions a page, so that there are several.
pub(super) fn page(all: &[Value], asked: &Asked) -> Value {
    let first: usize = asked.query("pageToken").parse().unwrap_or(0);
    let mut page = json!({"cryptoKeyVersions": all.iter().skip(first).take(2).collect::<Vec<_>>(),
        "totalSize": all.len()});
    if first + 2 < all.len() {
        page["nextPageToken"] = json!((first + 2).to_string());
    }
    page
}

/// Bytes of a field in base64, and whether the field with its checksum fits.
fn data(body: &Value, name: &str) -> Result<(Vec<u8>, bool), Answer> {
    let text = body[name].as_str().unwrap_or_default();
    let bytes = STANDARD.decode(text).map_err(|_| invalid("Base64 decoding failed"))?;
    let sum = body[format!("{name}Crc32c")].as_str().and_then(|sum| sum.parse::<i64>().ok());
    let matches = sum == Some(i64::from(crc32c::crc32c(&bytes)));
    Ok((bytes, matches))
}

fn checksum(name: &str) -> Answer {
    invalid(&format!("The checksum in field {name}_crc32c did not match the data in field {name}."))
}

impl CryptoKey {
    fn usable(&self, name: &str, number: u64) -> Result<&Version, Answer> {
        let missing = || error(404, "NOT_FOUND", &format!("CryptoKeyVersion {name} not found."));
        let version = self.versions.get(&number).ok_or_else(missing)?;
        if version.state == "ENABLED" {
            return Ok(version);
        }
        let text = format!(
            "{name}/cryptoKeyVersions/{number} is not enabled, current state is: {}.",
            version.state
        );
        Err(error(400, "FAILED_PRECONDITION", &text))
    }

    pub(super) fn encrypt(
        &self,
        name: &str,
        number: Option<u64>,
        body: &Value,
    ) -> Result<Value, Answer> {
        let number = number.or(self.primary);
        let number = number.ok_or_else(|| error(400, "FAILED_PRECONDITION", "no primary"))?;
        let version = self.usable(name, number)?;
        let (plaintext, plain_matches) = data(body, "plaintext")?;
        let (bound, bound_matches) = data(body, "additionalAuthenticatedData")?;
        if !plain_matches {
            return Err(checksum("plaintext"));
        }
        let internal = |_| error(500, "INTERNAL", "encryption");
        let mut nonce = [0; 12];
        openssl::rand::rand_bytes(&mut nonce).map_err(internal)?;
        let mut tag = [0; 16];
        let cipher = Cipher::aes_256_gcm();
        let encrypted =
            encrypt_aead(cipher, &version.secret, Some(&nonce), &bound, &plaintext, &mut tag)
                .map_err(internal)?;
        let ciphertext = [&number.to_be_bytes()[..], &nonce, &encrypted, &tag].concat();
        Ok(json!({"name": format!("{name}/cryptoKeyVersions/{number}"),
            "ciphertext": STANDARD.encode(&ciphertext),
            "ciphertextCrc32c": crc32c::crc32c(&ciphertext).to_string(),
            "verifiedPlaintextCrc32c": plain_matches,
            "verifiedAdditionalAuthenticatedDataCrc32c": bound_matches,
            "protectionLevel": self.level}))
    }

    pub(super) fn decrypt(&self, name: &str, body: &Value) -> Result<Value, Answer> {
        let (ciphertext, matches) = data(body, "ciphertext")?;
        let (bound, bound_matches) = data(body, "additionalAuthenticatedData")?;
        if !matches || !bound_matches {
            return Err(checksum("ciphertext"));
        }
        let failed = || invalid("Decryption failed: the ciphertext is invalid.");
        let (number, rest) = ciphertext.split_first_chunk::<8>().ok_or_else(failed)?;
        let (nonce, rest) = rest.split_at_checked(12).ok_or_else(failed)?;
        let (encrypted, tag) = rest.split_last_chunk::<16>().ok_or_else(failed)?;
        let number = u64::from_be_bytes(*number);
        if !self.versions.contains_key(&number) {
            return Err(invalid(
                "Decryption failed: verify that 'name' refers to the correct CryptoKey.",
            ));
        }
        let version = self.usable(name, number)?;
        let cipher = Cipher::aes_256_gcm();
        let plaintext = decrypt_aead(cipher, &version.secret, Some(nonce), &bound, encrypted, tag)
            .map_err(|_| failed())?;
        Ok(json!({"plaintext": STANDARD.encode(&plaintext),
            "plaintextCrc32c": crc32c::crc32c(&plaintext).to_string(),
            "usedPrimary": self.primary == Some(number), "protectionLevel": self.level}))
    }
}
