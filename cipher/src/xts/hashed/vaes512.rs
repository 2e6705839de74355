//! On 512-bit registers: the whole page in one loop ([`fused`]), corrected where needed.
//!
//! The loop does not stop for the tag. In sealing, the groups that get it are encrypted once more
//! when it is known. In opening, the hash is that of the page as it was decrypted. It depends
//! linearly on the page, so for a group that `visit` changes the hash of the difference is added.

#[allow(unsafe_code, reason = "assembler")]
mod fused;

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm512_loadu_si512, _mm512_storeu_si512};
use zeroize::ZeroizeOnDrop;

use self::fused::State;
use super::super::aesni::{encrypt_tweak, load};
use super::super::expand::RoundKeys;
use super::super::vaes512::{LANES, WIDTH, multiply_by_powers, run_group, xor3};
use super::super::{Block, Tweak, multiply_by_x};
use super::aesni::{divide_by_x, reduce};
use super::{BLOCKS, GROUP, GROUPS, Groups, Job, Powers, of};
use crate::layout::{PAGE_SIZE, Page};

/// Bytes of a turn of the loop, and its turns.
const SPAN: usize = 1024;
const SPANS: usize = PAGE_SIZE / SPAN;
const HALF: usize = SPAN / 2;

type Half = [u8; HALF];

/// Registers of a span.
const REGISTERS: usize = SPAN / 64;

/// A group of the page.
type Group = [__m512i; WIDTH];

type Lanes = [Block; LANES];

/// The powers of a POLYVAL key that only this kernel uses.
#[derive(ZeroizeOnDrop)]
#[repr(align(64))]
pub(super) struct WidePowers {
    /// For each register of a span but the last, and then for the hash before: H^60, H^56, ...,
    /// H^4, H^64, each four times.
    spans: [Lanes; REGISTERS],
    /// The sums of both halves of two of them.
    sums: [Lanes; REGISTERS / 2],
    /// What the hash of a group is multiplied by, for each group of the page.
    groups: [Block; GROUPS],
}

/// By which a block is multiplied without change: x^128 (RFC 8452 section 3).
const ONE: Block = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xc2];

impl WidePowers {
    /// Also needs the last power for the blocks of a group.
    pub(super) fn new(key: &Block, group: &Block) -> Self {
        let [.., fourth] = of::<LANES>(key);
        let mut spans: [Block; REGISTERS] = of(&fourth);
        spans[..REGISTERS - 1].reverse();
        let mut groups = [ONE; GROUPS];
        groups[..GROUPS - 1].copy_from_slice(&of::<{ GROUPS - 1 }>(group));
        groups[..GROUPS - 1].reverse();
        let mut sums = [[[0; 16]; LANES]; REGISTERS / 2];
        for (sums, [x, y]) in sums.iter_mut().zip(spans.as_chunks().0) {
            *sums = [pack(sum(x), sum(y)); LANES];
        }
        Self { spans: spans.map(|power| [power; LANES]), sums, groups }
    }
}

/// The sum of both halves of a block.
fn sum(block: &Block) -> u64 {
    let number = u128::from_le_bytes(*block);
    number as u64 ^ (number >> 64) as u64
}

fn pack(low: u64, high: u64) -> Block {
    (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(in super::super) fn seal<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    late: Groups,
    finish: &mut impl FnMut(Block, &mut Page),
) {
    let header = header(page);
    let tweak = first_tweak(keys, job);
    let mut kept = [(tweak, [0; GROUP]); 2];
    for ((tweak, bytes), number) in kept.iter_mut().zip(late.clone()) {
        *tweak = multiply(*tweak, GROUP_TWEAKS[number]);
        *bytes = page.as_chunks().0[number];
    }
    let hash = seal_all(keys, job, tweak, page);
    for ((_, bytes), number) in kept.iter().zip(late.clone()) {
        page.as_chunks_mut().0[number] = *bytes;
    }
    finish(bytes(hash), page);
    for ((tweak, _), number) in kept.iter().zip(late) {
        run_alone(&keys.seal, *tweak, &mut page.as_chunks_mut().0[number]);
    }
    page[..16].copy_from_slice(&bytes(header));
}

#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
pub(in super::super) fn open<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    page: &mut Page,
    visit: &mut impl FnMut(usize, &mut Page) -> usize,
) -> Block {
    let header = header(page);
    let mut hash = open_all(keys, job, first_tweak(keys, job), page);
    let mut next = 0;
    while next < GROUPS {
        let group = &mut page.as_chunks_mut().0[next];
        let hashed = read(group);
        if next == 0 {
            // A whole register: only then need not the next load wait for what is stored.
            let [first, b, c, d] = hashed;
            write(group, &[_mm512_inserti32x4::<0>(first, header), b, c, d]);
        }
        let after = visit(next, page);
        hash = correct(hash, next, [&hashed, &read(&page.as_chunks().0[next])], job.powers);
        next = after.max(next + 1);
    }
    bytes(hash)
}

