//! Page format version 1: how a relation page looks on disk when it is sealed.
//!
//! ```text
//! byte   0        8    10   12   14   16   18   20                                   8192
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! plain  | pd_lsn |sum |flag|low |up  |spec|2004| pd_prune_xid, line pointers, tuples|
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! sealed | pd_lsn |SUM |FLAG|low |up  |######## AES-XTS, 511 whole blocks ###########|
//!        +--------+----+----+----+----+----------------------------------------------+
//!         clear     |    |   clear     inside, bytes 18-19 are the plain page's sum
//!                   |    +- low 3 bits: pd_flags; high 13 bits: the epoch
//!                   +- PostgreSQL's checksum over the sealed page (0 when checksums are off)
//! ```
//!
//! All integers are little-endian, as on the platforms that pagevault runs on.
//!
//! The tweak, before its own encryption under the second XTS key:
//!
//! ```text
//! byte   0        8            12     13            16
//!        +--------+------------+------+-------------+
//!        | pd_lsn | block u32  | fork | 0   0   0   |
//!        +--------+------------+------+-------------+
//! ```
//!
//! bytes 0 to 7 are `pd_lsn` as stored in the page, 8 to 11 the block number in the fork (not in
//! the segment file), 12 the fork (0 main and init, 1 free space map, 2 visibility map), 13 to 15
//! zero. The same page at a new LSN is a new ciphertext.
//!
//! Rules that follow from the layout:
//!
//! * `pd_pagesize_version` of a plaintext page is a constant (page size 8192, layout version 4,
//!   which is every page since PostgreSQL 8.3), so its two bytes can carry the plaintext checksum.
//!   Opening a page gives both back, and PostgreSQL verifies its own checksum end to end.
//! * A carried checksum of 0 means that the page was sealed with checksums off. If they are on when
//!   it is opened (`pg_checksums --enable` ran in between), the plaintext checksum is recomputed.
//! * An all-zero page is a page that was never written; it stays all-zero in both directions.
//!   Whoever writes pages may write a page that has nothing but its header so, too ([`is_bare`]).
//! * A hint bit is set without WAL and without a new LSN, so a torn write of such a page mixes two
//!   ciphertexts of one tweak. XTS opens each block on its own: the result is the same mixture of
//!   the two plaintexts, exactly as benign as without pagevault.

use crate::checksum::page_checksum;
use crate::key::{Epoch, Fork, PageKey};
use crate::xts::{Block, Direction, Tweak};

/// Bytes of a page; PostgreSQL's default `BLCKSZ`, the only one supported.
pub const PAGE_SIZE: usize = 8192;

/// One relation page, plaintext or sealed.
pub type Page = [u8; PAGE_SIZE];

/// Number of the format that this module writes.
pub const FORMAT_VERSION: u8 = 1;

/// Bytes of a page that stay clear: all that [`epoch_of`] needs, and all that a proof of what is on
/// disk has to read.
pub const HEADER_SIZE: usize = 16;

/// Bytes of `pd_lsn`, with which a page begins.
pub const LSN_SIZE: usize = 8;

/// `pd_lsn` of `PageHeaderData` (src/include/storage/bufpage.h), as the other offsets below.
const LSN: usize = 0;
const CHECKSUM: usize = 8;
const FLAGS: usize = 10;
const LOWER: usize = 12;
const UPPER: usize = 14;
const SPECIAL: usize = 16;
const PAGESIZE_VERSION: usize = 18;

/// `BLCKSZ | PG_PAGE_LAYOUT_VERSION`, what `PageInit` stores.
const PAGESIZE_VERSION_VALUE: u16 = PAGE_SIZE as u16 | 4;

/// `SizeOfPageHeaderData`.
const PAGE_HEADER: u16 = 24;

/// `PD_VALID_FLAG_BITS`: the bits of `pd_flags` that belong to PostgreSQL.
const VALID_FLAGS: u16 = 0b111;
const EPOCH_SHIFT: u32 = 3;

