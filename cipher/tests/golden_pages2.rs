//! Page format version 2, compared with pages that another program sealed (vectors/page2.py).

use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::{NotAuthentic, Strength, open, seal};
use pagevault_cipher::{Backend, CipherId, DataKey, DataKeyVersion, Fork, Page, PageKey};

const BLOCK: u32 = 3;

struct Golden {
    name: &'static str,
    cipher: CipherId,
    fork: Fork,
    plain: &'static Page,
    sealed: &'static Page,
}

macro_rules! golden {
    ($cipher:ident $mac:literal, $fork:ident, $name:literal, $plain:literal) => {
        Golden {
            name: $name,
            cipher: CipherId::$cipher,
            fork: Fork::$fork,
            plain: include_bytes!(concat!("../vectors/plain-", $plain, ".page")),
            sealed: include_bytes!(concat!("../vectors/sealed-v2-", $mac, "-", $name, ".page")),
        }
    };
}

const GOLDEN: [Golden; 15] = [
    golden!(Aes256XtsAuth "polyval", Main, "heap", "v1"),
    golden!(Aes256XtsAuth "polyval", Main, "no-checksums", "v1"),
    golden!(Aes256XtsAuth "polyval", Main, "hole", "v2-hole"),
    golden!(Aes256XtsAuth "polyval", Main, "items", "v2-items"),
    golden!(Aes256XtsAuth "polyval", Main, "zeros", "v2-zeros"),
    golden!(Aes256XtsAuth "polyval", VisibilityMap, "vm", "v2-vm"),
    golden!(Aes256XtsAuth "polyval", FreeSpaceMap, "fsm", "v2-fsm"),
    golden!(Aes256XtsAuth "polyval", Main, "short", "v2-short"),
    golden!(Aes256XtsHmac "hmac", Main, "heap", "v1"),
    golden!(Aes256XtsHmac "hmac", Main, "hole", "v2-hole"),
    golden!(Aes256XtsHmac "hmac", Main, "items", "v2-items"),
    golden!(Aes256XtsHmac "hmac", Main, "zeros", "v2-zeros"),
    golden!(Aes256XtsHmac "hmac", VisibilityMap, "vm", "v2-vm"),
    golden!(Aes256XtsHmac "hmac", FreeSpaceMap, "fsm", "v2-fsm"),
    golden!(Aes256XtsHmac "hmac", Main, "short", "v2-short"),
];

impl Golden {
    #[allow(
        clippy::unwrap_used,
        reason = "a helper of tests: a key that cannot be had is a failure"
    )]
    fn keys(&self) -> impl Iterator<Item = PageKey> {
        let bytes: [u8; 64] = core::array::from_fn(|i| i as u8);
        let data_key = DataKey::from_bytes(self.cipher, &bytes).unwrap();
        Backend::ALL.into_iter().flat_map(move |backend| {
            let keys =
                [PageKey::with_backend, PageKey::in_two_passes].map(|new| new(&data_key, backend));
            keys.into_iter().flatten()
        })
    }

    fn checksums(&self) -> bool {
        self.name != "no-checksums"
    }

    fn strength(&self) -> Strength {
        if self.name == "short" { Strength::Short } else { Strength::Full }
    }

    /// The page after it was sealed and opened.
    fn opened(&self) -> Page {
        let mut page = *self.plain;
        let checksum = if self.checksums() { page_checksum(&page, BLOCK) } else { 0 };
        page[8..10].copy_from_slice(&checksum.to_le_bytes());
        page
    }
}

#[test]
fn version_2_seals_to_the_golden_pages() {
    let version = DataKeyVersion::new(4711).unwrap();
    for golden in &GOLDEN {
        for key in golden.keys() {
            let mut page = *golden.plain;
            assert!(seal(&mut page, &key, version, BLOCK, golden.fork, golden.checksums()));
            assert!(&page == golden.sealed, "{} {}", golden.cipher, golden.name);
        }
    }
}

#[test]
fn version_2_opens_the_golden_pages() {
    for golden in &GOLDEN {
        for key in golden.keys() {
            let mut page = *golden.sealed;
            let opened = open(&mut page, &key, BLOCK, golden.fork, golden.checksums());
            assert_eq!(opened, Ok(Some(golden.strength())), "{}", golden.name);
            assert!(page == golden.opened(), "{} {}", golden.cipher, golden.name);
        }
    }
}

#[test]
fn a_golden_page_opens_nowhere_else() {
    for golden in &GOLDEN {
        let key = golden.keys().next().unwrap();
        let other = if golden.fork == Fork::Main { Fork::FreeSpaceMap } else { Fork::Main };
        for (block, fork) in [(2, golden.fork), (BLOCK, other)] {
            let mut page = *golden.sealed;
            let opened = open(&mut page, &key, block, fork, false);
            assert_eq!(opened, Err(NotAuthentic), "{}", golden.name);
        }
    }
}

/// The checksum that stock `pg_checksums` and `pg_basebackup` compute over the file.
#[test]
fn stock_tools_accept_the_checksum_of_sealed_pages() {
    for golden in GOLDEN.iter().filter(|golden| golden.checksums()) {
        let stored = u16::from_le_bytes([golden.sealed[8], golden.sealed[9]]);
        assert_eq!(stored, page_checksum(golden.sealed, BLOCK), "{}", golden.name);
    }
}
