//! A key's state, and its version.

use std::borrow::Cow;

use aws_sdk_kms::primitives::{DateTime, DateTimeFormat};
use aws_sdk_kms::types::{
    KeyManagerType, KeyMaterialState, KeyMetadata, KeySpec, KeyState, KeyUsageType, OriginType,
    RotationsListEntry,
};
use pagevault_keystore::protocol::ErrorClass;

use super::failure::{Refused, is_unsupported};
use super::session::Session;
use super::wrapping::{KEY_LIMIT, Wrapping, in_region};
use crate::failure::Failure;
use crate::options::printable;
use crate::provider::Wrapped;

/// A key that can wrap.
pub(super) struct Key {
    pub(super) arn: String,
    /// [`version`] of its first key material.
    pub(super) created: u64,
    /// [`version`] of its current key material.
    pub(super) version: u64,
    /// Who manages it, and the origin of its key material.
    pub(super) kind: String,
}

impl Session {
    /// Looks up `key`: an id, an ARN, or an alias.
    ///
    /// # Errors
    /// Also for a key that cannot wrap now, or never.
    pub(super) async fn key(&self, key: &str) -> Result<Key, Failure> {
        check_name(key)?;
        let key = self.local(key)?;
        let request = self.client.describe_key().key_id(key.as_ref());
        let reply = self.ask("DescribeKey", &key, request.send()).await?;
        let incomplete = || self.incomplete("DescribeKey");
        let metadata = reply.key_metadata.ok_or_else(incomplete)?;
        check_kind(&metadata)?;
        check_state(&metadata)?;
        let arn = metadata.arn().ok_or_else(incomplete)?.to_owned();
        let created = metadata.creation_date().and_then(version).ok_or_else(incomplete)?;
        let newest = match self.newest_rotation(&arn).await {
            Ok(newest) => newest,
            // Not permitted, not supported for this kind of key, or a key of another account. Then
            // only the key's creation date is known.
            Err(refused)
                if matches!(refused.error.class, ErrorClass::Denied | ErrorClass::KeyMissing)
                    || is_unsupported(&refused.code) =>
            {
                None
            }
            Err(refused) => return Err(refused.error),
        };
        let version = newest.map_or(created, |newest| newest.max(created));
        Ok(Key { arn, created, version, kind: kind(&metadata) })
    }

    /// The version of the key material from the last completed rotation, if there was one.
    pub(super) async fn newest_rotation(&self, arn: &str) -> Result<Option<u64>, Refused> {
        // All rotations of a key fit into one page.
        let request = self.client.list_key_rotations().key_id(arn).limit(1000);
        let reply = self.ask("ListKeyRotations", arn, request.send()).await?;
        Ok(newest(reply.rotations()))
    }

    /// The name of `key` in this session's region.
    pub(super) fn local<'a>(&self, key: &'a str) -> Result<Cow<'a, str>, Failure> {
        in_region(key, &self.region).map_err(|home| {
            // Decided without a request: the region may come from a profile or from the instance.
            Failure::new(
                ErrorClass::BadOptions,
                format!("key \"{}\" is not in region {}", printable(key), self.region),
            )
            .with_detail(format!("Its region is {}.", printable(home)))
            .with_hint(
                "Set the option \"region\", or use a multi-Region key with a replica in this region.",
            )
        })
    }

    /// The result for [`Provider`](crate::provider::Provider), from the parts of a reply.
    pub(super) fn wrapped(
        &self,
        arn: Option<&str>,
        ciphertext: Option<&aws_sdk_kms::primitives::Blob>,
        key_version: u64,
    ) -> Result<Wrapped, Failure> {
        let parts = arn.zip(ciphertext);
        let bytes = parts.and_then(|(arn, ciphertext)| {
            Wrapping { arn, key_version, ciphertext: ciphertext.as_ref() }.to_bytes()
        });
        let wrapped = bytes.ok_or_else(|| self.incomplete("Encrypt"))?;
        Ok(Wrapped { wrapped, key_version })
    }
}

/// AWS KMS has no version numbers. Instead the time of the key material is used, `YYYYMMDDhhmmss`
/// in UTC. It also orders the keys of an alias that moves to a newer key.
fn version(since: &DateTime) -> Option<u64> {
    let text = since.fmt(DateTimeFormat::DateTime).ok()?;
    let digits: String = text.chars().filter(char::is_ascii_digit).take(14).collect();
    digits.parse().ok()
}