const _: () = {
    assert!((PAGE_SIZE - HEADER_SIZE) == 511 * size_of::<Block>());
    assert!(Epoch::LAST.get() == u16::MAX >> EPOCH_SHIFT);
    assert!(VALID_FLAGS == (1 << EPOCH_SHIFT) - 1);
    assert!(FLAGS + 2 <= HEADER_SIZE && HEADER_SIZE <= PAGESIZE_VERSION);
};

/// The epoch a page is sealed under, from its first [`HEADER_SIZE`] bytes; `None` for a plaintext
/// or all-zero page, and if `header` is too short to tell.
#[must_use]
pub fn epoch_of(header: &[u8]) -> Option<Epoch> {
    match header {
        [_, _, _, _, _, _, _, _, _, _, low, high, _, _, _, _, ..] => {
            Epoch::new(u16::from_le_bytes([*low, *high]) >> EPOCH_SHIFT)
        }
        _ => None,
    }
}

/// Most often that one byte may stand in the sealed part of a page. In 8176 random bytes each
/// stands 32 times on average; the chance that any stands more than four times as often is below
/// 2^-100 (Chernoff's bound).
const MOST_OF_ONE_BYTE: u16 = 128;

/// Whether a page that names an epoch, of which there is no key, can be a sealed page at all, and
/// is not a damaged one or something else that has bits there: its checksum is right (with
/// `checksums` off, or none), its header is one that PostgreSQL accepts, and the rest looks like
/// ciphertext.
///
/// Whatever was sealed and written wholly passes. Of what was not little does, but some may.
#[must_use]
pub fn may_be_sealed(page: &Page, block: u32, checksums: bool) -> bool {
    let checksum = get(page, CHECKSUM);
    let is_summed = checksum == 0 && !checksums || checksum == page_checksum(page, block);
    let (lower, upper) = (get(page, LOWER), get(page, UPPER));
    // PageIsVerified (bufpage.c)
    let is_header = lower <= upper && 0 < upper && usize::from(upper) <= PAGE_SIZE;
    let mut counts = [0_u16; 256];
    page[HEADER_SIZE..].iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    epoch_of(page).is_some()
        && is_summed
        && is_header
        && counts.iter().all(|count| *count <= MOST_OF_ONE_BYTE)
}

