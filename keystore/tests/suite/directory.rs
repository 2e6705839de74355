use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use pagevault_keystore::directory::{Directory, DirectoryError, KeyInfo};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::state::State;
use pagevault_keystore::{Lsn, Record, Scope};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, any_record, current, data_key, destroyed, fewer, file, key_version, plaintext,
    rewriting, sealed_only, version,
};

/// Number of rounds: fewer under Miri, which is slow.
pub(crate) const fn rounds(native: u32) -> u32 {
    if cfg!(miri) { native.div_ceil(2_000) } else { native }
}

/// Memory that was used before.
pub(crate) fn memory(capacity: u32) -> Vec<AtomicU32> {
    let words = Directory::words_needed(capacity);
    (0..words).map(|at| AtomicU32::new(at as u32 * 77)).collect()
}

/// The wrapped bytes, and the other fields.
pub(crate) fn key(directory: &Directory<'_>, relation: u32, number: u16) -> (Vec<u8>, KeyInfo) {
    let slot = directory.find(file(relation)).unwrap().unwrap();
    let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
    let info = directory.key(slot, version(number), &mut wrapped).unwrap();
    (wrapped[..info.length].to_vec(), info)
}

#[test]
fn recorded_keys_are_found() {
    let memory = memory(10);
    let directory = Directory::init(&memory, 10).unwrap();
    assert_eq!(directory.find(file(1)).unwrap(), None);
    for record in [data_key(1, 1, 3, 10), current(1, 1), data_key(2, 1, 1, 20)] {
        directory.apply(&record).unwrap();
    }
    let slot = directory.find(file(1)).unwrap().unwrap();
    assert_eq!(directory.current(slot).unwrap(), Some((version(1), 1)));
    assert_eq!(directory.next_version(slot).unwrap(), Some(version(2)));
    let (wrapped, info) = key(&directory, 1, 1);
    assert_eq!(wrapped, [10; 92]);
    assert_eq!(
        info,
        KeyInfo {
            version: version(1),
            cipher: 1,
            scope: DATABASE,
            key_version: key_version(3),
            length: 92
        }
    );

    // A key that is not current yet, then is, then is not any more.
    let slot = directory.find(file(2)).unwrap().unwrap();
    assert_eq!(directory.current(slot).unwrap(), None);
    directory.enter(slot, Phase::under(version(1))).unwrap();
    assert_eq!(directory.current(slot).unwrap(), Some((version(1), 1)));
    directory.apply(&plaintext(2, 1)).unwrap();
    assert_eq!(directory.current(slot).unwrap(), None);

    let no_key = DirectoryError::NoKey { file: file(3), version: version(1) };
    assert_eq!(directory.apply(&rewriting(3, 1, 0)).unwrap_err(), no_key);
    assert_eq!(directory.last_version(slot).unwrap(), Some(version(1)));
    let files: Vec<_> = directory.files().unwrap().map(Result::unwrap).collect();
    let told: Vec<_> = files.iter().map(|info| (info.file.relation, info.current)).collect();
    assert_eq!(told, [(1, Some((version(1), 1))), (2, None)]);
    let counts = directory.counts().unwrap();
    assert_eq!((counts.files, counts.keys, counts.capacity), (2, 2, 10));
}

#[test]
fn contradicting_records_are_refused() {
    let memory = memory(2);
    let directory = Directory::init(&memory, 2).unwrap();
    directory.apply(&data_key(1, 1, 1, 10)).unwrap();
    let slot = directory.find(file(1)).unwrap().unwrap();
    let no_key = DirectoryError::NoKey { file: file(1), version: version(2) };
    assert_eq!(directory.apply(&current(1, 2)).unwrap_err(), no_key);
    assert_eq!(directory.key(slot, version(2), &mut [0; 92]).unwrap_err(), no_key);
    assert!(directory.apply(&current(9, 1)).is_err());
    let mut other = data_key(1, 1, 1, 11);
    if let Record::DataKey { cipher, wrapped, .. } = &mut other {
        *cipher = 2;
        wrapped.truncate(60);
    }
    let replaced = DirectoryError::KeyReplaced { file: file(1), version: version(1) };
    assert_eq!(directory.apply(&other).unwrap_err(), replaced);

    directory.apply(&data_key(1, 2, 1, 12)).unwrap();
    let full = DirectoryError::Full { capacity: 2 };
    assert_eq!(directory.apply(&data_key(1, 3, 1, 13)).unwrap_err(), full);
    assert_eq!(directory.apply(&data_key(2, 1, 1, 13)).unwrap_err(), full);
    assert_eq!(directory.find(file(2)).unwrap(), None);
    // A full directory accepts new wrappings.
    directory.apply(&data_key(1, 2, 2, 22)).unwrap();
    directory.apply(&data_key(1, 1, 2, 21)).unwrap();
    assert_eq!((key(&directory, 1, 1).0[0], key(&directory, 1, 2).0[0]), (21, 22));
}

