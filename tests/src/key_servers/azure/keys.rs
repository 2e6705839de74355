//! Keys, their versions, and what they wrap.

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::aes::{AesKey, unwrap_key, wrap_key};
use openssl::md::Md;
use openssl::pkey::{PKey, Private};
use openssl::pkey_ctx::PkeyCtx;
use openssl::rsa::Padding;
use serde_json::{Value, json};

use super::{error, now, rsa};
use crate::key_servers::rest::{Answer, Asked};

enum Material {
    Rsa(PKey<Private>),
    Aes([u8; 32]),
}

struct Version {
    name: String,
    created: u64,
    enabled: bool,
    expires: Option<u64>,
    material: Material,
}

/// A key with all its versions, the newest last.
pub struct Key {
    kty: &'static str,
    operations: Vec<&'static str>,
    versions: Vec<Version>,
    /// Deleted, and can be recovered.
    pub is_deleted: bool,
}

impl Key {
    pub(super) fn new(kty: &'static str, created: u64) -> Result<Key> {
        let operations = vec!["encrypt", "decrypt", "wrapKey", "unwrapKey"];
        let mut key = Key { kty, operations, versions: Vec::new(), is_deleted: false };
        key.add_version(created)?;
        Ok(key)
    }

    pub(super) fn add_version(&mut self, created: u64) -> Result<()> {
        let mut name = [0; 16];
        openssl::rand::rand_bytes(&mut name)?;
        let name = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let material = if self.kty == "oct-HSM" {
            let mut secret = [0; 32];
            openssl::rand::rand_bytes(&mut secret)?;
            Material::Aes(secret)
        } else {
            Material::Rsa(rsa()?)
        };
        self.versions.push(Version { name, created, enabled: true, expires: None, material });
        Ok(())
    }

    /// Enables or disables a version by its position.
    pub fn set_enabled(&mut self, version: usize, enabled: bool) {
        if let Some(version) = self.versions.get_mut(version) {
            version.enabled = enabled;
        }
    }

    /// Sets when all versions expire, in seconds since 1970.
    pub fn set_expires(&mut self, expires: Option<u64>) {
        for version in &mut self.versions {
            version.expires = expires;
        }
    }

    /// Sets what the key may be used for.
    pub fn set_operations(&mut self, operations: Vec<&'static str>) {
        self.operations = operations;
    }

    /// Number of versions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.versions.len()
    }

    pub(super) fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    pub(super) fn version(&self, name: &str) -> Option<usize> {
        self.versions.iter().position(|version| version.name == name)
    }

    pub(super) fn bundle(&self, address: &str, version: usize) -> Option<Value> {
        let Version { name, .. } = self.versions.get(version)?;
        let key = json!({"kid": format!("{address}/{name}"), "kty": self.kty,
            "key_ops": self.operations});
        Some(json!({"key": key, "attributes": self.attributes(version)}))
    }

    fn attributes(&self, version: usize) -> Value {
        let version = &self.versions[version];
        let mut attributes = json!({"enabled": version.enabled, "created": version.created,
            "updated": version.created, "recoveryLevel": "Recoverable", "recoverableDays": 90});
        if let Some(expires) = version.expires {
            attributes["exp"] = json!(expires);
        }
        attributes
    }

    /// Two versions a page, so that there are several.
    pub(super) fn list(&self, address: &str, asked: &Asked) -> Value {
        let first: usize = asked.query("$skiptoken").parse().unwrap_or(0);
        let items: Vec<Value> = (first..self.versions.len())
            .take(2)
            .map(|at| {
                let kid = format!("{address}/{}", self.versions[at].name);
                json!({"kid": kid, "attributes": self.attributes(at)})
            })
            .collect();
        let mut page = json!({"value": items, "nextLink": null});
        if first + 2 < self.versions.len() {
            page["nextLink"] =
                json!(format!("{address}/versions?api-version=7.4&$skiptoken={}", first + 2));
        }
        page
    }

    pub(super) fn apply(
        &self,
        address: &str,
        version: usize,
        operation: &str,
        body: &Value,
    ) -> Result<Value, Answer> {
        let version = &self.versions[version];
        let refused = |what: &str, inner: &str| {
            let text = format!("Operation {operation} is not allowed on {what} key.");
            Err(error(403, "Forbidden", &text, inner))
        };
        let wraps = operation == "wrapKey";
        let public = wraps && matches!(version.material, Material::Rsa(_));
        if !version.enabled && !public {
            return refused("a disabled", "KeyDisabled");
        }
        if wraps && version.expires.is_some_and(|expires| expires <= now()) {
            return refused("an expired", "");
        }
        let bad = |text: &str| error(400, "BadParameter", text, "");
        if !self.operations.contains(&operation) {
            return Err(bad("The operation is not permitted by key_ops."));
        }
        let value = body["value"].as_str().and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        let value = value.ok_or_else(|| bad("value"))?;
        let result = match (&version.material, body["alg"].as_str()) {
            (Material::Rsa(key), Some("RSA-OAEP-256")) => oaep(key, wraps, &value).ok(),
            (Material::Aes(key), Some("A256KW")) => aes(key, wraps, &value),
            _ => return Err(bad("alg")),
        };
        let result = result.ok_or_else(|| bad("The parameter is incorrect."))?;
        Ok(json!({"kid": format!("{address}/{}", version.name),
            "value": URL_SAFE_NO_PAD.encode(result)}))
    }
}

fn oaep(key: &PKey<Private>, wraps: bool, value: &[u8]) -> Result<Vec<u8>> {
    let mut context = PkeyCtx::new(key)?;
    if wraps {
        context.encrypt_init()?
    } else {
        context.decrypt_init()?
    }
    context.set_rsa_padding(Padding::PKCS1_OAEP)?;
    context.set_rsa_oaep_md(Md::sha256())?;
    context.set_rsa_mgf1_md(Md::sha256())?;
    let mut result = Vec::new();
    if wraps {
        context.encrypt_to_vec(value, &mut result)?;
    } else {
        context.decrypt_to_vec(value, &mut result)?;
    }
    Ok(result)
}

fn aes(key: &[u8; 32], wraps: bool, value: &[u8]) -> Option<Vec<u8>> {
    if wraps {
        let mut result = vec![0; value.len() + 8];
        wrap_key(&AesKey::new_encrypt(key).ok()?, None, &mut result, value).ok()?;
        return Some(result);
    }
    if !value.len().is_multiple_of(8) || value.len() < 24 {
        return None;
    }
    let mut result = vec![0; value.len() - 8];
    unwrap_key(&AesKey::new_decrypt(key).ok()?, None, &mut result, value).ok()?;
    Some(result)
}
