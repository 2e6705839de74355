//! PostgreSQL's page checksum (`pg_checksum_page`, src/include/storage/checksum_impl.h): an
//! FNV-1a variant in 32 independent lanes, so that it runs in vector registers.
//!
//! A page is 64 rows of 32 lanes; two more steps follow without a row. Each step depends on the one
//! before, so a checksum takes at least 66 times the latency of a step. On Intel `vpmulld` alone
//! takes ten cycles, and a step with it thirteen. `vpmuludq` takes five, for half as many lanes. In
//! 512-bit registers this reduces a step to eight or nine cycles, see `avx512`.

#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
use std::arch::is_x86_feature_detected;

use crate::layout::{PAGE_SIZE, Page};

const LANES: usize = 32;
const FNV_PRIME: u32 = 16_777_619;

/// `checksumBaseOffsets`: the initial value of each lane.
const BASE_OFFSETS: [u32; LANES] = [
    0x5b1f_36e9,
    0xb852_5960,
    0x02ab_50aa,
    0x1de6_6d2a,
    0x79ff_467a,
    0x9bb9_f8a3,
    0x217e_7cd2,
    0x83e1_3d2c,
    0xf8d4_474f,
    0xe39e_b970,
    0x42c6_ae16,
    0x9932_16fa,
    0x7b09_3b5d,
    0x98da_ff3c,
    0xf718_902a,
    0x0b1c_9cdb,
    0xe58f_764b,
    0x1876_36bc,
    0x5d7b_3bb1,
    0xe73d_e7de,
    0x92be_c979,
    0xcca6_c0b2,
    0x304a_0979,
    0x85aa_43d4,
    0x7831_25bb,
    0x6ca8_eaa2,
    0xe407_eac6,
    0x4b5c_fc3e,
    0x9fbf_8c76,
    0x15ca_20be,
    0xf2ca_9fd3,
    0x959b_d756,
];

const _: () = assert!(PAGE_SIZE.is_multiple_of(LANES * 4));

/// The checksum of `page` as block `block` of its fork, as PostgreSQL computes it: the two bytes of
/// `pd_checksum` count as zero, and the result is never zero.
#[must_use]
pub fn page_checksum(page: &Page, block: u32) -> u16 {
    reduce(mix_fast(page), block)
}

/// Mixes in the block number and reduces to 1..=65535.
fn reduce(mixed: u32, block: u32) -> u16 {
    // The remainder is at most 65534.
    ((mixed ^ block) % 65535) as u16 + 1
}

#[cfg(not(target_arch = "x86_64"))]
fn mix_fast(page: &Page) -> u32 {
    mix(page)
}

/// [`mix`] in the widest registers that this CPU has.
#[cfg(target_arch = "x86_64")]
fn mix_fast(page: &Page) -> u32 {
    mix_with(Registers::Avx512, page)
        .or_else(|| mix_with(Registers::Avx2, page))
        .unwrap_or_else(|| mix(page))
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Registers {
    Avx512,
    Avx2,
}

/// [`mix`] in these registers; `None` if this CPU does not have them.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "calls of target_feature functions, right after detection")]
#[inline]
fn mix_with(registers: Registers, page: &Page) -> Option<u32> {
    #[target_feature(enable = "avx2")]
    fn mix_avx2(page: &Page) -> u32 {
        mix(page)
    }

    match registers {
        // Older CPUs lower their clock for 512-bit registers. AVX-512 VBMI identifies Ice Lake, Zen
        // 4 and later.
        Registers::Avx512
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vbmi") =>
        {
            // SAFETY: AVX-512 F has just been detected.
            Some(unsafe { avx512::mix(page) })
        }
        Registers::Avx2 if is_x86_feature_detected!("avx2") => {
            // SAFETY: AVX2 has just been detected.
            Some(unsafe { mix_avx2(page) })
        }
        Registers::Avx512 | Registers::Avx2 => None,
    }
}

/// `CHECKSUM_COMP`.
#[inline(always)]
fn step(sum: u32, value: u32) -> u32 {
    let mixed = sum ^ value;
    mixed.wrapping_mul(FNV_PRIME) ^ (mixed >> 17)
}

/// `pg_checksum_block`, with `pd_checksum` taken as zero. In this form the compiler keeps the 32
/// lanes in vector registers.
#[inline(always)]
fn mix(page: &Page) -> u32 {
    let rows = page.as_chunks::<4>().0.as_chunks::<LANES>().0;
    let mut sums = BASE_OFFSETS;
    for (i, row) in rows.iter().enumerate() {
        // Bytes 8 and 9 of the page are pd_checksum. A mask for every row, not a special first
        // row: anything else stops the compiler from vectorising the loop over the lanes.
        let mut mask = [u32::MAX; LANES];
        if i == 0 {
            mask[2] = 0xffff_0000;
        }
        for lane in 0..LANES {
            sums[lane] = step(sums[lane], u32::from_le_bytes(row[lane]) & mask[lane]);
        }
    }
    for _ in 0..2 {
        for sum in &mut sums {
            *sum = step(*sum, 0);
        }
    }
    sums.into_iter().fold(0, |folded, sum| folded ^ sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// PostgreSQL's C code word for word: one running sum per column.
    fn reference(page: &Page, block: u32) -> u16 {
        let mut page = *page;
        page[8..10].fill(0);
        let word = |i: usize| u32::from_le_bytes(page[i * 4..i * 4 + 4].try_into().unwrap());
        let mut result = 0;
        for (lane, offset) in BASE_OFFSETS.into_iter().enumerate() {
            let mut sum = offset;
            for row in 0..PAGE_SIZE / 4 / LANES {
                sum = step(sum, word(row * LANES + lane));
            }
            result ^= step(step(sum, 0), 0);
        }
        reduce(result, block)
    }

    proptest! {
        #[test]
        fn every_path_computes_postgresql_s_checksum(
            fill in prop::collection::vec(any::<u8>(), PAGE_SIZE), block: u32,
        ) {
            let page: Page = fill.try_into().unwrap();
            let expected = reference(&page, block);
            prop_assert_eq!(page_checksum(&page, block), expected);
            prop_assert_eq!(reduce(mix(&page), block), expected);
            #[cfg(target_arch = "x86_64")]
            for registers in [Registers::Avx512, Registers::Avx2] {
                if let Some(mixed) = mix_with(registers, &page) {
                    prop_assert_eq!(reduce(mixed, block), expected);
                }
            }
        }

        #[test]
        fn the_old_checksum_is_ignored(block: u32, old: [u8; 2]) {
            let mut page = [0x5a; PAGE_SIZE];
            let expected = page_checksum(&page, block);
            page[8..10].copy_from_slice(&old);
            prop_assert_eq!(page_checksum(&page, block), expected);
        }
    }
}
