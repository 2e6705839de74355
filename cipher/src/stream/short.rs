//! Files of 1 to 15 bytes: a block cipher of that block length.
//!
//! A Feistel network over the two halves of the bits, with the ten rounds of FF1 (NIST SP 800-38G).
//! The round function is the lower half of a block that AES-XTS encrypts under a tweak with the
//! length and the round. PostgreSQL leaves no file this short on disk, so it need not be fast, but
//! a file may be this short for a moment.

use super::BLOCK;
use crate::page_key::PageKey;
use crate::xts::{Direction, Tweak};

const ROUNDS: u32 = 10;

/// Seals a whole file of fewer than [`BLOCK`] bytes in place.
pub(super) fn seal(key: &PageKey, bytes: &mut [u8]) {
    let (mut low, mut high) = halves(bytes);
    for round in 0..ROUNDS {
        (low, high) = (high, low ^ mix(key, bytes.len(), round, high));
    }
    put(bytes, low, high);
}

/// Opens what [`seal`] sealed.
pub(super) fn open(key: &PageKey, bytes: &mut [u8]) {
    let (mut low, mut high) = halves(bytes);
    for round in (0..ROUNDS).rev() {
        (low, high) = (high ^ mix(key, bytes.len(), round, low), low);
    }
    put(bytes, low, high);
}

/// The bytes as a little-endian number, split into halves of four bits per byte.
fn halves(bytes: &[u8]) -> (u64, u64) {
    let mut block = [0; BLOCK];
    block[..bytes.len()].copy_from_slice(bytes);
    let number = u128::from_le_bytes(block);
    (number as u64 & mask(bytes.len()), (number >> (4 * bytes.len())) as u64)
}

fn put(bytes: &mut [u8], low: u64, high: u64) {
    let number = u128::from(low) | u128::from(high) << (4 * bytes.len());
    bytes.copy_from_slice(&number.to_le_bytes()[..bytes.len()]);
}

/// The bits of one half.
fn mask(length: usize) -> u64 {
    (1 << (4 * length)) - 1
}

fn mix(key: &PageKey, length: usize, round: u32, half: u64) -> u64 {
    let mut block = [u128::from(half).to_le_bytes()];
    let tweak = (length as Tweak) << 64 | Tweak::from(round) << 72;
    key.schedule.run(Direction::Encrypt, tweak, &mut block);
    u128::from_le_bytes(block[0]) as u64 & mask(length)
}

#[cfg(test)]
mod tests {
    use super::super::tests::key;
    use super::*;

    #[test]
    fn every_length_opens_to_the_plaintext() {
        for length in 0..BLOCK {
            for seed in [1, 2] {
                let plain: Vec<u8> = (0..length).map(|i| i as u8 * 7 + seed).collect();
                let mut bytes = plain.clone();
                seal(&key(seed), &mut bytes);
                assert!(length < 3 || bytes != plain, "{length}");
                open(&key(seed), &mut bytes);
                assert_eq!(bytes, plain);
            }
        }
    }

    /// Each of the 65,536 files of two bytes has a sealed form of its own.
    #[test]
    fn it_is_a_permutation() {
        let key = key(1);
        let mut seen = vec![false; 1 << 16];
        for number in 0..=u16::MAX {
            let mut bytes = number.to_le_bytes();
            seal(&key, &mut bytes);
            let place = &mut seen[usize::from(u16::from_le_bytes(bytes))];
            assert!(!*place, "{number}");
            *place = true;
        }
    }
}
