//! Stream format version 1: files that are read and written at any byte offset, in any length.
//!
//! For temporary data: sort runs, hash batches, spilled transactions. Every file has a key of its own.
//! A sealed file is exactly as long as the plaintext.
//!
//! ```text
//! byte   0                  4096               8192        8208      8213
//!        +------------------+------------------+-----------+---------+
//!        | XTS, unit 0      | XTS, unit 1      | XTS, ...  | masked  |
//!        +------------------+------------------+-----------+---------+
//!         data units of 4096 bytes = 256 blocks;  whole     the last 1 to 15 bytes of the
//!         each block can be had on its own        blocks    file, if its length is odd
//! ```
//!
//! Whole blocks are AES-XTS in data units of [`UNIT`] bytes. The tweak, before its own encryption, is the
//! number of the unit (offset / 4096) in bytes 0 to 7, little-endian, and zeros. A smaller unit would cost
//! an encryption of the tweak more often, a larger one more blocks run over in vain by an access that
//! begins in the middle of a unit.
//!
//! The last partial block is XORed with a mask: the encryption, by XTS, of a block of zeros under the
//! tweak
//!
//! ```text
//! byte   0               8            9                  16
//!        +---------------+------------+-------------------+
//!        | block u64     | length     | 0 0 0 0 0 0 0     |
//!        +---------------+------------+-------------------+
//! ```
//!
//! bytes 0 to 7 are offset / 16, byte 8 is the number of bytes, 1 to 15, which is never zero and so keeps
//! masks apart from data. When the file grows the block becomes whole and is sealed anew.
//!
//! A block of 16 zero bytes on disk is a hole, or what `ftruncate` added, and reads as zeros. That a sealed
//! block comes out as zeros has the probability 2^-128.
//!
//! Why XTS: names of temporary files recur within one start of the server, so the same key and offset
//! meet other data. XTS then shows whether two blocks are equal; a stream cipher would show the exclusive
//! or of the two. The mask has this weakness, for at most 15 bytes and only if a tail of the same length
//! stood there before.

mod file;

pub use file::{File, SCRATCH, Scratch, Stream};

use crate::key::PageKey;
use crate::xts::{Block, Direction, Tweak};

/// Bytes of a block.
pub const BLOCK: usize = size_of::<Block>();

/// Bytes of a data unit.
pub const UNIT: usize = 4096;

const UNIT_BLOCKS: usize = UNIT / BLOCK;

/// Seals bytes of a file in place. They begin at `offset`, a multiple of [`BLOCK`]; if their length is
/// not one too, they are the end of the file.
pub fn seal(key: &PageKey, offset: u64, bytes: &mut [u8]) {
    run(key, Direction::Encrypt, offset, bytes);
}

/// Opens bytes of a sealed file in place; `offset` and length are as for [`seal`].
pub fn open(key: &PageKey, offset: u64, bytes: &mut [u8]) {
    run(key, Direction::Decrypt, offset, bytes);
}

fn run(key: &PageKey, direction: Direction, offset: u64, bytes: &mut [u8]) {
    debug_assert!(offset.is_multiple_of(BLOCK as u64));
    let (mut blocks, tail) = bytes.as_chunks_mut::<BLOCK>();
    let mut number = offset / BLOCK as u64;
    while !blocks.is_empty() {
        let skip = (number % UNIT_BLOCKS as u64) as usize;
        let count = blocks.len().min(UNIT_BLOCKS - skip);
        let (part, rest) = blocks.split_at_mut(count);
        let unit = number / UNIT_BLOCKS as u64;
        match direction {
            Direction::Encrypt => run_part(key, direction, unit, skip, part),
            Direction::Decrypt => open_part(key, unit, skip, part),
        }
        number += count as u64;
        blocks = rest;
    }
    if !tail.is_empty() {
        let mut mask = [[0; BLOCK]];
        let tweak = Tweak::from(number) | (tail.len() as Tweak) << 64;
        key.schedule.run(Direction::Encrypt, tweak, &mut mask);
        tail.iter_mut().zip(mask.as_flattened()).for_each(|(byte, mask)| *byte ^= mask);
    }
}