fn newest(rotations: &[RotationsListEntry]) -> Option<u64> {
    let complete = rotations.iter().filter(|rotation| {
        matches!(
            rotation.key_material_state(),
            None | Some(KeyMaterialState::Current | KeyMaterialState::NonCurrent)
        )
    });
    complete.filter_map(|rotation| version(rotation.rotation_date()?)).max()
}

/// Checks the form only.
fn check_name(key: &str) -> Result<(), Failure> {
    if key.is_empty() || key.len() > KEY_LIMIT || key.chars().any(char::is_control) {
        return Err(Failure::new(
            ErrorClass::BadOptions,
            format!("\"{}\" is not a valid name of an AWS KMS key", printable(key)),
        )
        .with_hint("Specify a key ID, an ARN, or an alias such as alias/pagevault."));
    }
    Ok(())
}

fn check_kind(metadata: &KeyMetadata) -> Result<(), Failure> {
    let is_symmetric = metadata.key_spec().is_none_or(|spec| *spec == KeySpec::SymmetricDefault);
    if is_symmetric && metadata.key_usage() == Some(&KeyUsageType::EncryptDecrypt) {
        return Ok(());
    }
    let spec = metadata.key_spec().map_or("unknown", KeySpec::as_str);
    let usage = metadata.key_usage().map_or("unknown", KeyUsageType::as_str);
    Err(Failure::new(
        ErrorClass::BadOptions,
        format!("key \"{}\" cannot be used as a master key", shown(metadata)),
    )
    .with_detail(format!("Its key spec is {spec}, its key usage is {usage}."))
    .with_hint("Create a key of spec SYMMETRIC_DEFAULT and usage ENCRYPT_DECRYPT, the defaults."))
}

fn check_state(metadata: &KeyMetadata) -> Result<(), Failure> {
    let error =
        |class, what: &str| Failure::new(class, format!("key \"{}\" {what}", shown(metadata)));
    Err(match metadata.key_state() {
        // A key can be used while its primary region is being changed.
        Some(KeyState::Enabled | KeyState::Updating) => return Ok(()),
        Some(KeyState::Disabled) => error(ErrorClass::KeyDisabled, "is disabled")
            .with_detail("Its state is Disabled.")
            .with_hint("Enable it: aws kms enable-key."),
        Some(KeyState::PendingDeletion | KeyState::PendingReplicaDeletion) => {
            let date = metadata.deletion_date();
            let date = date.and_then(|date| date.fmt(DateTimeFormat::DateTime).ok());
            let date = date.map_or(String::new(), |date| format!(" on {date}"));
            error(ErrorClass::KeyDisabled, "is scheduled for deletion")
                .with_detail(format!("It is pending deletion, and will be deleted{date}. Then everything that it wrapped is lost."))
                .with_hint(
                    "Cancel the deletion, and enable the key: aws kms cancel-key-deletion, aws kms enable-key.",
                )
        }
        Some(KeyState::PendingImport) => error(ErrorClass::KeyDisabled, "has no key material")
            .with_detail("Its key material was not imported yet, has expired or was deleted.")
            .with_hint("Import the key material, the same as before: aws kms import-key-material."),
        Some(KeyState::Creating) => error(ErrorClass::KeyDisabled, "is still being created")
            .with_detail("Its state is Creating.")
            .with_hint("Try again in a few seconds.")
            .transient(),
        Some(KeyState::Unavailable) => error(ErrorClass::Unreachable, "is not available")
            .with_detail("The custom key store that contains it is not connected.")
            .with_hint("Check the state of the custom key store.")
            .transient(),
        other => error(ErrorClass::KeyDisabled, "cannot be used in its present state")
            .with_detail(format!("Its state is {}.", other.map_or("unknown", KeyState::as_str)))
            .with_hint("Check the key in AWS KMS: aws kms describe-key."),
    })
}

fn shown(metadata: &KeyMetadata) -> String {
    printable(metadata.arn().unwrap_or(metadata.key_id()))
}

