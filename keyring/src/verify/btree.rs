//! Which pages of a table an index has entries of (nbtree.h, the same in 15 to 19).

use std::collections::BTreeSet;

use pagevault_cipher::page::{self, PAGE_SIZE, Page};

use super::catalogs::{half, items, word};

/// Pages of a B-tree.
#[derive(Default)]
pub(super) struct Btree {
    /// Pages of the index that are not zero, and those that others are linked to.
    used: BTreeSet<u32>,
    linked: BTreeSet<u32>,
    /// Pages of the table.
    rows: BTreeSet<u32>,
}

impl Btree {
    /// `None` if it is no such page.
    pub(super) fn add(&mut self, block: u32, page: &Page) -> Option<()> {
        if page::is_zero(page) {
            return Some(());
        }
        self.used.insert(block);
        if block == 0 { self.add_meta(page) } else { self.add_node(page) }
    }

    /// BTMetaPageData
    fn add_meta(&mut self, page: &Page) -> Option<()> {
        const MAGIC: u32 = 0x0005_3162;
        let [magic, root, fast_root] = [24, 32, 40];
        self.linked.extend([word(page, root)?, word(page, fast_root)?]);
        (word(page, magic)? == MAGIC).then_some(())
    }

    /// BTPageOpaqueData and IndexTupleData (itup.h)
    fn add_node(&mut self, page: &Page) -> Option<()> {
        const SPECIAL: usize = PAGE_SIZE - 16;
        const LEAF: u16 = 1;
        const DELETED: u16 = 4;
        if usize::from(half(page, 16)?) != SPECIAL {
            return None;
        }
        let (before, next) = (word(page, SPECIAL)?, word(page, SPECIAL + 4)?);
        let flags = half(page, SPECIAL + 12)?;
        if flags & DELETED != 0 {
            return Some(());
        }
        // Without a neighbour they are 0, the page that is always there.
        self.linked.extend([before, next]);
        // The first item is the high key, but in the last page of its level.
        for item in items(page).skip(usize::from(next != 0)) {
            let item = item?;
            if flags & LEAF == 0 {
                self.linked.insert(block_of(item)?);
            } else {
                self.add_entry(item)?;
            }
        }
        Some(())
    }

    /// An entry of a leaf: for one row, or for several row versions with the same key, also in a
    /// unique index (`_bt_dedup_pass`, nbtdedup.c).
    fn add_entry(&mut self, item: &[u8]) -> Option<()> {
        /// `INDEX_ALT_TID_MASK`, `INDEX_SIZE_MASK` in `t_info`; `BT_IS_POSTING`, `BT_OFFSET_MASK`
        /// in the offset number of `t_tid`, whose block number is the place of the list then.
        const ALTERNATIVE: u16 = 0x2000;
        const SIZE: u16 = 0x1FFF;
        const IS_POSTING: u16 = 0x2000;
        const COUNT: u16 = 0x0FFF;
        /// `ItemPointerData`
        const POINTER: usize = 6;
        let (offset, info) = (half(item, 4)?, half(item, 6)?);
        if info & ALTERNATIVE == 0 {
            self.rows.insert(block_of(item)?);
            return Some(());
        }
        if offset & IS_POSTING == 0 {
            return None;
        }
        let list = item.get(block_of(item)? as usize..usize::from(info & SIZE))?;
        let list = list.get(..usize::from(offset & COUNT) * POINTER)?;
        for pointer in list.chunks(POINTER) {
            self.rows.insert(block_of(pointer)?);
        }
        Some(())
    }

    /// The pages of the table. `None` if pages of the index are missing.
    pub(super) fn rows(self) -> Option<BTreeSet<u32>> {
        let is_whole = self.used.contains(&0) && self.linked.is_subset(&self.used);
        is_whole.then_some(self.rows)
    }
}

/// The block number of an ItemPointerData (itemptr.h).
fn block_of(pointer: &[u8]) -> Option<u32> {
    Some(u32::from(half(pointer, 0)?) << 16 | u32::from(half(pointer, 2)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(page: &mut Page, at: usize, value: u32) {
        page[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn meta(root: u32) -> Page {
        let mut page = [0; PAGE_SIZE];
        for (at, value) in [(24, 0x5_3162), (32, root), (40, root)] {
            put(&mut page, at, value);
        }
        page
    }

    fn node(flags: u32, before: u32, next: u32, targets: &[u32]) -> Page {
        let mut page = [0; PAGE_SIZE];
        put(&mut page, 12, 24 + 4 * targets.len() as u32);
        put(&mut page, 16, 8176);
        for (at, value) in [(8176, before), (8180, next), (8188, flags)] {
            put(&mut page, at, value);
        }
        for (index, target) in targets.iter().enumerate() {
            let place = 4000 + 16 * index;
            put(&mut page, 24 + 4 * index, place as u32 | 1 << 15 | 16 << 17);
            put(&mut page, place, target.rotate_left(16));
        }
        page
    }

    fn rows(pages: &[(u32, Page)]) -> Option<Vec<u32>> {
        let mut index = Btree::default();
        pages.iter().try_for_each(|(block, page)| index.add(*block, page))?;
        index.rows().map(|rows| rows.into_iter().collect())
    }

    #[test]
    fn an_index_names_pages_of_its_table() {
        const LEAF: u32 = 1;
        let dead = node(LEAF | 4, 99, 98, &[97]);
        let pages = [
            (0, meta(3)),
            (1, node(LEAF, 0, 2, &[900, 0x2_0007, 5])),
            (2, node(LEAF, 1, 0, &[5, 6])),
            (3, node(2, 0, 0, &[1, 2])),
            (4, [0; PAGE_SIZE]),
            (5, dead),
        ];
        assert_eq!(rows(&pages), Some(vec![5, 6, 0x2_0007]));
        // Each of the pages that are in use is missed.
        for lost in 0..4 {
            let mut pages = pages;
            pages[lost].1 = [0; PAGE_SIZE];
            assert_eq!(rows(&pages), None, "{lost}");
        }
        assert_eq!(rows(&[]), None);
        assert_eq!(rows(&[(0, meta(0))]), Some(Vec::new()));
        let mut other = pages;
        other[0].1[24] ^= 1;
        assert_eq!(rows(&other), None, "not an index");
    }

    /// BTreeTupleSetPosting (nbtree.h)
    #[test]
    fn an_entry_can_have_several_rows() {
        let of = |place: u32, flags: u32, size: u32| {
            let mut page = node(1, 0, 0, &[5, place]);
            put(&mut page, 24 + 4, 4016 | 1 << 15 | size << 17);
            put(&mut page, 4016 + 4, flags | (size | 0x2000) << 16);
            for (index, row) in [7_u32, 0x3_0001].into_iter().enumerate() {
                put(&mut page, 4016 + 16 + 6 * index, row.rotate_left(16));
            }
            rows(&[(0, meta(1)), (1, page)])
        };
        assert_eq!(of(16, 0x2002, 32), Some(vec![5, 7, 0x3_0001]));
        assert_eq!(of(16, 0x2001, 32), Some(vec![5, 7]));
        assert_eq!(of(16, 0x2003, 32), None, "more than there is room for");
        assert_eq!(of(40, 0x2001, 32), None, "behind the entry");
        assert_eq!(of(16, 0x0002, 32), None, "no list");
    }

    #[test]
    fn entries_that_are_dead_do_not_count() {
        let mut page = node(1, 0, 0, &[5, 6]);
        page[24 + 2] |= 1;
        assert_eq!(rows(&[(0, meta(1)), (1, page)]), Some(vec![6]));
    }
}
