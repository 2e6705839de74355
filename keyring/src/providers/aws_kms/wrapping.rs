//! The format of keys that this provider has wrapped, and ARNs in it.
//!
//! Its layout is in `service_wrapping.rs`. AWS KMS decrypts the
//! blob only with the key of that ARN, so an exchanged ARN is detected. The version is information
//! about the key material; it has no effect on decryption.

use std::borrow::Cow;

use super::super::service_wrapping::Service;
use crate::failure::Failure;

/// AWS's limits in bytes, for a key name in requests and for a ciphertext.
pub(super) const KEY_LIMIT: usize = 2048;
const CIPHERTEXT_LIMIT: usize = 6144;

/// A parsed wrapped key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrapping<'a> {
    /// The key that wrapped it.
    pub(super) arn: &'a str,
    /// The version of its key material at that time.
    pub(super) key_version: u64,
    /// The ciphertext blob of AWS KMS.
    pub(super) ciphertext: &'a [u8],
}

const SERVICE: Service = Service {
    kind: "aws_kms",
    name: "AWS KMS",
    key: "the ARN of an AWS KMS key",
    is_key: is_key_arn,
    ciphertext_limit: CIPHERTEXT_LIMIT,
};

impl<'a> Wrapping<'a> {
    /// Parses a wrapped key that was read from disk.
    ///
    /// # Errors
    /// `wrong_ciphertext` for everything but results of [`Wrapping::to_bytes`].
    pub(super) fn parse(wrapped: &'a [u8]) -> Result<Wrapping<'a>, Failure> {
        let (arn, key_version, ciphertext) = SERVICE.parse(wrapped)?;
        Ok(Wrapping { arn, key_version, ciphertext })
    }

    /// The bytes of it; `None` if the reply of AWS KMS does not fit the format.
    pub(super) fn to_bytes(&self) -> Option<Vec<u8>> {
        SERVICE.encode((self.arn, self.key_version, self.ciphertext))
    }
}

/// `arn:<partition>:kms:<region>:<account>:key/<id>`.
fn is_key_arn(arn: &str) -> bool {
    arn.len() <= KEY_LIMIT
        && arn.bytes().all(|byte| byte.is_ascii_graphic())
        && matches!(
            arn.splitn(6, ':').collect::<Vec<_>>()[..],
            ["arn", _, "kms", _, _, resource] if resource.starts_with("key/")
        )
}

/// The name of `key` in `region`: itself, unless it is the ARN of a multi-Region key, which has a
/// replica with the same id in each of its regions.
///
/// # Errors
/// The key's region, if the ARN belongs to a key in another region only.
pub(super) fn in_region<'a>(key: &'a str, region: &str) -> Result<Cow<'a, str>, &'a str> {
    let parts: Vec<&str> = key.splitn(6, ':').collect();
    match parts[..] {
        ["arn", _, "kms", home, _, _] if home == region => Ok(Cow::Borrowed(key)),
        ["arn", partition, "kms", _, account, resource] if resource.starts_with("key/mrk-") => {
            Ok(Cow::Owned(format!("arn:{partition}:kms:{region}:{account}:{resource}")))
        }
        ["arn", _, "kms", home, _, _] => Err(home),
        _ => Ok(Cow::Borrowed(key)),
    }
}

#[cfg(test)]
mod tests {
    use pagevault_keystore::protocol::ErrorClass;

    use super::*;

    const ARN: &str =
        "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab";
    const EXAMPLE: Wrapping<'_> =
        Wrapping { arn: ARN, key_version: 20_261_121_154_220, ciphertext: &[7; 150] };

    fn detail(bytes: &[u8]) -> String {
        let error = Wrapping::parse(bytes).unwrap_err();
        assert_eq!(error.class, ErrorClass::WrongCiphertext);
        error.detail().to_owned()
    }

