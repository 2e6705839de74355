//! Stream format version 1: files that are read and written at any byte offset, in any length.
//!
//! For temporary data: sort runs, hash batches, spilled transactions. Every file has its own key. A
//! sealed file is exactly as long as the plaintext.
//!
//! ```text
//! byte   0                  4096               8192        8208      8224  8237
//!        +------------------+------------------+-----------+---------------+
//!        | XTS, unit 0      | XTS, unit 1      | XTS, ...  | stealing      |
//!        +------------------+------------------+-----------+---------------+
//!         data units of 4096 bytes = 256 blocks;  whole     the last whole block and
//!         each block can be read separately       blocks    the 1 to 15 bytes after it
//! ```
//!
//! AES-XTS in data units of [`UNIT`] bytes. The tweak, before its own encryption, is the number of
//! the unit (offset / 4096) in bytes 0 to 7, little-endian, and zeros. With smaller units tweaks
//! would be encrypted more often. With larger ones an access in the middle of a unit would process
//! more blocks for nothing.
//!
//! A file whose length is no multiple of 16 ends with ciphertext stealing, as IEEE 1619 and NIST SP
//! 800-38E define it. Bytes after the last whole unit that are fewer than a block belong to that
//! unit, which then has up to 4111 bytes. When such a file grows or is truncated, its last whole
//! block is sealed again.
//!
//! XTS needs at least 16 bytes. A file of 1 to 15 bytes is sealed as a block of that length, by a
//! Feistel network (module `short`). Its tweaks differ from those of data in byte 8, which is never
//! zero:
//!
//! ```text
//! byte   0               8            9           10            16
//!        +---------------+------------+-----------+-------------+
//!        | 0             | length     | round     | 0           |
//!        +---------------+------------+-----------+-------------+
//! ```
//!
//! A block of 16 zero bytes on disk is a hole, or was added by `ftruncate`, and reads as zeros. The
//! exception is the last whole block before a partial one, which is always written. A sealed block
//! is all zeros with probability 2^-128.
//!
//! Why XTS: names of temporary files recur within one start of the server, and files are
//! overwritten, so the same key and offset are used for different data. XTS and the Feistel network
//! then reveal only whether two blocks are equal. A stream cipher, or a mask for the last bytes,
//! would reveal the XOR of the two.

mod file;
mod short;

pub use file::{File, SCRATCH, Scratch, Stream};

use crate::page_key::PageKey;
use crate::xts::{Block, Direction, Tweak};

/// Bytes of a block.
pub const BLOCK: usize = size_of::<Block>();

/// Bytes of a data unit.
pub const UNIT: usize = 4096;

const UNIT_BLOCKS: usize = UNIT / BLOCK;

/// Seals bytes of a file in place. `offset` is a multiple of [`BLOCK`]. If the length of `bytes` is
/// not, they are the end of the file and must include its last whole block, if it has one. If the
/// length is a multiple of [`BLOCK`], they must not include the last whole block of a file that
/// ends with a partial one.
pub fn seal(key: &PageKey, offset: u64, bytes: &mut [u8]) {
    let (blocks, tail) = split(offset, bytes);
    let first = offset / BLOCK as u64;
    each_unit(first, blocks, |unit, skip, part| {
        run_part(key, Direction::Encrypt, unit, skip, part);
    });
    match blocks {
        [] if !tail.is_empty() => short::seal(key, tail),
        [before @ .., last] if !tail.is_empty() => {
            last[..tail.len()].swap_with_slice(tail);
            run_stealing_block(key, Direction::Encrypt, first + before.len() as u64, last);
        }
        _ => {}
    }
}

/// Opens bytes of a sealed file in place, with the same requirements as [`seal`].
pub fn open(key: &PageKey, offset: u64, bytes: &mut [u8]) {
    let (blocks, tail) = split(offset, bytes);
    let first = offset / BLOCK as u64;
    match blocks {
        [] if !tail.is_empty() => short::open(key, tail),
        [before @ .., last] if !tail.is_empty() => {
            run_stealing_block(key, Direction::Decrypt, first + before.len() as u64, last);
            last[..tail.len()].swap_with_slice(tail);
        }
        _ => {}
    }
    each_unit(first, blocks, |unit, skip, part| open_part(key, unit, skip, part));
}

/// Splits into whole blocks and the partial block at the end.
fn split(offset: u64, bytes: &mut [u8]) -> (&mut [Block], &mut [u8]) {
    debug_assert!(offset.is_multiple_of(BLOCK as u64));
    let (blocks, tail) = bytes.as_chunks_mut::<BLOCK>();
    debug_assert!(tail.is_empty() || !blocks.is_empty() || offset == 0, "a tail on its own");
    (blocks, tail)
}

/// Calls `f` for each unit, with its number, the number of its blocks before `blocks`, and its part
/// of `blocks`.
fn each_unit(first: u64, mut blocks: &mut [Block], f: impl Fn(u64, usize, &mut [Block])) {
    let mut number = first;
    while !blocks.is_empty() {
        let skip = (number % UNIT_BLOCKS as u64) as usize;
        let count = blocks.len().min(UNIT_BLOCKS - skip);
        let (part, rest) = blocks.split_at_mut(count);
        f(number / UNIT_BLOCKS as u64, skip, part);
        number += count as u64;
        blocks = rest;
    }
}

