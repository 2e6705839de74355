//! WAL page format version 1, compared with pages that another program sealed (vectors/wal.py). If
//! a test here fails, archived WAL of users can no longer be opened: the golden pages are right,
//! the code is wrong.

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{Backend, CipherId, DataKey, KeyVersion, Lsn, PageKey};

const VERSION: u32 = 4095 + 1234;
const PLAIN: &[u8; 8192] = include_bytes!("../vectors/plain-v1.wal");
const GOLDEN: [(CipherId, &[u8; 8192]); 2] = [
    (CipherId::Aes256Xts, include_bytes!("../vectors/sealed-v1-aes-256-xts.wal")),
    (CipherId::Aes128Xts, include_bytes!("../vectors/sealed-v1-aes-128-xts.wal")),
];

#[allow(clippy::unwrap_used, reason = "a helper of tests: a key that cannot be had is a failure")]
fn keys(cipher: CipherId) -> impl Iterator<Item = PageKey> {
    let bytes: Vec<u8> = (0..64).take(cipher.key_len()).collect();
    let data_key = DataKey::from_bytes(cipher, &bytes).unwrap();
    Backend::ALL.into_iter().filter_map(move |backend| PageKey::with_backend(&data_key, backend))
}

#[test]
fn version_1_seals_to_the_golden_pages() {
    for (cipher, sealed) in GOLDEN {
        for key in keys(cipher) {
            let mut page = *PLAIN;
            wal::seal(&mut page, &key, Mark::of_version(KeyVersion::new(VERSION).unwrap()));
            assert!(&page == sealed, "{}", key.backend());
        }
    }
}

#[test]
fn version_1_opens_the_golden_pages() {
    for (cipher, sealed) in GOLDEN {
        assert_eq!(wal::mark_of(sealed).map(Mark::get), Some(1234));
        assert_eq!(wal::address_of(sealed), Some(Lsn(0x0100_6000)));
        for key in keys(cipher) {
            let mut page = *sealed;
            wal::open(&mut page, &key);
            assert!(&page == PLAIN, "{}", key.backend());
        }
    }
}
