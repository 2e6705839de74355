//! Entries of forgotten files in the directory are used again.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use pagevault_keystore::RelFile;
use pagevault_keystore::directory::{Directory, DirectoryError};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{current, data_key, fewer, file, version};
use crate::directory::{key, memory, rounds, wrapping};

const fn full(capacity: u32) -> DirectoryError {
    DirectoryError::Full { capacity }
}

/// As many files as there are entries, again and again.
#[test]
fn entries_of_forgotten_files_are_used_again() {
    let memory = memory(4);
    let directory = Directory::init(&memory, 4).unwrap();
    for round in 0..100 {
        let first = 1 + 4 * round;
        for relation in first..first + 3 {
            directory.apply(&data_key(relation, 1, 1, 0x51)).unwrap();
            directory.apply(&current(relation, 1)).unwrap();
        }
        // Two keys of one file, one of which was rewrapped.
        directory.apply(&data_key(first, 2, 1, 0x51)).unwrap();
        directory.apply(&data_key(first, 1, 2, 0x51)).unwrap();
        assert_eq!(directory.apply(&data_key(first + 3, 1, 1, 0x51)), Err(full(4)));
        let slots = [first, first + 1].map(|of| directory.find(file(of)).unwrap().unwrap());
        let is_gone = |gone: RelFile, last| {
            assert_eq!(last, Some(version(if gone.relation == first { 2 } else { 1 })));
            gone.relation != first + 2
        };
        assert_eq!(directory.forget(is_gone), Ok(3));
        assert_eq!(key(&directory, first + 2, 1).0, [0x51; 92]);
        for (slot, relation) in slots.into_iter().zip(first..) {
            assert_eq!(directory.find(file(relation)), Ok(None));
            assert_eq!(directory.current(slot), Err(DirectoryError::Gone));
            assert_eq!(directory.info(slot), Err(DirectoryError::Gone));
            assert_eq!(directory.key(slot, version(1), &mut [0; 92]), Err(DirectoryError::Gone));
            assert_eq!(directory.keys(slot).unwrap().count(), 0);
        }
        let files: Vec<_> = directory.files().unwrap().map(|info| info.unwrap().file).collect();
        assert_eq!(files, [file(first + 2)]);
        assert_eq!((directory.counts().unwrap().files, directory.counts().unwrap().keys), (1, 1));
        let pattern = u32::from_le_bytes([0x51; 4]);
        let left = memory.iter().filter(|word| word.load(Ordering::Relaxed) == pattern).count();
        assert_eq!(left, 23, "of the key that is left");
        assert_eq!(directory.forget(|_, _| true), Ok(1));
    }
}

proptest! {
    #[test]
    fn the_directory_has_what_was_not_forgotten(
        steps in vec((1..12_u32, any::<bool>()), 0..fewer(200)),
    ) {
        const CAPACITY: u32 = 8;
        let memory = memory(CAPACITY);
        let directory = Directory::init(&memory, CAPACITY).unwrap();
        let mut known = std::collections::BTreeMap::new();
        for (step, (relation, forgets)) in steps.into_iter().enumerate() {
            let fill = step as u8;
            if forgets {
                let keys = directory.forget(|gone, _| gone == file(relation)).unwrap();
                prop_assert_eq!(keys > 0, known.remove(&relation).is_some());
            } else if known.contains_key(&relation) || known.len() < CAPACITY as usize {
                directory.apply(&data_key(relation, 1, 1, fill)).unwrap();
                known.insert(relation, fill);
            } else {
                let applied = directory.apply(&data_key(relation, 1, 1, fill));
                prop_assert_eq!(applied, Err(full(CAPACITY)));
            }
            for relation in 1..12 {
                let found = directory.find(file(relation)).unwrap();
                prop_assert_eq!(found.is_some(), known.contains_key(&relation));
                if let Some(fill) = known.get(&relation) {
                    prop_assert_eq!(key(&directory, relation, 1).0, [*fill; 92]);
                }
            }
            prop_assert_eq!(directory.files().unwrap().count(), known.len());
        }
    }
}

/// A file that stays is found all the time, with its key; one that goes is found whole, or not at
/// all.
#[test]
fn readers_find_what_stays_while_entries_are_used_again() {
    const CAPACITY: u32 = 16;
    let memory = memory(CAPACITY);
    let directory = Directory::init(&memory, CAPACITY).unwrap();
    (1..=8).for_each(|relation| directory.apply(&wrapping(relation, 1)).unwrap());
    let (next, done) = (AtomicU32::new(9), AtomicBool::new(false));
    std::thread::scope(|threads| {
        let readers: Vec<_> = (0..2)
            .map(|reader| {
                let (next, done) = (&next, &done);
                threads.spawn(move || {
                    let mut reads = 0_u32;
                    while !done.load(Ordering::Relaxed) || reads == 0 {
                        let stays = 1 + (reads + reader) % 8;
                        let goes = next.load(Ordering::Relaxed);
                        reads += 1;
                        for (relation, is_there) in [(stays, true), (goes, false)] {
                            let slot = match directory.find(file(relation)) {
                                Ok(Some(slot)) => slot,
                                Ok(None) | Err(DirectoryError::Busy) if !is_there => continue,
                                Err(DirectoryError::Busy) => continue,
                                other => panic!("{other:?}"),
                            };
                            let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                            match directory.key(slot, version(1), &mut wrapped) {
                                Ok(_) => {
                                    let word = (relation << 24 | 1).to_le_bytes();
                                    assert_eq!(wrapped.to_vec(), word.repeat(23));
                                }
                                Err(error) => assert!(!is_there, "{error}"),
                            }
                        }
                    }
                    reads
                })
            })
            .collect();
        for relation in 9..rounds(100_000) {
            directory.apply(&wrapping(relation, 1)).unwrap();
            next.store(relation, Ordering::Relaxed);
            if relation % 3 == 0 {
                directory.forget(|gone, _| gone.relation > 8).unwrap();
            }
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}
