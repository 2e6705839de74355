//! XTS with the AES instructions of aarch64, eight blocks interleaved to hide the latency.
//!
//! There are 32 registers: eight hold a group and eight its tweaks, so none of these is in memory.
//! Multiplication of a tweak by x^8 takes four instructions.

use core::arch::aarch64::*;
use core::array;

use super::expand::RoundKeys;
use super::{Block, Tweak, multiply_by_x};

/// Blocks whose rounds are interleaved.
pub(super) const GROUP: usize = 8;

/// The tweaks of a group.
pub(super) type Tweaks = [uint8x16_t; GROUP];

#[target_feature(enable = "neon,aes")]
pub(super) fn encrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<true>(Rounds::new(&keys.seal), encrypt_tweak(&keys.tweak, tweak), unit);
}

#[target_feature(enable = "neon,aes")]
pub(super) fn decrypt<const N: usize>(keys: &RoundKeys<N>, tweak: Tweak, unit: &mut [Block]) {
    run::<false>(Rounds::new(&keys.open), encrypt_tweak(&keys.tweak, tweak), unit);
}

/// Not by a pointer: builds with debug assertions would check it, and copy the block, which may be
/// a round key, to the stack for that.
#[inline]
#[target_feature(enable = "neon,aes")]
pub(super) fn load(block: &Block) -> uint8x16_t {
    vreinterpretq_u8_p128(u128::from_le_bytes(*block))
}

#[inline]
#[target_feature(enable = "neon,aes")]
pub(super) fn store(block: uint8x16_t) -> Block {
    vreinterpretq_p128_u8(block).to_le_bytes()
}

/// The tweak of a unit's first block: AES on the unit's number. Not inlined, so that no key is in a
/// register when its caller calls a function that saves registers on the stack.
#[inline(never)]
#[target_feature(enable = "neon,aes")]
pub(super) fn encrypt_tweak<const N: usize>(round_keys: &[Block; N], tweak: Tweak) -> Tweak {
    let rounds = Rounds::new(round_keys);
    let mut state = vreinterpretq_u8_p128(tweak);
    for key in rounds.mixed {
        state = vaesmcq_u8(vaeseq_u8(state, load(key)));
    }
    state = vaeseq_u8(state, load(rounds.last));
    vreinterpretq_p128_u8(veorq_u8(state, load(rounds.result)))
}

/// Round keys by use: these instructions XOR the key before the round, x86-64's after it.
///
/// The number of rounds is known only at run time. If the compiler knew it, it would keep all round
/// keys in registers, and for want of these store some on the stack, where nothing wipes them.
#[derive(Clone, Copy)]
pub(super) struct Rounds<'a> {
    /// Of all rounds but the last, which does not mix columns.
    mixed: &'a [Block],
    last: &'a Block,
    /// XORed with the result of the last round.
    result: &'a Block,
}

impl<'a> Rounds<'a> {
    pub(super) fn new<const N: usize>(keys: &'a [Block; N]) -> Self {
        Self { mixed: &keys[..N - 2], last: &keys[N - 2], result: &keys[N - 1] }
    }
}

/// `SEAL` chooses the direction; `tweak` is the first block's. Not inlined, see [`Rounds`].
#[inline(never)]
#[target_feature(enable = "neon,aes")]
fn run<const SEAL: bool>(rounds: Rounds<'_>, tweak: Tweak, unit: &mut [Block]) {
    let mut tweaks = first_tweaks(tweak);
    let (groups, rest) = unit.as_chunks_mut::<GROUP>();
    for group in groups {
        run_group::<SEAL, GROUP>(rounds, &mut tweaks, group);
    }
    for (block, tweak) in rest.iter_mut().zip(&mut tweaks) {
        run_group::<SEAL, 1>(rounds, array::from_mut(tweak), array::from_mut(block));
    }
}

/// The tweaks of the first group; `tweak` is the first block's.
#[inline]
#[target_feature(enable = "neon,aes")]
pub(super) fn first_tweaks(tweak: Tweak) -> Tweaks {
    let mut next = tweak;
    let mut tweaks = [vdupq_n_u8(0); GROUP];
    for tweak in &mut tweaks {
        *tweak = vreinterpretq_u8_p128(next);
        next = multiply_by_x(next);
    }
    tweaks
}

/// Replaces `tweaks` by those of the blocks eight further on.
#[inline]
#[target_feature(enable = "neon,aes")]
pub(super) fn run_group<const SEAL: bool, const G: usize>(
    rounds: Rounds<'_>,
    tweaks: &mut [uint8x16_t; G],
    group: &mut [Block; G],
) {
    let mut state = *tweaks;
    for (block, bytes) in state.iter_mut().zip(&*group) {
        *block = veorq_u8(*block, load(bytes));
    }
    for key in rounds.mixed {
        let key = load(key);
        for block in &mut state {
            // Many CPUs execute the two as one, if they follow each other.
            *block = if SEAL {
                vaesmcq_u8(vaeseq_u8(*block, key))
            } else {
                vaesimcq_u8(vaesdq_u8(*block, key))
            };
        }
    }
    let (last, result) = (load(rounds.last), load(rounds.result));
    for ((block, tweak), bytes) in state.iter().zip(tweaks).zip(group) {
        let block = if SEAL { vaeseq_u8(*block, last) } else { vaesdq_u8(*block, last) };
        *bytes = store(veorq_u8(block, veorq_u8(result, *tweak)));
        *tweak = multiply_by_x8(*tweak);
    }
}

/// A tweak times x^8: one byte is shifted out and returns multiplied by x^128 = x^7 + x^2 + x + 1.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn multiply_by_x8(tweak: uint8x16_t) -> uint8x16_t {
    let zero = vdupq_n_u8(0);
    let carry = vreinterpretq_p8_u8(vextq_u8::<15>(tweak, zero));
    let reduced = vmull_p8(vget_low_p8(carry), vdup_n_p8(0x87));
    veorq_u8(vextq_u8::<15>(zero, tweak), vreinterpretq_u8_p16(reduced))
}