/// Whether every byte of the page is zero.
#[must_use]
pub fn is_zero(page: &Page) -> bool {
    // Nearly every page is told from a zero page by its first row. The inner fold is without
    // branches so that it runs in vector registers.
    page.as_chunks::<64>().0.iter().all(|row| row.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Seals a plaintext page in place; false for an all-zero page, which is left as it is.
///
/// `block` is the block number in the fork. With `checksums`, the page must carry its plaintext
/// checksum already, as PostgreSQL sets it before every write (`PageSetChecksumCopy`); it travels
/// inside, and the sealed page gets one of its own. Without, both are zero.
pub fn seal(
    page: &mut Page,
    key: &PageKey,
    epoch: Epoch,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> bool {
    if is_zero(page) {
        return false;
    }
    let carried = if checksums { get(page, CHECKSUM) } else { 0 };
    put(page, PAGESIZE_VERSION, carried);
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, epoch.get() << EPOCH_SHIFT | flags);
    key.schedule.run(Direction::Encrypt, tweak(page, block, fork), unit(page));
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
    true
}

/// Opens a sealed page in place; `key` is that of its epoch ([`epoch_of`]). A page that is not
/// sealed is left as it is.
///
/// There is no error: with `checksums`, a page that was damaged on disk comes back with a
/// `pd_checksum` that cannot be right, so that PostgreSQL refuses it exactly as it refuses a
/// damaged plaintext page, and `ignore_checksum_failure` and `zero_damaged_pages` keep their
/// meaning.
pub fn open(page: &mut Page, key: &PageKey, block: u32, fork: Fork, checksums: bool) {
    if epoch_of(page).is_none() {
        return;
    }
    let damaged = checksums && get(page, CHECKSUM) != page_checksum(page, block);
    key.schedule.run(Direction::Decrypt, tweak(page, block, fork), unit(page));
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, flags);
    let carried = get(page, PAGESIZE_VERSION);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = match carried {
        // No page has the checksum 0.
        _ if damaged => 0,
        0 if checksums => page_checksum(page, block),
        carried => carried,
    };
    put(page, CHECKSUM, checksum);
}

/// Makes the page an empty one, as `PageInit` (bufpage.c) would, last changed at `lsn`.
///
/// With `checksums` it carries its checksum as block `block` of a fork.
pub fn blank(page: &mut Page, lsn: u64, block: u32, checksums: bool) {
    page.fill(0);
    // PageXLogRecPtr: the high half comes first.
    let stored = lsn.rotate_right(32).to_le_bytes();
    page[LSN..].iter_mut().zip(stored).for_each(|(byte, stored)| *byte = stored);
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
pub fn bury(page: &mut Page, lsn: u64, block: u32, checksums: bool) {
    const ITEM: usize = size_of::<u32>();
    blank(page, lsn, block, false);
    let items = page[usize::from(PAGE_HEADER)..].chunks_exact_mut(ITEM).take(MAX_ITEMS);
    items.for_each(|item| item.copy_from_slice(&DEAD_ITEM.to_le_bytes()));
    put(page, LOWER, PAGE_HEADER + (MAX_ITEMS * ITEM) as u16);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// `pd_lsn` of a page made by [`stand_in`]: later than any record of WAL, so no page of a server
/// has it.
const LATER_THAN_WAL: [u8; LSN_SIZE] = [0xFF; LSN_SIZE];

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
    page[..LSN_SIZE].copy_from_slice(&LATER_THAN_WAL);
    put(page, LOWER, PAGE_HEADER);
    put(page, UPPER, PAGE_HEADER);
    put(page, SPECIAL, PAGE_SIZE as u16 - SPECIAL_SPACE);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Whether a page, of which these are the first [`LSN_SIZE`] bytes, was made by [`stand_in`].
#[must_use]
pub fn is_stand_in(lsn: &[u8; LSN_SIZE]) -> bool {
    *lsn == LATER_THAN_WAL
}

/// Whether the page has nothing but its header, as `PageInit` (bufpage.c) makes it for a heap or a
/// map, and was never logged.
#[must_use]
pub fn is_bare(page: &Page) -> bool {
    let header = [(LOWER, PAGE_HEADER), (UPPER, PAGE_SIZE as u16), (SPECIAL, PAGE_SIZE as u16)];
    page[LSN..LSN + LSN_SIZE] == [0; LSN_SIZE]
        && get(page, FLAGS) == 0
        && header.iter().all(|(at, value)| get(page, *at) == *value)
        && get(page, PAGESIZE_VERSION) == PAGESIZE_VERSION_VALUE
        && page[PAGESIZE_VERSION + 2..].iter().all(|byte| *byte == 0)
}

fn tweak(page: &Page, block: u32, fork: Fork) -> Tweak {
    // Put together in registers: bytes written one by one would be slow to read back as a whole.
    let lsn = page[LSN..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    u128::from(lsn) | u128::from(block) << 64 | u128::from(fork.tweak_byte()) << 96
}

/// The encrypted part of the page.
fn unit(page: &mut Page) -> &mut [Block] {
    page[HEADER_SIZE..].as_chunks_mut().0
}

fn get(page: &Page, offset: usize) -> u16 {
    u16::from_le_bytes([page[offset], page[offset + 1]])
}

fn put(page: &mut Page, offset: usize, value: u16) {
    page[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{CipherId, DataKey};
    use proptest::prelude::*;

    fn key(cipher: CipherId, seed: u8) -> PageKey {
        let bytes: Vec<u8> = (0..cipher.key_len()).map(|i| seed.wrapping_add(i as u8)).collect();
        PageKey::new(&DataKey::from_bytes(cipher, &bytes).unwrap())
    }

    /// A page as PostgreSQL hands it over: plausible header, arbitrary rest, checksum if on.
    fn plain_page(fill: &[u8], block: u32, checksums: bool) -> Page {
        let mut page = [0; PAGE_SIZE];
        page.iter_mut().zip(fill.iter().cycle()).for_each(|(byte, fill)| *byte = *fill);
        put(&mut page, FLAGS, u16::from(fill[0]) & VALID_FLAGS);
        put(&mut page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
        put(&mut page, CHECKSUM, 0);
        if checksums {
            let checksum = page_checksum(&page, block);
            put(&mut page, CHECKSUM, checksum);
        }
        page
    }

    fn any_cipher() -> impl Strategy<Value = CipherId> {
        prop::sample::select(&CipherId::ALL[..])
    }

    fn any_fork() -> impl Strategy<Value = Fork> {
        (0..4_u8).prop_map(|number| Fork::from_number(number).unwrap())
    }

    fn any_plain() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 1..512)
    }

    const EPOCH: Epoch = Epoch::new(4711).unwrap();

    #[test]
    fn a_zero_page_stays_zero() {
        let key = key(CipherId::Aes256Xts, 1);
        let mut page = [0; PAGE_SIZE];
        seal(&mut page, &key, EPOCH, 7, Fork::Main, true);
        assert!(is_zero(&page));
        open(&mut page, &key, 7, Fork::Main, true);
        assert!(is_zero(&page));
    }

    #[test]
    fn a_page_with_one_bit_set_is_not_zero() {
        for bit in 0..PAGE_SIZE * 8 {
            let mut page = [0; PAGE_SIZE];
            page[bit / 8] = 1 << (bit % 8);
            assert!(!is_zero(&page), "bit {bit}");
        }
    }

    #[test]
    fn a_short_header_names_no_epoch() {
        for length in 0..HEADER_SIZE {
            assert_eq!(epoch_of(&vec![0xff; length]), None);
        }
        assert_eq!(epoch_of(&[0xff; HEADER_SIZE]), Some(Epoch::LAST));
        assert_eq!(epoch_of(&[0; HEADER_SIZE]), None);
    }

    /// A page with rows of text.
    fn page_of_rows(block: u32, checksums: bool) -> Page {
        let mut page = plain_page(b"row 4711: some text; ", block, false);
        for (at, value) in [(LOWER, 200), (UPPER, 400), (SPECIAL, 8192)] {
            put(&mut page, at, value);
        }
        let checksum = if checksums { page_checksum(&page, block) } else { 0 };
        put(&mut page, CHECKSUM, checksum);
        page
    }

    #[test]
    fn sealed_pages_may_be_sealed() {
        for cipher in CipherId::ALL {
            for (seed, checksums) in (0..64).map(|seed| (seed, seed % 2 == 0)) {
                let mut page = page_of_rows(9, checksums);
                page[0] = seed;
                assert!(!may_be_sealed(&page, 9, checksums), "plaintext");
                seal(&mut page, &key(cipher, seed), EPOCH, 9, Fork::Main, checksums);
                assert!(may_be_sealed(&page, 9, checksums));
                // Checksums were on when it was written, and are off now.
                assert!(may_be_sealed(&page, 9, false));
            }
        }
    }

    #[test]
    fn damaged_pages_are_not_taken_for_sealed_ones() {
        for checksums in [true, false] {
            // A bit of the flags fell over.
            let mut page = page_of_rows(9, checksums);
            page[10] ^= 1 << 6;
            assert!(epoch_of(&page).is_some() && !may_be_sealed(&page, 9, checksums));
            assert!(!may_be_sealed(&[0xA5; PAGE_SIZE], 9, checksums), "one byte over and over");
            let mut text = [b' '; PAGE_SIZE];
            text.iter_mut()
                .zip(b"the quick brown fox ".iter().cycle())
                .for_each(|(to, from)| *to = *from);
            assert!(!may_be_sealed(&text, 9, checksums), "text");
        }
        let sealed = |checksums| {
            let mut page = page_of_rows(9, checksums);
            seal(&mut page, &key(CipherId::Aes256Xts, 3), EPOCH, 9, Fork::Main, checksums);
            page
        };
        assert!(!may_be_sealed(&sealed(true), 10, true), "of another block");
        assert!(!may_be_sealed(&sealed(false), 9, true), "no page has the checksum 0");
        let mut page = sealed(false);
        put(&mut page, UPPER, 100);
        assert!(!may_be_sealed(&page, 9, false), "its header cannot be");
    }

    #[test]
    fn a_blank_page_is_one_that_postgresql_accepts() {
        let mut page = [7; PAGE_SIZE];
        blank(&mut page, 0x1_6B37_4D8F, 9, true);
        assert_eq!(page[..8], [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B]);
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (24, 8192, 8192));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        assert!(page[20..].iter().all(|byte| *byte == 0));
        blank(&mut page, 1, 9, false);
        assert_eq!(get(&page, CHECKSUM), 0);
    }

    #[test]
    fn a_buried_page_has_dead_rows_only() {
        let mut page = [7; PAGE_SIZE];
        bury(&mut page, 0x1_6B37_4D8F, 9, true);
        assert_eq!(page[..8], [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B]);
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (1188, 8192, 8192));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        // lp_off : 15, lp_flags : 2, lp_len : 15
        assert!(page[24..1188].chunks(4).all(|item| item == [0, 0x80, 1, 0]));
        assert!(page[1188..].iter().all(|byte| *byte == 0));
        bury(&mut page, 1, 9, false);
        assert_eq!(get(&page, CHECKSUM), 0);
    }

    #[test]
    fn a_stand_in_is_one_that_postgresql_accepts_and_tells_apart() {
        let mut page = [7; PAGE_SIZE];
        assert!(!is_stand_in(page.first_chunk().unwrap()));
        stand_in(&mut page, 9, true);
        assert!(is_stand_in(page.first_chunk().unwrap()));
        // PageIsVerified (bufpage.c): 0 < pd_lower <= pd_upper <= pd_special <= BLCKSZ, the last
        // one aligned.
        assert_eq!((get(&page, LOWER), get(&page, UPPER), get(&page, SPECIAL)), (24, 24, 8128));
        assert_eq!((get(&page, FLAGS), get(&page, PAGESIZE_VERSION)), (0, 0x2004));
        assert_eq!(get(&page, CHECKSUM), page_checksum(&page, 9));
        assert_eq!(epoch_of(&page), None);
    }

    #[test]
    fn a_page_is_bare_until_something_stands_in_it() {
        let mut page = [0; PAGE_SIZE];
        assert!(!is_bare(&page));
        blank(&mut page, 0, 3, true);
        assert!(is_bare(&page));
        for bit in 0..PAGE_SIZE * 8 {
            let in_checksum = (CHECKSUM * 8..FLAGS * 8).contains(&bit);
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(is_bare(&page), in_checksum, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn opening_a_plaintext_page_changes_nothing() {
        let plain = plain_page(b"plain", 3, true);
        let mut page = plain;
        open(&mut page, &key(CipherId::Aes128Xts, 1), 3, Fork::Main, true);
        assert!(page == plain);
    }

    #[test]
    fn init_opens_as_main_and_no_other_fork_does() {
        let key = key(CipherId::Aes256Xts, 1);
        let plain = plain_page(b"unlogged", 0, false);
        for (fork, same) in [
            (Fork::Main, true),
            (Fork::Init, true),
            (Fork::FreeSpaceMap, false),
            (Fork::VisibilityMap, false),
        ] {
            let mut page = plain;
            seal(&mut page, &key, EPOCH, 0, Fork::Init, false);
            open(&mut page, &key, 0, fork, false);
            assert_eq!(page == plain, same, "{fork:?}");
        }
    }

    proptest! {
        #[test]
        fn opening_gives_back_what_was_sealed(
            cipher in any_cipher(), seed: u8, fill in any_plain(), epoch in 1..8192_u16,
            block: u32, fork in any_fork(), checksums: bool,
        ) {
            let (key, epoch) = (key(cipher, seed), Epoch::new(epoch).unwrap());
            let plain = plain_page(&fill, block, checksums);
            let mut page = plain;
            seal(&mut page, &key, epoch, block, fork, checksums);
            prop_assert_eq!(epoch_of(&page), Some(epoch));
            prop_assert_eq!(epoch_of(&page[..HEADER_SIZE]), Some(epoch));
            prop_assert_eq!(&page[..8], &plain[..8]);
            prop_assert_eq!(get(&page, FLAGS) & VALID_FLAGS, get(&plain, FLAGS));
            prop_assert_eq!(&page[12..16], &plain[12..16]);
            prop_assert!(page[16..].iter().zip(&plain[16..]).filter(|(a, b)| a == b).count() < 200);
            let sum = if checksums { page_checksum(&page, block) } else { 0 };
            prop_assert_eq!(get(&page, CHECKSUM), sum);
            open(&mut page, &key, block, fork, checksums);
            prop_assert!(page == plain);
        }

        /// Whatever the disk returns, a page that was changed there is refused by PostgreSQL's own
        /// check after it was opened. (A changed epoch never gets here: it names another key.)
        #[test]
        fn flipped_bits_are_refused(
            cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
            bits in prop::collection::btree_set(0..PAGE_SIZE * 8, 1..4),
        ) {
            let key = key(cipher, 1);
            let mut page = plain_page(&fill, block, true);
            seal(&mut page, &key, EPOCH, block, fork, true);
            let sealed = page;
            for bit in bits {
                page[bit / 8] ^= 1 << (bit % 8);
            }
            prop_assume!(epoch_of(&page) == epoch_of(&sealed));
            // 16 bits of checksum cannot tell everything apart.
            prop_assume!(get(&page, CHECKSUM) != page_checksum(&page, block));
            open(&mut page, &key, block, fork, true);
            prop_assert_ne!(get(&page, CHECKSUM), page_checksum(&page, block));
        }

        #[test]
        fn a_page_at_another_place_is_refused(
            cipher in any_cipher(), fill in any_plain(), block: u32, distance in 1..65534_u32,
        ) {
            let key = key(cipher, 1);
            let mut page = plain_page(&fill, block, true);
            seal(&mut page, &key, EPOCH, block, Fork::Main, true);
            let elsewhere = block ^ distance;
            prop_assume!(get(&page, CHECKSUM) != page_checksum(&page, elsewhere));
            open(&mut page, &key, elsewhere, Fork::Main, true);
            prop_assert_ne!(get(&page, CHECKSUM), page_checksum(&page, elsewhere));
        }

        /// `pg_checksums --enable` over sealed files, then a start of the server.
        #[test]
        fn checksums_enabled_later_are_recomputed(
            cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
        ) {
            let key = key(cipher, 1);
            let mut page = plain_page(&fill, block, false);
            seal(&mut page, &key, EPOCH, block, fork, false);
            let checksum = page_checksum(&page, block);
            put(&mut page, CHECKSUM, checksum);
            open(&mut page, &key, block, fork, true);
            prop_assert!(page == plain_page(&fill, block, true));
        }

        /// `pg_checksums --disable` over sealed files: the carried checksum does no harm.
        #[test]
        fn checksums_disabled_later_change_nothing_else(
            cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
        ) {
            let key = key(cipher, 1);
            let plain = plain_page(&fill, block, true);
            let mut page = plain;
            seal(&mut page, &key, EPOCH, block, fork, true);
            open(&mut page, &key, block, fork, false);
            prop_assert!(page == plain);
        }

        /// The reason for XTS: hint bits change a page without a new LSN, and a torn write mixes
        /// old and new 512-byte sectors. The mixture must open to the mixture of the plaintexts.
        #[test]
        fn a_torn_hint_bit_write_opens_block_by_block(
            cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
            hints in prop::collection::btree_set(24..PAGE_SIZE, 1..40), new_sectors: u16,
        ) {
            let key = key(cipher, 1);
            let old_plain = plain_page(&fill, block, false);
            let mut new_plain = old_plain;
            for hint in hints {
                new_plain[hint] ^= 1;
            }
            let (mut old, mut new) = (old_plain, new_plain);
            seal(&mut old, &key, EPOCH, block, fork, false);
            seal(&mut new, &key, EPOCH, block, fork, false);
            let (mut torn, mut torn_plain) = (old, old_plain);
            for sector in (0..16).filter(|sector| new_sectors >> sector & 1 == 1) {
                let bytes = sector * 512..(sector + 1) * 512;
                torn[bytes.clone()].copy_from_slice(&new[bytes.clone()]);
                torn_plain[bytes.clone()].copy_from_slice(&new_plain[bytes]);
            }
            open(&mut torn, &key, block, fork, false);
            prop_assert!(torn == torn_plain);
        }
    }
}
