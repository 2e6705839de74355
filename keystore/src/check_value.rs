//! What tells the right database key from a wrong one, before it is used.
//!
//! A provider may give another key than the one that was wrapped: its address leads to another
//! server, it is another key of the same name, wrapped keys were exchanged in the keystore.
//! Everything sealed under that key would be lost as soon as the right one is back. So each version
//! of a database key is recorded with a key check value:
//!
//! ```text
//! HKDF-SHA256 (RFC 5869), no salt, 16 bytes: key = the database key, label = "pagevault database key check value v1",
//! context = keystore id (16 bytes) | scope u32 | version u32, little-endian       (label, context: pagevault_cipher::kdf)
//! ```
//!
//! It stands in the keystore, in WAL and in backups, readable for all who have those. It tells them
//! nothing of the key: HKDF's output under one `info` is, to who does not have the key, as good as
//! random, and gives no hint of its outputs under another. It only lets a guess be tried, as every
//! wrapped data key does that lies beside it; there are 2^256 guesses. The key's other use is
//! AES-256-GCM, with which HMAC-SHA256 has no structure in common. A wrong key passes with a
//! probability of 2^-128; to find one that passes takes as many attempts. Two keys with one value
//! are found in 2^64, by who may choose both of them: that is the server, which makes database keys
//! at random.
//!
//! Bound to keystore, scope and version, a value that was put in another's place fits no key. It is
//! not proof against who may write the keystore: they could exchange key and value together, as
//! they could all other files.

use std::fmt;

use pagevault_cipher::{KeyVersion, Secret32, kdf};
use subtle::ConstantTimeEq;

use crate::scope::Scope;

const LABEL: &str = "pagevault database key check value v1";
/// Its length in bytes.
pub const LENGTH: usize = 16;

/// The key check value of one version of a database key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckValue([u8; LENGTH]);

impl CheckValue {
    /// The value of a key that is this version of this scope's.
    #[must_use]
    pub fn of(key: &Secret32, keystore: &[u8; 16], scope: Scope, version: KeyVersion) -> Self {
        let mut context = [0; 24];
        context[..16].copy_from_slice(keystore);
        context[16..20].copy_from_slice(&scope.number().to_le_bytes());
        context[20..].copy_from_slice(&version.get().to_le_bytes());
        let mut value = [0; LENGTH];
        kdf::derive(key.expose(), LABEL, &context, &mut value);
        Self(value)
    }

    /// Whether this is the value of the key. Takes the same time wherever they differ.
    #[must_use]
    pub fn fits(
        self,
        key: &Secret32,
        keystore: &[u8; 16],
        scope: Scope,
        version: KeyVersion,
    ) -> bool {
        Self::of(key, keystore, scope, version).0.ct_eq(&self.0).into()
    }

    /// As it is recorded.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; LENGTH]) -> Self {
        Self(bytes)
    }

    /// To be recorded.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }
}

impl fmt::Debug for CheckValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckValue({:032x})", u128::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;

    const KEYSTORE: [u8; 16] = *b"0123456789abcdef";

    const SCOPE: Scope = Scope::database(5);

    fn version(number: u32) -> KeyVersion {
        KeyVersion::new(number).unwrap()
    }

    fn key(byte: u8) -> Secret32 {
        Secret32::from_bytes(&[byte; 32])
    }

    /// Written down from another implementation: vectors/check_value.py.
    #[test]
    fn the_construction_is_fixed() {
        let value = CheckValue::of(&key(7), &KEYSTORE, SCOPE, version(3));
        assert_eq!(*value.as_bytes(), hex!("e24f98f6339acd2362adf5a8ea31e3d8"));
    }

    #[test]
    fn it_fits_one_key_in_one_place() {
        let value = CheckValue::of(&key(7), &KEYSTORE, SCOPE, version(3));
        assert!(value.fits(&key(7), &KEYSTORE, SCOPE, version(3)));
        assert!(!value.fits(&key(8), &KEYSTORE, SCOPE, version(3)));
        assert!(!value.fits(&key(7), b"0123456789abcdeg", SCOPE, version(3)));
        assert!(!value.fits(&key(7), &KEYSTORE, Scope::database(3), version(5)));
        assert!(!value.fits(&key(7), &KEYSTORE, SCOPE, version(4)));
    }
}
