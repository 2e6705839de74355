//! The checksum in 512-bit registers, by `vpmuludq`: on Intel its latency is half of `vpmulld`'s.
//!
//! It multiplies the low halves of 64-bit lanes, so a register holds eight sums. The high halves
//! are ignored. On Intel the limit is then the port that both multiplies and shifts, eight cycles
//! for a row. So odd lanes are moved down by a shuffle, not by a shift.

use core::arch::x86_64::*;

use safe_unaligned_simd::x86_64::{_mm512_loadu_si512, _mm512_storeu_si512};

use super::{BASE_OFFSETS, FNV_PRIME};
use crate::layout::Page;

/// One register for the even lanes of each half row, and one for the odd lanes.
const REGISTERS: usize = 4;

/// Eight sums, each `product ^ shifted`. Kept apart because one instruction can XOR both with the
/// next row.
#[derive(Clone, Copy)]
struct Sums {
    product: __m512i,
    shifted: __m512i,
}

/// The same as [`super::mix`].
#[target_feature(enable = "avx512f")]
pub(super) fn mix(page: &Page) -> u32 {
    let mut offsets = BASE_OFFSETS;
    // Bytes 8 and 9 of the page are pd_checksum, in lane 2: added here, they cancel out in the
    // first row.
    offsets[2] ^= u32::from(u16::from_le_bytes([page[8], page[9]]));
    let offsets = offsets.as_chunks::<16>().0;
    let offsets = split([_mm512_loadu_si512(&offsets[0]), _mm512_loadu_si512(&offsets[1])]);
    let zero = _mm512_setzero_si512();
    let mut sums = [Sums { product: zero, shifted: zero }; REGISTERS];
    for (sum, offset) in sums.iter_mut().zip(offsets) {
        sum.product = offset;
    }
    for row in page.as_chunks::<64>().0.as_chunks::<2>().0 {
        step(&mut sums, split([_mm512_loadu_si512(&row[0]), _mm512_loadu_si512(&row[1])]));
    }
    for _ in 0..2 {
        step(&mut sums, [zero; REGISTERS]);
    }
    let mut folded = zero;
    for Sums { product, shifted } in sums {
        folded = xor3(folded, product, shifted);
    }
    let mut bytes = [0; 64];
    _mm512_storeu_si512(&mut bytes, folded);
    let sums = bytes.as_chunks::<8>().0;
    sums.iter().fold(0, |folded, sum| folded ^ u64::from_le_bytes(*sum)) as u32
}

/// The lanes of a row, in the low halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn split([first, second]: [__m512i; 2]) -> [__m512i; REGISTERS] {
    let odd = [
        _mm512_shuffle_epi32::<0b11_11_01_01>(first),
        _mm512_shuffle_epi32::<0b11_11_01_01>(second),
    ];
    [first, odd[0], second, odd[1]]
}

/// `CHECKSUM_COMP` on all lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn step(sums: &mut [Sums; REGISTERS], row: [__m512i; REGISTERS]) {
    let prime = _mm512_set1_epi64(i64::from(FNV_PRIME));
    for (sum, value) in sums.iter_mut().zip(row) {
        let mixed = xor3(sum.product, sum.shifted, value);
        sum.product = _mm512_mul_epu32(mixed, prime);
        sum.shifted = _mm512_srli_epi32::<17>(mixed);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor3(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0x96>(a, b, c)
}
