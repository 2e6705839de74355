//! What formats of one line of JSON have in common: hexadecimal digits, and a MAC at the end.

use std::fmt::Write;

use pagevault_cipher::{KeyVersion, Secret32, kdf};

/// Text before the MAC's hexadecimal digits. The MAC is that of all text before this.
pub(crate) const BEFORE_MAC: &str = ",\"mac\":\"";

/// The key of MACs of this purpose, from this version of the cluster's database key. The context is
/// the keystore id (16 bytes) and the version (4 bytes, little-endian).
pub(crate) fn mac_key(
    database_key: &[u8; 32],
    label: &str,
    keystore: &[u8; 16],
    version: KeyVersion,
) -> Secret32 {
    let mut context = [0; 20];
    context[..16].copy_from_slice(keystore);
    context[16..].copy_from_slice(&version.get().to_le_bytes());
    Secret32::filled(|key| kdf::derive(database_key, label, &context, key))
}

/// Bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The bytes of hexadecimal digits, if it is that many in lower case.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.bytes().all(is_digit) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}
