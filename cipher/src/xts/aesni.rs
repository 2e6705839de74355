//! XTS with AES instructions on 128-bit registers, eight blocks interleaved to hide the latency.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_loadu_si128, _mm_storeu_si128};

use super::Block;
use super::expand::RoundKeys;

/// Blocks to a group.
const GROUP: usize = 8;

#[target_feature(enable = "aes,avx")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Block, unit: &mut [Block]) {
    run::<true, N>(&keys.seal, encrypt_block(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,avx")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Block, unit: &mut [Block]) {
    run::<false, N>(&keys.open, encrypt_block(&keys.tweak, tweak), unit);
}

#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn load(block: &Block) -> __m128i {
    _mm_loadu_si128(block)
}

/// AES on one block.
#[inline]
#[target_feature(enable = "aes")]
pub(super) fn encrypt_block<const N: usize>(round_keys: &[Block; N], block: Block) -> __m128i {
    let mut state = _mm_xor_si128(load(&block), load(&round_keys[0]));
    for key in &round_keys[1..N - 1] {
        state = _mm_aesenc_si128(state, load(key));
    }
    _mm_aesenclast_si128(state, load(&round_keys[N - 1]))
}

/// `SEAL` chooses the direction; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "aes,avx")]
fn run<const SEAL: bool, const N: usize>(
    keys: &[Block; N],
    mut tweak: __m128i,
    unit: &mut [Block],
) {
    let (groups, rest) = unit.as_chunks_mut::<GROUP>();
    for group in groups {
        tweak = run_group::<SEAL, N>(keys, tweak, group);
    }
    if !rest.is_empty() {
        let mut group = [[0; 16]; GROUP];
        group[..rest.len()].copy_from_slice(rest);
        run_group::<SEAL, N>(keys, tweak, &mut group);
        rest.copy_from_slice(&group[..rest.len()]);
    }
}

/// Returns the tweak of the next group's first block.
#[inline]
#[target_feature(enable = "aes,avx")]
fn run_group<const SEAL: bool, const N: usize>(
    keys: &[Block; N],
    mut tweak: __m128i,
    group: &mut [Block; GROUP],
) -> __m128i {
    let mut tweaks = [tweak; GROUP];
    let mut state = [tweak; GROUP];
    let key = load(&keys[0]);
    for i in 0..GROUP {
        tweaks[i] = tweak;
        state[i] = _mm_xor_si128(_mm_xor_si128(load(&group[i]), key), tweak);
        tweak = multiply_by_x(tweak);
    }
    for key in &keys[1..N - 1] {
        let key = load(key);
        for block in &mut state {
            *block =
                if SEAL { _mm_aesenc_si128(*block, key) } else { _mm_aesdec_si128(*block, key) };
        }
    }
    let key = load(&keys[N - 1]);
    for i in 0..GROUP {
        // The last round adds its key anyhow: let it add the tweak in the same step.
        let key = _mm_xor_si128(key, tweaks[i]);
        let block = if SEAL {
            _mm_aesenclast_si128(state[i], key)
        } else {
            _mm_aesdeclast_si128(state[i], key)
        };
        _mm_storeu_si128(&mut group[i], block);
    }
    tweak
}

/// The next block's tweak. The sign bits of the two halves, spread and swapped, select what is
/// carried: 1 into the high half, x^7 + x^2 + x + 1 into the low half.
#[inline]
#[target_feature(enable = "sse2")]
fn multiply_by_x(tweak: __m128i) -> __m128i {
    let signs = _mm_srai_epi32::<31>(_mm_shuffle_epi32::<0b00_01_00_11>(tweak));
    let carry = _mm_and_si128(signs, _mm_setr_epi32(0x87, 0, 1, 0));
    _mm_xor_si128(_mm_add_epi64(tweak, tweak), carry)
}
