//! Pages in plaintext without rows: those that are put in the place of others, and those that
//! nobody has used yet.

use crate::checksum::page_checksum;
use crate::layout::{
    CHECKSUM, FLAGS, LOWER, LSN, LSN_SIZE, PAGE_HEADER, PAGE_SIZE, PAGESIZE_VERSION,
    PAGESIZE_VERSION_VALUE, Page, SPECIAL, UPPER, get, put,
};
use crate::lsn::Lsn;
use crate::page::lsn_of;

/// Makes the page an empty one, as `PageInit` (bufpage.c) would, last changed at `lsn`.
///
/// With `checksums` it carries its checksum as block `block` of a fork.
pub fn blank(page: &mut Page, lsn: Lsn, block: u32, checksums: bool) {
    page.fill(0);
    page[LSN..LSN + LSN_SIZE].copy_from_slice(&lsn.to_page());
    put(page, LOWER, PAGE_HEADER);
    put(page, UPPER, PAGE_SIZE as u16);
    put(page, SPECIAL, PAGE_SIZE as u16);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// `ItemIdData` with `LP_DEAD` (itemid.h), and how many there are at most in a page of a heap
/// (`MaxHeapTuplesPerPage`, htup_details.h).
const DEAD_ITEM: u32 = 3 << 15;
const MAX_ITEMS: usize = 291;

/// As [`blank`], for a page of a heap: every row that it may have had is dead. Entries of indexes
/// may still point to any of them. VACUUM removes these before it gives the places of dead rows to
/// others, or shortens the file; a page without rows it would do both to at once.
pub fn bury(page: &mut Page, lsn: Lsn, block: u32, checksums: bool) {
    const ITEM: usize = size_of::<u32>();
    blank(page, lsn, block, false);
    let items = page[usize::from(PAGE_HEADER)..].chunks_exact_mut(ITEM).take(MAX_ITEMS);
    items.for_each(|item| item.copy_from_slice(&DEAD_ITEM.to_le_bytes()));
    put(page, LOWER, PAGE_HEADER + (MAX_ITEMS * ITEM) as u16);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Of a page made by [`stand_in`]: no page of a server has it.
const LATER_THAN_WAL: Lsn = Lsn::MAX;

/// Bytes at the end of a [`stand_in`] where others look for the special space of an index page.
const SPECIAL_SPACE: u16 = 64;

/// Makes the page one that stands in for a page that cannot be opened yet: valid, without room (as
/// a visibility map, one that says of nothing that it is visible), and changed later than whatever
/// WAL says of it, so that redo passes over it, and everybody can tell that it is none of the
/// server's ([`is_stand_in`]).
///
/// With `checksums` it carries its checksum as block `block` of a fork.
pub fn stand_in(page: &mut Page, block: u32, checksums: bool) {
    page.fill(0);
    page[LSN..LSN + LSN_SIZE].copy_from_slice(&LATER_THAN_WAL.to_page());
    put(page, LOWER, PAGE_HEADER);
    put(page, UPPER, PAGE_HEADER);
    put(page, SPECIAL, PAGE_SIZE as u16 - SPECIAL_SPACE);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Whether the page with this LSN was made by [`stand_in`].
#[inline]
#[must_use]
pub fn is_stand_in(lsn: Lsn) -> bool {
    lsn == LATER_THAN_WAL
}

/// Whether the page has nothing but its header, as `PageInit` (bufpage.c) makes it for a heap or a
/// map, and was never logged.
#[must_use]
pub fn is_bare(page: &Page) -> bool {
    let header = [(LOWER, PAGE_HEADER), (UPPER, PAGE_SIZE as u16), (SPECIAL, PAGE_SIZE as u16)];
    lsn_of(page) == Lsn::INVALID
        && get(page, FLAGS) == 0
        && header.iter().all(|(at, value)| get(page, *at) == *value)
        && get(page, PAGESIZE_VERSION) == PAGESIZE_VERSION_VALUE
        && page[PAGESIZE_VERSION + 2..].iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::version_of;

    #[test]
    fn a_blank_page_is_one_that_postgresql_accepts() {
        let mut page = [7; PAGE_SIZE];
        blank(&mut page, Lsn(0x1_6B37_4D8F), 9, true);
        assert_eq!(page[..8], [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B]);
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (24, 8192, 8192));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        assert!(page[20..].iter().all(|byte| *byte == 0));
        blank(&mut page, Lsn(1), 9, false);
        assert_eq!(get(&page, CHECKSUM), 0);
    }

    #[test]
    fn a_buried_page_has_dead_rows_only() {
        let mut page = [7; PAGE_SIZE];
        bury(&mut page, Lsn(0x1_6B37_4D8F), 9, true);
        assert_eq!(page[..8], [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B]);
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (1188, 8192, 8192));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        // lp_off : 15, lp_flags : 2, lp_len : 15
        assert!(page[24..1188].chunks(4).all(|item| item == [0, 0x80, 1, 0]));
        assert!(page[1188..].iter().all(|byte| *byte == 0));
        bury(&mut page, Lsn(1), 9, false);
        assert_eq!(get(&page, CHECKSUM), 0);
    }

    #[test]
    fn a_stand_in_is_one_that_postgresql_accepts_and_tells_apart() {
        let mut page = [7; PAGE_SIZE];
        assert!(!is_stand_in(lsn_of(&page)));
        stand_in(&mut page, 9, true);
        assert!(is_stand_in(lsn_of(&page)));
        // PageIsVerified (bufpage.c): 0 < pd_lower <= pd_upper <= pd_special <= BLCKSZ, the last
        // one aligned.
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (24, 24, 8128));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        assert_eq!(version_of(&page), None);
    }

    #[test]
    fn a_page_is_bare_until_something_stands_in_it() {
        let mut page = [0; PAGE_SIZE];
        assert!(!is_bare(&page));
        blank(&mut page, Lsn::INVALID, 3, true);
        assert!(is_bare(&page));
        for bit in 0..PAGE_SIZE * 8 {
            let in_checksum = (CHECKSUM * 8..FLAGS * 8).contains(&bit);
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(is_bare(&page), in_checksum, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