/// The tweak of the block before the data unit.
#[inline(never)]
#[target_feature(enable = "aes,pclmulqdq")]
fn first_tweak<const N: usize>(keys: &RoundKeys<N>, job: &Job<'_>) -> __m128i {
    divide_by_x(encrypt_tweak(&keys.tweak, job.tweak))
}

/// Encrypts all blocks of the page, and hashes it as it was before.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,pclmulqdq,vpclmulqdq")]
fn seal_all<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    tweak: __m128i,
    page: &mut Page,
) -> __m128i {
    let powers = &job.powers.wide;
    // The last block before the page: so it is the last lane's.
    let context = _mm512_inserti32x4::<3>(_mm512_setzero_si512(), load(job.context));
    let mut state = State::new(tweak, context);
    fused::seal(&mut state, &keys.seal, powers, page);
    let [low, high] = state.hash;
    add_lanes(reduce_lanes(low, high), job.powers.last())
}

/// Decrypts all blocks of the page, and hashes the result.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,pclmulqdq,vpclmulqdq")]
fn open_all<const N: usize>(
    keys: &RoundKeys<N>,
    job: &Job<'_>,
    tweak: __m128i,
    page: &mut Page,
) -> __m128i {
    let powers = &job.powers.wide;
    let mut behind: Half = [0; HALF];
    behind[HALF - 16..].copy_from_slice(job.context);
    let mut state = State::new(tweak, _mm512_setzero_si512());
    fused::open(&mut state, &keys.open, powers, page, &behind);
    let [low, middle, high] = state.products;
    let mut products = Products { low, middle: xor3(middle, low, high), high };
    let (_, half) = page.split_at(PAGE_SIZE - HALF);
    let (_, powers) = powers.spans.split_at(REGISTERS / 2);
    let (registers, last) = half.as_chunks().0.split_at(powers.len() - 1);
    for (register, powers) in registers.iter().zip(powers) {
        products.add(_mm512_loadu_si512(register), lanes(powers));
    }
    // What was hashed before is multiplied instead of the last register.
    for (register, powers) in last.iter().zip(&powers[registers.len()..]) {
        products.add(state.hash[1], lanes(powers));
        products.high = _mm512_xor_si512(products.high, _mm512_loadu_si512(register));
    }
    let [low, high] = products.halves();
    add_lanes(reduce_lanes(low, high), job.powers.last())
}

/// Encrypts a group, whose first tweak is given.
#[inline(never)]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn run_alone<const N: usize>(round_keys: &[Block; N], tweak: __m128i, group: &mut [u8; GROUP]) {
    let key = |round: usize| _mm512_broadcast_i32x4(load(&round_keys[round]));
    write(group, &run_group::<true, N>(key, &tweaks_from(tweak), read(group)));
}

/// The hash of a page after a group has changed.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,pclmulqdq,vpclmulqdq")]
fn correct(hash: __m128i, number: usize, [before, after]: [&Group; 2], powers: &Powers) -> __m128i {
    let mut products = Products::none();
    let registers = before.iter().zip(after);
    for ((before, after), powers) in registers.zip(powers.last::<BLOCKS>().as_chunks().0) {
        products.add(_mm512_xor_si512(*before, *after), lanes(powers));
    }
    let [low, high] = products.halves();
    let change = reduce(fold(low), fold(high));
    let mut products = Products::none();
    products.add(
        _mm512_zextsi128_si512(change),
        _mm512_zextsi128_si512(load(&powers.wide.groups[number])),
    );
    let [low, high] = products.halves();
    _mm_xor_si128(hash, reduce(fold(low), fold(high)))
}

impl State {
    /// With the tweak of the first block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
    fn new(tweak: __m128i, hash: __m512i) -> Self {
        let zero = _mm512_setzero_si512();
        let tweaks = tweaks_from(tweak);
        Self { tweaks, products: [zero; 3], hash: [zero, hash] }
    }
}

/// The tweaks of the blocks from the first one on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,vpclmulqdq")]
fn tweaks_from<const COUNT: usize>(first: __m128i) -> [__m512i; COUNT] {
    let first = _mm512_broadcast_i32x4(first);
    let lanes = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    let mut tweaks = [first; COUNT];
    for (i, tweaks) in tweaks.iter_mut().enumerate() {
        let power = _mm512_set1_epi64((i * LANES) as i64);
        *tweaks = multiply_by_powers(first, _mm512_add_epi64(lanes, power));
    }
    tweaks
}

