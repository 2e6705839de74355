//! AES key expansion (FIPS 197 section 5.2) for the kernels of this crate.
//!
//! Built from the `aes` crate's constant-time round functions: no table, no secret-dependent
//! branch.

use aes::Block as AesBlock;
use aes::cipher::Array;
use aes::hazmat;
use zeroize::ZeroizeOnDrop;

use super::Block;

/// The round keys of one XTS key; `N` is the number of rounds plus one.
#[derive(ZeroizeOnDrop)]
pub(crate) struct RoundKeys<const N: usize> {
    /// Encrypts data.
    pub(crate) seal: [Block; N],
    /// Decrypts data, in the order of use (the equivalent inverse cipher, FIPS 197 section 5.3.5).
    pub(crate) open: [Block; N],
    /// Encrypts the tweak.
    pub(crate) tweak: [Block; N],
}

impl<const N: usize> RoundKeys<N> {
    /// `data` and `tweak` are the two AES keys, 16 bytes for `N` = 11 or 32 for `N` = 15.
    pub(crate) fn new(data: &[u8], tweak: &[u8]) -> Self {
        let seal = expand(data);
        Self { open: invert(&seal), seal, tweak: expand(tweak) }
    }
}

/// References to keys, for a turn of a loop. The compiler must not know that they are the same in
/// each turn: it would load the keys before the loop, and for want of registers store some on the
/// stack, where nothing wipes them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline]
pub(super) fn again<T>(keys: T) -> T {
    core::hint::black_box(keys)
}

fn expand<const N: usize>(key: &[u8]) -> [Block; N] {
    let key_words = key.as_chunks::<4>().0;
    let mut round_keys = [[0; 16]; N];
    let words = round_keys.as_flattened_mut().as_chunks_mut::<4>().0;
    let mut round_constant = 1_u8;
    let mut previous = [0; 4];
    for i in 0..words.len() {
        let word = match key_words.get(i) {
            Some(word) => *word,
            None => {
                let mut mixed = previous;
                if i % key_words.len() == 0 {
                    mixed.rotate_left(1);
                    mixed = substitute(mixed);
                    mixed[0] ^= round_constant;
                    // AES-128 has ten round constants: those after 0x80 are reduced by the AES
                    // polynomial.
                    round_constant = (round_constant << 1) ^ ((round_constant >> 7) * 0x1b);
                } else if key_words.len() > 6 && i % key_words.len() == 4 {
                    mixed = substitute(mixed);
                }
                let earlier = words[i - key_words.len()];
                (u32::from_ne_bytes(mixed) ^ u32::from_ne_bytes(earlier)).to_ne_bytes()
            }
        };
        words[i] = word;
        previous = word;
    }
    round_keys
}

/// `SubWord`: the S-box on four bytes. A block of four equal columns passes `ShiftRows` unchanged,
/// so one round with a zero key, its `MixColumns` undone, is the S-box alone.
fn substitute(word: [u8; 4]) -> [u8; 4] {
    let mut block: AesBlock = Array([word; 4].as_flattened().as_chunks().0[0]);
    hazmat::cipher_round(&mut block, &AesBlock::default());
    hazmat::inv_mix_columns(&mut block);
    [block[0], block[1], block[2], block[3]]
}

fn invert<const N: usize>(seal: &[Block; N]) -> [Block; N] {
    let mut open = *seal;
    open.reverse();
    let inner = 1..N - 1;
    for key in &mut open[inner] {
        let mut block = Array(*key);
        hazmat::inv_mix_columns(&mut block);
        *key = block.0;
    }
    open
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    /// FIPS 197, appendix A.1 and A.3: first and last round keys.
    #[test]
    fn fips_197_key_expansion() {
        let key = hex!("2b7e151628aed2a6abf7158809cf4f3c");
        let round_keys: [Block; 11] = expand(&key);
        assert_eq!(round_keys[0], key);
        assert_eq!(round_keys[1], hex!("a0fafe1788542cb123a339392a6c7605"));
        assert_eq!(round_keys[10], hex!("d014f9a8c9ee2589e13f0cc8b6630ca6"));

        let key = hex!("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4");
        let round_keys: [Block; 15] = expand(&key);
        assert_eq!(round_keys.as_flattened()[..32], key);
        assert_eq!(round_keys[2], hex!("9ba354118e6925afa51a8b5f2067fcde"));
        assert_eq!(round_keys[14], hex!("fe4890d1e6188d0b046df344706c631e"));
    }
}
