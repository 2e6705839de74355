//! XTS with AES instructions on 128-bit registers, eight blocks interleaved to hide the latency.
//!
//! The tweaks of a batch are computed first, two to a 256-bit register, and read back from memory:
//! vector instructions share their ports with AES, loads and stores do not.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_loadu_si128, _mm_storeu_si128, _mm256_storeu_si256};

use super::expand::RoundKeys;
use super::{Block, Tweak};

/// Blocks whose rounds are interleaved.
const GROUP: usize = 8;
/// Blocks whose tweaks are computed at once.
const BATCH: usize = 64;

#[target_feature(enable = "aes,avx2")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true, N>(&keys.seal, encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,avx2")]
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

/// The tweaks of a batch with the first and the last round key already added.
struct Batch {
    first: [Block; BATCH],
    last: [Block; BATCH],
}

/// `SEAL` chooses the direction; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "aes,avx2")]
fn run<const SEAL: bool, const N: usize>(keys: &[Block; N], tweak: __m128i, unit: &mut [Block]) {
    let first_key = _mm256_broadcastsi128_si256(load(&keys[0]));
    let last_key = _mm256_broadcastsi128_si256(load(&keys[N - 1]));
    let mut tweaks = [_mm256_setzero_si256(); GROUP / 2];
    let mut next = tweak;
    for pair in &mut tweaks {
        let odd = multiply_by_x(next);
        *pair = _mm256_set_m128i(odd, next);
        next = multiply_by_x(odd);
    }

    let mut batch = Batch { first: [[0; 16]; BATCH], last: [[0; 16]; BATCH] };
    for blocks in unit.chunks_mut(BATCH) {
        let first = batch.first.as_flattened_mut().as_chunks_mut::<32>().0;
        let last = batch.last.as_flattened_mut().as_chunks_mut::<32>().0;
        let first = first.as_chunks_mut::<{ GROUP / 2 }>().0;
        let last = last.as_chunks_mut::<{ GROUP / 2 }>().0;
        let pairs = first.iter_mut().zip(last);
        for (first, last) in pairs.take(blocks.len().div_ceil(GROUP)) {
            for (i, tweak) in tweaks.iter_mut().enumerate() {
                _mm256_storeu_si256(&mut first[i], _mm256_xor_si256(*tweak, first_key));
                _mm256_storeu_si256(&mut last[i], _mm256_xor_si256(*tweak, last_key));
                *tweak = multiply_by_x8(*tweak);
            }
        }

        let first = batch.first.as_chunks::<GROUP>().0;
        let last = batch.last.as_chunks::<GROUP>().0;
        let (groups, rest) = blocks.as_chunks_mut::<GROUP>();
        let whole = groups.len();
        for (group, (first, last)) in groups.iter_mut().zip(first.iter().zip(last)) {
            run_group::<SEAL, N>(keys, first, last, group);
        }
        if let (false, Some(first), Some(last)) =
            (rest.is_empty(), first.get(whole), last.get(whole))
        {
            let mut group = [[0; 16]; GROUP];
            group[..rest.len()].copy_from_slice(rest);
            run_group::<SEAL, N>(keys, first, last, &mut group);
            rest.copy_from_slice(&group[..rest.len()]);
        }
    }
}

#[inline]
#[target_feature(enable = "aes,avx2")]
fn run_group<const SEAL: bool, const N: usize>(
    keys: &[Block; N],
    first: &[Block; GROUP],
    last: &[Block; GROUP],
    group: &mut [Block; GROUP],
) {
    let mut state = [_mm_setzero_si128(); GROUP];
    for i in 0..GROUP {
        state[i] = _mm_xor_si128(load(&group[i]), load(&first[i]));
    }
    for key in &keys[1..N - 1] {
        let key = load(key);
        for block in &mut state {
            *block =
                if SEAL { _mm_aesenc_si128(*block, key) } else { _mm_aesdec_si128(*block, key) };
        }
    }
    for i in 0..GROUP {
        let key = load(&last[i]);
        let block = if SEAL {
            _mm_aesenclast_si128(state[i], key)
        } else {
            _mm_aesdeclast_si128(state[i], key)
        };
        _mm_storeu_si128(&mut group[i], block);
    }
}

/// Each 128-bit lane times x^8: rotate by a byte, then add what the byte that came round is worth.
/// It stands at x^128 = x^7 + x^2 + x + 1, and the rotation has added the 1.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply_by_x8(tweaks: __m256i) -> __m256i {
    let rotation = _mm_setr_epi8(15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
    let rotated = _mm256_shuffle_epi8(tweaks, _mm256_broadcastsi128_si256(rotation));
    let low_byte = _mm256_broadcastsi128_si256(_mm_setr_epi32(0xff, 0, 0, 0));
    let carry = _mm256_and_si256(rotated, low_byte);
    let x1 = _mm256_add_epi32(carry, carry);
    let x2 = _mm256_add_epi32(x1, x1);
    let x7 = _mm256_slli_epi32::<7>(carry);
    _mm256_xor_si256(_mm256_xor_si256(rotated, x1), _mm256_xor_si256(x2, x7))
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
