//! AES-XTS (IEEE 1619-2018, NIST SP 800-38E) over data units of whole blocks.
//!
//! Ciphertext stealing is left out: the data units of pagevault are whole blocks.

mod portable;

use aes::cipher::Array;
use aes::cipher::consts::{U16, U32, U64};

use crate::key::CipherId;

/// One AES block.
pub type Block = [u8; 16];

/// The next block's tweak: multiplication by x in GF(2^128), IEEE 1619-2018 section 5.2.
/// Constant time: the carry selects by mask, not by branch.
fn multiply_by_x(tweak: u128) -> u128 {
    let carry = (tweak.cast_signed() >> 127).cast_unsigned();
    (tweak << 1) ^ (carry & 0x87)
}

/// The expanded keys, in the form that the chosen kernel wants.
pub(crate) enum Schedule {
    Portable256(portable::Keys256),
    Portable128(portable::Keys128),
}

impl Schedule {
    /// Expands the XTS key in the first [`CipherId::key_len`] of `bytes`.
    pub(crate) fn new(cipher: CipherId, bytes: &[u8; 64]) -> Self {
        let bytes: &Array<u8, U64> = bytes.into();
        match cipher {
            CipherId::Aes256Xts => {
                let (data, tweak) = bytes.split_ref::<U32>();
                Self::Portable256(portable::Keys256::new(data, tweak))
            }
            CipherId::Aes128Xts => {
                let (data, rest) = bytes.split_ref::<U16>();
                let (tweak, _) = rest.split_ref::<U16>();
                Self::Portable128(portable::Keys128::new(data, tweak))
            }
        }
    }

    /// Encrypts a data unit in place; `tweak` is the unit's number before its own encryption.
    pub(crate) fn encrypt(&self, tweak: Block, unit: &mut [Block]) {
        match self {
            Self::Portable256(keys) => keys.encrypt(tweak, unit),
            Self::Portable128(keys) => keys.encrypt(tweak, unit),
        }
    }

    /// Decrypts a data unit in place.
    pub(crate) fn decrypt(&self, tweak: Block, unit: &mut [Block]) {
        match self {
            Self::Portable256(keys) => keys.decrypt(tweak, unit),
            Self::Portable128(keys) => keys.decrypt(tweak, unit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    #[test]
    fn doubling_folds_the_carry_back() {
        assert_eq!(multiply_by_x(1), 2);
        assert_eq!(multiply_by_x(1 << 127), 0x87);
        assert_eq!(multiply_by_x(u128::MAX), (u128::MAX << 1) ^ 0x87);
    }

    /// IEEE 1619-2018, annex B, vector 2.
    #[test]
    fn ieee_1619_vector_2() {
        let mut key = [0; 64];
        key[..16].fill(0x11);
        key[16..32].fill(0x22);
        let mut tweak = [0; 16];
        tweak[..5].fill(0x33);
        let mut unit = [[0x44; 16]; 2];
        let schedule = Schedule::new(CipherId::Aes128Xts, &key);
        schedule.encrypt(tweak, &mut unit);
        assert_eq!(
            unit.as_flattened(),
            hex!("c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0")
        );
        schedule.decrypt(tweak, &mut unit);
        assert_eq!(unit, [[0x44; 16]; 2]);
    }
}
