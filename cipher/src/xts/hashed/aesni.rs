//! On 128-bit registers: eight blocks interleaved, two times to a group. For what is not inlined,
//! and for [`again`], see [`super`].

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_loadu_si128, _mm_storeu_si128};

use super::super::Block;
use super::super::aesni::{Rounds, encrypt_tweak, load, multiply_by_x, multiply_by_x8};
use super::super::expand::{RoundKeys, again};
use super::{BLOCKS, GROUP, GROUPS, Groups, Job, Powers};
use crate::layout::Page;

/// Blocks whose rounds are interleaved.
const HALF: usize = BLOCKS / 2;

type Tweaks = [__m128i; HALF];

/// What passes from group to group.
struct State {
    tweaks: Tweaks,
    hash: __m128i,
}

#[target_feature(enable = "aes,avx,pclmulqdq")]
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
        hash_alone::<BLOCKS>(&mut state.hash, group, job.powers);
        for _ in 0..BLOCKS / HALF {
            advance(&mut state.tweaks);
        }
    }
    run::<true>(rounds, job.powers, &mut state, &mut groups[late.end..]);
    finish(state.hash(), page);
    for (group, tweaks) in page.as_chunks_mut::<GROUP>().0[late].iter_mut().zip(&mut kept) {
        run_alone::<true>(rounds, tweaks, group);
    }
    page[..16].copy_from_slice(&header);
}

#[target_feature(enable = "aes,avx,pclmulqdq")]
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
        hash_alone::<BLOCKS>(&mut state.hash, &page.as_chunks::<GROUP>().0[next], job.powers);
        (done, next) = (next + 1, after.max(next + 1));
    }
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<false>(rounds, job.powers, &mut state, &mut groups[done..]);
    state.hash()
}

/// Encrypts or decrypts, and hashes the plaintext.
#[inline(never)]
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn run<const SEAL: bool>(
    rounds: Rounds<'_>,
    powers: &Powers,
    state: &mut State,
    groups: &mut [[u8; GROUP]],
) {
    let halves = groups.as_flattened_mut().as_chunks_mut().0.as_chunks_mut::<HALF>().0;
    let mut keys = (rounds, powers);
    for i in 0..halves.len() {
        // In each turn it takes some per cent more time.
        if i.is_multiple_of(4) {
            keys = again(keys);
        }
        let (rounds, powers) = keys;
        if SEAL {
            state.hash = hash(state.hash, &halves[i], powers);
        }
        run_half::<SEAL>(rounds, &mut state.tweaks, &mut halves[i]);
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
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn run_alone<const SEAL: bool>(rounds: Rounds<'_>, tweaks: &mut Tweaks, group: &mut [u8; GROUP]) {
    for half in group.as_chunks_mut().0.as_chunks_mut().0 {
        run_half::<SEAL>(again(rounds), tweaks, half);
    }
}

/// Hashes, `COUNT` blocks at a time.
#[inline(never)]
#[target_feature(enable = "avx,pclmulqdq")]
fn hash_alone<const COUNT: usize>(sum: &mut __m128i, bytes: &[u8], powers: &Powers) {
    for blocks in bytes.as_chunks().0.as_chunks().0 {
        *sum = hash::<COUNT>(*sum, blocks, again(powers));
    }
}

impl State {
    #[inline]
    #[target_feature(enable = "aes,avx,pclmulqdq")]
    fn new<const N: usize>(tweak_keys: &[Block; N], job: &Job<'_>) -> Self {
        let mut tweaks = [divide_by_x(encrypt_tweak(tweak_keys, job.tweak)); HALF];
        for i in 1..HALF {
            tweaks[i] = multiply_by_x(tweaks[i - 1]);
        }
        let mut hash = _mm_setzero_si128();
        hash_alone::<1>(&mut hash, job.context, job.powers);
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
#[target_feature(enable = "sse2,pclmulqdq")]
fn advance(tweaks: &mut Tweaks) {
    for tweak in tweaks {
        *tweak = multiply_by_x8(*tweak);
    }
}

/// Replaces `tweaks` by those of the next eight blocks.
#[inline]
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn run_half<const SEAL: bool>(rounds: Rounds<'_>, tweaks: &mut Tweaks, half: &mut [Block; HALF]) {
    let mut state = *tweaks;
    let key = load(rounds.first);
    for (block, bytes) in state.iter_mut().zip(&*half) {
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
    for ((block, tweak), bytes) in state.iter().zip(tweaks).zip(half) {
        let key = _mm_xor_si128(key, *tweak);
        let block = if SEAL {
            _mm_aesenclast_si128(*block, key)
        } else {
            _mm_aesdeclast_si128(*block, key)
        };
        _mm_storeu_si128(bytes, block);
        *tweak = multiply_by_x8(*tweak);
    }
}

/// The hash after `blocks`.
#[inline]
#[target_feature(enable = "avx,pclmulqdq")]
fn hash<const COUNT: usize>(sum: __m128i, blocks: &[Block; COUNT], powers: &Powers) -> __m128i {
    let mut low = _mm_setzero_si128();
    let mut middle = low;
    let mut high = low;
    let mut sum = sum;
    for (block, power) in blocks.iter().zip(powers.last::<COUNT>()) {
        let power = _mm_loadu_si128(power);
        let block = _mm_xor_si128(_mm_loadu_si128(block), sum);
        sum = _mm_setzero_si128();
        low = _mm_xor_si128(low, _mm_clmulepi64_si128::<0x00>(block, power));
        high = _mm_xor_si128(high, _mm_clmulepi64_si128::<0x11>(block, power));
        let mixed = _mm_clmulepi64_si128::<0x01>(block, power);
        middle =
            _mm_xor_si128(middle, _mm_xor_si128(mixed, _mm_clmulepi64_si128::<0x10>(block, power)));
    }
    low = _mm_xor_si128(low, _mm_slli_si128::<8>(middle));
    high = _mm_xor_si128(high, _mm_srli_si128::<8>(middle));
    reduce(low, high)
}

/// A product of 256 bits times x^-128, modulo x^128 + x^127 + x^126 + x^121 + 1 (RFC 8452 section
/// 3): the low half is removed 64 bits at a time, by adding multiples of the polynomial.
#[inline]
#[target_feature(enable = "sse2,pclmulqdq")]
pub(super) fn reduce(low: __m128i, high: __m128i) -> __m128i {
    // x^63 + x^62 + x^57
    let polynomial = _mm_set1_epi64x(0xc2 << 56);
    let mut low = low;
    for _ in 0..2 {
        let multiple = _mm_clmulepi64_si128::<0x00>(low, polynomial);
        low = _mm_xor_si128(_mm_shuffle_epi32::<0b01_00_11_10>(low), multiple);
    }
    _mm_xor_si128(low, high)
}

/// The tweak of the block before.
#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn divide_by_x(tweak: __m128i) -> __m128i {
    let mut halves = [0; 16];
    _mm_storeu_si128(&mut halves, tweak);
    let tweak = super::divide_by_x(u128::from_le_bytes(halves));
    _mm_set_epi64x((tweak >> 64) as i64, tweak as i64)
}
