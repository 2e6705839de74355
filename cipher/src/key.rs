//! Ciphers and data keys.

use core::fmt;
use core::str::FromStr;

use subtle::ConstantTimeEq;
use zeroize::ZeroizeOnDrop;

use crate::primitives::module;
use crate::secret::{RandomError, fill_random};
use crate::xts::KeySize;

/// A page cipher. The numbers are on disk (keystore) and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CipherId {
    /// AES-256 in XTS mode (IEEE 1619, NIST SP 800-38E), the default.
    Aes256Xts = 1,
    /// AES-128 in XTS mode.
    Aes128Xts = 2,
    /// AES-256 in XTS mode, with a tag in each page: AES-256 over POLYVAL (RFC 8452).
    Aes256XtsAuth = 3,
    /// The same with HMAC-SHA-256 (FIPS 198-1), cut to 128 bits: approved algorithms only, and
    /// several times slower.
    Aes256XtsHmac = 4,
}

impl CipherId {
    /// A number that is higher for the stronger of two ciphers: authentication counts more than the
    /// length of the key, and approved algorithms more than speed.
    #[must_use]
    pub fn strength(self) -> u8 {
        match self {
            Self::Aes128Xts => 1,
            Self::Aes256Xts => 2,
            Self::Aes256XtsAuth => 3,
            Self::Aes256XtsHmac => 4,
        }
    }

    /// Every cipher, in the order of the numbers.
    pub const ALL: [Self; 4] =
        [Self::Aes256Xts, Self::Aes128Xts, Self::Aes256XtsAuth, Self::Aes256XtsHmac];

    /// The name used in SQL.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes256Xts => "aes-256-xts",
            Self::Aes128Xts => "aes-128-xts",
            Self::Aes256XtsAuth => "aes-256-xts-auth",
            Self::Aes256XtsHmac => "aes-256-xts-hmac",
        }
    }

    /// Length of a data key in bytes: both XTS keys, data key first.
    #[must_use]
    pub const fn key_len(self) -> usize {
        self.key_size().bytes()
    }

    /// The cipher for data that has no room for tags: WAL.
    #[must_use]
    pub const fn without_tag(self) -> Self {
        match self {
            Self::Aes256Xts | Self::Aes256XtsAuth | Self::Aes256XtsHmac => Self::Aes256Xts,
            Self::Aes128Xts => Self::Aes128Xts,
        }
    }

    /// The cipher that authenticates pages and is the best choice in this build.
    #[must_use]
    pub fn authenticating() -> Self {
        if Self::Aes256XtsAuth.is_for_new_keys() {
            Self::Aes256XtsAuth
        } else {
            Self::Aes256XtsHmac
        }
    }

    /// Whether it consists of approved algorithms that the validated module has.
    #[must_use]
    pub const fn is_approved(self) -> bool {
        match self {
            Self::Aes256Xts | Self::Aes256XtsHmac => true,
            Self::Aes128Xts | Self::Aes256XtsAuth => false,
        }
    }

    /// Whether this build makes keys for it: with a validated module only for approved ciphers.
    #[must_use]
    pub fn is_for_new_keys(self) -> bool {
        module().is_none() || self.is_approved()
    }

    pub(crate) const fn key_size(self) -> KeySize {
        match self {
            Self::Aes256Xts | Self::Aes256XtsAuth | Self::Aes256XtsHmac => KeySize::Aes256,
            Self::Aes128Xts => KeySize::Aes128,
        }
    }
}

impl fmt::Display for CipherId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number or name that belongs to no cipher of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown cipher")]
pub struct UnknownCipher;

impl TryFrom<u8> for CipherId {
    type Error = UnknownCipher;

    fn try_from(number: u8) -> Result<Self, UnknownCipher> {
        Self::ALL.into_iter().find(|id| *id as u8 == number).ok_or(UnknownCipher)
    }
}

impl FromStr for CipherId {
    type Err = UnknownCipher;

    fn from_str(name: &str) -> Result<Self, UnknownCipher> {
        Self::ALL.into_iter().find(|id| id.name() == name).ok_or(UnknownCipher)
    }
}

/// A fork of a relation (`ForkNumber`, src/include/common/relpath.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fork {
    /// `MAIN_FORKNUM`: the data.
    Main,
    /// `FSM_FORKNUM`: the free space map.
    FreeSpaceMap,
    /// `VISIBILITYMAP_FORKNUM`: the visibility map.
    VisibilityMap,
    /// `INIT_FORKNUM`: the empty state of an unlogged relation.
    Init,
}

impl Fork {
    /// The fork with PostgreSQL's number `number` (0 to 3).
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Main),
            1 => Some(Self::FreeSpaceMap),
            2 => Some(Self::VisibilityMap),
            3 => Some(Self::Init),
            _ => None,
        }
    }

    /// The fork's byte in the tweak. Recovery copies the init fork over the main fork as a raw file
    /// (`ResetUnloggedRelations`, reinit.c), so both have the same byte.
    pub(crate) const fn tweak_byte(self) -> u8 {
        match self {
            Self::Main | Self::Init => 0,
            Self::FreeSpaceMap => 1,
            Self::VisibilityMap => 2,
        }
    }
}