#[test]
fn records_that_would_change_it_are_recognised() {
    let memory = memory(4);
    let directory = Directory::init(&memory, 4).unwrap();
    let news = |record: &Record| directory.would_change(record).unwrap();
    let history = [
        data_key(1, 1, 1, 10),
        current(1, 1),
        plaintext(1, 1),
        data_key(1, 2, 1, 20),
        current(1, 2),
    ];
    for record in &history {
        assert!(news(record), "{record:?}");
        directory.apply(record).unwrap();
        assert!(!news(record), "{record:?}");
    }
    let before: Vec<u32> = memory.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    for record in &history {
        assert!(!news(record), "{record:?}");
        directory.apply(record).unwrap();
    }
    let after: Vec<u32> = memory.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    assert_eq!(before, after);
    // Another wrapping: by the same database key, by another version of it, by that of another
    // scope.
    let mut other_scope = data_key(1, 2, 1, 20);
    if let Record::DataKey { scope, .. } = &mut other_scope {
        *scope = Scope::CLUSTER;
    }
    for record in [data_key(1, 2, 1, 21), data_key(1, 2, 2, 20), other_scope] {
        assert!(news(&record));
    }
    assert!(news(&sealed_only(1, 2, false)) && !news(&sealed_only(1, 1, true)));
    assert!(news(&rewriting(1, 2, 0)) && news(&current(9, 1)) && news(&plaintext(1, 2)));
    assert!(news(&Record::DropProvider { name: "disk".into() }));
}

