//! Files that contain sealed pages only, in the directory.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::Record;
use pagevault_keystore::directory::Directory;
use pagevault_keystore::state::State;

use crate::arbitrary::{
    DATABASE, current, data_key, file, plaintext, rewriting, sealed_only, version,
};

/// A page in plaintext is refused by the same word by which pages are written as plaintext.
#[test]
fn no_reader_sees_a_plaintext_phase_in_a_file_that_is_sealed_only() {
    let memory: Vec<AtomicU32> =
        (0..Directory::words_needed(4)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init(&memory, 4).unwrap();
    let is_sealed_only = || {
        let slot = directory.find(file(1)).unwrap().unwrap();
        (directory.current(slot).unwrap().is_some(), directory.is_sealed_only(slot).unwrap())
    };
    let after = |record: &Record| {
        directory.apply(record).unwrap();
        is_sealed_only()
    };
    assert_eq!(after(&data_key(1, 1, 1, 1)), (false, false));
    assert_eq!(after(&sealed_only(1, 1, false)), (false, false));
    assert_eq!(after(&current(1, 1)), (true, true));
    directory.apply(&data_key(1, 2, 1, 1)).unwrap();
    // Another key.
    assert_eq!(after(&rewriting(1, 2, 0)), (true, true));
    assert_eq!(after(&current(1, 2)), (true, true));
    assert_eq!(after(&plaintext(1, 2)), (false, false));
    // Encrypted again: old pages are plaintext.
    directory.apply(&data_key(1, 3, 1, 1)).unwrap();
    assert_eq!(after(&current(1, 3)), (true, false));
    // The file number is used again.
    assert_eq!(after(&sealed_only(1, 3, false)), (true, true));
    assert_eq!(after(&sealed_only(1, 3, true)), (true, false));
}

/// A page under an earlier version is refused. The floor rises when that is said again of a later
/// version, not with the key; and processes notice.
#[test]
fn the_floor_is_the_version_of_the_last_proof() {
    let memory: Vec<AtomicU32> =
        (0..Directory::words_needed(4)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init(&memory, 4).unwrap();
    let after = |records: &[Record]| {
        records.iter().for_each(|record| directory.apply(record).unwrap());
        let slot = directory.find(file(1)).unwrap().unwrap();
        let floor = directory.floor(slot).unwrap().map(|version| version.get());
        (floor, directory.floors().unwrap())
    };
    let born = [data_key(1, 1, 1, 1), current(1, 1), sealed_only(1, 1, false)];
    assert_eq!(after(&born), (Some(1), 0));
    let rotated = [data_key(1, 2, 1, 1), rewriting(1, 2, 0), current(1, 2)];
    assert_eq!(after(&rotated), (Some(1), 0));
    assert!(directory.would_change(&sealed_only(1, 2, false)).unwrap());
    assert_eq!(after(&[rewriting(1, 2, 2), sealed_only(1, 2, false)]), (Some(2), 1));
    // Redo repeats older records.
    assert!(!directory.would_change(&sealed_only(1, 1, false)).unwrap());
    assert_eq!(after(&born).0, Some(2));
    // It is recorded of a version that is not in use yet.
    let next = [data_key(1, 3, 1, 1), sealed_only(1, 3, false)];
    assert_eq!(after(&next).0, None);
    assert_eq!(after(&[current(1, 3)]).0, Some(3));
    assert_eq!(after(&[plaintext(1, 3)]).0, None);
}

/// What is written over a page while the file is being rewritten depends on it, in the directory as
/// in the state that is read from a log.
#[test]
fn the_first_version_is_that_of_the_last_rewriting_that_was_done() {
    let rewritten = |number: u16| {
        [data_key(1, number, 1, 1), rewriting(1, number, 0), current(1, number)].to_vec()
    };
    let done = |number: u16| vec![rewriting(1, number, 2)];
    let steps = [
        // Some pages may still be in plaintext.
        (rewritten(1), None),
        (rewritten(2), None),
        (done(2), Some(2)),
        (rewritten(3), Some(2)),
        // Nothing is known of those under the third key.
        (rewritten(4), Some(2)),
        (done(4), Some(4)),
        (vec![plaintext(1, 4)], None),
        (rewritten(5), None),
        (done(5), Some(5)),
        (vec![rewriting(1, 5, 1), plaintext(1, 5)], None),
        (vec![rewriting(1, 5, 3)], None),
        (rewritten(6), None),
        (done(6), Some(6)),
        (rewritten(7), Some(6)),
        // A proof says more.
        (vec![rewriting(1, 7, 2), sealed_only(1, 7, false)], Some(7)),
        (rewritten(8), Some(7)),
    ];
    let mut log = Vec::new();
    for (records, first) in steps {
        log.extend(records);
        let state = State::from_records(log.iter().cloned()).unwrap();
        let compacted = state.records(DATABASE);
        // Redo repeats older records.
        for mut log in [log.clone(), compacted.clone(), [compacted, log.clone()].concat()] {
            for _ in 0..2 {
                let memory: Vec<AtomicU32> =
                    (0..Directory::words_needed(9)).map(|_| AtomicU32::new(0)).collect();
                let directory = Directory::init(&memory, 9).unwrap();
                for record in log.iter() {
                    directory.apply(record).unwrap();
                }
                let slot = directory.find(file(1)).unwrap().unwrap();
                let of_state = State::from_records(log.iter().cloned()).unwrap();
                let of_state = of_state.file(file(1)).unwrap().first_version();
                let found = directory.first_version(slot).unwrap();
                assert_eq!([found, of_state], [first.map(version); 2], "{log:?}");
                log.reverse();
                log.sort_by_key(|record| !matches!(record, Record::DataKey { .. }));
            }
        }
    }
}
