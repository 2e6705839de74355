//! XTS with VAES on 256-bit registers, for CPUs without AVX-512: two blocks to a register, eight
//! registers to a group.
//!
//! There are 16 registers: eight hold a group, and tweaks are in memory, as in [`super::aesni`].

use core::arch::x86_64::*;
use core::array;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256};

use super::aesni::{Rounds, encrypt_tweak, load, multiply_by_x};
use super::expand::{RoundKeys, again};
use super::{Block, Tweak};

/// The bytes of a register.
pub(super) type Lanes = [u8; 32];

/// Blocks to a register, and registers to a group.
const LANES: usize = 2;
pub(super) const WIDTH: usize = 8;

/// Groups whose tweaks are kept: 64 blocks.
const GROUPS: usize = 4;

#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true>(Rounds::new(&keys.seal), encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<false>(Rounds::new(&keys.open), encrypt_tweak(&keys.tweak, tweak), unit);
}

/// `SEAL` chooses the direction; `tweak` is the first block's. Not inlined, see [`Rounds`].
///
/// A block that does not fill a register is processed first. A page's unit begins 16 bytes into the
/// page and has 511 blocks, so every other access is aligned if the page is.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
fn run<const SEAL: bool>(rounds: Rounds<'_>, tweak: __m128i, unit: &mut [Block]) {
    let (head, body) = unit.split_at_mut(unit.len() % LANES);
    let mut tweak = tweak;
    if let [block] = head {
        let mut state = [_mm256_zextsi128_si256(load(block))];
        run_group::<SEAL, 1>(rounds, &[_mm256_zextsi128_si256(tweak)], &mut state);
        _mm_storeu_si128(block, _mm256_castsi256_si128(state[0]));
        tweak = multiply_by_x(tweak);
    }
    let mut next = first_tweaks(tweak);
    let mut tweaks = [next; GROUPS];
    for tweaks in &mut tweaks {
        *tweaks = next;
        for tweak in &mut next {
            *tweak = multiply_by_x16(*tweak);
        }
    }
    let registers = body.as_flattened_mut().as_chunks_mut::<{ size_of::<Lanes>() }>().0;
    for registers in registers.chunks_mut(GROUPS * WIDTH) {
        let (groups, rest) = registers.as_chunks_mut::<WIDTH>();
        for (group, tweaks) in groups.iter_mut().zip(&mut tweaks) {
            run_in_place::<SEAL, WIDTH>(rounds, tweaks, group);
        }
        let unused = tweaks.as_flattened_mut().iter_mut().skip(groups.len() * WIDTH);
        for (register, tweak) in rest.iter_mut().zip(unused) {
            run_in_place::<SEAL, 1>(rounds, array::from_mut(tweak), array::from_mut(register));
        }
    }
}

/// Replaces `tweaks` by those of the blocks 64 further on.
#[inline]
#[target_feature(enable = "aes,vaes,avx2,vpclmulqdq")]
fn run_in_place<const SEAL: bool, const W: usize>(
    rounds: Rounds<'_>,
    tweaks: &mut [__m256i; W],
    group: &mut [Lanes; W],
) {
    let mut state = *tweaks;
    for (block, bytes) in state.iter_mut().zip(&*group) {
        *block = _mm256_loadu_si256(bytes);
    }
    run_group::<SEAL, W>(rounds, tweaks, &mut state);
    for ((block, bytes), tweak) in state.iter().zip(group).zip(tweaks) {
        _mm256_storeu_si256(bytes, *block);
        *tweak = multiply_by_x64(*tweak);
    }
}

#[inline]
#[target_feature(enable = "aes,vaes,avx2")]
pub(super) fn run_group<const SEAL: bool, const W: usize>(
    rounds: Rounds<'_>,
    tweaks: &[__m256i; W],
    state: &mut [__m256i; W],
) {
    let key = broadcast(again(rounds.first));
    for (block, tweak) in state.iter_mut().zip(tweaks) {
        *block = _mm256_xor_si256(*block, _mm256_xor_si256(*tweak, key));
    }
    for key in rounds.middle {
        let key = broadcast(key);
        for block in &mut *state {
            *block = if SEAL {
                _mm256_aesenc_epi128(*block, key)
            } else {
                _mm256_aesdec_epi128(*block, key)
            };
        }
    }
    let key = broadcast(again(rounds.last));
    for (block, tweak) in state.iter_mut().zip(tweaks) {
        // The last round XORs its key anyway: include the tweak in the same instruction.
        let key = _mm256_xor_si256(key, *tweak);
        *block = if SEAL {
            _mm256_aesenclast_epi128(*block, key)
        } else {
            _mm256_aesdeclast_epi128(*block, key)
        };
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn broadcast(key: &Block) -> __m256i {
    _mm256_broadcastsi128_si256(load(key))
}

/// The tweaks of the first group; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
pub(super) fn first_tweaks(tweak: __m128i) -> [__m256i; WIDTH] {
    let mut tweaks = [_mm256_setzero_si256(); WIDTH];
    let mut next = tweak;
    for tweaks in &mut tweaks {
        let second = multiply_by_x(next);
        *tweaks = _mm256_set_m128i(second, next);
        next = multiply_by_x(second);
    }
    tweaks
}

/// Each 128-bit lane times x^16: two bytes are shifted out and return multiplied by x^128 = x^7 +
/// x^2 + x + 1.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
pub(super) fn multiply_by_x16(tweaks: __m256i) -> __m256i {
    let carry = _mm256_bsrli_epi128::<14>(tweaks);
    let reduced = _mm256_clmulepi64_epi128::<0x00>(carry, _mm256_set1_epi64x(0x87));
    _mm256_xor_si256(_mm256_bslli_epi128::<2>(tweaks), reduced)
}

/// Likewise x^64, with the whole high half shifted out.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn multiply_by_x64(tweaks: __m256i) -> __m256i {
    let reduced = _mm256_clmulepi64_epi128::<0x01>(tweaks, _mm256_set1_epi64x(0x87));
    _mm256_xor_si256(_mm256_bslli_epi128::<8>(tweaks), reduced)
}
