//! Page format version 1, compared with pages that another program sealed (vectors/page.py), and
//! the checksum, compared with a page that PostgreSQL wrote. If a test here fails, files of users
//! on disk can no longer be opened: the golden pages are right, the code is wrong.

use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::{Backend, CipherId, DataKey, DataKeyVersion, Fork, Page, PageKey, page};

const BLOCK: u32 = 3;
const PLAIN: &Page = include_bytes!("../vectors/plain-v1.page");

struct Golden {
    cipher: CipherId,
    fork: Fork,
    checksums: bool,
    sealed: &'static Page,
}

macro_rules! golden {
    ($cipher:ident, $fork:ident, $checksums:literal, $file:literal) => {
        Golden {
            cipher: CipherId::$cipher,
            fork: Fork::$fork,
            checksums: $checksums,
            sealed: include_bytes!(concat!("../vectors/sealed-v1-", $file, ".page")),
        }
    };
}

const GOLDEN: [Golden; 8] = [
    golden!(Aes256Xts, Main, true, "aes-256-xts"),
    golden!(Aes256Xts, Main, false, "aes-256-xts-no-checksums"),
    golden!(Aes256Xts, FreeSpaceMap, true, "aes-256-xts-fsm"),
    golden!(Aes256Xts, VisibilityMap, true, "aes-256-xts-vm"),
    golden!(Aes128Xts, Main, true, "aes-128-xts"),
    golden!(Aes128Xts, Main, false, "aes-128-xts-no-checksums"),
    golden!(Aes128Xts, FreeSpaceMap, true, "aes-128-xts-fsm"),
    golden!(Aes128Xts, VisibilityMap, true, "aes-128-xts-vm"),
];

#[allow(clippy::unwrap_used, reason = "a helper of tests: a key that cannot be had is a failure")]
fn keys(cipher: CipherId) -> impl Iterator<Item = PageKey> {
    let bytes: Vec<u8> = (0..64).take(cipher.key_len()).collect();
    let data_key = DataKey::from_bytes(cipher, &bytes).unwrap();
    Backend::ALL.into_iter().filter_map(move |backend| PageKey::with_backend(&data_key, backend))
}

fn stored_checksum(page: &Page) -> u16 {
    u16::from_le_bytes([page[8], page[9]])
}

#[test]
fn the_checksum_is_postgresql_s() {
    assert_eq!(page_checksum(PLAIN, BLOCK), stored_checksum(PLAIN));
    assert_ne!(page_checksum(PLAIN, BLOCK + 1), stored_checksum(PLAIN));
}

#[test]
fn version_1_seals_to_the_golden_pages() {
    let version = DataKeyVersion::new(4711).unwrap();
    for golden in &GOLDEN {
        for key in keys(golden.cipher) {
            let mut page = *PLAIN;
            page::seal(&mut page, &key, version, BLOCK, golden.fork, golden.checksums);
            assert!(&page == golden.sealed, "{} {:?}", key.backend(), golden.fork);
        }
    }
}

#[test]
fn version_1_opens_the_golden_pages() {
    for golden in &GOLDEN {
        assert_eq!(page::version_of(golden.sealed).map(DataKeyVersion::get), Some(4711));
        for key in keys(golden.cipher) {
            let mut page = *golden.sealed;
            page::open(&mut page, &key, BLOCK, golden.fork, golden.checksums).unwrap();
            let mut expected = *PLAIN;
            if !golden.checksums {
                expected[8..10].fill(0);
            }
            assert!(page == expected, "{} {:?}", key.backend(), golden.fork);
        }
    }
}

/// The checksum that stock `pg_checksums` and `pg_basebackup` compute over the file, without any
/// key.
#[test]
fn stock_tools_accept_the_checksum_of_sealed_pages() {
    for golden in GOLDEN.iter().filter(|golden| golden.checksums) {
        assert_eq!(stored_checksum(golden.sealed), page_checksum(golden.sealed, BLOCK));
    }
}
