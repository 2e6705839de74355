//! Key wrapping: AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce.
//!
//! ```text
//! byte   0           12                     12+n              28+n
//!        +-----------+----------------------+-----------------+
//!        | nonce     | ciphertext, n bytes  | tag             |
//!        +-----------+----------------------+-----------------+
//! ```
//!
//! Nothing is allocated and nothing panics: unwrapping runs in critical sections.

use zeroize::Zeroize;

use crate::primitives::Gcm;
use crate::secret::RandomError;

const NONCE: usize = 12;
const TAG: usize = 16;

/// Difference in length between a wrapped secret and the secret, in bytes.
pub const OVERHEAD: usize = NONCE + TAG;

/// A wrapping key, ready for use; wiped when dropped.
pub struct WrapKey(Gcm);

impl WrapKey {
    /// Prepares `key`; the caller wipes its own copy.
    #[must_use]
    pub fn new(key: &[u8; 32]) -> Self {
        Self(Gcm::new(key))
    }
}

/// Why wrapping or unwrapping failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WrapError {
    /// No random nonce.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// The output buffer is too small.
    #[error("the buffer has {given} bytes, {needed} are needed")]
    Buffer {
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// Fewer bytes than nonce and tag, or more than GCM can process.
    #[error("{0} bytes cannot be a wrapped key")]
    Length(usize),
    /// Another key, other associated data, or a damaged wrapping; the tag cannot tell which.
    #[error("the wrapped key cannot be unwrapped: wrong key, wrong context, or damaged")]
    Refused,
}

/// Wraps `plain` and returns the number of bytes written to `out`: `plain.len()` + [`OVERHEAD`].
///
/// `aad` is authenticated: unwrapping needs the same.
///
/// # Errors
/// [`WrapError::Buffer`] if `out` is too small, [`WrapError::Random`] if there is no nonce,
/// [`WrapError::Length`] for a secret longer than GCM can process (64 GiB).
pub fn wrap(key: &WrapKey, aad: &[u8], plain: &[u8], out: &mut [u8]) -> Result<usize, WrapError> {
    let needed = plain.len().saturating_add(OVERHEAD);
    let given = out.len();
    let out = out.get_mut(..needed).ok_or(WrapError::Buffer { needed, given })?;
    let length = WrapError::Length(plain.len());
    let (nonce, rest) = out.split_first_chunk_mut::<NONCE>().ok_or(length)?;
    let (body, tag) = rest.split_last_chunk_mut::<TAG>().ok_or(length)?;

    body.copy_from_slice(plain);
    match key.0.seal(aad, nonce, body, tag) {
        Ok(true) => Ok(needed),
        Ok(false) => {
            body.zeroize();
            Err(length)
        }
        Err(error) => {
            body.zeroize();
            Err(error.into())
        }
    }
}

/// Unwraps what [`wrap`] returned, and returns the number of bytes written to `out`. After an error
/// `out` contains nothing of the secret.
///
/// # Errors
/// [`WrapError::Length`] if `wrapped` is too short, [`WrapError::Buffer`] if `out` is too small,
/// [`WrapError::Refused`] if key, `aad` or `wrapped` are not those of the wrapping.
pub fn unwrap(
    key: &WrapKey,
    aad: &[u8],
    wrapped: &[u8],
    out: &mut [u8],
) -> Result<usize, WrapError> {
    let length = WrapError::Length(wrapped.len());
    let (nonce, rest) = wrapped.split_first_chunk::<NONCE>().ok_or(length)?;
    let (body, tag) = rest.split_last_chunk::<TAG>().ok_or(length)?;
    let given = out.len();
    let out = out.get_mut(..body.len()).ok_or(WrapError::Buffer { needed: body.len(), given })?;

    out.copy_from_slice(body);
    if !key.0.open(aad, nonce, out, tag) {
        out.zeroize();
        return Err(WrapError::Refused);
    }
    Ok(body.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    fn wrapped(key: &WrapKey, aad: &[u8], plain: &[u8]) -> Vec<u8> {
        let mut out = vec![0; plain.len() + OVERHEAD];
        assert_eq!(wrap(key, aad, plain, &mut out), Ok(out.len()));
        out
    }

    /// Wrapped by another implementation, cipher/vectors/wrap.py. The layout is used on disk.
    #[test]
    fn the_layout_is_fixed() {
        let wrapped = hex!(
            "6465666768696a6b6c6d6e6f683afc455dcc70b9164b75c3f64844d272f33439"
            "bf59c5459fe89673c79e9b778d3eb69af66c72c0a3093d6ebe377cea"
        );
        let (key, secret): ([u8; 32], [u8; 32]) =
            (std::array::from_fn(|i| i as u8), std::array::from_fn(|i| 32 + i as u8));
        let mut out = [0; 32];
        assert_eq!(unwrap(&WrapKey::new(&key), b"context", &wrapped, &mut out), Ok(32));
        assert_eq!(out, secret);
    }

    #[test]
    fn the_same_secret_never_wraps_to_the_same_bytes() {
        let key = WrapKey::new(&[1; 32]);
        assert_ne!(wrapped(&key, b"", &[2; 64]), wrapped(&key, b"", &[2; 64]));
    }

    #[test]
    fn every_bit_of_wrapping_and_context_counts() {
        let key = WrapKey::new(&[1; 32]);
        let good = wrapped(&key, b"context", &[2; 32]);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let mut out = [9; 32];
            assert_eq!(unwrap(&key, b"context", &bad, &mut out), Err(WrapError::Refused));
            assert_eq!(out, [0; 32]);
        }
        for aad in [&b"contexu"[..], b"context ", b"", b"contex"] {
            assert_eq!(unwrap(&key, aad, &good, &mut [0; 32]), Err(WrapError::Refused));
        }
        let other = WrapKey::new(&[3; 32]);
        assert_eq!(unwrap(&other, b"context", &good, &mut [0; 32]), Err(WrapError::Refused));
    }

    #[test]
    fn short_input_and_short_buffers_are_refused() {
        let key = WrapKey::new(&[1; 32]);
        for length in 0..OVERHEAD {
            let short = vec![0; length];
            assert_eq!(unwrap(&key, b"", &short, &mut [0; 9]), Err(WrapError::Length(length)));
        }
        let good = wrapped(&key, b"", &[2; 32]);
        let small = WrapError::Buffer { needed: 32, given: 31 };
        assert_eq!(unwrap(&key, b"", &good, &mut [0; 31]), Err(small));
        let small = WrapError::Buffer { needed: 60, given: 59 };
        assert_eq!(wrap(&key, b"", &[2; 32], &mut [0; 59]), Err(small));
    }

    proptest! {
        #[test]
        fn unwrapping_reverses_wrapping(
            key: [u8; 32], aad: Vec<u8>, plain: Vec<u8>, room in 0..9_usize,
        ) {
            let key = WrapKey::new(&key);
            let wrapped = wrapped(&key, &aad, &plain);
            let mut out = vec![0xee; plain.len() + room];
            prop_assert_eq!(unwrap(&key, &aad, &wrapped, &mut out), Ok(plain.len()));
            prop_assert_eq!(&out[..plain.len()], &plain[..]);
            prop_assert_eq!(&out[plain.len()..], &vec![0xee; room][..]);
        }
    }
}
