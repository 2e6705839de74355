//! Page format version 2, compared with pages that another program sealed (vectors/page2.py).

use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::NotAuthentic;
use pagevault_cipher::page::v2::{
    Authenticator, Key, Position, Sealed, Sealing, Strength, open, seal,
};
use pagevault_cipher::{Backend, CipherId, DataKey, DataKeyVersion, Fork, Page};

struct Golden {
    name: &'static str,
    authenticator: Authenticator,
    fork: Fork,
    plain: &'static Page,
    sealed: &'static Page,
}

macro_rules! golden {
    ($authenticator:ident $mac:literal, $fork:ident, $name:literal, $plain:literal) => {
        Golden {
            name: $name,
            authenticator: Authenticator::$authenticator,
            fork: Fork::$fork,
            plain: include_bytes!(concat!("../vectors/plain-", $plain, ".page")),
            sealed: include_bytes!(concat!("../vectors/sealed-v2-", $mac, "-", $name, ".page")),
        }
    };
}

const GOLDEN: [Golden; 14] = [
    golden!(Polyval "polyval", Main, "heap", "v1"),
    golden!(Polyval "polyval", Main, "no-checksums", "v1"),
    golden!(Polyval "polyval", Main, "hole", "v2-hole"),
    golden!(Polyval "polyval", Main, "items", "v2-items"),
    golden!(Polyval "polyval", Main, "zeros", "v2-zeros"),
    golden!(Polyval "polyval", VisibilityMap, "vm", "v2-vm"),
    golden!(Polyval "polyval", FreeSpaceMap, "fsm", "v2-fsm"),
    golden!(Polyval "polyval", Main, "short", "v2-short"),
    golden!(HmacSha256 "hmac", Main, "heap", "v1"),
    golden!(HmacSha256 "hmac", Main, "items", "v2-items"),
    golden!(HmacSha256 "hmac", Main, "zeros", "v2-zeros"),
    golden!(HmacSha256 "hmac", VisibilityMap, "vm", "v2-vm"),
    golden!(HmacSha256 "hmac", FreeSpaceMap, "fsm", "v2-fsm"),
    golden!(HmacSha256 "hmac", Main, "short", "v2-short"),
];

impl Golden {
    #[allow(
        clippy::unwrap_used,
        reason = "a helper of tests: a key that cannot be had is a failure"
    )]
    fn keys(&self) -> impl Iterator<Item = Key> {
        let bytes: [u8; 64] = core::array::from_fn(|i| i as u8);
        let data_key = DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap();
        let authenticator = self.authenticator;
        Backend::ALL.into_iter().flat_map(|backend| [(backend, true), (backend, false)]).filter_map(
            move |(backend, fused)| Key::with_backend(&data_key, authenticator, backend, fused),
        )
    }

    fn position(&self) -> Position {
        Position { block: 3, fork: self.fork, epoch: 0x0102_0304 }
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
        if self.name == "hole" {
            page[250..266].fill(0);
        }
        let checksum = if self.checksums() { page_checksum(&page, 3) } else { 0 };
        page[8..10].copy_from_slice(&checksum.to_le_bytes());
        page
    }
}

#[test]
fn version_2_seals_to_the_golden_pages() {
    let version = DataKeyVersion::new(4711).unwrap();
    for golden in &GOLDEN {
        let holes_are_unused = golden.name == "hole";
        let how = Sealing { version, checksums: golden.checksums(), holes_are_unused };
        for key in golden.keys() {
            let mut page = *golden.plain;
            let sealed = seal(&mut page, &key, golden.position(), how);
            assert_eq!(sealed, Sealed::With(golden.strength()), "{}", golden.name);
            assert!(&page == golden.sealed, "{:?} {}", golden.authenticator, golden.name);
        }
    }
}

#[test]
fn version_2_opens_the_golden_pages() {
    for golden in &GOLDEN {
        for key in golden.keys() {
            let mut page = *golden.sealed;
            let opened = open(&mut page, &key, golden.position(), golden.checksums());
            assert_eq!(opened, Ok(golden.strength()), "{}", golden.name);
            assert!(page == golden.opened(), "{:?} {}", golden.authenticator, golden.name);
        }
    }
}

#[test]
fn a_golden_page_opens_nowhere_else() {
    for golden in &GOLDEN {
        let key = golden.keys().next().unwrap();
        let here = golden.position();
        for elsewhere in [
            Position { block: 2, ..here },
            Position { epoch: 0x0102_0305, ..here },
            Position {
                fork: if here.fork == Fork::Main { Fork::FreeSpaceMap } else { Fork::Main },
                ..here
            },
        ] {
            let mut page = *golden.sealed;
            assert_eq!(
                open(&mut page, &key, elsewhere, false),
                Err(NotAuthentic),
                "{}",
                golden.name
            );
        }
    }
}

/// The checksum that stock `pg_checksums` and `pg_basebackup` compute over the file.
#[test]
fn stock_tools_accept_the_checksum_of_sealed_pages() {
    for golden in GOLDEN.iter().filter(|golden| golden.checksums()) {
        let stored = u16::from_le_bytes([golden.sealed[8], golden.sealed[9]]);
        assert_eq!(stored, page_checksum(golden.sealed, 3), "{}", golden.name);
    }
}
