//! HMAC-SHA-256 (RFC 2104, FIPS 198-1) and SHA-256, for data that must not be forged but is not
//! secret.

use hkdf::hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::residue::without_trace;
use crate::secret::Secret32;

/// Size of a MAC, and of a hash, in bytes.
pub const LENGTH: usize = 32;

/// The MAC of `message` under `key`.
#[must_use]
pub fn authenticate(key: &Secret32, message: &[u8]) -> [u8; LENGTH] {
    without_trace(|| keyed(key, message).finalize().into_bytes().into())
}

/// Whether `mac` is the MAC of `message` under `key`. Takes constant time.
#[must_use]
pub fn is_authentic(key: &Secret32, message: &[u8], mac: &[u8; LENGTH]) -> bool {
    without_trace(|| keyed(key, message).verify_slice(mac).is_ok())
}

/// The SHA-256 hash of `message`.
#[must_use]
pub fn hash(message: &[u8]) -> [u8; LENGTH] {
    Sha256::digest(message).into()
}

fn keyed(key: &Secret32, message: &[u8]) -> Hmac<Sha256> {
    // A key as long as a block is used as it is; a shorter one is padded with zeros (RFC 2104,
    // section 2).
    let mut block = zeroize::Zeroizing::new([0; 64]);
    block[..32].copy_from_slice(key.expose());
    let mut mac = Hmac::<Sha256>::new(&(*block).into());
    mac.update(message);
    mac
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
