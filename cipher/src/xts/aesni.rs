//! XTS with AES instructions on 128-bit registers, eight blocks interleaved to hide the latency.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_loadu_si128, _mm_storeu_si128};

use super::expand::RoundKeys;
use super::{Block, Tweak};

/// Blocks whose rounds are interleaved; at most the number of middle rounds, 9 or 13.
const GROUP: usize = 8;

#[target_feature(enable = "aes,avx")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true, N>(&keys.seal, encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,avx")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<false, N>(&keys.open, encrypt_tweak(&keys.tweak, tweak), unit);
}

#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn load(block: &Block) -> __m128i {
    _mm_loadu_si128(block)
}

/// The tweak of a unit's first block: AES on the unit's number.
#[inline]
#[target_feature(enable = "aes")]
pub(super) fn encrypt_tweak<const N: usize>(round_keys: &[Block; N], tweak: Tweak) -> __m128i {
    let number = _mm_set_epi64x((tweak >> 64) as i64, tweak as i64);
    let mut state = _mm_xor_si128(number, load(&round_keys[0]));
    for key in &round_keys[1..N - 1] {
        state = _mm_aesenc_si128(state, load(key));
    }
    _mm_aesenclast_si128(state, load(&round_keys[N - 1]))
}

/// `SEAL` chooses the direction; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "aes,avx")]
fn run<const SEAL: bool, const N: usize>(keys: &[Block; N], tweak: __m128i, unit: &mut [Block]) {
    let mut tweaks = [tweak; GROUP];
    for i in 1..GROUP {
        tweaks[i] = multiply_by_x(tweaks[i - 1]);
    }
    let (groups, rest) = unit.as_chunks_mut::<GROUP>();
    for group in groups {
        tweaks = run_group::<SEAL, N>(keys, tweaks, group);
    }
    if !rest.is_empty() {
        let mut group = [[0; 16]; GROUP];
        group[..rest.len()].copy_from_slice(rest);
        run_group::<SEAL, N>(keys, tweaks, &mut group);
        rest.copy_from_slice(&group[..rest.len()]);
    }
}

/// Returns the tweaks of the next group, so that their chain of doublings runs beside the rounds of
/// this one instead of before its own.
#[inline]
#[target_feature(enable = "aes,avx")]
fn run_group<const SEAL: bool, const N: usize>(
    keys: &[Block; N],
    tweaks: [__m128i; GROUP],
    group: &mut [Block; GROUP],
) -> [__m128i; GROUP] {
    let mut state = tweaks;
    let key = load(&keys[0]);
    for (block, bytes) in state.iter_mut().zip(&*group) {
        *block = _mm_xor_si128(_mm_xor_si128(*block, key), load(bytes));
    }
    let mut next = tweaks;
    let mut tweak = tweaks[GROUP - 1];
    for (round, key) in keys[1..N - 1].iter().enumerate() {
        let key = load(key);
        for block in &mut state {
            *block =
                if SEAL { _mm_aesenc_si128(*block, key) } else { _mm_aesdec_si128(*block, key) };
        }
        if let Some(next) = next.get_mut(round) {
            tweak = multiply_by_x(tweak);
            *next = tweak;
        }
    }
    let key = load(&keys[N - 1]);
    for ((block, tweak), bytes) in state.into_iter().zip(tweaks).zip(group) {
        // The last round adds its key anyhow: let it add the tweak in the same step.
        let key = _mm_xor_si128(key, tweak);
        let block =
            if SEAL { _mm_aesenclast_si128(block, key) } else { _mm_aesdeclast_si128(block, key) };
        _mm_storeu_si128(bytes, block);
    }
    next
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
