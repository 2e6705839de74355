use super::*;
use crate::checksum::page_checksum;
use crate::key::{CipherId, DataKey};
use crate::layout::{
    CHECKSUM, FLAGS, LOWER, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, SPECIAL, UPPER, VALID_FLAGS,
    get, put,
};
use proptest::prelude::*;

/// Those of format 1, which these tests are about.
const CIPHERS: [CipherId; 2] = [CipherId::Aes256Xts, CipherId::Aes128Xts];

fn key(cipher: CipherId, seed: u8) -> PageKey {
    let bytes: Vec<u8> = (0..cipher.key_len()).map(|i| seed.wrapping_add(i as u8)).collect();
    PageKey::new(&DataKey::from_bytes(cipher, &bytes).unwrap())
}

/// A page as PostgreSQL passes it: plausible header, arbitrary rest, checksum if on.
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
    prop::sample::select(&CIPHERS[..])
}

fn any_fork() -> impl Strategy<Value = Fork> {
    (0..4_u8).prop_map(|number| Fork::from_number(number).unwrap())
}

fn any_plain() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..512)
}

const VERSION: DataKeyVersion = DataKeyVersion::new(4711).unwrap();

#[test]
fn a_zero_page_stays_zero() {
    let key = key(CipherId::Aes256Xts, 1);
    let mut page = [0; PAGE_SIZE];
    seal(&mut page, &key, VERSION, 7, Fork::Main, true);
    assert!(is_zero(&page));
    open(&mut page, &key, 7, Fork::Main, true).unwrap();
    assert!(is_zero(&page));
}

#[test]
fn a_short_header_names_no_version() {
    for length in 0..HEADER_SIZE {
        assert_eq!(version_of(&vec![0xff; length]), None);
    }
    assert_eq!(version_of(&[0xff; HEADER_SIZE]), Some(DataKeyVersion::LAST));
    assert_eq!(version_of(&[0; HEADER_SIZE]), None);
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
    for cipher in CIPHERS {
        for (seed, checksums) in (0..64).map(|seed| (seed, seed % 2 == 0)) {
            let mut page = page_of_rows(9, checksums);
            page[0] = seed;
            assert!(!may_be_sealed(&page, 9, checksums), "plaintext");
            seal(&mut page, &key(cipher, seed), VERSION, 9, Fork::Main, checksums);
            assert!(may_be_sealed(&page, 9, checksums));
            // Checksums were on when it was written, and are off now.
            assert!(may_be_sealed(&page, 9, false));
        }
    }
}

#[test]
fn damaged_pages_are_not_taken_for_sealed_ones() {
    for checksums in [true, false] {
        // One bit of the flags is flipped.
        let mut page = page_of_rows(9, checksums);
        page[10] ^= 1 << 6;
        assert!(version_of(&page).is_some() && !may_be_sealed(&page, 9, checksums));
        assert!(!may_be_sealed(&[0xA5; PAGE_SIZE], 9, checksums), "one byte over and over");
        let mut text = [b' '; PAGE_SIZE];
        text.iter_mut()
            .zip(b"the quick brown fox ".iter().cycle())
            .for_each(|(to, from)| *to = *from);
        assert!(!may_be_sealed(&text, 9, checksums), "text");
    }
    let sealed = |checksums| {
        let mut page = page_of_rows(9, checksums);
        seal(&mut page, &key(CipherId::Aes256Xts, 3), VERSION, 9, Fork::Main, checksums);
        page
    };
    assert!(!may_be_sealed(&sealed(true), 10, true), "of another block");
    assert!(!may_be_sealed(&sealed(false), 9, true), "no page has the checksum 0");
    let mut page = sealed(false);
    put(&mut page, UPPER, 100);
    assert!(!may_be_sealed(&page, 9, false), "its header cannot be");
}

#[test]
fn opening_a_plaintext_page_changes_nothing() {
    let plain = plain_page(b"plain", 3, true);
    let mut page = plain;
    open(&mut page, &key(CipherId::Aes128Xts, 1), 3, Fork::Main, true).unwrap();
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
        seal(&mut page, &key, VERSION, 0, Fork::Init, false);
        open(&mut page, &key, 0, fork, false).unwrap();
        assert_eq!(page == plain, same, "{fork:?}");
    }
}

