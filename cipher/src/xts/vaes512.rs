//! XTS with VAES on 512-bit registers: four blocks to a register, four registers to a group.
//!
//! The limit is one `vaesenc` per cycle, so all other instructions avoid the ports that it uses.
//! Each register keeps the tweaks of its own four blocks and advances them by 16 blocks at once.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm512_loadu_si512, _mm512_storeu_si512};

use super::aesni::{encrypt_tweak, load};
use super::expand::RoundKeys;
use super::{Block, Tweak};

/// Blocks to a register, and registers to a group.
pub(super) const LANES: usize = 4;
pub(super) const WIDTH: usize = 4;

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true, N>(&keys.seal, encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<false, N>(&keys.open, encrypt_tweak(&keys.tweak, tweak), unit);
}

/// `SEAL` chooses the direction; `tweak` is the first block's.
///
/// Blocks that do not fill a register or a group are processed first. A page's unit begins 16 bytes
/// into the page and has 511 blocks: 3 blocks and 3 registers in the first group, after which every
/// access is aligned to the cache line if the page is.
#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn run<const SEAL: bool, const N: usize>(
    round_keys: &[Block; N],
    tweak: __m128i,
    unit: &mut [Block],
) {
    let mut keys = [_mm512_setzero_si512(); N];
    for (key, bytes) in keys.iter_mut().zip(round_keys) {
        *key = _mm512_broadcast_i32x4(load(bytes));
    }
    let (head, body) = unit.split_at_mut(unit.len() % LANES);
    let registers = body.as_flattened_mut().as_chunks_mut::<64>().0;
    let (first, rest) = registers.split_at_mut(registers.len() % WIDTH);

    let tweak = _mm512_broadcast_i32x4(tweak);
    let lanes = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    let mut tweaks = [tweak; WIDTH];
    for (i, body_tweak) in tweaks.iter_mut().enumerate() {
        let power = _mm512_set1_epi64((head.len() + i * LANES) as i64);
        *body_tweak = multiply_by_powers(tweak, _mm512_add_epi64(lanes, power));
    }
    let head_tweak = multiply_by_powers(tweak, lanes);

    if !head.is_empty() || !first.is_empty() {
        // Branches, not copies of variable length: those would be calls that spill every register.
        let mut state = [_mm512_setzero_si512(); WIDTH];
        if let [a, rest @ ..] = &*head {
            state[0] = _mm512_zextsi128_si512(load(a));
            if let [b, rest @ ..] = rest {
                state[0] = _mm512_inserti32x4::<1>(state[0], load(b));
                if let [c, ..] = rest {
                    state[0] = _mm512_inserti32x4::<2>(state[0], load(c));
                }
            }
        }
        for (i, block) in state[1..].iter_mut().enumerate() {
            if let Some(bytes) = first.get(i) {
                *block = _mm512_loadu_si512(bytes);
            }
        }
        let [a, b, c, _] = tweaks;
        let state = run_group::<SEAL, N>(|round| keys[round], &[head_tweak, a, b, c], state);
        if let [a, rest @ ..] = head {
            _mm_storeu_si128(a, _mm512_castsi512_si128(state[0]));
            if let [b, rest @ ..] = rest {
                _mm_storeu_si128(b, _mm512_extracti32x4_epi32::<1>(state[0]));
                if let [c, ..] = rest {
                    _mm_storeu_si128(c, _mm512_extracti32x4_epi32::<2>(state[0]));
                }
            }
        }
        for (i, block) in state[1..].iter().enumerate() {
            if let Some(bytes) = first.get_mut(i) {
                _mm512_storeu_si512(bytes, *block);
                let [used, b, c, d] = tweaks;
                tweaks = [b, c, d, multiply_by_x16(used)];
            }
        }
    }

    for group in rest.as_chunks_mut::<WIDTH>().0 {
        let mut state = tweaks;
        for (block, bytes) in state.iter_mut().zip(&*group) {
            *block = _mm512_loadu_si512(bytes);
        }
        let state = run_group::<SEAL, N>(|round| keys[round], &tweaks, state);
        for (block, bytes) in state.iter().zip(group) {
            _mm512_storeu_si512(bytes, *block);
        }
        for tweak in &mut tweaks {
            *tweak = multiply_by_x16(*tweak);
        }
    }
}

#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(super) fn run_group<const SEAL: bool, const N: usize>(
    key: impl Fn(usize) -> __m512i,
    tweaks: &[__m512i; WIDTH],
    mut state: [__m512i; WIDTH],
) -> [__m512i; WIDTH] {
    for (block, tweak) in state.iter_mut().zip(tweaks) {
        *block = xor3(*block, *tweak, key(0));
    }
    for round in 1..N - 1 {
        let key = key(round);
        for block in &mut state {
            *block = if SEAL {
                _mm512_aesenc_epi128(*block, key)
            } else {
                _mm512_aesdec_epi128(*block, key)
            };
        }
    }
    for (block, tweak) in state.iter_mut().zip(tweaks) {
        // The last round XORs its key anyway: include the tweak in the same instruction.
        let key = _mm512_xor_si512(key(N - 1), *tweak);
        *block = if SEAL {
            _mm512_aesenclast_epi128(*block, key)
        } else {
            _mm512_aesdeclast_epi128(*block, key)
        };
    }
    state
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn xor3(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

/// Each 128-bit lane times x^16: rotate by two bytes, then correct for the two bytes that wrapped
/// around. They represent multiples of x^128 = x^7 + x^2 + x + 1, and the rotation has added the 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
pub(super) fn multiply_by_x16(tweaks: __m512i) -> __m512i {
    let rotation = _mm_setr_epi8(14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13);
    let rotated = _mm512_shuffle_epi8(tweaks, _mm512_broadcast_i32x4(rotation));
    let low_two = _mm512_broadcast_i32x4(_mm_setr_epi32(0xffff, 0, 0, 0));
    let carry = _mm512_and_si512(rotated, low_two);
    // No shifts: on Intel they take the port that does AES. Products take the other.
    let rest = _mm512_clmulepi64_epi128::<0x00>(carry, _mm512_set1_epi64(0x86));
    _mm512_xor_si512(rotated, rest)
}

/// Each 128-bit lane times x^k; `powers` holds each lane's k (at most 56) in both its halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(super) fn multiply_by_powers(tweaks: __m512i, powers: __m512i) -> __m512i {
    let shifted = _mm512_sllv_epi64(tweaks, powers);
    let carry = _mm512_srlv_epi64(tweaks, _mm512_sub_epi64(_mm512_set1_epi64(64), powers));
    // The low half's carry enters the high half; the high half's returns multiplied by x^128 =
    // x^7 + x^2 + x + 1.
    let reduced = _mm512_clmulepi64_epi128::<0x01>(carry, _mm512_set1_epi64(0x87));
    xor3(shifted, _mm512_bslli_epi128::<8>(carry), reduced)
}
