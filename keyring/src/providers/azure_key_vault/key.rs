//! Versions of keys: their states, types and times.

use pagevault_keystore::audit::utc;
use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;
use serde::Deserialize;

use crate::envelope::Method;
use crate::failure::Failure;
use crate::options::printable;

/// Maximum length of the name of a version; Azure's are 32 hexadecimal digits.
const VERSION_LIMIT: usize = 64;

/// A version of a key (`KeyBundle`).
#[derive(Deserialize)]
pub(super) struct KeyBundle {
    pub(super) key: JsonWebKey,
    #[serde(default)]
    pub(super) attributes: Attributes,
}

#[derive(Deserialize)]
pub(super) struct JsonWebKey {
    /// The address of the version.
    pub(super) kid: String,
    kty: String,
    #[serde(default)]
    key_ops: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Attributes {
    pub(super) enabled: Option<bool>,
    /// Seconds since 1970.
    pub(super) created: Option<u64>,
    exp: Option<u64>,
    recovery_level: Option<String>,
}

/// An element of a list of versions (`KeyItem`).
#[derive(Deserialize)]
pub(super) struct KeyItem {
    #[serde(default)]
    pub(super) attributes: Attributes,
}

/// A page of a list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct KeyItems {
    #[serde(default)]
    pub(super) value: Vec<KeyItem>,
    pub(super) next_link: Option<String>,
}

/// A deleted key that can be restored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeletedKey {
    /// Seconds since 1970.
    pub(super) scheduled_purge_date: Option<u64>,
}

/// A version that may wrap.
pub(super) struct Usable {
    pub(super) version: String,
    pub(super) number: u64,
    pub(super) method: Method,
}

/// A name that Key Vault cannot have must not get into a URL, and counts as missing.
pub(super) fn check_name(key: &str) -> Result<(), Failure> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if (1..=127).contains(&key.len()) && key.bytes().all(is_plain) {
        return Ok(());
    }
    Err(Failure::new(
        ErrorClass::KeyMissing,
        format!("\"{}\" is not a valid name of a key in Key Vault", printable(key)),
    )
    .with_detail("The name of a key consists of at most 127 letters, digits and \"-\".")
    .with_hint("Check the name of the master key; give it without the address of the vault."))
}

/// The name of a version in a wrapped key, which becomes a part of a URL.
pub(super) fn version_name(id: &[u8]) -> Option<&str> {
    let is_plain =
        (1..=VERSION_LIMIT).contains(&id.len()) && id.iter().all(u8::is_ascii_alphanumeric);
    str::from_utf8(id).ok().filter(|_| is_plain)
}

/// The version in `<vault>/keys/<key>/<version>`, if it is an address of `key` in `vault`.
pub(super) fn version_in(vault: &Url, key: &str, address: &str) -> Option<String> {
    let url = Url::parse(address).ok().filter(|url| url.origin() == vault.origin())?;
    let parts: Vec<&str> = url.path_segments()?.collect();
    let ["keys", name, version] = parts[..] else { return None };
    // Names are not case-sensitive.
    let is_same = name.eq_ignore_ascii_case(key);
    version_name(version.as_bytes()).filter(|_| is_same).map(str::to_owned)
}

/// Versions have no order. Instead the time of their creation is used, `YYYYMMDDhhmmss` in UTC.
pub(super) fn number(created: Option<u64>) -> Option<u64> {
    // Until the year 9999.
    let created = created.filter(|seconds| *seconds < 253_402_300_800)?;
    let digits: String =
        utc(created * 1_000_000).chars().filter(char::is_ascii_digit).take(14).collect();
    digits.parse().ok()
}

impl KeyBundle {
    /// How this version wraps, if it is enabled.
    ///
    /// # Errors
    /// `bad_options` for a key of another type, `key_disabled` if it must not be used.
    pub(super) fn method(&self, name: &str) -> Result<Method, Failure> {
        let shown = printable(name);
        let error = |class, what: &str| Failure::new(class, format!("key {shown} {what}"));
        let method = match self.key.kty.as_str() {
            "RSA" | "RSA-HSM" => Method::Oaep,
            "oct-HSM" => Method::Kw,
            kty => {
                return Err(error(ErrorClass::BadOptions, "cannot be used as a master key")
                    .with_detail(format!("Its type is {}.", printable(kty)))
                    .with_hint("Create an RSA key, or in a Managed HSM a key of type oct-HSM with 256 bits."));
            }
        };
        let lacking = ["wrapKey", "unwrapKey"]
            .into_iter()
            .find(|needed| !self.key.key_ops.iter().any(|operation| operation == needed));
        if let Some(lacking) = lacking {
            return Err(error(ErrorClass::KeyDisabled, "may not be used to wrap and unwrap")
                .with_detail(format!("Its permitted operations lack {lacking}."))
                .with_hint("Permit it: az keyvault key set-attributes --ops wrapKey unwrapKey."));
        }
        // The service lets a disabled RSA key wrap, but not unwrap.
        if self.attributes.enabled == Some(false) {
            return Err(error(ErrorClass::KeyDisabled, "is disabled")
                .with_detail("The attribute \"enabled\" of its newest version is false.")
                .with_hint("Enable it: az keyvault key set-attributes --enabled true."));
        }
        Ok(method)
    }

