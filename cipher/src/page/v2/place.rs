//! Where in a page the tag is, and how it gets there and out again without loss.
//!
//! Bytes 18-19 of a plaintext page are a constant. Within a sealed page they say where the tag is:
//!
//! ```text
//! bit    15   14-12   11-0
//!        0    0       n     16 zero bytes at byte 2n
//!        0    1       n     spare bits of the 19 line pointers from byte 4n on
//!        0    2       0     visibility map: bytes 24 to 103 are packed into 64, the tag follows
//!        1    bits 5-19      no room: 20 bits of the tag, of which 0 to 4 are in pd_special
//! ```
//!
//! Anything else is no sealed page.

use core::ops::Range;

use super::packed;
use crate::key::Fork;
use crate::layout::{
    LOWER, PAGE_HEADER, PAGE_SIZE, PAGESIZE_VERSION, Page, SPECIAL, UPPER, get, put,
};
use crate::tag::Tag;

/// Where the tag of a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// 16 zero bytes from this byte on, which is even.
    Zeros(usize),
    /// Spare bits of line pointers, of which the first is at this byte.
    Items(usize),
    /// The first bytes of a visibility map, packed.
    PackedMap,
    /// There is no room for more than a few bits of it.
    Short,
}

const HEADER: usize = PAGE_HEADER as usize;
const TAG: usize = size_of::<Tag>();

/// Bits of a line pointer (`ItemIdData`, itemid.h) that are zero in one that points to a tuple:
/// `lp_off`, the low 15 bits, is a multiple of 8 below 8192; `lp_len`, the high 15, is below 8192.
const SPARE: u32 = 0b111 | 0b11 << 13 | 0b11 << 30;
const SPARE_BITS: usize = SPARE.count_ones() as usize;

/// Line pointers needed for a tag.
const ITEMS: usize = (TAG * 8).div_ceil(SPARE_BITS);
const ITEM: usize = size_of::<u32>();

const SHORT: u16 = 1 << 15;
const FORM_SHIFT: u32 = 12;
const ARGUMENT: u16 = (1 << FORM_SHIFT) - 1;

/// Spare bits of `pd_special`, which is a multiple of 8 (`MAXALIGN`) and at most 8192: the low
/// three and the high two.
const SPARE_OF_SPECIAL: u16 = 0b11 << 14 | 0b111;

/// Bits of a short tag.
pub(super) const SHORT_BITS: u32 = 15 + SPARE_OF_SPECIAL.count_ones();

/// A page without room that PostgreSQL itself would refuse to read. It is refused here, too.
const NONE: u16 = 7 << FORM_SHIFT;

impl Place {
    /// A place in a plaintext page that can be used and given back exactly as it is; `None` if
    /// there is none.
    pub(super) fn lossless(page: &Page, fork: Fork) -> Option<Self> {
        zeros_in_hole(page)
            .or_else(|| {
                (fork == Fork::VisibilityMap && packed::can_pack(page)).then_some(Self::PackedMap)
            })
            .or_else(|| items(page))
            .or_else(|| zeros(page))
    }

    /// What bytes 18-19 say, in an opened page; `None` if no sealed page says so.
    pub(super) fn read(page: &Page) -> Option<Self> {
        let word = get(page, PAGESIZE_VERSION);
        if word & SHORT != 0 {
            return Some(Self::Short);
        }
        let argument = usize::from(word & ARGUMENT);
        let place = match word >> FORM_SHIFT {
            0 => Self::Zeros(argument * 2),
            1 => Self::Items(argument * ITEM),
            2 if argument == 0 => Self::PackedMap,
            _ => return None,
        };
        let bytes = place.bytes();
        (bytes.start >= HEADER && bytes.end <= PAGE_SIZE).then_some(place)
    }

    /// The bytes among which the tag is.
    pub(super) fn bytes(self) -> Range<usize> {
        match self {
            Self::Zeros(start) => start..start + TAG,
            Self::Items(start) => start..start + ITEMS * ITEM,
            Self::PackedMap => packed::TAG_AT..packed::TAG_AT + TAG,
            Self::Short => SPECIAL..PAGESIZE_VERSION + 2,
        }
    }

    /// Says in bytes 18-19 where the tag will be, and makes room for it: afterwards all bits of the
    /// tag are zero.
    pub(super) fn prepare(self, page: &mut Page) {
        let (form, argument) = match self {
            Self::Zeros(start) => (0, start / 2),
            Self::Items(start) => (1, start / ITEM),
            Self::PackedMap => {
                packed::pack(page);
                (2, 0)
            }
            Self::Short => return put(page, PAGESIZE_VERSION, SHORT),
        };
        put(page, PAGESIZE_VERSION, form << FORM_SHIFT | argument as u16 & ARGUMENT);
    }

    /// Marks a page that cannot be authenticated as one that must not be opened.
    pub(super) fn prepare_none(page: &mut Page) {
        put(page, PAGESIZE_VERSION, NONE);
    }

    /// Writes the tag into a prepared page.
    pub(super) fn put(self, page: &mut Page, tag: Tag) {
        match self {
            Self::Zeros(_) | Self::PackedMap => {
                page[self.bytes()].copy_from_slice(&tag.to_le_bytes());
            }
            Self::Items(_) => {
                let mut rest = tag;
                for item in page[self.bytes()].as_chunks_mut().0 {
                    *item = (u32::from_le_bytes(*item) | deposit(rest as u32)).to_le_bytes();
                    rest >>= SPARE_BITS;
                }
            }
            Self::Short => {
                let spare = tag as u16 & 0b111 | (tag as u16 >> 3 & 0b11) << 14;
                let (word, special) = (get(page, PAGESIZE_VERSION), get(page, SPECIAL));
                put(page, PAGESIZE_VERSION, word | (tag >> 5) as u16 & !SHORT);
                put(page, SPECIAL, special | spare);
            }
        }
    }

