//! Packing a visibility map. Each heap page has two bits: all-visible, all-frozen. The second is
//! set only with the first (visibilitymap.c), so there are three values, and five of them fit a
//! byte: 80 bytes become 64, and 16 are free.

use crate::layout::{PAGE_HEADER, Page};

const START: usize = PAGE_HEADER as usize;
const PLAIN: usize = 80;
const PACKED: usize = 64;

/// The first of the 16 bytes that packing frees.
pub(super) const TAG_AT: usize = START + PACKED;

/// Pairs of bits in a byte of the map, and in a packed byte.
const IN_PLAIN: usize = 4;
const IN_PACKED: usize = 5;

const _: () = assert!(PLAIN * IN_PLAIN == PACKED * IN_PACKED && PLAIN - PACKED == 16);

/// All-frozen without all-visible: does not occur.
const IMPOSSIBLE: u8 = 0b10;

/// Whether no pair of bits in the part that is packed has the impossible value.
pub(super) fn can_pack(page: &Page) -> bool {
    page[START..START + PLAIN].iter().all(|byte| (byte >> 1) & !byte & 0b0101_0101 == 0)
}

/// Packs the part, which must be one that [`can_pack`]; the bytes that become free are zero.
pub(super) fn pack(page: &mut Page) {
    let mut packed = [0; PLAIN];
    for (i, byte) in packed[..PACKED].iter_mut().enumerate() {
        let pairs = (0..IN_PACKED).rev().map(|k| pair(page, i * IN_PACKED + k));
        *byte = pairs.fold(0, |number, pair| number * 3 + digit(pair));
    }
    page[START..START + PLAIN].copy_from_slice(&packed);
}

/// Undoes [`pack`].
pub(super) fn unpack(page: &mut Page) {
    let mut plain = [0; PLAIN];
    for i in 0..PACKED {
        let mut number = page[START + i];
        for at in i * IN_PACKED..(i + 1) * IN_PACKED {
            let pair = [0b00, 0b01, 0b11][usize::from(number % 3)];
            plain[at / IN_PLAIN] |= pair << (at % IN_PLAIN * 2);
            number /= 3;
        }
    }
    page[START..START + PLAIN].copy_from_slice(&plain);
}

fn pair(page: &Page, at: usize) -> u8 {
    page[START + at / IN_PLAIN] >> (at % IN_PLAIN * 2) & 0b11
}

fn digit(pair: u8) -> u8 {
    debug_assert!(pair != IMPOSSIBLE);
    // 0b00, 0b01, 0b11
    (pair & 1) + (pair >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::PAGE_SIZE;
    use proptest::prelude::*;

    #[test]
    fn every_byte_of_a_map_survives_at_every_position() {
        for byte in (0..=u8::MAX).filter(|b| (0..4).all(|i| b >> (i * 2) & 3 != IMPOSSIBLE)) {
            for at in START..START + PLAIN {
                let mut page = [0xFF; PAGE_SIZE];
                page[at] = byte;
                let plain = page;
                assert!(can_pack(&page));
                pack(&mut page);
                assert!(page[TAG_AT..START + PLAIN].iter().all(|byte| *byte == 0));
                unpack(&mut page);
                assert!(page == plain);
            }
        }
    }

    #[test]
    fn a_map_with_an_impossible_pair_is_not_packed() {
        for at in 0..PLAIN * IN_PLAIN {
            let mut page = [0; PAGE_SIZE];
            page[START + at / IN_PLAIN] = IMPOSSIBLE << (at % IN_PLAIN * 2);
            assert!(!can_pack(&page), "pair {at}");
        }
    }

    proptest! {
        #[test]
        fn unpacking_reverses_packing(
            pairs in prop::collection::vec(0..3_usize, PLAIN * IN_PLAIN),
        ) {
            let mut page = [7; PAGE_SIZE];
            page[START..START + PLAIN].fill(0);
            for (at, pair) in pairs.iter().enumerate() {
                page[START + at / IN_PLAIN] |= [0b00, 0b01, 0b11][*pair] << (at % IN_PLAIN * 2);
            }
            let plain = page;
            prop_assert!(can_pack(&page));
            pack(&mut page);
            unpack(&mut page);
            prop_assert!(page == plain);
        }
    }
}
