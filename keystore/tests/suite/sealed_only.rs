//! Files that contain sealed pages only, in the directory.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::{Lsn, Record};

use crate::arbitrary::{
    current, data_key, file, plaintext, rewriting, sealed_from, sealed_only, version,
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

/// The latest counts, whatever the order; all 64 bits of the LSN.
#[test]
fn the_lsn_from_which_on_pages_are_sealed() {
    let memory: Vec<AtomicU32> =
        (0..Directory::words_needed(4)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init(&memory, 4).unwrap();
    for record in [data_key(1, 1, 1, 1), data_key(1, 2, 1, 2), current(1, 2)] {
        directory.apply(&record).unwrap();
    }
    let slot = directory.find(file(1)).unwrap().unwrap();
    let news = |record: &Record| directory.would_change(record).unwrap();
    assert_eq!(directory.sealed_from(slot), Ok(None));
    assert!(news(&sealed_from(1, 1, 0)));
    let lsn = (1 << 63) + 7;
    directory.apply(&sealed_from(1, 2, lsn)).unwrap();
    for older in [sealed_from(1, 2, lsn), sealed_from(1, 2, 7), sealed_from(1, 1, lsn + 1)] {
        assert!(!news(&older), "{older:?}");
        directory.apply(&older).unwrap();
    }
    assert_eq!(directory.sealed_from(slot), Ok(Some((version(2), Lsn(lsn)))));
    assert!(news(&sealed_from(1, 2, lsn + 1)));
    assert!(directory.check(&[sealed_from(1, 3, 7)]).is_err(), "it has no such key");
}