#[test]
fn unused_memory_is_not_written() {
    let memory: Vec<AtomicU32> =
        (0..Directory::words_needed(100)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init_zeroed(&memory, 100).unwrap();
    assert!(memory[16..].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    directory.apply(&data_key(1, 1, 1, 10)).unwrap();
    directory.apply(&data_key(1, 1, 1, 11)).unwrap();
    assert_eq!(key(&directory, 1, 1).0, [11; 92]);
    assert_eq!(directory.counts().unwrap().keys, 1);
}

#[test]
fn memory_that_is_too_small_is_refused() {
    let small = memory(4);
    let words = Directory::words_needed(4);
    for words in [0, words - 1] {
        assert_eq!(Directory::init(&small[..words], 4).unwrap_err(), DirectoryError::Damaged);
    }
    Directory::init(&small, 4).unwrap();
    let empty = memory(0);
    let directory = Directory::init(&empty, 0).unwrap();
    assert_eq!(directory.find(file(1)).unwrap(), None);
    assert!(directory.apply(&data_key(1, 1, 1, 1)).is_err());
}

/// Writers take the key, and whether to read the disk first, from the same word.
#[test]
fn no_reader_sees_a_new_phase_without_its_rewriting() {
    let memory = memory(4);
    let directory = Directory::init(&memory, 4).unwrap();
    let writing = || {
        let writing = directory.writing(directory.find(file(1)).unwrap().unwrap()).unwrap();
        (writing.current.map(|(version, _)| version.get()), writing.mixed)
    };
    let rewriting = |number, plaintext, done| {
        let phase = Phase { version: Some(version(number)), plaintext };
        directory.apply(&Record::Rewriting { file: file(1), phase, done }).unwrap();
    };
    directory.apply(&data_key(1, 1, 1, 1)).unwrap();
    directory.apply(&current(1, 1)).unwrap();
    assert_eq!(writing(), (Some(1), false));
    directory.apply(&data_key(1, 2, 1, 1)).unwrap();
    rewriting(2, false, false);
    assert_eq!(writing(), (Some(1), true));
    directory.apply(&current(1, 2)).unwrap();
    assert_eq!(writing(), (Some(2), true));
    // The next key comes before all pages are under version 2.
    directory.apply(&data_key(1, 3, 1, 1)).unwrap();
    rewriting(3, false, false);
    assert_eq!(writing(), (Some(2), true));
    directory.apply(&current(1, 3)).unwrap();
    assert_eq!(writing(), (Some(3), true));
    rewriting(2, false, true);
    assert_eq!(writing(), (Some(3), true));
    rewriting(3, false, true);
    assert_eq!(writing(), (Some(3), false));
    rewriting(3, true, false);
    directory.apply(&Record::Plaintext { file: file(1), after: version(3) }).unwrap();
    assert_eq!(writing(), (None, true));
    rewriting(3, true, true);
    assert_eq!(writing(), (None, false));
}

#[test]
fn overwritten_memory_causes_errors_and_no_endless_loop() {
    let memory = memory(4);
    let directory = Directory::init(&memory, 4).unwrap();
    for relation in 1..=4 {
        directory.apply(&data_key(relation, 1, 1, 1)).unwrap();
        directory.apply(&current(relation, 1)).unwrap();
    }
    for word in memory.iter().step_by(if cfg!(miri) { 12 } else { 1 }) {
        for value in [0, 1, 2, 3, 5, 77, u32::MAX] {
            let was = word.swap(value, Ordering::Relaxed);
            for relation in 1..=4 {
                if let Ok(Some(slot)) = directory.find(file(relation)) {
                    let _ = directory.key(slot, version(1), &mut [0; 92]);
                    let _ = directory.keys(slot).map(Iterator::count);
                    let _ = directory.apply(&data_key(relation, 2, 1, 1));
                }
            }
            let _ = directory.files().map(Iterator::count);
            word.store(was, Ordering::Relaxed);
        }
    }
}

proptest! {
    #[test]
    fn the_directory_equals_the_state(records in vec(any_record(), 0..fewer(80))) {
        let memory = memory(200);
        let directory = Directory::init(&memory, 200).unwrap();
        let mut state = State::default();
        for record in records {
            let (folded, applied) = (state.apply(record.clone()), directory.apply(&record));
            prop_assert_eq!(folded.is_ok(), applied.is_ok());
        }
        prop_assert_eq!(directory.counts().unwrap().files as usize, state.files().count());
        for info in directory.files().unwrap() {
            let info = info.unwrap();
            let entry = state.file(info.file).unwrap();
            prop_assert_eq!(directory.find(info.file).unwrap(), Some(info.slot));
            prop_assert_eq!(info.phase, entry.phase);
            prop_assert_eq!(info.current, directory.current(info.slot).unwrap());
            prop_assert_eq!(info.current.map(|(version, _)| version), entry.phase.current());
            if let Some(key) = entry.phase.current().and_then(|version| entry.keys.get(&version)) {
                prop_assert_eq!(info.current.map(|(_, cipher)| cipher), Some(key.cipher));
            }
            let left = entry.destroyed;
            let left = left.map_or((None, Lsn::INVALID), |left| (Some(left.through), left.lsn));
            prop_assert_eq!(directory.destroyed(info.slot).unwrap(), left);
            prop_assert_eq!(info.destroyed, left.0);
            prop_assert_eq!(directory.is_mixed(info.slot).unwrap(), entry.is_mixed());
            prop_assert_eq!(directory.is_sealed_only(info.slot).unwrap(), entry.is_sealed_only());
            prop_assert_eq!(directory.floor(info.slot).unwrap(), entry.floor());
            prop_assert_eq!(directory.next_version(info.slot).unwrap(), entry.next_version());
            prop_assert_eq!(directory.keys(info.slot).unwrap().count(), entry.keys.len());
            for (version, known) in &entry.keys {
                let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                let key = directory.key(info.slot, *version, &mut wrapped).unwrap();
                prop_assert_eq!(&wrapped[..key.length], &known.wrapped[..]);
                prop_assert_eq!((key.scope, key.key_version, key.cipher),
                    (known.scope, known.key_version, known.cipher));
            }
        }
    }
}

proptest! {
    /// `check` is called before anything is written, so it must refuse all that `apply` would.
    #[test]
    fn check_returns_what_apply_would(
        before in vec(any_record(), 0..fewer(40)),
        records in vec(any_record(), 1..=fewer(11)),
    ) {
        const CAPACITY: u32 = 30;
        let (checked, applied) = (memory(CAPACITY), memory(CAPACITY));
        let checked = Directory::init(&checked, CAPACITY).unwrap();
        let applied = Directory::init(&applied, CAPACITY).unwrap();
        for record in &before {
            prop_assert_eq!(checked.apply(record).is_ok(), applied.apply(record).is_ok());
        }
        let counts = checked.counts().unwrap();
        let answer = checked.check(&records);
        prop_assert_eq!(checked.counts().unwrap(), counts);
        let outcome = records.iter().try_for_each(|record| applied.apply(record));
        prop_assert_eq!(answer.is_ok(), outcome.is_ok(), "{:?} {:?}", answer, outcome);
    }
}

#[test]
fn destroyed_keys_leave_nothing_in_memory() {
    let memory = memory(10);
    let directory = Directory::init(&memory, 10).unwrap();
    let story = [
        data_key(1, 1, 1, 0x51),
        current(1, 1),
        data_key(1, 2, 1, 0x52),
        current(1, 2),
        data_key(1, 3, 1, 0x53),
        data_key(2, 1, 1, 0x61),
        // Leaves the old wrapping in the spare body.
        data_key(1, 1, 2, 0x54),
    ];
    story.iter().for_each(|record| directory.apply(record).unwrap());
    let words = |fill: u8| {
        let pattern = u32::from_le_bytes([fill; 4]);
        memory.iter().filter(|word| word.load(Ordering::Relaxed) == pattern).count()
    };
    assert!([0x51, 0x52, 0x53, 0x54, 0x61].iter().all(|fill| words(*fill) == 23));
    let record = destroyed(1, 2, 0x1_0000_0007);
    assert!(directory.would_change(&record).unwrap());
    directory.apply(&record).unwrap();
    assert_eq!([0x51, 0x52, 0x54].map(words), [0; 3]);
    assert_eq!([0x53, 0x61].map(words), [23; 2]);

    let slot = directory.find(file(1)).unwrap().unwrap();
    assert_eq!(directory.destroyed(slot).unwrap(), (Some(version(2)), Lsn(0x1_0000_0007)));
    let no_key = DirectoryError::NoKey { file: file(1), version: version(2) };
    assert_eq!(directory.key(slot, version(2), &mut [0; 92]).unwrap_err(), no_key);
    // The file's state is the same; new versions come after the old ones.
    let info = directory.info(slot).unwrap();
    assert_eq!((info.current, info.is_destroyed()), (Some((version(2), 1)), true));
    assert_eq!(directory.next_version(slot).unwrap(), Some(version(4)));
    assert_eq!(key(&directory, 1, 3).0, [0x53; 92]);
    // Repeated records are ignored without further checks.
    for record in story.iter().take(4).chain([&record]) {
        assert!(!directory.would_change(record).unwrap(), "{record:?}");
        directory.apply(record).unwrap();
    }
    assert_eq!([0x51, 0x52, 0x54].map(words), [0; 3]);
    directory.apply(&current(1, 3)).unwrap();
    assert!(!directory.info(slot).unwrap().is_destroyed());
    directory.apply(&destroyed(1, 3, 0x2_0000_0000)).unwrap();
    assert_eq!(directory.next_version(slot).unwrap(), Some(version(4)));
    assert_eq!([0x53, 0x61].map(words), [0, 23]);
    // A file about which nothing else is known.
    directory.apply(&destroyed(9, 5, 1)).unwrap();
    directory.apply(&current(9, 5)).unwrap();
    let slot = directory.find(file(9)).unwrap().unwrap();
    assert_eq!(directory.info(slot).unwrap().current, Some((version(5), 1)));
}

/// A reader gets a whole key or none.
#[test]
fn readers_never_see_a_part_of_a_destroyed_key() {
    let count = rounds(30_000);
    let memory = memory(count);
    let directory = Directory::init(&memory, count).unwrap();
    (1..=count).for_each(|relation| directory.apply(&wrapping(relation, 1)).unwrap());
    let (next, done) = (AtomicU32::new(1), AtomicBool::new(false));
    std::thread::scope(|threads| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                threads.spawn(|| {
                    let mut reads = 0_u64;
                    while !done.load(Ordering::Relaxed) || reads == 0 {
                        let relation = next.load(Ordering::Relaxed).min(count);
                        let slot = directory.find(file(relation)).unwrap().unwrap();
                        let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                        reads += 1;
                        match directory.key(slot, version(1), &mut wrapped) {
                            Ok(info) => {
                                let word = (relation << 24 | 1).to_le_bytes();
                                assert_eq!(wrapped.to_vec(), word.repeat(23));
                                assert_eq!((info.scope, info.length), (Scope::database(1), 92));
                            }
                            Err(error) => {
                                assert!(matches!(error, DirectoryError::NoKey { .. }), "{error}");
                            }
                        }
                    }
                    reads
                })
            })
            .collect();
        for relation in 1..=count {
            next.store(relation, Ordering::Relaxed);
            directory.apply(&destroyed(relation, 1, 1)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}

/// Each word of a wrapping contains its number, so that a mixture of two is detected.
pub(crate) fn wrapping(relation: u32, round: u32) -> Record {
    let word = (relation << 24 | round & 0xFF_FFFF).to_le_bytes();
    Record::DataKey {
        file: file(relation),
        version: version(1),
        cipher: 1,
        scope: Scope::database(round),
        key_version: key_version(round + 1),
        wrapped: word.repeat(23),
        created: 0,
    }
}

/// Two keys exchange the spare body all the time, the hardest case for a reader.
#[test]
fn readers_never_see_a_part_of_a_wrapping() {
    let memory = memory(2);
    let directory = Directory::init(&memory, 2).unwrap();
    directory.apply(&wrapping(1, 0)).unwrap();
    directory.apply(&wrapping(2, 0)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let done = &done;
                threads.spawn(move || {
                    let (mut reads, mut last) = (0_u64, [0, 0]);
                    while !done.load(Ordering::Relaxed) || reads == 0 {
                        let relation = 1 + (reads + reader) as u32 % 2;
                        let slot = directory.find(file(relation)).unwrap().unwrap();
                        let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                        reads += 1;
                        match directory.key(slot, version(1), &mut wrapped) {
                            Ok(info) => {
                                let round = info.scope.number();
                                let word = (relation << 24 | round & 0xFF_FFFF).to_le_bytes();
                                assert_eq!(wrapped.to_vec(), word.repeat(23));
                                assert_eq!(info.key_version, key_version(round + 1));
                                // Numbers never go back.
                                let last = &mut last[relation as usize - 1];
                                assert!(round >= *last);
                                *last = round;
                            }
                            Err(error) => assert_eq!(error, DirectoryError::Busy),
                        }
                    }
                    reads
                })
            })
            .collect();
        for round in 1..rounds(400_000) {
            directory.apply(&wrapping(1 + round % 3 / 2, round)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}

/// A reader finds whole entries, however new they are.
#[test]
fn readers_see_whole_entries_while_files_are_added() {
    let count = rounds(50_000);
    let memory = memory(2 * count);
    let directory = Directory::init(&memory, 2 * count).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let done = &done;
                threads.spawn(move || {
                    let (mut found, mut relation) = (0, 0);
                    while !done.load(Ordering::Relaxed) || found == 0 {
                        let there = directory.counts().unwrap().files;
                        relation = (relation * 31 + 17) % (there + 8);
                        let slot = directory.find(file(relation + 1)).unwrap();
                        assert!(slot.is_some() || relation >= there, "counted and not found");
                        let Some(slot) = slot else { continue };
                        found += 1;
                        let fill = (relation + 1) as u8;
                        let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                        directory.key(slot, version(1), &mut wrapped).unwrap();
                        assert_eq!(wrapped, [fill; 92]);
                        if let Some((version, cipher)) = directory.current(slot).unwrap() {
                            assert_eq!(cipher, 1);
                            directory.key(slot, version, &mut wrapped).unwrap();
                            assert_eq!(wrapped, [fill.wrapping_add(version.get() as u8 - 1); 92]);
                        }
                    }
                    found
                })
            })
            .collect();
        for relation in 1..=count {
            for number in 1..=2 {
                let fill = (relation as u8).wrapping_add(number as u8 - 1);
                directory.apply(&data_key(relation, number, 1, fill)).unwrap();
                directory.apply(&current(relation, number)).unwrap();
            }
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}