proptest! {
    #[test]
    fn opening_reverses_sealing(
        cipher in any_cipher(), seed: u8, fill in any_plain(), version in 1..8192_u16,
        block: u32, fork in any_fork(), checksums: bool,
    ) {
        let (key, version) = (key(cipher, seed), DataKeyVersion::new(version).unwrap());
        let plain = plain_page(&fill, block, checksums);
        let mut page = plain;
        seal(&mut page, &key, version, block, fork, checksums);
        prop_assert_eq!(version_of(&page), Some(version));
        prop_assert_eq!(version_of(&page[..HEADER_SIZE]), Some(version));
        prop_assert_eq!(&page[..8], &plain[..8]);
        prop_assert_eq!(get(&page, FLAGS) & VALID_FLAGS, get(&plain, FLAGS));
        prop_assert_eq!(&page[12..16], &plain[12..16]);
        prop_assert!(page[16..].iter().zip(&plain[16..]).filter(|(a, b)| a == b).count() < 200);
        let sum = if checksums { page_checksum(&page, block) } else { 0 };
        prop_assert_eq!(get(&page, CHECKSUM), sum);
        open(&mut page, &key, block, fork, checksums).unwrap();
        prop_assert!(page == plain);
    }

    /// PostgreSQL's own check refuses a page that was changed on disk, after it was opened. (A
    /// changed key version is not tested here: it selects another key.)
    #[test]
    fn flipped_bits_are_refused(
        cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
        bits in prop::collection::btree_set(0..PAGE_SIZE * 8, 1..4),
    ) {
        let key = key(cipher, 1);
        let mut page = plain_page(&fill, block, true);
        seal(&mut page, &key, VERSION, block, fork, true);
        let sealed = page;
        for bit in bits {
            page[bit / 8] ^= 1 << (bit % 8);
        }
        prop_assume!(version_of(&page) == version_of(&sealed));
        // 16 bits of checksum do not detect every change.
        prop_assume!(get(&page, CHECKSUM) != page_checksum(&page, block));
        open(&mut page, &key, block, fork, true).unwrap();
        prop_assert_ne!(get(&page, CHECKSUM), page_checksum(&page, block));
    }

    #[test]
    fn a_page_at_another_place_is_refused(
        cipher in any_cipher(), fill in any_plain(), block: u32, distance in 1..65534_u32,
    ) {
        let key = key(cipher, 1);
        let mut page = plain_page(&fill, block, true);
        seal(&mut page, &key, VERSION, block, Fork::Main, true);
        let elsewhere = block ^ distance;
        prop_assume!(get(&page, CHECKSUM) != page_checksum(&page, elsewhere));
        open(&mut page, &key, elsewhere, Fork::Main, true).unwrap();
        prop_assert_ne!(get(&page, CHECKSUM), page_checksum(&page, elsewhere));
    }

    /// `pg_checksums --enable` over sealed files, then a start of the server.
    #[test]
    fn checksums_enabled_later_are_recomputed(
        cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
    ) {
        let key = key(cipher, 1);
        let mut page = plain_page(&fill, block, false);
        seal(&mut page, &key, VERSION, block, fork, false);
        let checksum = page_checksum(&page, block);
        put(&mut page, CHECKSUM, checksum);
        open(&mut page, &key, block, fork, true).unwrap();
        prop_assert!(page == plain_page(&fill, block, true));
    }

    /// `pg_checksums --disable` over sealed files: the stored plaintext checksum does no harm.
    #[test]
    fn checksums_disabled_later_change_nothing_else(
        cipher in any_cipher(), fill in any_plain(), block: u32, fork in any_fork(),
    ) {
        let key = key(cipher, 1);
        let plain = plain_page(&fill, block, true);
        let mut page = plain;
        seal(&mut page, &key, VERSION, block, fork, true);
        open(&mut page, &key, block, fork, false).unwrap();
        prop_assert!(page == plain);
    }

    /// The reason for XTS: hint bits change a page without a new LSN, and a torn write mixes old
    /// and new 512-byte sectors. The mixture must open to the same mixture of the plaintexts.
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
        seal(&mut old, &key, VERSION, block, fork, false);
        seal(&mut new, &key, VERSION, block, fork, false);
        let (mut torn, mut torn_plain) = (old, old_plain);
        for sector in (0..16).filter(|sector| new_sectors >> sector & 1 == 1) {
            let bytes = sector * 512..(sector + 1) * 512;
            torn[bytes.clone()].copy_from_slice(&new[bytes.clone()]);
            torn_plain[bytes.clone()].copy_from_slice(&new_plain[bytes]);
        }
        open(&mut torn, &key, block, fork, false).unwrap();
        prop_assert!(torn == torn_plain);
    }
}

/// One bit of the version is wrong. A page under another key is not taken for one under this.
#[test]
fn a_page_that_names_another_version_is_recognized_by_its_key() {
    for cipher in CipherId::ALL {
        for (seed, checksums) in (0..64).map(|seed| (seed, seed % 2 == 0)) {
            let key = key(cipher, seed);
            let sealed = || {
                let mut page = page_of_rows(9, checksums);
                page[200..1000].fill(seed);
                page[0] = seed;
                if checksums {
                    let sum = page_checksum(&page, 9);
                    put(&mut page, CHECKSUM, sum);
                }
                seal(&mut page, &key, VERSION, 9, Fork::Main, checksums);
                page
            };
            let is_it = |page: &Page, key: &PageKey| {
                is_misnamed(&mut { *page }, key, VERSION, 9, Fork::Main, checksums)
            };
            assert!(!is_it(&sealed(), &key), "it names this version");
            for bit in 3..16 {
                let mut page = sealed();
                page[FLAGS + bit / 8] ^= 1 << (bit % 8);
                for is_summed in [false, true] {
                    if is_summed && checksums {
                        let sum = page_checksum(&page, 9);
                        put(&mut page, CHECKSUM, sum);
                    }
                    assert!(is_it(&page, &key), "{cipher:?} bit {bit}");
                }
                assert!(!is_it(&page, &self::key(cipher, seed + 64)), "another key");
                assert!(!is_misnamed_plaintext(&page), "not in plaintext");
                page[5000] ^= 1;
                if PageFormat::of(cipher) == PageFormat::V2 {
                    assert!(!is_it(&page, &key), "it has another wrong bit");
                }
            }
        }
    }
}

#[test]
fn a_page_in_plaintext_that_names_a_version_is_recognized() {
    let page = page_of_rows(9, false);
    assert!(!is_misnamed_plaintext(&page), "it names none");
    for bit in 3..16 {
        let mut page = page;
        page[FLAGS + bit / 8] ^= 1 << (bit % 8);
        assert!(is_misnamed_plaintext(&page));
        let key = key(CipherId::Aes256Xts, 1);
        assert!(!is_misnamed(&mut page, &key, VERSION, 9, Fork::Main, false));
    }
    assert!(!is_misnamed_plaintext(&[0xFF; PAGE_SIZE]));
}
