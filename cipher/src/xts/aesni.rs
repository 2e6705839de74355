//! XTS with AES instructions on 128-bit registers, eight blocks interleaved to hide the latency.
//!
//! The limit on recent CPUs is two `aesenc` per cycle: seven cycles for a block of AES-256. Intel's
//! have one more port for vector instructions, which should execute everything else, so at most
//! seven other instructions per block. Three XOR the tweak and round keys; doubling each tweak
//! would be five more. Hence the tweaks of 64 blocks are kept: multiplication by x^64 takes three.

use core::arch::x86_64::*;
use core::array;

use safe_unaligned_simd::x86_64::{_mm_loadu_si128, _mm_storeu_si128};

use super::expand::RoundKeys;
use super::{Block, Tweak};

/// Blocks whose rounds are interleaved.
const GROUP: usize = 8;

/// Groups whose tweaks are kept: 64 blocks.
const GROUPS: usize = 8;

#[target_feature(enable = "aes,avx,pclmulqdq")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true>(Rounds::new(&keys.seal), encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "aes,avx,pclmulqdq")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<false>(Rounds::new(&keys.open), encrypt_tweak(&keys.tweak, tweak), unit);
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

/// Round keys by use.
///
/// The number of rounds is known only at run time. If the compiler knew it, it would unroll the
/// rounds and then, to save registers, process the blocks one after the other instead of in
/// parallel.
#[derive(Clone, Copy)]
pub(super) struct Rounds<'a> {
    pub(super) first: &'a Block,
    pub(super) middle: &'a [Block],
    pub(super) last: &'a Block,
}

impl<'a> Rounds<'a> {
    pub(super) fn new<const N: usize>(keys: &'a [Block; N]) -> Self {
        Self { first: &keys[0], middle: &keys[1..N - 1], last: &keys[N - 1] }
    }
}

/// `SEAL` chooses the direction; `tweak` is the first block's. Not inlined, see [`Rounds`].
#[inline(never)]
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn run<const SEAL: bool>(rounds: Rounds<'_>, tweak: __m128i, unit: &mut [Block]) {
    let mut next = [tweak; GROUP];
    for i in 1..GROUP {
        next[i] = multiply_by_x(next[i - 1]);
    }
    let mut tweaks = [next; GROUPS];
    for tweaks in &mut tweaks {
        *tweaks = next;
        for tweak in &mut next {
            *tweak = multiply_by_x8(*tweak);
        }
    }
    for blocks in unit.chunks_mut(GROUPS * GROUP) {
        let (groups, rest) = blocks.as_chunks_mut::<GROUP>();
        for (group, tweaks) in groups.iter_mut().zip(&mut tweaks) {
            run_group::<SEAL, GROUP>(rounds, tweaks, group);
        }
        let unused = tweaks.as_flattened_mut().iter_mut().skip(groups.len() * GROUP);
        for (block, tweak) in rest.iter_mut().zip(unused) {
            run_group::<SEAL, 1>(rounds, array::from_mut(tweak), array::from_mut(block));
        }
    }
}

/// Replaces `tweaks` by those of the blocks 64 further on.
#[inline]
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn run_group<const SEAL: bool, const G: usize>(
    rounds: Rounds<'_>,
    tweaks: &mut [__m128i; G],
    group: &mut [Block; G],
) {
    let mut state = *tweaks;
    let key = load(rounds.first);
    for (block, bytes) in state.iter_mut().zip(&*group) {
        *block = _mm_xor_si128(_mm_xor_si128(*block, key), load(bytes));
    }
    for key in rounds.middle {
        let key = load(key);
        for block in &mut state {
            *block =
                if SEAL { _mm_aesenc_si128(*block, key) } else { _mm_aesdec_si128(*block, key) };
        }
    }
    let key = load(rounds.last);
    for ((block, tweak), bytes) in state.iter().zip(tweaks).zip(group) {
        // The last round XORs its key anyway: include the tweak in the same instruction.
        let key = _mm_xor_si128(key, *tweak);
        let block = if SEAL {
            _mm_aesenclast_si128(*block, key)
        } else {
            _mm_aesdeclast_si128(*block, key)
        };
        _mm_storeu_si128(bytes, block);
        *tweak = multiply_by_x64(*tweak);
    }
}

/// The next block's tweak. The sign bits of the two halves, spread and swapped, select the carries:
/// 1 into the high half, x^7 + x^2 + x + 1 into the low half.
#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn multiply_by_x(tweak: __m128i) -> __m128i {
    let signs = _mm_srai_epi32::<31>(_mm_shuffle_epi32::<0b00_01_00_11>(tweak));
    let carry = _mm_and_si128(signs, _mm_setr_epi32(0x87, 0, 1, 0));
    _mm_xor_si128(_mm_add_epi64(tweak, tweak), carry)
}

/// A tweak times x^8: one byte is shifted out and returns multiplied by x^128 = x^7 + x^2 + x + 1.
#[inline]
#[target_feature(enable = "sse2,pclmulqdq")]
pub(super) fn multiply_by_x8(tweak: __m128i) -> __m128i {
    let carry = _mm_srli_si128::<15>(tweak);
    let reduced = _mm_clmulepi64_si128::<0x00>(carry, _mm_setr_epi32(0x87, 0, 0, 0));
    _mm_xor_si128(_mm_slli_si128::<1>(tweak), reduced)
}

/// A tweak times x^64: likewise, with the whole high half shifted out.
#[inline]
#[target_feature(enable = "sse2,pclmulqdq")]
fn multiply_by_x64(tweak: __m128i) -> __m128i {
    let reduced = _mm_clmulepi64_si128::<0x01>(tweak, _mm_setr_epi32(0x87, 0, 0, 0));
    _mm_xor_si128(_mm_slli_si128::<8>(tweak), reduced)
}
