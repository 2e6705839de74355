//! With the AES instructions of aarch64: eight blocks interleaved, two times to a group. For what
//! is not inlined, and for [`again`], see [`super`].

use core::arch::aarch64::*;

use super::super::Block;
use super::super::armaes::{
    GROUP as HALF, Rounds, Tweaks, encrypt_tweak, first_tweaks, load, multiply_by_x8, run_group,
    store,
};
use super::super::expand::{RoundKeys, again};
use super::{GROUP, GROUPS, Groups, Job, Powers, divide_by_x};
use crate::layout::Page;

/// What passes from group to group.
struct State {
    tweaks: Tweaks,
    hash: uint8x16_t,
}

#[target_feature(enable = "neon,aes")]
pub(in super::super) fn seal<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    late: Groups,
    finish: &mut impl FnMut(Block, &mut Page),
) {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let rounds = Rounds::new(&keys.seal);
    let mut state = State::new(&keys.tweak, job);
    let mut kept = [state.tweaks; 2];
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<true>(rounds, job.powers, &mut state, &mut groups[..late.start]);
    for (group, kept) in groups[late.clone()].iter().zip(&mut kept) {
        *kept = state.tweaks;
        hash_alone::<HALF>(&mut state.hash, group, job.powers);
        for _ in 0..GROUP / size_of::<[Block; HALF]>() {
            advance(&mut state.tweaks);
        }
    }
    run::<true>(rounds, job.powers, &mut state, &mut groups[late.end..]);
    finish(store(state.hash), page);
    for (group, tweaks) in page.as_chunks_mut::<GROUP>().0[late].iter_mut().zip(&mut kept) {
        run_alone::<true>(rounds, tweaks, group);
    }
    page[..16].copy_from_slice(&header);
}

#[target_feature(enable = "neon,aes")]
pub(in super::super) fn open<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    visit: &mut impl FnMut(usize, &mut Page) -> usize,
) -> Block {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let rounds = Rounds::new(&keys.open);
    let mut state = State::new(&keys.tweak, job);
    let (mut done, mut next) = (0, 0);
    while next < GROUPS {
        let groups = page.as_chunks_mut::<GROUP>().0;
        run::<false>(rounds, job.powers, &mut state, &mut groups[done..next]);
        run_alone::<false>(rounds, &mut state.tweaks, &mut groups[next]);
        if next == 0 {
            page[..16].copy_from_slice(&header);
        }
        let after = visit(next, page);
        hash_alone::<HALF>(&mut state.hash, &page.as_chunks::<GROUP>().0[next], job.powers);
        (done, next) = (next + 1, after.max(next + 1));
    }
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<false>(rounds, job.powers, &mut state, &mut groups[done..]);
    store(state.hash)
}

/// Encrypts or decrypts, and hashes the plaintext.
#[inline(never)]
#[target_feature(enable = "neon,aes")]
fn run<const SEAL: bool>(
    rounds: Rounds<'_>,
    powers: &Powers,
    state: &mut State,
    groups: &mut [[u8; GROUP]],
) {
    let halves = groups.as_flattened_mut().as_chunks_mut().0.as_chunks_mut::<HALF>().0;
    for i in 0..halves.len() {
        let (rounds, powers) = again((rounds, powers));
        if SEAL {
            state.hash = hash(state.hash, &halves[i], powers);
        }
        run_group::<SEAL, HALF>(rounds, &mut state.tweaks, &mut halves[i]);
        // The half before: its plaintext is there already, so neither waits for the other.
        if !SEAL && i > 0 {
            state.hash = hash(state.hash, &halves[i - 1], powers);
        }
    }
    if !SEAL && let Some(last) = halves.last() {
        state.hash = hash(state.hash, last, powers);
    }
}

/// Encrypts or decrypts, and does not hash.
#[inline(never)]
#[target_feature(enable = "neon,aes")]
fn run_alone<const SEAL: bool>(rounds: Rounds<'_>, tweaks: &mut Tweaks, group: &mut [u8; GROUP]) {
    for half in group.as_chunks_mut().0.as_chunks_mut().0 {
        run_group::<SEAL, HALF>(again(rounds), tweaks, half);
    }
}

