//! Pages of WAL whose key is far from the one in use at their address: a standby encrypts what it
//! receives under the key that it has replayed, and may lag by any number of rotations.

use std::collections::BTreeMap;

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{CipherId, DataKey, KeyVersion, Lsn, PageKey};
use pagevault_keystore::wal::WalPhase;
use pagevault_keystore::wal_pages::{self, Cause, WalKeys};

use crate::arbitrary::key_version;

const PAGE: usize = 8192;
const ADDRESS: Lsn = Lsn(0x1_2300_0000);

/// Keys by version, and the version in use.
struct Kept {
    keys: BTreeMap<u32, PageKey>,
    in_use: u32,
}

impl WalKeys for Kept {
    type Error = KeyVersion;

    fn phase_at(&self, _address: Lsn) -> WalPhase {
        WalPhase::under(key_version(self.in_use))
    }

    fn with_key<R>(
        &self,
        version: KeyVersion,
        f: impl FnOnce(&PageKey) -> R,
    ) -> Result<R, KeyVersion> {
        self.keys.get(&version.get()).map(f).ok_or(version)
    }
}

fn kept(versions: &[u32], in_use: u32) -> Kept {
    let key = |version: u32| {
        let bytes: [u8; 64] = std::array::from_fn(|at| (at as u8).wrapping_add(version as u8));
        PageKey::new(&DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap())
    };
    Kept { keys: versions.iter().map(|version| (*version, key(*version))).collect(), in_use }
}

fn plain() -> Vec<u8> {
    let mut page = vec![0x5a; PAGE];
    page[..24].fill(0);
    page[0] = 0x10;
    page[4] = 1;
    page[8..16].copy_from_slice(&ADDRESS.0.to_le_bytes());
    page
}

fn sealed(keys: &Kept, version: u32) -> Vec<u8> {
    let mut page = plain();
    wal::seal(&mut page, &keys.keys[&version], Mark::of_version(key_version(version)));
    page
}

fn opened(keys: &Kept, page: &mut [u8]) -> Result<(), Cause<KeyVersion>> {
    wal_pages::open(keys, page, |_, _| true).map_err(|fault| fault.cause)
}

#[test]
fn a_page_is_opened_with_the_key_that_is_there() {
    for in_use in [1, 2048, 2049, 3000, 4000] {
        let keys = kept(&[1, in_use], in_use);
        let mut page = sealed(&keys, 1);
        assert_eq!(opened(&keys, &mut page), Ok(()), "{in_use}");
        assert_eq!(page, plain(), "{in_use}");
    }
    let keys = kept(&[1], 9000);
    let mut page = sealed(&keys, 1);
    assert_eq!(opened(&keys, &mut page), Err(Cause::Key(key_version(8191))));
}

#[test]
fn of_two_keys_with_one_mark_the_one_that_opens_the_page_counts() {
    let keys = kept(&[1, 4096], 3000);
    for version in [1, 4096] {
        let mut page = sealed(&keys, version);
        assert_eq!(opened(&keys, &mut page), Ok(()), "{version}");
        assert_eq!(page, plain(), "{version}");
    }
    // Under neither.
    let mut page = sealed(&kept(&[8191], 8191), 8191);
    assert_eq!(opened(&keys, &mut page), Err(Cause::OtherKey));
}

#[test]
fn a_page_that_is_completed_keeps_its_key() {
    for (versions, in_use) in [(&[1, 2049][..], 2049), (&[1, 4096][..], 3000)] {
        let keys = kept(versions, in_use);
        let mut page = sealed(&keys, 1);
        wal_pages::complete(&keys, &mut page, ADDRESS, |_| false, 4000, &[7; 100]).unwrap();
        wal::open(&mut page, &keys.keys[&1]);
        let mut expected = plain();
        expected[4000..4100].fill(7);
        assert_eq!(page, expected, "{in_use}");
    }
}
