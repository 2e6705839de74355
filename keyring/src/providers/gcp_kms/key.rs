//! A key's versions and their states.

use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;

use super::names::version_of;
use crate::failure::Failure;
use crate::options::printable;

/// The resource `CryptoKey`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CryptoKey {
    pub(super) name: String,
    pub(super) primary: Option<Version>,
    #[serde(default)]
    purpose: String,
    rotation_period: Option<String>,
}

/// The resource `CryptoKeyVersion`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Version {
    pub(super) name: String,
    #[serde(default)]
    pub(super) state: String,
    protection_level: Option<String>,
    destroy_time: Option<String>,
}

/// A page of versions.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Versions {
    #[serde(default)]
    pub(super) crypto_key_versions: Vec<Version>,
    pub(super) next_page_token: Option<String>,
}

impl Version {
    pub(super) fn is_enabled(&self) -> bool {
        self.state == "ENABLED"
    }

    /// Whether its key material is still being made, as in an HSM.
    pub(super) fn is_coming(&self) -> bool {
        self.state == "PENDING_GENERATION"
    }
}

impl CryptoKey {
    /// The number of the primary version, whatever its state.
    ///
    /// # Errors
    /// `bad_options` for a key of another purpose, `key_disabled` without a primary version.
    pub(super) fn primary_number(&self) -> Result<u64, Failure> {
        let shown = printable(&self.name);
        if self.purpose != "ENCRYPT_DECRYPT" {
            return Err(Failure::new(
                ErrorClass::BadOptions,
                format!("key {shown} cannot be used as a master key"),
            )
            .with_detail(format!("Its purpose is {}.", printable(&self.purpose)))
            .with_hint("Create a key with --purpose encryption."));
        }
        let number =
            self.primary.as_ref().and_then(|primary| version_of(&self.name, &primary.name));
        number.ok_or_else(|| {
            Failure::new(ErrorClass::KeyDisabled, format!("key {shown} has no primary version"))
                .with_detail("It was created without one, or its primary version was destroyed.")
                .with_hint(
                    "Make an enabled version the primary one: gcloud kms keys set-primary-version.",
                )
        })
    }

    /// The number of the primary version, if it is enabled.
    pub(super) fn usable(&self) -> Result<u64, Failure> {
        let number = self.primary_number()?;
        match &self.primary {
            Some(primary) => check_state(&self.name, primary).map(|()| number),
            None => Ok(number),
        }
    }

    /// For example "protection level HSM, rotated every 90 days".
    pub(super) fn kind(&self) -> String {
        let level = self.primary.as_ref().and_then(|primary| primary.protection_level.as_deref());
        let level = format!("protection level {}", printable(level.unwrap_or("unknown")));
        match self.rotation_period.as_deref().map(days) {
            Some(period) => format!("{level}, rotated every {period}"),
            None => level,
        }
    }
}

/// "7776000s" as days, if it is that.
fn days(period: &str) -> String {
    let seconds = period.strip_suffix('s').and_then(|seconds| seconds.parse::<u64>().ok());
    match seconds {
        Some(seconds) if seconds % 86_400 == 0 => format!("{} days", seconds / 86_400),
        _ => printable(period),
    }
}

/// Refuses a version that must not be used now.
pub(super) fn check_state(key: &str, version: &Version) -> Result<(), Failure> {
    let shown = printable(key);
    let number = version_of(key, &version.name).unwrap_or_default();
    let error = |class, what: &str| {
        Failure::new(class, format!("version {number} of key {shown} {what}"))
            .with_detail(format!("Its state is {}.", printable(&version.state)))
    };
    Err(match version.state.as_str() {
        "ENABLED" => return Ok(()),
        "DISABLED" => error(ErrorClass::KeyDisabled, "is disabled")
            .with_hint("Enable it: gcloud kms keys versions enable."),
        "DESTROY_SCHEDULED" => {
            let date = version.destroy_time.as_deref().map_or(String::new(), |time| {
                format!(" on {}", printable(time))
            });
            error(ErrorClass::KeyDisabled, "is scheduled for destruction")
                .with_detail(format!("It will be destroyed{date}. Then everything that it wrapped is lost."))
                .with_hint("Restore and enable it: gcloud kms keys versions restore, enable.")
        }
        "DESTROYED" => error(ErrorClass::KeyMissing, "was destroyed")
            .with_hint("It cannot be restored. Make another version the primary one; what this version wrapped is lost."),
        "PENDING_GENERATION" | "PENDING_IMPORT" => {
            error(ErrorClass::Unreachable, "has no key material yet")
                .with_hint("Try again in a minute.")
                .transient()
        }
        _ => error(ErrorClass::KeyDisabled, "cannot be used in its present state")
            .with_hint("Check it: gcloud kms keys versions describe."),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn key(purpose: &str, primary: Value) -> CryptoKey {
        let key = json!({"name": "k", "purpose": purpose, "primary": primary,
            "rotationPeriod": "7776000s"});
        serde_json::from_value(key).unwrap()
    }

    fn primary(state: &str) -> Value {
        json!({"name": "k/cryptoKeyVersions/3", "state": state, "protectionLevel": "HSM",
            "destroyTime": "2026-12-24T00:00:00Z"})
    }

    #[test]
    fn each_state_has_its_class() {
        for (state, class, retry) in [
            ("DISABLED", ErrorClass::KeyDisabled, false),
            ("DESTROY_SCHEDULED", ErrorClass::KeyDisabled, false),
            ("DESTROYED", ErrorClass::KeyMissing, false),
            ("PENDING_GENERATION", ErrorClass::Unreachable, true),
            ("IMPORT_FAILED", ErrorClass::KeyDisabled, false),
            ("MELTED", ErrorClass::KeyDisabled, false),
        ] {
            let key = key("ENCRYPT_DECRYPT", primary(state));
            assert_eq!(key.primary_number(), Ok(3));
            let error = key.usable().unwrap_err();
            assert_eq!((error.class, error.retry), (class, retry), "{state}");
            assert!(!error.detail().is_empty() && !error.hint().is_empty());
        }
        let key = key("ENCRYPT_DECRYPT", primary("ENABLED"));
        assert_eq!(key.usable(), Ok(3));
        assert_eq!(key.kind(), "protection level HSM, rotated every 90 days");
    }

    #[test]
    fn other_keys_are_refused() {
        let other = key("ASYMMETRIC_SIGN", Value::Null).usable().unwrap_err();
        assert_eq!(other.class, ErrorClass::BadOptions);
        let none = key("ENCRYPT_DECRYPT", Value::Null).usable().unwrap_err();
        assert_eq!(none.class, ErrorClass::KeyDisabled);
        let foreign = json!({"name": "other/cryptoKeyVersions/3", "state": "ENABLED"});
        assert!(key("ENCRYPT_DECRYPT", foreign).usable().is_err());
    }
}