    /// Takes the part of the tag that is in the bytes `within` out of the page; the other bits of
    /// the result are zero. When all parts are taken, the page is as it was prepared. The bits of a
    /// [`Place::Short`] are the lowest of the result. `within` must not divide four bytes.
    pub(super) fn take(self, page: &mut Page, within: Range<usize>) -> Tag {
        let bytes = self.bytes();
        let part = bytes.start.max(within.start)..bytes.end.min(within.end);
        let mut tag = 0;
        match self {
            _ if part.is_empty() => {}
            Self::Zeros(_) | Self::PackedMap if part == bytes => {
                if let Some(place) = page[part].first_chunk_mut() {
                    tag = Tag::from_le_bytes(*place);
                    *place = [0; TAG];
                }
            }
            Self::Zeros(_) | Self::PackedMap => {
                for at in part {
                    tag |= Tag::from(page[at]) << ((at - bytes.start) * 8);
                    page[at] = 0;
                }
            }
            Self::Items(_) => {
                let first = (part.start - bytes.start) / ITEM;
                for (i, item) in (first..).zip(page[part].as_chunks_mut().0) {
                    let word = u32::from_le_bytes(*item);
                    // The last line pointer has more room than is needed; bits there are kept, so
                    // that the tag covers them.
                    let used = deposit((Tag::MAX >> (i * SPARE_BITS)) as u32);
                    tag |= Tag::from(extract(word & used)) << (i * SPARE_BITS);
                    *item = (word & !used).to_le_bytes();
                }
            }
            Self::Short => {
                let (word, special) = (get(page, PAGESIZE_VERSION), get(page, SPECIAL));
                put(page, PAGESIZE_VERSION, SHORT);
                put(page, SPECIAL, special & !SPARE_OF_SPECIAL);
                let spare = special & 0b111 | (special >> 14) << 3;
                tag = Tag::from(word & !SHORT) << 5 | Tag::from(spare);
            }
        }
        tag
    }

    /// Undoes what [`Place::prepare`] did, apart from bytes 18-19.
    pub(super) fn restore(self, page: &mut Page) {
        if self == Self::PackedMap {
            packed::unpack(page);
        }
    }
}

/// The lowest bits of `value`, moved to the spare bits of a line pointer.
fn deposit(value: u32) -> u32 {
    value & 0b111 | (value >> 3 & 0b11) << 13 | (value >> 5 & 0b11) << 30
}

/// The spare bits of a line pointer, moved together.
fn extract(item: u32) -> u32 {
    item & 0b111 | (item >> 13 & 0b11) << 3 | (item >> 30) << 5
}

/// `PageIsVerified` (bufpage.c) accepts this header: PostgreSQL does not read other pages.
pub(super) fn is_sane(page: &Page) -> bool {
    let (lower, upper, special) = (get(page, LOWER), get(page, UPPER), get(page, SPECIAL));
    upper != 0
        && lower <= upper
        && upper <= special
        && usize::from(special) <= PAGE_SIZE
        && special & SPARE_OF_SPECIAL == 0
}

/// The first even byte of the hole between `pd_lower` and `pd_upper`, if a tag fits there, and only
/// zeros are there. Most pages have room there: holes are filled from behind.
fn zeros_in_hole(page: &Page) -> Option<Place> {
    let (lower, upper) = (usize::from(get(page, LOWER)), usize::from(get(page, UPPER)));
    let start = lower.next_multiple_of(2);
    if start < HEADER || start + TAG > upper || upper > PAGE_SIZE {
        return None;
    }
    let is_zero = page[start..start + TAG].iter().fold(0, |all, byte| all | byte) == 0;
    is_zero.then_some(Place::Zeros(start))
}

/// The first [`ITEMS`] consecutive line pointers whose spare bits are zero. What is behind the line
/// pointers is searched as well: it costs only pages that have none that suffice, and so nothing in
/// the header, which is not encrypted, decides whether there is a place.
fn items(page: &Page) -> Option<Place> {
    let items = page[HEADER..].as_chunks::<ITEM>().0;
    let mut usable = 0;
    for (i, item) in items.iter().enumerate() {
        usable = if u32::from_le_bytes(*item) & SPARE == 0 { usable + 1 } else { 0 };
        if usable == ITEMS {
            return Some(Place::Items(HEADER + (i + 1 - ITEMS) * ITEM));
        }
    }
    None
}

/// The first 16 zero bytes anywhere behind the header, at an even byte.
fn zeros(page: &Page) -> Option<Place> {
    const WORD: usize = 8;
    // 16 zero bytes contain a whole word of 8, so only around such words is a closer look needed.
    let words = page.as_chunks::<WORD>().0;
    let is_zero = |at: usize| page[at] == 0;
    let mut at = HEADER;
    while let Some(word) = (at.div_ceil(WORD)..words.len()).find(|i| words[*i] == [0; WORD]) {
        let mut start = word * WORD;
        while start > at && is_zero(start - 1) {
            start -= 1;
        }
        let start = start.next_multiple_of(2);
        let mut end = (word + 1) * WORD;
        while end < PAGE_SIZE && end - start < TAG && is_zero(end) {
            end += 1;
        }
        if end - start >= TAG {
            return Some(Place::Zeros(start));
        }
        at = end;
    }
    None
}

const _: () = {
    assert!(ITEMS == 19 && SPARE_BITS == 7);
    assert!(SHORT_BITS == 20);
    assert!(PAGE_SIZE / 2 <= 1 << FORM_SHIFT);
    assert!(PAGE_SIZE & SPARE_OF_SPECIAL as usize == 0);
};