/// Why bytes are not a data key. Does not contain the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not [`CipherId::key_len`] bytes.
    #[error("a data key of {cipher} has {} bytes, not {length}", cipher.key_len())]
    Length {
        /// The cipher the key was meant for.
        cipher: CipherId,
        /// Bytes given.
        length: usize,
    },
    /// The two XTS keys are the same, which FIPS 140-3 (implementation guidance C.I) forbids.
    #[error("the two halves of an XTS key must differ")]
    EqualHalves,
}

/// The data key of one relation file and one version: the two XTS keys, data key first.
///
/// Wiped when dropped. There is deliberately no `Debug` and no `Clone`.
#[derive(ZeroizeOnDrop)]
pub struct DataKey {
    #[zeroize(skip)]
    cipher: CipherId,
    bytes: [u8; 64],
}

impl DataKey {
    /// A new random key.
    ///
    /// # Errors
    /// [`RandomError`] if the operating system's generator fails.
    pub fn random(cipher: CipherId) -> Result<Self, RandomError> {
        let mut key = Self { cipher, bytes: [0; 64] };
        fill_random(&mut key.bytes[..cipher.key_len()])?;
        Ok(key)
    }

    /// Copies the bytes of an unwrapped key; the caller wipes its own.
    ///
    /// # Errors
    /// [`KeyError`] if the length is wrong or both XTS keys are the same.
    pub fn from_bytes(cipher: CipherId, bytes: &[u8]) -> Result<Self, KeyError> {
        if bytes.len() != cipher.key_len() {
            return Err(KeyError::Length { cipher, length: bytes.len() });
        }
        let (data, tweak) = bytes.split_at(bytes.len() / 2);
        if data.ct_eq(tweak).into() {
            return Err(KeyError::EqualHalves);
        }
        let mut key = Self { cipher, bytes: [0; 64] };
        key.bytes[..bytes.len()].copy_from_slice(bytes);
        Ok(key)
    }

    /// All bytes, of which those behind [`CipherId::key_len`] are zero.
    pub(crate) fn bytes(&self) -> &[u8; 64] {
        &self.bytes
    }

    /// The cipher this key is for.
    #[must_use]
    pub fn cipher(&self) -> CipherId {
        self.cipher
    }

    /// Whether the other key and its cipher are the same. Takes constant time for keys of one
    /// cipher.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.cipher == other.cipher && bool::from(self.bytes.ct_eq(&other.bytes))
    }

    /// The bytes of the key, [`CipherId::key_len`] of them. Keep no copy beyond the caller's frame,
    /// and compare keys by [`DataKey::is_same`] only.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.bytes[..self.cipher.key_len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cipher_numbers_and_names_are_fixed() {
        for (id, number, name, len) in [
            (CipherId::Aes256Xts, 1, "aes-256-xts", 64),
            (CipherId::Aes128Xts, 2, "aes-128-xts", 32),
            (CipherId::Aes256XtsAuth, 3, "aes-256-xts-auth", 64),
            (CipherId::Aes256XtsHmac, 4, "aes-256-xts-hmac", 64),
        ] {
            assert_eq!(id as u8, number);
            assert_eq!(CipherId::try_from(number), Ok(id));
            assert_eq!(name.parse(), Ok(id));
            assert_eq!(id.to_string(), name);
            assert_eq!(id.key_len(), len);
        }
        for number in (0..=255).filter(|n| !(1..=4).contains(n)) {
            assert_eq!(CipherId::try_from(number), Err(UnknownCipher));
        }
        for name in ["", "AES-256-XTS", "aes-256-xts ", "aes-192-xts"] {
            assert_eq!(name.parse::<CipherId>(), Err(UnknownCipher));
        }
    }

    #[test]
    fn init_and_main_share_a_tweak_and_the_others_do_not() {
        assert_eq!(Fork::Init.tweak_byte(), Fork::Main.tweak_byte());
        assert_ne!(Fork::FreeSpaceMap.tweak_byte(), Fork::Main.tweak_byte());
        assert_ne!(Fork::FreeSpaceMap.tweak_byte(), Fork::VisibilityMap.tweak_byte());
        assert_eq!(Fork::from_number(3), Some(Fork::Init));
        assert_eq!(Fork::from_number(4), None);
    }

    #[test]
    fn a_key_of_the_wrong_length_is_refused() {
        for cipher in CipherId::ALL {
            for length in (0..=96).filter(|n| *n != cipher.key_len()) {
                let error = DataKey::from_bytes(cipher, &vec![1; length]).err();
                assert_eq!(error, Some(KeyError::Length { cipher, length }));
            }
        }
        let error = KeyError::Length { cipher: CipherId::Aes256Xts, length: 32 };
        assert_eq!(error.to_string(), "a data key of aes-256-xts has 64 bytes, not 32");
    }

    #[test]
    fn equal_halves_are_refused() {
        for cipher in CipherId::ALL {
            let mut bytes = vec![9; cipher.key_len()];
            assert_eq!(DataKey::from_bytes(cipher, &bytes).err(), Some(KeyError::EqualHalves));
            bytes[0] ^= 1;
            assert_eq!(DataKey::from_bytes(cipher, &bytes).unwrap().expose(), bytes);
        }
    }

    #[test]
    fn random_keys_have_the_right_length_and_differ() {
        for cipher in CipherId::ALL {
            let (a, b) = (DataKey::random(cipher).unwrap(), DataKey::random(cipher).unwrap());
            assert_eq!(a.expose().len(), cipher.key_len());
            assert!(!a.is_same(&b));
            assert!(a.is_same(&DataKey::from_bytes(cipher, a.expose()).unwrap()));
        }
    }
}
