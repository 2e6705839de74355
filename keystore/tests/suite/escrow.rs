//! The files of escrow beside the key files.

use pagevault_keystore::escrow::{Mark, Restored};
use pagevault_keystore::{CheckValue, DatabaseKey, Record, Scope, Wrapping};

use crate::arbitrary::key_version;

const ID: [u8; 16] = [0xAB, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn mark() -> Mark {
    let keys = [(0, 1), (0, 2), (16384, 1)].map(|(scope, version)| {
        let check = CheckValue::from_bytes([scope as u8 + version as u8; 16]);
        ((Scope::database(scope), key_version(version)), check)
    });
    Mark { keystore: ID, made: 1_767_225_599, keys: keys.into() }
}

/// As documented; another program computed the checksum.
const TEXT: &str = "pagevault escrow 2\n\
    keystore ab0102030405060708090a0b0c0d0e0f\n\
    made 1767225599\n\
    key 0 1 01010101010101010101010101010101\n\
    key 0 2 02020202020202020202020202020202\n\
    key 16384 1 01010101010101010101010101010101\n\
    end a9c71a84\n";

#[test]
fn the_mark_is_as_documented() {
    assert_eq!(mark().encode(), TEXT);
    assert_eq!(Mark::decode(TEXT.as_bytes()), Some(mark()));
    let none = Mark { keys: [].into(), ..mark() };
    assert_eq!(Mark::decode(none.encode().as_bytes()), Some(none));
}

#[test]
fn a_damaged_mark_is_refused() {
    for length in 0..TEXT.len() {
        assert_eq!(Mark::decode(&TEXT.as_bytes()[..length]), None, "{length} bytes");
    }
    for at in 0..TEXT.len() * 8 {
        let mut bytes = TEXT.as_bytes().to_vec();
        bytes[at / 8] ^= 1 << (at % 8);
        // A checksum in capital letters is the same checksum.
        assert!(Mark::decode(&bytes).is_none_or(|read| read == mark()), "bit {at}");
    }
    let later = TEXT.replace("escrow 2", "escrow 3");
    assert_eq!(Mark::decode(later.as_bytes()), None);
}

fn restored() -> Restored {
    let records = vec![
        Record::Provider {
            name: "new".into(),
            kind: "file".into(),
            options: "{}".into(),
            programs: true,
        },
        Record::DatabaseKey {
            scope: Scope::CLUSTER,
            version: key_version(2),
            key: DatabaseKey::new(
                CheckValue::from_bytes([7; 16]),
                Wrapping::new(("new", "main"), 1, (0..60).collect(), 1_767_225_599),
            ),
        },
    ];
    Restored { keystore: ID, records }
}

#[test]
fn a_restore_is_read_completely_or_refused() {
    let bytes = restored().encode().unwrap();
    assert_eq!(Restored::decode(&bytes).unwrap(), restored());
    for length in 0..bytes.len() {
        assert!(Restored::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
    for at in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[at / 8] ^= 1 << (at % 8);
        // The file of another keystore is ignored by its readers.
        assert!(Restored::decode(&flipped).map_or(true, |read| read.keystore != ID), "bit {at}");
    }
}

#[test]
fn a_restore_holds_providers_and_database_keys_only() {
    let records = vec![Record::DropProvider { name: "old".into() }];
    let bytes = Restored { keystore: ID, records }.encode().unwrap();
    assert!(Restored::decode(&bytes).is_err());
}
