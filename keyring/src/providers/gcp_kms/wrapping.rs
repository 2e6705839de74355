//! The format of keys that this provider has wrapped.
//!
//! Its layout is in `service_wrapping.rs`. The name is the
//! complete one. Cloud KMS finds the version by the ciphertext; its number here says whether there
//! is a newer one.

use super::super::service_wrapping::Service;
use super::names::is_key;
use crate::failure::Failure;

/// Cloud KMS encrypts at most 64 KiB, and adds a header.
const CIPHERTEXT_LIMIT: usize = 65 * 1024;

/// A parsed wrapped key.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrapping<'a> {
    /// The key that wrapped it.
    pub key: &'a str,
    /// The version of it.
    pub key_version: u64,
    /// What Cloud KMS returned.
    pub ciphertext: &'a [u8],
}

const SERVICE: Service = Service {
    kind: "gcp_kms",
    name: "Cloud KMS",
    key: "the name of a Cloud KMS key",
    is_key,
    ciphertext_limit: CIPHERTEXT_LIMIT,
};

impl<'a> Wrapping<'a> {
    /// Parses a wrapped key that was read from disk.
    ///
    /// # Errors
    /// `wrong_ciphertext` for everything but results of [`Wrapping::to_bytes`].
    pub fn parse(wrapped: &'a [u8]) -> Result<Wrapping<'a>, Failure> {
        let (key, key_version, ciphertext) = SERVICE.parse(wrapped)?;
        Ok(Wrapping { key, key_version, ciphertext })
    }

    /// The bytes of it; `None` if the reply of Cloud KMS does not fit the format.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        SERVICE.encode((self.key, self.key_version, self.ciphertext))
    }
}

#[cfg(test)]
mod tests {
    use pagevault_keystore::protocol::ErrorClass;

    use super::*;

    const KEY: &str = "projects/p/locations/europe-west3/keyRings/r/cryptoKeys/k";
    const EXAMPLE: Wrapping<'_> = Wrapping { key: KEY, key_version: 7, ciphertext: &[7; 113] };

    #[test]
    fn encoding_and_parsing_agree() {
        let bytes = EXAMPLE.to_bytes().unwrap();
        assert_eq!(bytes.len(), 11 + KEY.len() + 113);
        assert_eq!(Wrapping::parse(&bytes).unwrap(), EXAMPLE);
    }

    #[test]
    fn the_format_is_that_of_the_golden_file() {
        use base64::Engine;
        let file = include_str!("../../../vectors/gcp_kms_wrapped_1.json");
        let examples: Vec<serde_json::Value> = serde_json::from_str(file).unwrap();
        assert_eq!(examples.len(), 2);
        for example in examples {
            let bytes = |name: &str| {
                let text = example[name].as_str().unwrap();
                base64::engine::general_purpose::STANDARD.decode(text).unwrap()
            };
            let ciphertext = bytes("ciphertext");
            let wrapping = Wrapping {
                key: example["key"].as_str().unwrap(),
                key_version: example["key_version"].as_u64().unwrap(),
                ciphertext: &ciphertext,
            };
            assert_eq!(wrapping.to_bytes(), Some(bytes("wrapped")));
            assert_eq!(Wrapping::parse(&bytes("wrapped")).unwrap(), wrapping);
        }
    }

    #[test]
    fn truncated_and_foreign_bytes_are_refused() {
        let bytes = EXAMPLE.to_bytes().unwrap();
        let without_ciphertext = bytes.len() - EXAMPLE.ciphertext.len();
        for length in 0..=without_ciphertext {
            let error = Wrapping::parse(&bytes[..length]).unwrap_err();
            assert_eq!(error.class, ErrorClass::WrongCiphertext, "{length}");
        }
        for (at, value) in [(0, 0), (0, 2), (1, 1), (2, 0), (3, b'q'), (12, b'?')] {
            let mut other = bytes.clone();
            other[at] = value;
            assert!(Wrapping::parse(&other).is_err(), "byte {at}");
        }
        assert_eq!(Wrapping { key: "k", ..EXAMPLE }.to_bytes(), None);
        let long = vec![0; CIPHERTEXT_LIMIT + 1];
        assert_eq!(Wrapping { ciphertext: &long, ..EXAMPLE }.to_bytes(), None);
    }
}
