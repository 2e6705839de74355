//! Secret bytes that leave no trace: wiped when dropped, never printed, never copied by accident.

use zeroize::{Zeroize, ZeroizeOnDrop};

/// The operating system gave no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the operating system's random number generator failed: {0}")]
pub struct RandomError(#[from] getrandom::Error);

/// Fills `out` with bytes of the operating system's generator (`getrandom(2)` on Linux).
///
/// # Errors
/// [`RandomError`] if the system call fails; `out` must then not be used.
pub fn fill_random(out: &mut [u8]) -> Result<(), RandomError> {
    Ok(getrandom::fill(out)?)
}

/// A 256-bit secret: a database key, or one derived from it.
///
/// There is deliberately no `Debug`, `Clone`, `Copy` or `PartialEq`.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct Secret32([u8; 32]);

impl Secret32 {
    /// A new random secret.
    ///
    /// # Errors
    /// [`RandomError`] if the operating system's generator fails.
    pub fn random() -> Result<Self, RandomError> {
        let mut secret = Self([0; 32]);
        fill_random(&mut secret.0)?;
        Ok(secret)
    }

    /// Takes the bytes over; the caller wipes its own copy.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        Self(*bytes)
    }

    /// The secret itself. Do not let it out of the caller's frame.
    #[must_use]
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_secrets_differ() {
        let (a, b) = (Secret32::random().unwrap(), Secret32::random().unwrap());
        assert!(a.expose() != b.expose());
        assert!(a.expose() != &[0; 32]);
    }

    #[test]
    fn wiping_leaves_zeros() {
        let mut secret = Secret32::from_bytes(&[7; 32]);
        secret.zeroize();
        assert_eq!(secret.expose(), &[0; 32]);
    }
}