/// The power of x for the first block of each group, by which tweaks are multiplied.
const GROUP_TWEAKS: [Tweak; GROUPS] = {
    let mut powers = [1; GROUPS];
    let mut power = 1;
    let mut block = 0;
    while block < GROUPS * BLOCKS {
        if block.is_multiple_of(BLOCKS) {
            powers[block / BLOCKS] = power;
        }
        power = multiply_by_x(power);
        block += 1;
    }
    powers
};

/// The product of a tweak and a power of x, modulo x^128 + x^7 + x^2 + x + 1.
#[inline]
#[target_feature(enable = "sse2,pclmulqdq")]
fn multiply(tweak: __m128i, power: Tweak) -> __m128i {
    let power = _mm_set_epi64x((power >> 64) as i64, power as i64);
    let middle = _mm_xor_si128(
        _mm_clmulepi64_si128::<0x01>(tweak, power),
        _mm_clmulepi64_si128::<0x10>(tweak, power),
    );
    let low = _mm_clmulepi64_si128::<0x00>(tweak, power);
    let high = _mm_clmulepi64_si128::<0x11>(tweak, power);
    let low = _mm_xor_si128(low, _mm_slli_si128::<8>(middle));
    let high = _mm_xor_si128(high, _mm_srli_si128::<8>(middle));
    // Of the highest 64 bits, 7 get beyond x^128 once more.
    let rest = _mm_set_epi64x(0, 0x87);
    let upper = _mm_clmulepi64_si128::<0x01>(high, rest);
    let lower = _mm_clmulepi64_si128::<0x00>(high, rest);
    let beyond = _mm_clmulepi64_si128::<0x01>(upper, rest);
    let sum = _mm_xor_si128(_mm_xor_si128(low, lower), _mm_slli_si128::<8>(upper));
    _mm_xor_si128(sum, beyond)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn read(group: &[u8; GROUP]) -> Group {
    let mut registers = [_mm512_setzero_si512(); WIDTH];
    for (register, bytes) in registers.iter_mut().zip(group.as_chunks().0) {
        *register = _mm512_loadu_si512(bytes);
    }
    registers
}

#[inline]
#[target_feature(enable = "avx512f")]
fn write(group: &mut [u8; GROUP], registers: &Group) {
    for (bytes, register) in group.as_chunks_mut().0.iter_mut().zip(registers) {
        _mm512_storeu_si512(bytes, *register);
    }
}

/// The first block, which is not encrypted.
#[inline]
#[target_feature(enable = "sse2")]
fn header(page: &Page) -> __m128i {
    load(page.first_chunk().unwrap_or(&[0; 16]))
}

#[inline]
#[target_feature(enable = "sse2")]
fn bytes(hash: __m128i) -> Block {
    let mut bytes = [0; 16];
    _mm_storeu_si128(&mut bytes, hash);
    bytes
}

/// Four blocks.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(blocks: &Lanes) -> __m512i {
    _mm512_loadu_si512(blocks.as_flattened().first_chunk().unwrap_or(&[0; 64]))
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
    fn add(&mut self, blocks: __m512i, powers: __m512i) {
        self.low = _mm512_xor_si512(self.low, _mm512_clmulepi64_epi128::<0x00>(blocks, powers));
        self.high = _mm512_xor_si512(self.high, _mm512_clmulepi64_epi128::<0x11>(blocks, powers));
        self.middle = xor3(
            self.middle,
            _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
            _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
        );
    }

    /// The low and the high half of the sum.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn halves(&self) -> [__m512i; 2] {
        [
            _mm512_xor_si512(self.low, _mm512_bslli_epi128::<8>(self.middle)),
            _mm512_xor_si512(self.high, _mm512_bsrli_epi128::<8>(self.middle)),
        ]
    }
}

/// The hash of the page from that of each lane, by the powers H^4 to H.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,pclmulqdq,vpclmulqdq")]
fn add_lanes(hash: __m512i, powers: &Lanes) -> __m128i {
    let mut products = Products::none();
    products.add(hash, lanes(powers));
    let [low, high] = products.halves();
    reduce(fold(low), fold(high))
}

/// Each lane reduced, see [`reduce`].
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn reduce_lanes(low: __m512i, high: __m512i) -> __m512i {
    let mut low = low;
    for _ in 0..2 {
        let multiple = _mm512_clmulepi64_epi128::<0x00>(low, polynomial());
        low = _mm512_xor_si512(_mm512_shuffle_epi32::<0b01_00_11_10>(low), multiple);
    }
    _mm512_xor_si512(low, high)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn polynomial() -> __m512i {
    // x^63 + x^62 + x^57
    _mm512_set1_epi64(0xc2 << 56)
}

/// The sum of the four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold(lanes: __m512i) -> __m128i {
    let half =
        _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}
