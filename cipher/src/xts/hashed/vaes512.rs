//! On 512-bit registers: four registers to a group.
//!
//! The encryption of a group does not depend on any hash, so the CPU runs both at the same time.
//! But each hash depends on the one before. So that nothing waits for it, products of two groups
//! are added before they are reduced, and the only one that needs the hash is added last.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm512_loadu_si512, _mm512_storeu_si512};

use super::super::aesni::{encrypt_tweak, load};
use super::super::expand::{RoundKeys, again};
use super::super::vaes512::{LANES, WIDTH, multiply_by_powers, multiply_by_x16, run_group, xor3};
use super::super::{Block, Tweak};
use super::aesni::{divide_by_x, reduce};
use super::{BLOCKS, GROUP, GROUPS, Groups, Job, POWERS, Powers};
use crate::layout::Page;

type Registers = [__m512i; WIDTH];

/// What passes from group to group.
struct State {
    tweaks: Registers,
    hash: __m128i,
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(in super::super) fn seal<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    late: Groups,
    finish: &mut impl FnMut(Block, &mut Page),
) {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let mut state = State::new(&keys.tweak, job);
    let mut kept = [state.tweaks; 2];
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<true, N>(&keys.seal, job.powers, &mut state, &mut groups[..late.start]);
    for (group, kept) in groups[late.clone()].iter().zip(&mut kept) {
        *kept = state.tweaks;
        hash_alone(&mut state.hash, group, job.powers);
        state.advance();
    }
    run::<true, N>(&keys.seal, job.powers, &mut state, &mut groups[late.end..]);
    finish(state.hash(), page);
    for (group, tweaks) in page.as_chunks_mut::<GROUP>().0[late].iter_mut().zip(&kept) {
        run_alone::<true, N>(&keys.seal, tweaks, group);
    }
    page[..16].copy_from_slice(&header);
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(in super::super) fn open<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    visit: &mut impl FnMut(usize, &mut Page) -> usize,
) -> Block {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let mut state = State::new(&keys.tweak, job);
    let (mut done, mut next) = (0, 0);
    while next < GROUPS {
        let groups = page.as_chunks_mut::<GROUP>().0;
        run::<false, N>(&keys.open, job.powers, &mut state, &mut groups[done..next]);
        run_alone::<false, N>(&keys.open, &state.tweaks, &mut groups[next]);
        if next == 0 {
            page[..16].copy_from_slice(&header);
        }
        let after = visit(next, page);
        hash_alone(&mut state.hash, &page.as_chunks().0[next], job.powers);
        state.advance();
        (done, next) = (next + 1, after.max(next + 1));
    }
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<false, N>(&keys.open, job.powers, &mut state, &mut groups[done..]);
    state.hash()
}

/// Encrypts or decrypts, and hashes the plaintext.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn run<const SEAL: bool, const N: usize>(
    round_keys: &[Block; N],
    powers: &Powers,
    state: &mut State,
    groups: &mut [[u8; GROUP]],
) {
    let mut tweaks = state.tweaks;
    let mut sum = state.hash;
    let (pairs, rest) = groups.as_chunks_mut::<2>();
    for [one, two] in pairs {
        let (keys, powers) = again((round_keys, powers));
        let [highest, powers @ ..] = registers(powers.last::<POWERS>()) else { break };
        let (powers_of_one, powers_of_two) = powers.split_at(WIDTH - 1);
        let [first, others @ ..] = run_group_in_place::<SEAL, N>(keys, &mut tweaks, one);
        let mut products = Products::none();
        products.add_all(&others, powers_of_one);
        let others = run_group_in_place::<SEAL, N>(again(keys), &mut tweaks, two);
        products.add_all(&others, powers_of_two);
        products.add(add(first, sum), highest);
        sum = products.reduce();
    }
    for group in rest {
        let (keys, powers) = again((round_keys, powers));
        let plain = run_group_in_place::<SEAL, N>(keys, &mut tweaks, group);
        sum = hash(sum, &plain, powers);
    }
    state.tweaks = tweaks;
    state.hash = sum;
}