/// Processes the last whole block of a file that ends with a partial one; `number` is its number.
/// In ciphertext stealing it uses the tweak of the block after it in the same unit.
fn run_stealing_block(key: &PageKey, direction: Direction, number: u64, block: &mut Block) {
    let skip = (number % UNIT_BLOCKS as u64) as usize + 1;
    run_part(key, direction, number / UNIT_BLOCKS as u64, skip, std::slice::from_mut(block));
}

/// Processes `part`, which begins after `skip` blocks of its unit.
fn run_part(key: &PageKey, direction: Direction, unit: u64, skip: usize, part: &mut [Block]) {
    let tweak = Tweak::from(unit);
    if skip == 0 {
        return key.schedule.run(direction, tweak, part);
    }
    // A kernel starts at the beginning of a unit: process the blocks before `part` and discard
    // them.
    let mut whole = [[0; BLOCK]; UNIT_BLOCKS + 1];
    let end = (skip + part.len()).min(whole.len());
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
    use crate::xts::Backend;
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
        assert_ne!(bytes[2 * UNIT..], [0; 15]);
    }

    #[test]
    fn every_offset_length_of_tail_and_key_gives_other_bytes() {
        let mut seen = std::collections::HashSet::new();
        for seed in [1, 2] {
            for offset in [0, 16, 4096 - 16, 4096, 1 << 20, 1 << 40, u64::MAX - 15] {
                for length in [16, 25, 26, 31] {
                    let mut bytes = vec![0; length];
                    seal(&key(seed), offset, &mut bytes);
                    assert!(seen.insert(bytes[..9].to_vec()), "{seed} {offset} {length}");
                }
            }
            for length in 9..16 {
                let mut bytes = vec![0; length];
                seal(&key(seed), 0, &mut bytes);
                assert!(seen.insert(bytes[..9].to_vec()), "{seed} {length}");
            }
        }
    }

    /// Two states of the end of a file, before and after it was overwritten, must not reveal the
    /// XOR of the plaintexts (as a mask would), whatever precedes them and however short the file
    /// is.
    #[test]
    fn two_states_of_the_end_do_not_reveal_their_difference() {
        for length in [1, 2, 15, 17, 31, UNIT + 1, UNIT + 15, UNIT + 17] {
            let mut shown = 0;
            for other in 1..=255 {
                let (mut one, mut two) = (vec![7; length], vec![7; length]);
                two[length - 1] ^= other;
                seal(&key(1), 0, &mut one);
                seal(&key(1), 0, &mut two);
                assert_ne!(one, two);
                shown += u32::from(one[length - 1] ^ two[length - 1] == other);
            }
            // By chance about one of 256 is equal; with a mask all 255 would be.
            assert!(shown < 10, "{length}: {shown}");
        }
    }

    /// IEEE 1619-2018, annex B, vectors 15 to 18: data units of 17 to 20 bytes.
    #[test]
    fn ciphertext_stealing_is_that_of_ieee_1619() {
        let bytes: [u8; 32] =
            std::array::from_fn(|i| if i < 16 { 0xFF - i as u8 } else { 0xCF - i as u8 });
        let sealed: [&[u8]; 4] = [
            b"\x6c\x16\x25\xdb\x46\x71\x52\x2d\x3d\x75\x99\x60\x1d\xe7\xca\x09\xed",
            b"\xd0\x69\x44\x4b\x7a\x7e\x0c\xab\x09\xe2\x44\x47\xd2\x4d\xeb\x1f\xed\xbf",
            b"\xe5\xdf\x13\x51\xc0\x54\x4b\xa1\x35\x0b\x33\x63\xcd\x8e\xf4\xbe\xed\xbf\x9d",
            b"\x9d\x84\xc8\x13\xf7\x19\xaa\x2c\x7b\xe3\xf6\x61\x71\xc7\xc5\xc2\xed\xbf\x9d\xac",
        ];
        let data_key = DataKey::from_bytes(CipherId::Aes128Xts, &bytes).unwrap();
        let offset = 0x12_3456_789a * UNIT as u64;
        for backend in Backend::ALL {
            let Some(key) = PageKey::with_backend(&data_key, backend) else { continue };
            for sealed in sealed {
                let plain: Vec<u8> = (0..sealed.len()).map(|i| i as u8).collect();
                let mut bytes = plain.clone();
                seal(&key, offset, &mut bytes);
                assert_eq!(bytes, sealed, "{backend}");
                open(&key, offset, &mut bytes);
                assert_eq!(bytes, plain, "{backend}");
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
            // Fewer bytes than a block are a file of their own.
            let first = if plain.len() < BLOCK { 0 } else { first * BLOCK as u64 };
            let key = key(1);
            let mut whole = plain.clone();
            seal(&key, first, &mut whole);
            // The end of the file is not divided.
            let end = if plain.len().is_multiple_of(BLOCK) { 0 } else { BLOCK };
            let cut = cut.min(plain.len().saturating_sub(end)) / BLOCK * BLOCK;
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
