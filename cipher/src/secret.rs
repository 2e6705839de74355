//! Secrets: wiped when dropped, never printed, never copied by accident.

use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::primitives;

/// The operating system gave no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the operating system's random number generator failed: {0}")]
pub struct RandomError(#[from] getrandom::Error);

/// Fills `out` with bytes of the operating system's generator (`getrandom(2)` on Linux), or of the
/// validated module's own, which never fails.
///
/// # Errors
/// [`RandomError`] if the system call fails; `out` must then not be used.
pub fn fill_random(out: &mut [u8]) -> Result<(), RandomError> {
    primitives::fill_random(out)
}

/// A 256-bit secret: a database key, or one derived from it.
///
/// It is on the heap, so that moving its owner copies nothing. There is deliberately no `Debug`,
/// `Clone`, `Copy` or `PartialEq`.
pub struct Secret32(Box<[u8; 32]>);

impl Secret32 {
    /// A secret that `fill` writes in place, into zeros.
    pub fn filled(fill: impl FnOnce(&mut [u8; 32])) -> Self {
        let mut secret = Self(Box::new([0; 32]));
        fill(&mut secret.0);
        secret
    }

    /// A new random secret.
    ///
    /// # Errors
    /// [`RandomError`] if the operating system's generator fails.
    pub fn random() -> Result<Self, RandomError> {
        let mut result = Ok(());
        let secret = Self::filled(|bytes| result = fill_random(bytes));
        result.map(|()| secret)
    }

    /// Copies the bytes; the caller wipes its own.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        Self::filled(|secret| secret.copy_from_slice(bytes))
    }

    /// Whether the secret has these bytes. Takes constant time.
    #[must_use]
    pub fn matches(&self, bytes: &[u8]) -> bool {
        self.0.as_slice().ct_eq(bytes).into()
    }

    /// The bytes of the secret. Keep no copy beyond the caller's frame, and compare secrets by
    /// [`Secret32::matches`] only.
    #[must_use]
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Zeroize for Secret32 {
    fn zeroize(&mut self) {
        self.0.as_mut_slice().zeroize();
    }
}

impl Drop for Secret32 {
    fn drop(&mut self) {
        self.zeroize();
    }
}

impl ZeroizeOnDrop for Secret32 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_secrets_differ() {
        let (a, b) = (Secret32::random().unwrap(), Secret32::random().unwrap());
        assert!(!a.matches(b.expose()));
        assert!(!a.matches(&[0; 32]));
    }

    #[test]
    fn a_secret_matches_its_own_bytes_only() {
        let secret = Secret32::from_bytes(&[7; 32]);
        assert!(secret.matches(&[7; 32]));
        for at in 0..32 {
            let mut other = [7; 32];
            other[at] ^= 0x80;
            assert!(!secret.matches(&other), "byte {at}");
        }
        assert!(!secret.matches(&[7; 31]) && !secret.matches(&[7; 33]) && !secret.matches(&[]));
    }

    #[test]
    fn wiping_leaves_zeros() {
        let mut secret = Secret32::from_bytes(&[7; 32]);
        secret.zeroize();
        assert_eq!(secret.expose(), &[0; 32]);
    }
}