    /// For example "RSA-HSM, expires 2027-01-01T00:00:00Z, recoverable".
    pub(super) fn kind(&self) -> String {
        let expires = self.attributes.exp.filter(|seconds| *seconds < 253_402_300_800);
        let expires = expires.map_or(String::new(), |seconds| {
            format!(", wraps until {}Z", &utc(seconds * 1_000_000)[..19])
        });
        let level = self
            .attributes
            .recovery_level
            .as_deref()
            .map_or(String::new(), |level| format!(", recovery level {}", printable(level)));
        format!("{}{expires}{level}", printable(&self.key.kty))
    }
}

/// The failure for a deleted key that can be restored.
pub(super) fn deleted(key: &str, found: &DeletedKey) -> Failure {
    let until = found.scheduled_purge_date.filter(|seconds| *seconds < 253_402_300_800);
    let until = until
        .map_or(String::new(), |seconds| format!(" until {}Z", &utc(seconds * 1_000_000)[..19]));
    Failure::new(ErrorClass::KeyDisabled, format!("key {} is deleted", printable(key)))
        .with_detail(format!(
            "It can be recovered{until}. Then everything that it wrapped is lost."
        ))
        .with_hint("Recover it: az keyvault key recover.")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn bundle(kty: &str, operations: Value, attributes: Value) -> KeyBundle {
        let key = json!({"kid": "x", "kty": kty, "key_ops": operations});
        serde_json::from_value(json!({"key": key, "attributes": attributes})).unwrap()
    }

    #[test]
    fn the_type_decides_how_a_key_wraps() {
        let both = json!(["sign", "wrapKey", "unwrapKey"]);
        for (kty, method) in [
            ("RSA", Some(Method::Oaep)),
            ("RSA-HSM", Some(Method::Oaep)),
            ("oct-HSM", Some(Method::Kw)),
            ("EC", None),
            ("oct", None),
        ] {
            let found = bundle(kty, both.clone(), json!({"enabled": true})).method("k");
            assert_eq!(found.ok(), method, "{kty}");
        }
        for (operations, attributes) in [
            (json!(["wrapKey"]), json!({})),
            (json!([]), json!({})),
            (both.clone(), json!({"enabled": false})),
        ] {
            let error = bundle("RSA", operations, attributes).method("k").unwrap_err();
            assert_eq!(error.class, ErrorClass::KeyDisabled);
            assert!(!error.detail().is_empty() && !error.hint().is_empty());
        }
        let kind =
            bundle("RSA-HSM", both, json!({"exp": 1_798_761_600, "recoveryLevel": "Recoverable"}))
                .kind();
        assert_eq!(kind, "RSA-HSM, wraps until 2027-01-01T00:00:00Z, recovery level Recoverable");
    }

    #[test]
    fn versions_are_times() {
        assert_eq!(number(Some(0)), Some(19_700_101_000_000));
        assert_eq!(number(Some(1_709_210_096)), Some(20_240_229_123_456));
        assert_eq!(number(Some(u64::MAX)), None);
        assert_eq!(number(None), None);
    }

    #[test]
    fn addresses_are_those_of_the_key() {
        let vault = Url::parse("https://db.vault.azure.net").unwrap();
        let version = |address: &str| version_in(&vault, "db-kek", address);
        assert_eq!(version("https://db.vault.azure.net/keys/db-kek/0a1b").as_deref(), Some("0a1b"));
        assert_eq!(version("https://DB.vault.azure.net:443/keys/DB-KEK/1").as_deref(), Some("1"));
        for wrong in [
            "https://other.vault.azure.net/keys/db-kek/0a1b",
            "http://db.vault.azure.net/keys/db-kek/0a1b",
            "https://db.vault.azure.net/keys/db-next/0a1b",
            "https://db.vault.azure.net/keys/db-kek",
            "https://db.vault.azure.net/keys/db-kek/",
            "https://db.vault.azure.net/keys/db-kek/0a1b/x",
            "https://db.vault.azure.net/secrets/db-kek/0a1b",
            "https://db.vault.azure.net/keys/db-kek/0a%2f1b",
            "db-kek",
        ] {
            assert_eq!(version(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn names_cannot_escape_from_their_path() {
        for good in ["k", "DB-kek-1"] {
            assert!(check_name(good).is_ok());
        }
        for bad in ["", "a/b", "a?b", "a_b", "..", "a%2fb", "\u{e4}", &"k".repeat(128)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        for bad in [&b""[..], b"a/b", b"..", b"\xff", &[b'a'; 65]] {
            assert_eq!(version_name(bad), None);
        }
    }
}
