//! Pages as PostgreSQL writes them, with random content.

use proptest::prelude::*;

use crate::key::Fork;
use crate::layout::{
    LOWER, PAGE_SIZE, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, Page, SPECIAL, UPPER, get, put,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Some rows, dead rows and redirections, and remains of old rows in the hole.
    Heap,
    /// As after its first rows: the hole is zero.
    HeapYoung,
    /// Rows up to the last byte.
    HeapFull,
    /// Four chunks of a TOAST value, and a hole of 24 bytes.
    Toast,
    /// Sorted items, remains in the hole, and a special space.
    BTree,
    /// A bucket of a hash index, nearly full.
    Hash,
    /// A meta page whose `pd_lower` is that of an empty page.
    GinMeta,
    /// Everything visible and frozen.
    MapFull,
    /// Any state of each heap page.
    MapMixed,
    /// An impossible state in the bytes that could be packed.
    MapDamaged,
    FreeSpaceMap,
    /// `PageInit` and nothing else.
    New,
    /// No hole, no zeros, no line pointers.
    NoRoom,
    /// A plausible header and random bytes.
    Garbage,
}

impl Kind {
    pub(super) const ALL: [Self; 14] = [
        Self::Heap,
        Self::HeapYoung,
        Self::HeapFull,
        Self::Toast,
        Self::BTree,
        Self::Hash,
        Self::GinMeta,
        Self::MapFull,
        Self::MapMixed,
        Self::MapDamaged,
        Self::FreeSpaceMap,
        Self::New,
        Self::NoRoom,
        Self::Garbage,
    ];

    pub(super) fn fork(self) -> Fork {
        match self {
            Self::MapFull | Self::MapMixed | Self::MapDamaged => Fork::VisibilityMap,
            Self::FreeSpaceMap => Fork::FreeSpaceMap,
            _ => Fork::Main,
        }
    }

    /// The place of its tag, if nothing may be lost.
    pub(super) fn place(self) -> &'static str {
        match self {
            Self::HeapYoung | Self::Toast | Self::New => "hole",
            Self::Heap | Self::HeapFull | Self::BTree => "items",
            // In a long run of zeros, which are as good as line pointers.
            Self::GinMeta | Self::FreeSpaceMap => "items",
            Self::MapFull | Self::MapMixed => "packed",
            // As the header has it, all of a map is a hole.
            Self::MapDamaged => "hole",
            Self::Hash => "zeros",
            Self::NoRoom | Self::Garbage => "short",
        }
    }
}

pub(super) fn any_kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(&Kind::ALL[..])
}

/// SplitMix64: as good as random, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Without zeros.
    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = self.next() as u8 | 1);
    }
}

fn header(page: &mut Page, lower: usize, upper: usize, special: usize) {
    for (at, value) in [(LOWER, lower), (UPPER, upper), (SPECIAL, special)] {
        put(page, at, value as u16);
    }
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
}

/// Appends tuples of about `length` bytes until fewer than `keep` bytes would be left.
fn tuples(page: &mut Page, random: &mut Random, special: usize, length: usize, keep: usize) {
    let (mut lower, mut upper) = (24, special);
    loop {
        let length = length + random.below(8);
        let start = upper.saturating_sub(length) / 8 * 8;
        if start < lower + 4 + keep {
            break;
        }
        let item = (start as u32) | 1 << 15 | (length as u32) << 17;
        page[lower..lower + 4].copy_from_slice(&item.to_le_bytes());
        random.fill(&mut page[start..upper]);
        (lower, upper) = (lower + 4, start);
    }
    header(page, lower, upper, special);
}

/// What is left of earlier tuples.
fn old_bytes(page: &mut Page, random: &mut Random) {
    let (lower, upper) = (usize::from(get(page, LOWER)), usize::from(get(page, UPPER)));
    random.fill(&mut page[lower..upper]);
}

/// A page of this kind; `seed` decides about its content.
pub(super) fn page_of(kind: Kind, seed: u64) -> Page {
    let mut random = Random(seed);
    let mut page = [0; PAGE_SIZE];
    match kind {
        Kind::Heap => {
            tuples(&mut page, &mut random, PAGE_SIZE, 40, 3000);
            old_bytes(&mut page, &mut random);
            // A dead row, and a redirection to row 3.
            page[24 + 40..24 + 44].copy_from_slice(&(3_u32 << 15).to_le_bytes());
            page[24 + 80..24 + 84].copy_from_slice(&(3_u32 | 2 << 15).to_le_bytes());
        }
        Kind::HeapYoung => tuples(&mut page, &mut random, PAGE_SIZE, 100, 5000),
        Kind::HeapFull => {
            tuples(&mut page, &mut random, PAGE_SIZE, 28, 0);
            let lower = usize::from(get(&page, LOWER));
            header(&mut page, lower, lower, PAGE_SIZE);
            random.fill(&mut page[lower..]);
        }
        Kind::Toast => {
            for i in 0..4_u32 {
                let item = (PAGE_SIZE as u32 - (i + 1) * 2032) | 1 << 15 | 2032 << 17;
                page[24 + i as usize * 4..][..4].copy_from_slice(&item.to_le_bytes());
            }
            header(&mut page, 40, 64, PAGE_SIZE);
            random.fill(&mut page[64..]);
        }
        Kind::BTree => {
            tuples(&mut page, &mut random, PAGE_SIZE - 16, 16, 800);
            old_bytes(&mut page, &mut random);
        }
        Kind::Hash => {
            // Few and long items, of which the line pointers do not suffice.
            tuples(&mut page, &mut random, PAGE_SIZE - 16, 900, 0);
            old_bytes(&mut page, &mut random);
            // Sixteen zero bytes that no word of memory begins with.
            page[8003..8003 + 19].fill(0);
        }
        Kind::GinMeta => {
            header(&mut page, 24, PAGE_SIZE - 8, PAGE_SIZE - 8);
            random.fill(&mut page[24..80]);
        }
        Kind::MapFull => {
            header(&mut page, 24, PAGE_SIZE, PAGE_SIZE);
            page[24..].fill(0xFF);
        }
        Kind::MapMixed | Kind::MapDamaged => {
            header(&mut page, 24, PAGE_SIZE, PAGE_SIZE);
            for byte in &mut page[24..] {
                *byte = (0..4).fold(0, |byte, _| byte << 2 | [0, 1, 3][random.below(3)]);
            }
            // So that the first 16 bytes are not zero.
            page[24] |= 1;
            if kind == Kind::MapDamaged {
                page[24] = 2;
                page[8000..8020].fill(0);
            }
        }
        Kind::FreeSpaceMap => {
            header(&mut page, 24, PAGE_SIZE, PAGE_SIZE);
            let filled = 24 + 16 + random.below(4000);
            random.fill(&mut page[24..filled]);
        }
        Kind::New => header(&mut page, 24, PAGE_SIZE, PAGE_SIZE),
        Kind::NoRoom => {
            random.fill(&mut page);
            header(&mut page, PAGE_SIZE, PAGE_SIZE, PAGE_SIZE);
        }
        Kind::Garbage => {
            random.fill(&mut page);
            let special = PAGE_SIZE - random.below(8) * 8;
            let upper = special - random.below(3000);
            header(&mut page, upper - random.below(3000), upper, special);
        }
    }
    random.fill(&mut page[..8]);
    page[8..10].fill(0);
    page[10..12].fill(0);
    page
}
