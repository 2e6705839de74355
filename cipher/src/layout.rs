//! PostgreSQL's pages: size, and fields of the header (`PageHeaderData`,
//! src/include/storage/bufpage.h).

/// Size of a page in bytes: PostgreSQL's default `BLCKSZ`, the only one supported.
pub const PAGE_SIZE: usize = 8192;

/// One relation page, plaintext or sealed.
pub type Page = [u8; PAGE_SIZE];

/// Size of `pd_lsn` in bytes.
pub(crate) const LSN_SIZE: usize = 8;

/// Offset of `pd_lsn`. The following constants are offsets of other fields.
pub(crate) const LSN: usize = 0;
pub(crate) const CHECKSUM: usize = 8;
pub(crate) const FLAGS: usize = 10;
pub(crate) const LOWER: usize = 12;
pub(crate) const UPPER: usize = 14;
pub(crate) const SPECIAL: usize = 16;
pub(crate) const PAGESIZE_VERSION: usize = 18;

/// `BLCKSZ | PG_PAGE_LAYOUT_VERSION`, as `PageInit` stores it.
pub(crate) const PAGESIZE_VERSION_VALUE: u16 = PAGE_SIZE as u16 | 4;

/// `SizeOfPageHeaderData`.
pub(crate) const PAGE_HEADER: u16 = 24;

/// `PD_VALID_FLAG_BITS`: the bits of `pd_flags` that PostgreSQL uses.
pub(crate) const VALID_FLAGS: u16 = 0b111;

/// Two bytes of the header.
pub(crate) fn get(page: &Page, offset: usize) -> u16 {
    u16::from_le_bytes([page[offset], page[offset + 1]])
}

/// Stores two bytes of the header.
pub(crate) fn put(page: &mut Page, offset: usize, value: u16) {
    page[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
}

/// Whether every byte of the page is zero.
#[must_use]
pub fn is_zero(page: &Page) -> bool {
    // The first row decides for nearly every page. The inner fold has no branches, so that it runs
    // in vector registers.
    page.as_chunks::<64>().0.iter().all(|row| row.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_with_one_bit_set_is_not_zero() {
        for bit in 0..PAGE_SIZE * 8 {
            let mut page = [0; PAGE_SIZE];
            page[bit / 8] = 1 << (bit % 8);
            assert!(!is_zero(&page), "bit {bit}");
        }
    }
}