/// For example "customer managed, material from KMS".
fn kind(metadata: &KeyMetadata) -> String {
    let manager = match metadata.key_manager() {
        Some(KeyManagerType::Aws) => "AWS managed",
        _ => "customer managed",
    };
    let regions = if metadata.multi_region() == Some(true) { ", multi-Region" } else { "" };
    let origin = match metadata.origin() {
        Some(OriginType::AwsKms) | None => "KMS",
        Some(OriginType::External) => "an external source (imported)",
        Some(OriginType::AwsCloudhsm) => "a CloudHSM key store",
        Some(OriginType::ExternalKeyStore) => "an external key store",
        Some(other) => other.as_str(),
    };
    format!("{manager}{regions}, material from {origin}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotation(second: i64, state: Option<KeyMaterialState>) -> RotationsListEntry {
        RotationsListEntry::builder()
            .rotation_date(DateTime::from_secs(second))
            .set_key_material_state(state)
            .build()
    }

    #[test]
    fn versions_are_times() {
        assert_eq!(version(&DateTime::from_secs(0)), Some(19_700_101_000_000));
        let leap_day = DateTime::from_secs_and_nanos(1_709_210_096, 999_999_999);
        assert_eq!(version(&leap_day), Some(20_240_229_123_456));
        assert_eq!(version(&DateTime::from_secs(i64::MAX)), None);
    }

    #[test]
    fn versions_grow_with_time() {
        let times = (0..4000).map(|day| DateTime::from_secs(1_700_000_000 + day * 86_399));
        let versions: Vec<_> = times.map(|time| version(&time).unwrap()).collect();
        assert!(versions.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn only_completed_rotations_count() {
        assert_eq!(newest(&[]), None);
        let rotations = [
            rotation(86_400, Some(KeyMaterialState::NonCurrent)),
            rotation(172_800, Some(KeyMaterialState::Current)),
            rotation(259_200, Some(KeyMaterialState::PendingRotation)),
        ];
        assert_eq!(newest(&rotations), Some(19_700_103_000_000));
        assert_eq!(newest(&[rotation(1, None), rotation(0, None)]), Some(19_700_101_000_001));
    }

    #[test]
    fn only_the_form_of_names_is_checked() {
        for good in ["alias/x", "1234abcd-12ab", "anything else"] {
            assert_eq!(check_name(good), Ok(()));
        }
        for bad in ["", "a\nb", &"x".repeat(2049)] {
            assert_eq!(check_name(bad).unwrap_err().class, ErrorClass::BadOptions);
        }
    }

    fn metadata(state: KeyState) -> KeyMetadata {
        let builder = KeyMetadata::builder().key_id("id").key_state(state);
        builder.key_usage(KeyUsageType::EncryptDecrypt).build().unwrap()
    }

    #[test]
    fn each_state_has_a_hint() {
        for (state, class, retry) in [
            (KeyState::Disabled, ErrorClass::KeyDisabled, false),
            (KeyState::PendingDeletion, ErrorClass::KeyDisabled, false),
            (KeyState::PendingReplicaDeletion, ErrorClass::KeyDisabled, false),
            (KeyState::PendingImport, ErrorClass::KeyDisabled, false),
            (KeyState::Creating, ErrorClass::KeyDisabled, true),
            (KeyState::Unavailable, ErrorClass::Unreachable, true),
            (KeyState::from("Melted"), ErrorClass::KeyDisabled, false),
        ] {
            let error = check_state(&metadata(state)).unwrap_err();
            assert_eq!((error.class, error.retry), (class, retry), "{error}");
            assert!(!error.detail().is_empty() && !error.hint().is_empty());
        }
        assert_eq!(check_state(&metadata(KeyState::Enabled)), Ok(()));
        assert_eq!(check_state(&metadata(KeyState::Updating)), Ok(()));
    }

    #[test]
    fn keys_of_another_kind_are_refused() {
        assert_eq!(check_kind(&metadata(KeyState::Enabled)), Ok(()));
        let signing = KeyMetadata::builder().key_id("id").key_usage(KeyUsageType::SignVerify);
        assert!(check_kind(&signing.build().unwrap()).is_err());
        let asymmetric = KeyMetadata::builder().key_id("id").key_spec(KeySpec::Rsa2048);
        let asymmetric = asymmetric.key_usage(KeyUsageType::EncryptDecrypt).build().unwrap();
        assert_eq!(check_kind(&asymmetric).unwrap_err().class, ErrorClass::BadOptions);
    }
}
