//! Plaintext pages without rows: pages that replace others, and pages that are not used yet.

use crate::checksum::page_checksum;
use crate::layout::{
    CHECKSUM, FLAGS, LOWER, LSN, LSN_SIZE, PAGE_HEADER, PAGE_SIZE, PAGESIZE_VERSION,
    PAGESIZE_VERSION_VALUE, Page, SPECIAL, UPPER, get, put,
};
use crate::lsn::Lsn;
use crate::page::lsn_of;

/// Makes the page an empty one, as `PageInit` (bufpage.c) does, with `lsn` as its LSN.
///
/// With `checksums` it gets its checksum as block `block` of a fork.
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

/// `ItemIdData` with `LP_DEAD` (itemid.h), and the maximum number of items in a heap page
/// (`MaxHeapTuplesPerPage`, htup_details.h).
const DEAD_ITEM: u32 = 3 << 15;
const MAX_ITEMS: usize = 291;

/// Like [`blank`], for a heap page: every row that it may have had is dead. Index entries may still
/// point to these rows. VACUUM removes the entries before it reuses the line pointers of dead rows
/// or truncates the file. In a page without line pointers it would do both at once.
pub fn blank_heap(page: &mut Page, lsn: Lsn, block: u32, checksums: bool) {
    const ITEM: usize = size_of::<u32>();
    blank(page, lsn, block, false);
    let items = page[usize::from(PAGE_HEADER)..].chunks_exact_mut(ITEM).take(MAX_ITEMS);
    items.for_each(|item| item.copy_from_slice(&DEAD_ITEM.to_le_bytes()));
    put(page, LOWER, PAGE_HEADER + (MAX_ITEMS * ITEM) as u16);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Of a page made by [`placeholder`]: higher than any LSN in WAL, so no page of the server has it.
const LATER_THAN_WAL: Lsn = Lsn::MAX;

/// Bytes at the end of a [`placeholder`] page, where index code expects the special space.
const SPECIAL_SPACE: u16 = 64;

/// Makes the page a placeholder for a page that cannot be opened yet. It is valid and has no free
/// space; as a visibility map page it says that nothing is visible. Its LSN is higher than any in
/// WAL, so that redo skips the page and all code can recognise it ([`is_placeholder`]).
///
/// With `checksums` it carries its checksum as block `block` of a fork.
pub fn placeholder(page: &mut Page, block: u32, checksums: bool) {
    page.fill(0);
    page[LSN..LSN + LSN_SIZE].copy_from_slice(&LATER_THAN_WAL.to_page());
    put(page, LOWER, PAGE_HEADER);
    put(page, UPPER, PAGE_HEADER);
    put(page, SPECIAL, PAGE_SIZE as u16 - SPECIAL_SPACE);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Whether the page with this LSN is a placeholder made by
/// [`placeholder`].
#[inline]
#[must_use]
pub fn is_placeholder(lsn: Lsn) -> bool {
    lsn == LATER_THAN_WAL
}

/// Whether the page is empty except for its header, as `PageInit` (bufpage.c) leaves a page of a
/// heap or map, and has no LSN.
#[must_use]
pub fn is_bare(page: &Page) -> bool {
    let header = [(LOWER, PAGE_HEADER), (UPPER, PAGE_SIZE as u16), (SPECIAL, PAGE_SIZE as u16)];
    lsn_of(page) == Lsn::INVALID
        && get(page, FLAGS) == 0
        && header.iter().all(|(at, value)| get(page, *at) == *value)
        && get(page, PAGESIZE_VERSION) == PAGESIZE_VERSION_VALUE
        && page[PAGESIZE_VERSION + 2..].iter().all(|byte| *byte == 0)
}

/// Whether a page of zeros may replace this page on disk: [`is_bare`], and with `checksums` it has
/// its checksum as block `block` of a fork. With another one it is damaged, and must stay so.
#[must_use]
pub fn is_bare_block(page: &Page, block: u32, checksums: bool) -> bool {
    is_bare(page) && (!checksums || get(page, CHECKSUM) == page_checksum(page, block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::version_of;

    #[test]
    fn a_blank_page_is_valid_for_postgresql() {
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
    fn a_blank_heap_page_has_dead_rows_only() {
        let mut page = [7; PAGE_SIZE];
        blank_heap(&mut page, Lsn(0x1_6B37_4D8F), 9, true);
        assert_eq!(page[..8], [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B]);
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (1188, 8192, 8192));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        // lp_off : 15, lp_flags : 2, lp_len : 15
        assert!(page[24..1188].chunks(4).all(|item| item == [0, 0x80, 1, 0]));
        assert!(page[1188..].iter().all(|byte| *byte == 0));
        blank_heap(&mut page, Lsn(1), 9, false);
        assert_eq!(get(&page, CHECKSUM), 0);
    }

    #[test]
    fn a_placeholder_is_valid_for_postgresql_and_recognised() {
        let mut page = [7; PAGE_SIZE];
        assert!(!is_placeholder(lsn_of(&page)));
        placeholder(&mut page, 9, true);
        assert!(is_placeholder(lsn_of(&page)));
        // PageIsVerified (bufpage.c): 0 < pd_lower <= pd_upper <= pd_special <= BLCKSZ, and
        // pd_special is aligned.
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (24, 24, 8128));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        assert_eq!(version_of(&page), None);
    }

    #[test]
    fn any_content_makes_a_page_not_bare() {
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

    #[test]
    fn a_wrong_checksum_is_not_replaced_by_zeros() {
        let mut page = [0; PAGE_SIZE];
        blank(&mut page, Lsn::INVALID, 3, true);
        assert!(is_bare_block(&page, 3, true));
        assert!(!is_bare_block(&page, 4, true));
        let right = get(&page, CHECKSUM);
        put(&mut page, CHECKSUM, right ^ 1);
        assert!(!is_bare_block(&page, 3, true));
        assert!(is_bare_block(&page, 3, false));
    }
}
