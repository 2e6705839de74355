//! The format of keys that a cloud's key service has wrapped.
//!
//! ```text
//! byte   0        1             3           3 + n           11 + n
//!        +--------+-------------+-----------+---------------+---------------+
//!        | format | name length | name of   | key version,  | ciphertext of |
//!        | = 1    | n, 2 bytes  | the key   | 8 bytes       | the service   |
//!        +--------+-------------+-----------+---------------+---------------+
//! ```
//!
//! Big-endian.

use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;

const FORMAT: u8 = 1;

/// What is particular to a service.
pub(super) struct Service {
    /// The kind of provider.
    pub(super) kind: &'static str,
    /// The service in messages.
    pub(super) name: &'static str,
    /// What names a key in messages, such as "the name of a Cloud KMS key".
    pub(super) key: &'static str,
    pub(super) is_key: fn(&str) -> bool,
    /// Most bytes of a ciphertext.
    pub(super) ciphertext_limit: usize,
}

/// Name of the key, its version, ciphertext.
pub(super) type Parts<'a> = (&'a str, u64, &'a [u8]);

impl Service {
    /// Parses a wrapped key that was read from disk.
    ///
    /// # Errors
    /// `wrong_ciphertext` for everything but results of [`Service::encode`].
    pub(super) fn parse<'a>(&self, wrapped: &'a [u8]) -> Result<Parts<'a>, Failure> {
        let Service { kind, name, key: named, .. } = self;
        let (&format, rest) = wrapped.split_first().ok_or_else(|| damaged("It is empty."))?;
        if format != FORMAT {
            return Err(damaged(&format!(
                "It was not wrapped by a provider of kind \"{kind}\", or by a newer version of pagevault."
            )));
        }
        let short = || damaged("It is too short.");
        let (length, rest) = rest.split_first_chunk::<2>().ok_or_else(short)?;
        let length = usize::from(u16::from_be_bytes(*length));
        let (key, rest) = rest.split_at_checked(length).ok_or_else(short)?;
        let (version, ciphertext) = rest.split_first_chunk::<8>().ok_or_else(short)?;
        let key = str::from_utf8(key).ok().filter(|key| (self.is_key)(key));
        let key = key.ok_or_else(|| damaged(&format!("It does not contain {named}.")))?;
        if ciphertext.is_empty() || ciphertext.len() > self.ciphertext_limit {
            return Err(damaged(&format!("The size of its ciphertext is not possible in {name}.")));
        }
        Ok((key, u64::from_be_bytes(*version), ciphertext))
    }

    /// The format above; `None` if the reply of the service does not fit it.
    pub(super) fn encode(&self, (key, version, ciphertext): Parts<'_>) -> Option<Vec<u8>> {
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(&u16::try_from(key.len()).ok()?.to_be_bytes());
        bytes.extend_from_slice(key.as_bytes());
        bytes.extend_from_slice(&version.to_be_bytes());
        bytes.extend_from_slice(ciphertext);
        // Only what can be parsed again is returned.
        self.parse(&bytes).is_ok().then_some(bytes)
    }
}

fn damaged(cause: &str) -> Failure {
    Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be read")
        .with_detail(cause)
        .with_hint(
            "Check that the provider is the one that wrapped it. If it is damaged, restore the \
             keystore from a backup.",
        )
}