/// Encrypts or decrypts, and does not hash.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn run_alone<const SEAL: bool, const N: usize>(
    round_keys: &[Block; N],
    tweaks: &Registers,
    group: &mut [u8; GROUP],
) {
    let output = run_group::<SEAL, N>(|round| broadcast(&round_keys[round]), tweaks, read(group));
    write(group, &output);
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq")]
fn hash_alone(sum: &mut __m128i, group: &[u8; GROUP], powers: &Powers) {
    *sum = hash(*sum, &read(group), powers);
}

/// Returns the plaintext of the group.
#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn run_group_in_place<const SEAL: bool, const N: usize>(
    round_keys: &[Block; N],
    tweaks: &mut Registers,
    group: &mut [u8; GROUP],
) -> Registers {
    let input = read(group);
    let output = run_group::<SEAL, N>(|round| broadcast(&round_keys[round]), tweaks, input);
    write(group, &output);
    for tweak in tweaks {
        *tweak = multiply_by_x16(*tweak);
    }
    if SEAL { input } else { output }
}

impl State {
    #[inline]
    #[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
    fn new<const N: usize>(tweak_keys: &[Block; N], job: &Job<'_>) -> Self {
        let tweak: Tweak = job.tweak;
        let first = _mm512_broadcast_i32x4(divide_by_x(encrypt_tweak(tweak_keys, tweak)));
        let lanes = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
        let mut tweaks = [first; WIDTH];
        for (i, tweaks) in tweaks.iter_mut().enumerate() {
            let powers = _mm512_add_epi64(lanes, _mm512_set1_epi64((i * LANES) as i64));
            *tweaks = multiply_by_powers(first, powers);
        }
        // Zeros before the context do not change the hash.
        let mut blocks = [0; GROUP];
        blocks[GROUP - 16..].copy_from_slice(job.context);
        let mut hash = _mm_setzero_si128();
        hash_alone(&mut hash, &blocks, job.powers);
        Self { tweaks, hash }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn advance(&mut self) {
        for tweak in &mut self.tweaks {
            *tweak = multiply_by_x16(*tweak);
        }
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    fn hash(&self) -> Block {
        let mut hash = [0; 16];
        _mm_storeu_si128(&mut hash, self.hash);
        hash
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn broadcast(key: &Block) -> __m512i {
    _mm512_broadcast_i32x4(load(key))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn read(group: &[u8; GROUP]) -> Registers {
    let mut registers = [_mm512_setzero_si512(); WIDTH];
    for (register, bytes) in registers.iter_mut().zip(group.as_chunks::<64>().0) {
        *register = _mm512_loadu_si512(bytes);
    }
    registers
}

#[inline]
#[target_feature(enable = "avx512f")]
fn write(group: &mut [u8; GROUP], registers: &Registers) {
    for (register, bytes) in registers.iter().zip(group.as_chunks_mut::<64>().0) {
        _mm512_storeu_si512(bytes, *register);
    }
}

/// The hash after a group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq")]
fn hash(sum: __m128i, group: &Registers, powers: &Powers) -> __m128i {
    let [first, others @ ..] = group;
    let [highest, powers @ ..] = registers(powers.last::<BLOCKS>()) else { return sum };
    let mut products = Products::none();
    products.add_all(others, powers);
    products.add(add(*first, sum), highest);
    products.reduce()
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(blocks: __m512i, sum: __m128i) -> __m512i {
    _mm512_xor_si512(blocks, _mm512_zextsi128_si512(sum))
}

fn registers(powers: &[Block]) -> &[[u8; 64]] {
    powers.as_flattened().as_chunks().0
}

/// Sums of products of 64-bit halves: of both low ones, of a low and a high one, of both high ones.
struct Products {
    low: __m512i,
    middle: __m512i,
    high: __m512i,
}

impl Products {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn none() -> Self {
        let zero = _mm512_setzero_si512();
        Self { low: zero, middle: zero, high: zero }
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add_all(&mut self, blocks: &[__m512i], powers: &[[u8; 64]]) {
        for (blocks, powers) in blocks.iter().zip(powers) {
            self.add(*blocks, powers);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(&mut self, blocks: __m512i, powers: &[u8; 64]) {
        let powers = _mm512_loadu_si512(powers);
        self.low = _mm512_xor_si512(self.low, _mm512_clmulepi64_epi128::<0x00>(blocks, powers));
        self.high = _mm512_xor_si512(self.high, _mm512_clmulepi64_epi128::<0x11>(blocks, powers));
        self.middle = xor3(
            self.middle,
            _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
            _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
        );
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,pclmulqdq")]
    fn reduce(self) -> __m128i {
        let low = _mm512_xor_si512(self.low, _mm512_bslli_epi128::<8>(self.middle));
        let high = _mm512_xor_si512(self.high, _mm512_bsrli_epi128::<8>(self.middle));
        reduce(fold(low), fold(high))
    }
}

/// The sum of the four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold(lanes: __m512i) -> __m128i {
    let half =
        _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}
