//! On 512-bit registers: four registers to a group.
//!
//! The encryption of a group does not depend on any hash, so the CPU runs both at the same time.
//! But each hash depends on the one before. So that nothing waits for it, products of two groups
//! are added before they are reduced, each lane for itself until the end. The products of a group
//! are computed among the rounds of the next one, so that both are near each other in the program:
//! a CPU looks ahead a few hundred instructions.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm_storeu_si128, _mm512_loadu_si512, _mm512_storeu_si512};

use super::super::aesni::{encrypt_tweak, load};
use super::super::expand::{RoundKeys, again};
use super::super::vaes512::{LANES, WIDTH, multiply_by_powers, multiply_by_x16, run_group, xor3};
use super::super::{Block, Tweak};
use super::aesni::{divide_by_x, reduce};
use super::{BLOCKS, GROUP, GROUPS, Groups, Job, Powers};
use crate::layout::Page;

type Registers = [__m512i; WIDTH];

/// The rounds before which products are computed.
const FIRST: usize = 2;
const SECOND: usize = 7;

/// Encrypts or decrypts a group and returns its plaintext. Meanwhile it adds the products of other
/// blocks with powers. Not a function, because such a large one is not always inlined, and then the
/// registers are passed on the stack.
macro_rules! pass {
    (
        $seal:ident, $round_keys:ident, $tweaks:ident, $group:ident;
        $products:ident += $blocks:ident * $load:ident($powers:expr)
    ) => {{
        let [a, b, c, d] = $blocks;
        let keys = again($round_keys);
        let input = read($group);
        let mut output = input;
        for (block, tweak) in output.iter_mut().zip(&$tweaks) {
            *block = xor3(*block, *tweak, broadcast(&keys[0]));
        }
        for round in 1..FIRST {
            output = one_round::<$seal>(output, broadcast(&keys[round]));
        }
        let [x, y, _, _] = $load(again($powers));
        $products.add([a, b], [x, y]);
        let keys = again($round_keys);
        for round in FIRST..SECOND {
            output = one_round::<$seal>(output, broadcast(&keys[round]));
        }
        let [_, _, z, w] = $load(again($powers));
        $products.add([c, d], [z, w]);
        let keys = again($round_keys);
        for round in SECOND..N - 1 {
            output = one_round::<$seal>(output, broadcast(&keys[round]));
        }
        for (block, tweak) in output.iter_mut().zip(&$tweaks) {
            let key = _mm512_xor_si512(broadcast(&keys[N - 1]), *tweak);
            *block = if $seal {
                _mm512_aesenclast_epi128(*block, key)
            } else {
                _mm512_aesdeclast_epi128(*block, key)
            };
        }
        write($group, &output);
        for tweak in &mut $tweaks {
            *tweak = multiply_by_x16(*tweak);
        }
        if $seal { input } else { output }
    }};
}

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
    let (pairs, rest) = groups.as_chunks_mut::<2>();
    let mut left = pairs.len();
    if left > 0 {
        // Each lane has a sum of its own until the last pair, so all are multiplied by the same
        // powers. A group's products are computed among the rounds of the next one.
        let mut products = Products::of(state.hash);
        let mut plain = [_mm512_setzero_si512(); WIDTH];
        for [one, two] in pairs {
            let powers = again(powers);
            plain = pass!(SEAL, round_keys, tweaks, one; products += plain * common(powers.last()));
            plain[0] = _mm512_xor_si512(plain[0], products.reduce_lanes());
            products = Products::none();
            left -= 1;
            let first = if left == 0 { powers.first() } else { &powers.common };
            plain = pass!(SEAL, round_keys, tweaks, two; products += plain * each(first));
        }
        products.add_group(plain, each(again(powers).last()));
        state.hash = products.reduce();
    }
    for group in rest {
        let (keys, powers) = again((round_keys, powers));
        let plain = run_group_in_place::<SEAL, N>(keys, &mut tweaks, group);
        state.hash = hash(state.hash, &plain, powers);
    }
    state.tweaks = tweaks;
}

#[inline]
#[target_feature(enable = "vaes,avx512f")]
fn one_round<const SEAL: bool>(blocks: Registers, key: __m512i) -> Registers {
    let [a, b, c, d] = blocks;
    if SEAL {
        [
            _mm512_aesenc_epi128(a, key),
            _mm512_aesenc_epi128(b, key),
            _mm512_aesenc_epi128(c, key),
            _mm512_aesenc_epi128(d, key),
        ]
    } else {
        [
            _mm512_aesdec_epi128(a, key),
            _mm512_aesdec_epi128(b, key),
            _mm512_aesdec_epi128(c, key),
            _mm512_aesdec_epi128(d, key),
        ]
    }
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
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
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
    let mut products = Products::none();
    let [first, others @ ..] = *group;
    let first = _mm512_xor_si512(first, _mm512_zextsi128_si512(sum));
    let [a, b, c] = others;
    products.add_group([first, a, b, c], each(powers.last()));
    products.reduce()
}

/// A power of its own for each block.
#[inline]
#[target_feature(enable = "avx512f")]
fn each(powers: &[Block; BLOCKS]) -> Registers {
    read(powers.as_flattened().first_chunk().unwrap_or(&[0; GROUP]))
}

/// The power of the first block of each register for all its blocks.
#[inline]
#[target_feature(enable = "avx512f")]
fn common(powers: &[Block; BLOCKS]) -> Registers {
    let [a, _, _, _, b, _, _, _, c, _, _, _, d, _, _, _] = powers;
    [broadcast(a), broadcast(b), broadcast(c), broadcast(d)]
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
    fn add_group(&mut self, [a, b, c, d]: Registers, [x, y, z, w]: Registers) {
        self.add([a, b], [x, y]);
        self.add([c, d], [z, w]);
    }

    /// Whose reduced sum is this hash, in the first lane. The high half is not changed by reducing.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn of(hash: __m128i) -> Self {
        Self { high: _mm512_zextsi128_si512(hash), ..Self::none() }
    }

    /// Adds the products of two registers: three operands are added at a time.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(&mut self, [a, b]: [__m512i; 2], [x, y]: [__m512i; 2]) {
        let low = [_mm512_clmulepi64_epi128::<0x00>(a, x), _mm512_clmulepi64_epi128::<0x00>(b, y)];
        let high = [_mm512_clmulepi64_epi128::<0x11>(a, x), _mm512_clmulepi64_epi128::<0x11>(b, y)];
        self.low = xor3(self.low, low[0], low[1]);
        self.high = xor3(self.high, high[0], high[1]);
        for (blocks, powers) in [(a, x), (b, y)] {
            self.middle = xor3(
                self.middle,
                _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
                _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
            );
        }
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

    /// The sum of all lanes, reduced.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,pclmulqdq")]
    fn reduce(self) -> __m128i {
        let [low, high] = self.halves();
        reduce(fold(low), fold(high))
    }

    /// Each lane reduced, see [`reduce`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
    fn reduce_lanes(self) -> __m512i {
        let polynomial = _mm512_set1_epi64(0xc2 << 56);
        let [mut low, high] = self.halves();
        for _ in 0..2 {
            let multiple = _mm512_clmulepi64_epi128::<0x00>(low, polynomial);
            low = _mm512_xor_si512(_mm512_shuffle_epi32::<0b01_00_11_10>(low), multiple);
        }
        _mm512_xor_si512(low, high)
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