    #[test]
    fn encoding_and_parsing_agree() {
        let bytes = EXAMPLE.to_bytes().unwrap();
        assert_eq!(bytes.len(), 11 + ARN.len() + 150);
        assert_eq!(Wrapping::parse(&bytes).unwrap(), EXAMPLE);
    }

    #[test]
    fn the_format_is_that_of_the_golden_file() {
        use base64::Engine;
        let file = include_str!("../../../vectors/aws_kms_wrapped_1.json");
        let examples: Vec<serde_json::Value> = serde_json::from_str(file).unwrap();
        assert_eq!(examples.len(), 2);
        for example in examples {
            let bytes = |name: &str| {
                let text = example[name].as_str().unwrap();
                base64::engine::general_purpose::STANDARD.decode(text).unwrap()
            };
            let ciphertext = bytes("ciphertext");
            let wrapping = Wrapping {
                arn: example["arn"].as_str().unwrap(),
                key_version: example["key_version"].as_u64().unwrap(),
                ciphertext: &ciphertext,
            };
            assert_eq!(wrapping.to_bytes(), Some(bytes("wrapped")));
            assert_eq!(Wrapping::parse(&bytes("wrapped")).unwrap(), wrapping);
        }
    }

    #[test]
    fn every_truncation_is_refused_and_none_panics() {
        let bytes = EXAMPLE.to_bytes().unwrap();
        let without_ciphertext = bytes.len() - EXAMPLE.ciphertext.len();
        for length in 0..=without_ciphertext {
            detail(&bytes[..length]);
        }
        // A shorter ciphertext is detected only by AWS KMS.
        assert!(Wrapping::parse(&bytes[..=without_ciphertext]).is_ok());
    }

    #[test]
    fn every_changed_byte_of_format_and_length_is_refused() {
        let bytes = EXAMPLE.to_bytes().unwrap();
        for (at, change) in (0..3).flat_map(|at| (1..=255).map(move |change| (at, change))) {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            // A slightly different length may leave something that looks like an ARN; AWS KMS
            // refuses it.
            let near = at == 2 && Wrapping::parse(&bytes).is_ok_and(|parsed| parsed.arn != ARN);
            assert!(near || !detail(&bytes).is_empty());
        }
    }

    #[test]
    fn other_arns_are_refused() {
        for arn in [
            "",
            "key",
            "arn:aws:kms:r:1:alias/x",
            "arn:aws:s3:r:1:key/k",
            "arn:aws:kms:r:1:key/a b",
        ] {
            assert_eq!(Wrapping { arn, ..EXAMPLE }.to_bytes(), None, "{arn}");
        }
        let long = format!("{ARN}{}", "x".repeat(KEY_LIMIT));
        assert_eq!(Wrapping { arn: &long, ..EXAMPLE }.to_bytes(), None);
        assert_eq!(Wrapping { ciphertext: &[0; 6145], ..EXAMPLE }.to_bytes(), None);
    }

    #[test]
    fn only_multi_region_keys_change_their_region() {
        let replicated = "arn:aws:kms:eu-central-1:1:key/mrk-0a1b";
        assert_eq!(
            in_region(replicated, "eu-west-1").unwrap(),
            "arn:aws:kms:eu-west-1:1:key/mrk-0a1b"
        );
        assert_eq!(in_region(replicated, "eu-central-1").unwrap(), replicated);
        assert_eq!(in_region(ARN, "eu-central-1").unwrap(), ARN);
        assert_eq!(in_region(ARN, "eu-west-1").unwrap_err(), "eu-central-1");
        let alias = "arn:aws:kms:eu-central-1:1:alias/mrk-x";
        assert_eq!(in_region(alias, "eu-west-1").unwrap_err(), "eu-central-1");
        for name in ["alias/x", "mrk-0a1b", "1234abcd-12ab-34cd-56ef-1234567890ab"] {
            assert_eq!(in_region(name, "eu-west-1").unwrap(), name);
        }
    }
}
