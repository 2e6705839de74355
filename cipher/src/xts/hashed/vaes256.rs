//! On 256-bit registers: eight registers to a group. For what is not inlined, and for [`again`],
//! see [`super`].

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256};

use super::super::Block;
use super::super::aesni::{Rounds, encrypt_tweak};
use super::super::expand::{RoundKeys, again};
use super::super::vaes256::{Lanes, WIDTH, first_tweaks, multiply_by_x16, run_group};
use super::aesni::{divide_by_x, reduce};
use super::{BLOCKS, GROUP, GROUPS, Groups, Job, Powers};
use crate::layout::Page;

type Registers = [__m256i; WIDTH];

/// What passes from group to group.
struct State {
    tweaks: Registers,
    hash: __m128i,
}

#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
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
        hash_alone(&mut state.hash, group, job.powers);
        advance(&mut state.tweaks);
    }
    run::<true>(rounds, job.powers, &mut state, &mut groups[late.end..]);
    finish(state.hash(), page);
    for (group, tweaks) in page.as_chunks_mut::<GROUP>().0[late].iter_mut().zip(&mut kept) {
        run_alone::<true>(rounds, tweaks, group);
    }
    page[..16].copy_from_slice(&header);
}

#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
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
        hash_alone(&mut state.hash, &page.as_chunks().0[next], job.powers);
        (done, next) = (next + 1, after.max(next + 1));
    }
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<false>(rounds, job.powers, &mut state, &mut groups[done..]);
    state.hash()
}

/// Encrypts or decrypts, and hashes the plaintext.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
fn run<const SEAL: bool>(
    rounds: Rounds<'_>,
    powers: &Powers,
    state: &mut State,
    groups: &mut [[u8; GROUP]],
) {
    for i in 0..groups.len() {
        let (rounds, powers) = again((rounds, powers));
        if SEAL {
            state.hash = hash(state.hash, &groups[i], powers);
        }
        run_in_place::<SEAL>(rounds, &mut state.tweaks, &mut groups[i]);
        // The group before: its plaintext is there already, so neither waits for the other.
        if !SEAL && i > 0 {
            state.hash = hash(state.hash, &groups[i - 1], powers);
        }
    }
    if !SEAL && let Some(last) = groups.last() {
        state.hash = hash(state.hash, last, powers);
    }
}

/// Encrypts or decrypts, and does not hash.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx2,vpclmulqdq")]
fn run_alone<const SEAL: bool>(
    rounds: Rounds<'_>,
    tweaks: &mut Registers,
    group: &mut [u8; GROUP],
) {
    run_in_place::<SEAL>(rounds, tweaks, group);
}

#[inline(never)]
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn hash_alone(sum: &mut __m128i, group: &[u8; GROUP], powers: &Powers) {
    *sum = hash(*sum, group, powers);
}

impl State {
    #[inline]
    #[target_feature(enable = "aes,vaes,avx2,pclmulqdq,vpclmulqdq")]
    fn new<const N: usize>(tweak_keys: &[Block; N], job: &Job<'_>) -> Self {
        let tweaks = first_tweaks(divide_by_x(encrypt_tweak(tweak_keys, job.tweak)));
        // Zeros before the context do not change the hash.
        let mut blocks = [0; GROUP];
        blocks[GROUP - 16..].copy_from_slice(job.context);
        let mut hash = _mm_setzero_si128();
        hash_alone(&mut hash, &blocks, job.powers);
        Self { tweaks, hash }
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
#[target_feature(enable = "avx2,vpclmulqdq")]
fn advance(tweaks: &mut Registers) {
    for tweak in tweaks {
        *tweak = multiply_by_x16(*tweak);
    }
}

/// Replaces `tweaks` by those of the next group.
#[inline]
#[target_feature(enable = "aes,vaes,avx2,vpclmulqdq")]
fn run_in_place<const SEAL: bool>(
    rounds: Rounds<'_>,
    tweaks: &mut Registers,
    group: &mut [u8; GROUP],
) {
    let registers: &mut [Lanes] = group.as_chunks_mut().0;
    let mut state = *tweaks;
    for (block, bytes) in state.iter_mut().zip(&*registers) {
        *block = _mm256_loadu_si256(bytes);
    }
    run_group::<SEAL, WIDTH>(rounds, tweaks, &mut state);
    for (block, bytes) in state.iter().zip(registers) {
        _mm256_storeu_si256(bytes, *block);
    }
    advance(tweaks);
}

/// The hash after a group.
///
/// Three multiplications for a block (Karatsuba's method), not four: AMD's CPUs do them on the
/// ports that do AES.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn hash(sum: __m128i, group: &[u8; GROUP], powers: &Powers) -> __m128i {
    let mut low = _mm256_setzero_si256();
    let mut middle = low;
    let mut high = low;
    // The first block of the group is multiplied by the highest power, and so is the sum.
    let mut sum = _mm256_zextsi128_si256(sum);
    let blocks: &[Lanes] = group.as_chunks().0;
    let powers: &[Lanes] = powers.last::<BLOCKS>().as_flattened().as_chunks().0;
    for (blocks, powers) in blocks.iter().zip(powers) {
        let powers = _mm256_loadu_si256(powers);
        let blocks = _mm256_xor_si256(_mm256_loadu_si256(blocks), sum);
        sum = _mm256_setzero_si256();
        low = _mm256_xor_si256(low, _mm256_clmulepi64_epi128::<0x00>(blocks, powers));
        high = _mm256_xor_si256(high, _mm256_clmulepi64_epi128::<0x11>(blocks, powers));
        let mixed = _mm256_clmulepi64_epi128::<0x00>(add_halves(blocks), add_halves(powers));
        middle = _mm256_xor_si256(middle, mixed);
    }
    let middle = _mm256_xor_si256(middle, _mm256_xor_si256(low, high));
    let low = _mm256_xor_si256(low, _mm256_bslli_epi128::<8>(middle));
    let high = _mm256_xor_si256(high, _mm256_bsrli_epi128::<8>(middle));
    reduce(fold(low), fold(high))
}

/// The sum of both halves of each lane, in each half.
#[inline]
#[target_feature(enable = "avx2")]
fn add_halves(blocks: __m256i) -> __m256i {
    _mm256_xor_si256(blocks, _mm256_shuffle_epi32::<0b01_00_11_10>(blocks))
}

/// The sum of the two lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn fold(lanes: __m256i) -> __m128i {
    _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes))
}
