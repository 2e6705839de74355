//! HMAC-SHA-256 (RFC 2104, FIPS 198-1) and SHA-256, for data that must not be forged but is not
//! secret.

use subtle::ConstantTimeEq;

use crate::primitives::{hmac, sha256};
use crate::residue::without_trace;
use crate::secret::Secret32;

/// Size of a MAC, and of a hash, in bytes.
pub const LENGTH: usize = 32;

/// The MAC of `message` under `key`.
#[must_use]
pub fn authenticate(key: &Secret32, message: &[u8]) -> [u8; LENGTH] {
    without_trace(|| hmac(key.expose(), message))
}

/// Whether `mac` is the MAC of `message` under `key`. Takes constant time.
#[must_use]
pub fn is_authentic(key: &Secret32, message: &[u8], mac: &[u8; LENGTH]) -> bool {
    without_trace(|| hmac(key.expose(), message).ct_eq(mac).into())
}

/// The SHA-256 hash of `message`.
#[must_use]
pub fn hash(message: &[u8]) -> [u8; LENGTH] {
    sha256(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    /// RFC 4231, test case 3. Its key of 20 bytes is padded with zeros, which HMAC does anyway.
    #[test]
    fn it_is_hmac_sha_256() {
        let mut key = [0; 32];
        key[..20].fill(0xaa);
        let key = Secret32::from_bytes(&key);
        let expected = hex!("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
        assert_eq!(authenticate(&key, &[0xdd; 50]), expected);
        assert!(is_authentic(&key, &[0xdd; 50], &expected));
        assert!(!is_authentic(&key, &[0xdd; 51], &expected));
    }

    /// FIPS 180-4, example.
    #[test]
    fn the_hash_is_sha_256() {
        let expected = hex!("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(hash(b"abc"), expected);
    }
}
