//! The file of key groups that were given up.

use pagevault_keystore::given_up::{AFTER_ALL_WAL, GivenUp};
use pagevault_keystore::{KeyGroup, Lsn, Record, batch};

const GOLDEN: &[u8] = include_bytes!("../../vectors/v1/given_up");
const ID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn given_up() -> GivenUp {
    let groups = [(100, 1_700_000_013), (11999, -1)];
    let groups = groups.map(|(group, at)| (KeyGroup::new(group).unwrap(), at));
    GivenUp { keystore: ID, groups: groups.into() }
}

#[test]
fn the_file_is_as_documented() {
    assert_eq!(given_up().encode().unwrap(), GOLDEN);
    assert_eq!(GivenUp::decode(GOLDEN).unwrap(), given_up());
    assert!(given_up().has(KeyGroup::new(100).unwrap().scope()));
    assert!(!given_up().has(KeyGroup::new(101).unwrap().scope()));
}

#[test]
fn it_is_read_completely_or_refused() {
    for length in 0..GOLDEN.len() {
        assert!(GivenUp::decode(&GOLDEN[..length]).is_err(), "{length} bytes");
    }
    for at in 0..GOLDEN.len() * 8 {
        let mut flipped = GOLDEN.to_vec();
        flipped[at / 8] ^= 1 << (at % 8);
        // The file of another keystore is ignored by its readers.
        assert!(GivenUp::decode(&flipped).map_or(true, |read| read.keystore != ID), "bit {at}");
    }
}

#[test]
fn it_has_ends_of_groups_only() {
    let record = Record::DropProvider { name: "old".into() };
    let bytes = [&GOLDEN[..24], &batch::encode(&[record]).unwrap()].concat();
    assert!(GivenUp::decode(&bytes).is_err());
}

/// The address of placeholder pages stays theirs.
#[test]
fn its_address_is_after_all_wal() {
    assert!(AFTER_ALL_WAL < Lsn::MAX && AFTER_ALL_WAL.0 + 1 == Lsn::MAX.0);
}