/// Hashes, `COUNT` blocks at a time.
#[inline(never)]
#[target_feature(enable = "neon,aes")]
fn hash_alone<const COUNT: usize>(sum: &mut uint8x16_t, bytes: &[u8], powers: &Powers) {
    for blocks in bytes.as_chunks().0.as_chunks().0 {
        *sum = hash::<COUNT>(*sum, blocks, again(powers));
    }
}

impl State {
    #[inline]
    #[target_feature(enable = "neon,aes")]
    fn new<const N: usize>(tweak_keys: &[Block; N], job: &Job<'_>) -> Self {
        let tweaks = first_tweaks(divide_by_x(encrypt_tweak(tweak_keys, job.tweak)));
        let mut hash = vdupq_n_u8(0);
        hash_alone::<1>(&mut hash, job.context, job.powers);
        Self { tweaks, hash }
    }
}

#[inline]
#[target_feature(enable = "neon,aes")]
fn advance(tweaks: &mut Tweaks) {
    for tweak in tweaks {
        *tweak = multiply_by_x8(*tweak);
    }
}

/// The hash after `blocks`.
///
/// Three multiplications for a block (Karatsuba's method), not four: some CPUs, Neoverse N1 among
/// them, have a single unit for AES and PMULL.
#[inline]
#[target_feature(enable = "neon,aes")]
fn hash<const COUNT: usize>(
    sum: uint8x16_t,
    blocks: &[Block; COUNT],
    powers: &Powers,
) -> uint8x16_t {
    let zero = vdupq_n_u8(0);
    let (mut low, mut middle, mut high) = (zero, zero, zero);
    let mut sum = sum;
    for (block, power) in blocks.iter().zip(powers.last::<COUNT>()) {
        let power = load(power);
        let block = veorq_u8(load(block), sum);
        sum = zero;
        low = veorq_u8(low, multiply_low(block, power));
        high = veorq_u8(high, multiply_high(block, power));
        let product = multiply_low(add_halves(block), add_halves(power));
        middle = veorq_u8(middle, product);
    }
    middle = veorq_u8(middle, veorq_u8(low, high));
    low = veorq_u8(low, vextq_u8::<8>(zero, middle));
    high = veorq_u8(high, vextq_u8::<8>(middle, zero));
    reduce(low, high)
}

/// The product of the low halves, as polynomials over GF(2).
#[inline]
#[target_feature(enable = "neon,aes")]
fn multiply_low(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
    let (a, b) = (vreinterpretq_p64_u8(a), vreinterpretq_p64_u8(b));
    vreinterpretq_u8_p128(vmull_p64(vgetq_lane_p64::<0>(a), vgetq_lane_p64::<0>(b)))
}

/// Likewise of the high halves.
#[inline]
#[target_feature(enable = "neon,aes")]
fn multiply_high(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
    vreinterpretq_u8_p128(vmull_high_p64(vreinterpretq_p64_u8(a), vreinterpretq_p64_u8(b)))
}

/// The sum of both halves, in each half.
#[inline]
#[target_feature(enable = "neon")]
fn add_halves(block: uint8x16_t) -> uint8x16_t {
    veorq_u8(block, swap_halves(block))
}

#[inline]
#[target_feature(enable = "neon")]
fn swap_halves(block: uint8x16_t) -> uint8x16_t {
    vextq_u8::<8>(block, block)
}

/// A product of 256 bits times x^-128, modulo x^128 + x^127 + x^126 + x^121 + 1 (RFC 8452 section
/// 3): the low half is removed 64 bits at a time, by adding multiples of the polynomial.
#[inline]
#[target_feature(enable = "neon,aes")]
fn reduce(low: uint8x16_t, high: uint8x16_t) -> uint8x16_t {
    // x^63 + x^62 + x^57
    let polynomial = vreinterpretq_u8_p128(0xc2 << 56);
    let mut low = low;
    for _ in 0..2 {
        low = veorq_u8(swap_halves(low), multiply_low(low, polynomial));
    }
    veorq_u8(low, high)
}
