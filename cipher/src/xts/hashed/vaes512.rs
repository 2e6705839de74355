//! On 512-bit registers: four registers to a group.
//!
//! Of 16 blocks four products each are added before they are reduced once. The encryption of a
//! group does not depend on its hash, so the CPU runs both at the same time.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm512_loadu_si512, _mm512_storeu_si512};

use super::super::aesni::{encrypt_tweak, load};
use super::super::expand::RoundKeys;
use super::super::vaes512::{LANES, WIDTH, multiply_by_powers, multiply_by_x16, run_group, xor3};
use super::super::{Block, Tweak};
use super::aesni::{divide_by_x, reduce};
use super::{GROUP, GROUPS, Groups, Job, Powers};
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
    finish: impl FnOnce(Block, &mut Page),
) {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let mut state = State::new(&keys.tweak, job);
    let mut kept = [state.tweaks; 2];
    let groups = page.as_chunks_mut::<GROUP>().0;
    run::<true, N>(&keys.seal, job.powers, &mut state, &mut groups[..late.start]);
    for (group, kept) in groups[late.clone()].iter().zip(&mut kept) {
        *kept = state.tweaks;
        state.hash = hash(state.hash, &read(group), job.powers);
        state.advance();
    }
    run::<true, N>(&keys.seal, job.powers, &mut state, &mut groups[late.end..]);
    finish(state.hash(), page);
    let keys = broadcast(&keys.seal);
    for (group, tweaks) in page.as_chunks_mut::<GROUP>().0[late].iter_mut().zip(&kept) {
        let sealed = run_group::<true, N>(&keys, tweaks, read(group));
        write(group, &sealed);
    }
    page[..16].copy_from_slice(&header);
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(in super::super) fn open<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    mut visit: impl FnMut(usize, &mut Page) -> usize,
) -> Block {
    let mut header: Block = [0; 16];
    header.copy_from_slice(&page[..16]);
    let mut state = State::new(&keys.tweak, job);
    let (mut done, mut next) = (0, 0);
    while next < GROUPS {
        let groups = page.as_chunks_mut::<GROUP>().0;
        run::<false, N>(&keys.open, job.powers, &mut state, &mut groups[done..next]);
        let opened =
            run_group::<false, N>(&broadcast(&keys.open), &state.tweaks, read(&groups[next]));
        write(&mut groups[next], &opened);
        if next == 0 {
            page[..16].copy_from_slice(&header);
        }
        let after = visit(next, page);
        state.hash = hash(state.hash, &read(&page.as_chunks().0[next]), job.powers);
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
    let keys = broadcast(round_keys);
    let mut tweaks = state.tweaks;
    let mut sum = state.hash;
    for group in groups {
        let input = read(group);
        let output = run_group::<SEAL, N>(&keys, &tweaks, input);
        write(group, &output);
        sum = hash(sum, if SEAL { &input } else { &output }, powers);
        for tweak in &mut tweaks {
            *tweak = multiply_by_x16(*tweak);
        }
    }
    state.tweaks = tweaks;
    state.hash = sum;
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
        let mut blocks = [_mm512_setzero_si512(); WIDTH];
        blocks[WIDTH - 1] = _mm512_inserti32x4::<3>(_mm512_setzero_si512(), load(job.context));
        Self { tweaks, hash: hash(_mm_setzero_si128(), &blocks, job.powers) }
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
fn broadcast<const N: usize>(round_keys: &[Block; N]) -> [__m512i; N] {
    let mut keys = [_mm512_setzero_si512(); N];
    for (key, bytes) in keys.iter_mut().zip(round_keys) {
        *key = _mm512_broadcast_i32x4(load(bytes));
    }
    keys
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

/// The hash after a group. The product of 64-bit halves gives a low, a middle and a high part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq")]
fn hash(sum: __m128i, group: &Registers, powers: &Powers) -> __m128i {
    let powers = powers.0.as_flattened().as_chunks::<64>().0;
    let mut low = _mm512_setzero_si512();
    let mut middle = low;
    let mut high = low;
    for (i, (blocks, powers)) in group.iter().zip(powers).enumerate() {
        let powers = _mm512_loadu_si512(powers);
        let blocks =
            if i == 0 { _mm512_xor_si512(*blocks, _mm512_zextsi128_si512(sum)) } else { *blocks };
        low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128::<0x00>(blocks, powers));
        high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128::<0x11>(blocks, powers));
        middle = xor3(
            middle,
            _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
            _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
        );
    }
    low = _mm512_xor_si512(low, _mm512_bslli_epi128::<8>(middle));
    high = _mm512_xor_si512(high, _mm512_bsrli_epi128::<8>(middle));
    reduce(fold(low), fold(high))
}

/// The sum of the four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold(lanes: __m512i) -> __m128i {
    let half =
        _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}