/// Runs over `part`, which stands in its unit after `skip` blocks.
fn run_part(key: &PageKey, direction: Direction, unit: u64, skip: usize, part: &mut [Block]) {
    let tweak = Tweak::from(unit);
    if skip == 0 {
        return key.schedule.run(direction, tweak, part);
    }
    // A kernel begins at the beginning of a unit: run over the blocks in front in vain.
    let mut whole = [[0; BLOCK]; UNIT_BLOCKS];
    let end = (skip + part.len()).min(UNIT_BLOCKS);
    whole[skip..end].copy_from_slice(part);
    key.schedule.run(direction, tweak, &mut whole[..end]);
    part.copy_from_slice(&whole[skip..end]);
}

fn open_part(key: &PageKey, unit: u64, skip: usize, part: &mut [Block]) {
    const HOLE: Block = [0; BLOCK];
    if part.iter().all(|block| *block != HOLE) {
        return run_part(key, Direction::Decrypt, unit, skip, part);
    }
    let mut sealed = [HOLE; UNIT_BLOCKS];
    let sealed = &mut sealed[..part.len()];
    sealed.copy_from_slice(part);
    run_part(key, Direction::Decrypt, unit, skip, part);
    for (block, _) in part.iter_mut().zip(sealed).filter(|(_, sealed)| **sealed == HOLE) {
        *block = HOLE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{CipherId, DataKey};
    use proptest::prelude::*;

    pub(super) fn key(seed: u8) -> PageKey {
        let bytes: [u8; 64] = std::array::from_fn(|i| seed.wrapping_add(i as u8));
        PageKey::new(&DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap())
    }

    #[test]
    fn a_hole_reads_as_zeros_among_sealed_blocks() {
        let key = key(1);
        let plain: Vec<u8> = (0..3 * UNIT).map(|i| i as u8).collect();
        let (mut bytes, mut expected) = (plain.clone(), plain);
        seal(&key, 0, &mut bytes);
        for hole in [16..48, 4080..4112, 8192..12288] {
            bytes[hole.clone()].fill(0);
            expected[hole].fill(0);
        }
        open(&key, 0, &mut bytes);
        assert!(bytes == expected);
    }

    #[test]
    fn zeros_are_sealed_like_anything_else() {
        let mut bytes = [0; 2 * UNIT + 15];
        seal(&key(1), 0, &mut bytes);
        assert!(bytes.as_chunks::<BLOCK>().0.iter().all(|block| *block != [0; BLOCK]));
    }

    #[test]
    fn every_offset_length_of_tail_and_key_gives_other_bytes() {
        let mut seen = std::collections::HashSet::new();
        for seed in [1, 2] {
            for offset in [0, 16, 4096, 1 << 20, 1 << 40, u64::MAX - 15] {
                for length in [9, 10, 15, 16] {
                    let mut bytes = vec![0; length];
                    seal(&key(seed), offset, &mut bytes);
                    assert!(seen.insert(bytes[..9].to_vec()), "{seed} {offset} {length}");
                }
            }
        }
    }

    proptest! {
        /// Any part that begins at a block can be sealed and opened on its own.
        #[test]
        fn parts_are_the_whole(
            plain in prop::collection::vec(any::<u8>(), 1..3 * UNIT),
            first in 0_u64..600, cut in 0..3 * UNIT,
        ) {
            let (key, first) = (key(1), first * BLOCK as u64);
            let mut whole = plain.clone();
            seal(&key, first, &mut whole);
            let cut = cut.min(plain.len()) / BLOCK * BLOCK;
            let mut parts = plain.clone();
            seal(&key, first, &mut parts[..cut]);
            seal(&key, first + cut as u64, &mut parts[cut..]);
            prop_assert!(whole == parts);
            open(&key, first + cut as u64, &mut parts[cut..]);
            prop_assert!(parts[cut..] == plain[cut..]);
            open(&key, first, &mut whole);
            prop_assert!(whole == plain);
        }
    }
}
