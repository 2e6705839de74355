//! XTS with VAES on 512-bit registers: four blocks to a register, four registers to a group.
//!
//! The limit is one `vaesenc` per cycle, so all else is arranged to stay off the ports it runs on.
//! Each register keeps the tweaks of its own four blocks and steps them by 16 blocks at once.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm512_loadu_si512, _mm512_storeu_si512};

use super::Block;
use super::aesni::{encrypt_block, load};
use super::expand::RoundKeys;

/// Blocks to a group.
const GROUP: usize = 16;

#[target_feature(enable = "aes,vaes,avx512f,avx512bw")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Block, unit: &mut [Block]) {
    run::<true, N>(&keys.seal, encrypt_block(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Block, unit: &mut [Block]) {
    run::<false, N>(&keys.open, encrypt_block(&keys.tweak, tweak), unit);
}

/// `SEAL` chooses the direction; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw")]
fn run<const SEAL: bool, const N: usize>(
    round_keys: &[Block; N],
    tweak: __m128i,
    unit: &mut [Block],
) {
    let mut keys = [_mm512_setzero_si512(); N];
    for (key, bytes) in keys.iter_mut().zip(round_keys) {
        *key = _mm512_broadcast_i32x4(load(bytes));
    }
    let tweak = _mm512_broadcast_i32x4(tweak);
    let mut tweaks = [
        multiply_by_powers(tweak, _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3)),
        multiply_by_powers(tweak, _mm512_setr_epi64(4, 4, 5, 5, 6, 6, 7, 7)),
        multiply_by_powers(tweak, _mm512_setr_epi64(8, 8, 9, 9, 10, 10, 11, 11)),
        multiply_by_powers(tweak, _mm512_setr_epi64(12, 12, 13, 13, 14, 14, 15, 15)),
    ];

    let (groups, rest) = unit.as_chunks_mut::<GROUP>();
    for group in groups {
        run_group::<SEAL, N>(&keys, &tweaks, group);
        for tweak in &mut tweaks {
            *tweak = multiply_by_x16(*tweak);
        }
    }
    if !rest.is_empty() {
        let mut group = [[0; 16]; GROUP];
        group[..rest.len()].copy_from_slice(rest);
        run_group::<SEAL, N>(&keys, &tweaks, &mut group);
        rest.copy_from_slice(&group[..rest.len()]);
    }
}

#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw")]
fn run_group<const SEAL: bool, const N: usize>(
    keys: &[__m512i; N],
    tweaks: &[__m512i; 4],
    group: &mut [Block; GROUP],
) {
    let quarters = group.as_flattened_mut().as_chunks_mut::<64>().0;
    let mut state = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        let block = _mm512_loadu_si512(&quarters[i]);
        state[i] = xor3(block, tweaks[i], keys[0]);
    }
    for key in &keys[1..N - 1] {
        for block in &mut state {
            *block = if SEAL {
                _mm512_aesenc_epi128(*block, *key)
            } else {
                _mm512_aesdec_epi128(*block, *key)
            };
        }
    }
    for i in 0..4 {
        // The last round adds its key anyhow: let it add the tweak in the same step.
        let key = _mm512_xor_si512(keys[N - 1], tweaks[i]);
        let block = if SEAL {
            _mm512_aesenclast_epi128(state[i], key)
        } else {
            _mm512_aesdeclast_epi128(state[i], key)
        };
        _mm512_storeu_si512(&mut quarters[i], block);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor3(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

/// Each 128-bit lane times x^16: rotate by two bytes, then add what the two bytes that came
/// round are worth. They stand at x^128 = x^7 + x^2 + x + 1, and the rotation has added the 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn multiply_by_x16(tweaks: __m512i) -> __m512i {
    let rotation = _mm_setr_epi8(14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13);
    let rotated = _mm512_shuffle_epi8(tweaks, _mm512_broadcast_i32x4(rotation));
    let low_two = _mm512_broadcast_i32x4(_mm_setr_epi32(0xffff, 0, 0, 0));
    let carry = _mm512_and_si512(rotated, low_two);
    // Additions, not shifts: on Intel only one port shifts, and it is the one that does AES.
    let x1 = _mm512_add_epi32(carry, carry);
    let x2 = _mm512_add_epi32(x1, x1);
    let x7 = _mm512_slli_epi32::<7>(carry);
    _mm512_xor_si512(xor3(rotated, x1, x2), x7)
}

/// Each 128-bit lane times x^k; `powers` holds each lane's k (at most 56) in both its halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn multiply_by_powers(tweaks: __m512i, powers: __m512i) -> __m512i {
    let shifted = _mm512_sllv_epi64(tweaks, powers);
    let carry = _mm512_srlv_epi64(tweaks, _mm512_sub_epi64(_mm512_set1_epi64(64), powers));
    // The low half's carry enters the high half; the high half's is reduced into the low half.
    let carry = _mm512_shuffle_epi32::<0b01_00_11_10>(carry);
    let low_half = _mm512_broadcast_i32x4(_mm_setr_epi32(-1, -1, 0, 0));
    let reduced = _mm512_and_si512(carry, low_half);
    let x1 = _mm512_slli_epi64::<1>(reduced);
    let x2 = _mm512_slli_epi64::<2>(reduced);
    let x7 = _mm512_slli_epi64::<7>(reduced);
    xor3(_mm512_xor_si512(shifted, carry), xor3(x1, x2, x7), _mm512_setzero_si512())
}
