//! Key check values: they distinguish the right database key from a wrong one before it is used.
//!
//! A provider may return another key than the one that was wrapped: its address leads to another
//! server, another key has the same name, or wrapped keys were exchanged in the keystore. Pages
//! encrypted under that key would be lost as soon as the right key is back. So each version of a
//! database key is recorded with a key check value:
//! of a database key is recorded with a key check value:
//!
//! ```text
//! HKDF-SHA256 (RFC 5869), no salt, 16 bytes
//! key = the database key, label = "pagevault database key check value v1",
//! context = keystore id (16 bytes) | scope u32 | version u32, little-endian
//! (label, context: pagevault_cipher::kdf)
//! ```
//!
//! The value is in the keystore, in WAL and in backups, and readable there. It reveals nothing
//! about the key: without the key, HKDF's output under one `info` is indistinguishable from random
//! and unrelated to its outputs under others. It only lets an attacker test a guess, as does each
//! wrapped data key beside it; there are 2^256 guesses. The key is otherwise used for AES-256-GCM,
//! which has no structure in common with HMAC-SHA256. A wrong key passes with a probability of
//! 2^-128, and finding one that passes takes as many attempts. Finding two keys with the same value
//! takes 2^64 attempts and the choice of both keys; only the server chooses database keys, at
//! random.
//!
//! A value is bound to keystore, scope and version, so it matches no key in another place. It does
//! not protect against an attacker who can write the keystore: they could exchange key and value
//! together, like all other files.

use std::fmt;

use pagevault_cipher::{KeyVersion, Secret32, kdf};
use subtle::ConstantTimeEq;

use crate::scope::Scope;

const LABEL: &str = "pagevault database key check value v1";
/// Length in bytes.
pub const LENGTH: usize = 16;

/// The key check value of one version of a database key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckValue([u8; LENGTH]);

impl CheckValue {
    /// Computes the value of `key` as this version of the scope's key.
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

    /// Whether this is the value of `key`. Runs in constant time.
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

    /// From the bytes in a record.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; LENGTH]) -> Self {
        Self(bytes)
    }

    /// The bytes for a record.
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

    /// From an independent implementation: vectors/check_value.py.
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
