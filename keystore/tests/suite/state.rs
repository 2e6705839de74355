use pagevault_keystore::state::{State, StateError};
use pagevault_keystore::{
    CheckValue, DataKeyVersion, DatabaseKey, Lsn, Record, RelFile, Scope, Wrapping,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, any_record, current, data_key, destroyed, file, is_too_early, key_version, plaintext,
    rewriting, sealed_only, version,
};

/// A database key whose wrapped bytes are all `fill`.
fn database_key(scope: u32, number: u32, fill: u8) -> Record {
    Record::DatabaseKey {
        scope: Scope::database(scope),
        version: key_version(number),
        key: DatabaseKey::new(
            CheckValue::from_bytes([number as u8; 16]),
            Wrapping::new(("disk", "main"), u64::from(fill), vec![fill; 60], 1),
        ),
    }
}

fn fold(records: &[Record]) -> State {
    State::from_records(records.to_vec()).unwrap()
}

/// The records of a state, for all logs.
fn all_records(state: &State) -> Vec<Record> {
    let mut homes: Vec<Scope> = state.files().map(|(file, _)| file.scope()).collect();
    homes.extend([0, 1, 2, 3, 4, 5].map(Scope::database));
    homes.sort_unstable();
    homes.dedup();
    homes.into_iter().flat_map(|home| state.records(home)).collect()
}

proptest! {
    #[test]
    fn compaction_loses_nothing(records in vec(any_record(), 0..80)) {
        let mut state = State::default();
        let mut accepted = Vec::new();
        for record in records {
            if !is_too_early(&record, &state) && state.apply(record.clone()).is_ok() {
                accepted.push(record);
            }
        }
        let compact = all_records(&state);
        // Ranges of former files that overlap become more.
        let others = |records: &[Record]| {
            records.iter().filter(|record| !matches!(record, Record::FormerFiles(_))).count()
        };
        prop_assert!(others(&compact) <= others(&accepted));
        prop_assert_eq!(&fold(&compact), &state);
        // Redo may repeat all records.
        accepted.into_iter().for_each(|record| drop(state.apply(record)));
        prop_assert_eq!(&fold(&compact), &state);
        // Each record is in the log to which it belongs.
        for home in [0, 4, 5, 6].map(Scope::database) {
            let records = state.records(home);
            prop_assert!(records.iter().all(|record| record.home() == home));
            prop_assert_eq!(state.count(home), records.len());
        }
    }

    #[test]
    fn a_known_key_stays_or_is_destroyed(records in vec(any_record(), 0..80)) {
        let mut state = State::default();
        let mut known: Vec<(RelFile, DataKeyVersion, u8)> = vec![];
        for record in records {
            let _ = state.apply(record);
            for (file, version, cipher) in &known {
                let entry = state.file(*file).unwrap();
                match entry.keys.get(version) {
                    Some(key) => prop_assert_eq!(key.cipher, *cipher),
                    None => prop_assert!(entry.is_destroyed(*version)),
                }
            }
            known = state
                .files()
                .flat_map(|(file, f)| f.keys.iter().map(move |(v, key)| (file, *v, key.cipher)))
                .collect();
        }
    }
}

#[test]
fn what_was_rewritten_to_plaintext_enters_no_other_state() {
    let done = |number| rewriting(1, number, 0b11);
    // The record of the state that was announced is in a later batch, or never comes.
    let states = [
        vec![destroyed(1, 4, 9), rewriting(1, 3, 0), done(1)],
        vec![destroyed(1, 4, 9), plaintext(1, 2), rewriting(1, 3, 0), done(1), done(2)],
        vec![destroyed(1, 4, 9), plaintext(1, 2), rewriting(1, 1, 0)],
    ];
    for records in states {
        let state = fold(&records);
        assert_eq!(fold(&all_records(&state)), state);
    }
}

#[test]
fn a_new_wrapping_replaces_and_a_new_key_does_not() {
    let mut state = fold(&[data_key(1, 1, 1, 10), current(1, 1)]);
    // By the same database key, and by the next one.
    for (number, fill) in [(1, 11), (2, 12)] {
        state.apply(data_key(1, 1, number, fill)).unwrap();
        let key = &state.file(file(1)).unwrap().keys[&version(1)];
        assert_eq!((key.key_version, key.wrapped[0]), (key_version(number), fill));
    }
    let mut other = data_key(1, 1, 2, 13);
    if let Record::DataKey { cipher, wrapped, .. } = &mut other {
        *cipher = 2;
        wrapped.truncate(60);
    }
    let error = state.apply(other).unwrap_err();
    assert_eq!(error, StateError::KeyReplaced { file: file(1), version: version(1) });
    assert_eq!(error.to_string(), "relation file 1663/5/1 has another data key of version 1");
    assert_eq!(state.file(file(1)).unwrap().keys[&version(1)].wrapped[0], 12);
}

#[test]
fn a_cipher_of_a_later_version_keeps_its_length() {
    let key = |length| {
        let mut record = data_key(1, 1, 1, 10);
        if let Record::DataKey { cipher, wrapped, .. } = &mut record {
            *cipher = 200;
            wrapped.truncate(length);
        }
        record
    };
    let mut state = fold(&[key(80)]);
    state.apply(key(80)).unwrap();
    let error = state.apply(key(79)).unwrap_err();
    assert_eq!(error, StateError::KeyReplaced { file: file(1), version: version(1) });
}

#[test]
fn only_a_version_with_a_key_becomes_current() {
    let mut state = fold(&[data_key(1, 1, 1, 10)]);
    assert_eq!(state.file(file(1)).unwrap().phase.current(), None);
    let error = state.apply(current(1, 2)).unwrap_err();
    assert_eq!(error, StateError::NoKey { file: file(1), version: version(2) });
    for record in
        [current(2, 1), plaintext(2, 1), plaintext(1, 2), rewriting(1, 2, 0), rewriting(2, 1, 3)]
    {
        assert!(state.apply(record).is_err());
    }
    state.apply(current(1, 1)).unwrap();
    assert_eq!(state.file(file(1)).unwrap().phase.current(), Some(version(1)));
    state.apply(plaintext(1, 1)).unwrap();
    assert_eq!(state.file(file(1)).unwrap().phase.current(), None);
}

#[test]
fn a_file_is_sealed_only_until_it_is_written_in_plaintext() {
    let born = [data_key(1, 1, 1, 10), current(1, 1), sealed_only(1, 1, false)];
    let rotated = [data_key(1, 2, 1, 20), rewriting(1, 2, 0), current(1, 2)];
    let decrypted = [plaintext(1, 2)];
    let again = [data_key(1, 3, 1, 30), current(1, 3)];
    let reused = [sealed_only(1, 3, false)];
    let mut state = State::default();
    let mut is = |records: &[Record]| {
        records.iter().for_each(|record| state.apply(record.clone()).unwrap());
        let state = fold(&all_records(&state));
        state.file(file(1)).unwrap().is_sealed_only()
    };
    assert!(!is(&born[..2]) && is(&born) && is(&rotated));
    assert!(!is(&decrypted) && !is(&again));
    // Redo repeats older records.
    assert!(!is(&born) && !is(&rotated));
    assert!(is(&reused) && is(&decrypted) && is(&born));
}

#[test]
fn a_reused_file_number_continues_its_versions() {
    let mut state = fold(&[data_key(1, 1, 1, 10), current(1, 1), plaintext(1, 1)]);
    assert_eq!(state.file(file(1)).unwrap().next_version(), Some(version(2)));
    state.apply(data_key(1, 2, 1, 20)).unwrap();
    state.apply(current(1, 2)).unwrap();
    let entry = state.file(file(1)).unwrap();
    assert_eq!((entry.keys.len(), entry.next_version()), (2, Some(version(3))));
    state.apply(data_key(1, 8191, 1, 30)).unwrap();
    assert_eq!(state.file(file(1)).unwrap().next_version(), None);
}

/// Whatever records follow, in whatever order: see also the module `redo`.
#[test]
fn a_destroyed_key_never_comes_back() {
    let story = [data_key(1, 1, 1, 10), data_key(1, 2, 1, 20), current(1, 2)];
    let mut state = fold(&[&story[..], &[destroyed(1, 2, 7)]].concat());
    let again =
        [&story[..], &[data_key(1, 1, 2, 11), rewriting(1, 1, 3), plaintext(1, 1)]].concat();
    for record in again {
        state.apply(record).unwrap();
    }
    let entry = state.file(file(1)).unwrap();
    assert!(entry.keys.is_empty());
    assert!(entry.is_destroyed(version(2)) && !entry.is_destroyed(version(3)));
    // The file's state is the same, with a key that nobody has; its versions continue.
    assert_eq!((entry.phase.current(), entry.next_version()), (Some(version(2)), Some(version(3))));
    let bytes = pagevault_keystore::batch::encode(&state.records(DATABASE)).unwrap();
    for fill in [10, 11, 20] {
        assert!(
            !bytes.windows(92).any(|window| window == [fill; 92]),
            "wrapped key is still there"
        );
    }
    // Of two times the later one counts.
    state.apply(destroyed(1, 2, 5)).unwrap();
    state.apply(destroyed(1, 1, 9)).unwrap();
    let left = state.file(file(1)).unwrap().destroyed.unwrap();
    assert_eq!((left.through, left.lsn), (version(2), Lsn(7)));
    // For a file about which nothing else is known.
    state.apply(destroyed(2, 3, 7)).unwrap();
    state.apply(current(2, 3)).unwrap();
    state.apply(data_key(2, 4, 1, 40)).unwrap();
    state.apply(current(2, 4)).unwrap();
    let entry = state.file(file(2)).unwrap();
    assert_eq!((entry.phase.current(), entry.keys.len()), (Some(version(4)), 1));
    assert_eq!(fold(&state.records(DATABASE)), state);
}

#[test]
fn the_highest_version_is_the_current_database_key() {
    let state = fold(&[
        database_key(5, 2, 20),
        database_key(5, 1, 10),
        database_key(6, 9, 90),
        database_key(0, 1, 1),
        database_key(5, 1, 11),
    ]);
    let (newest, key) = state.current_database_key(DATABASE).unwrap();
    assert_eq!((newest, key.first.master_version), (key_version(2), 20));
    assert_eq!(state.database_key(DATABASE, key_version(1)).unwrap().first.master_version, 11);
    assert_eq!(state.current_database_key(Scope::database(7)), None);
    assert_eq!(state.database_keys().count(), 4);
}

#[test]
fn a_database_key_is_rewrapped_and_never_replaced() {
    let mut state = fold(&[database_key(5, 1, 1), database_key(5, 1, 2), database_key(0, 1, 1)]);
    let mut other = database_key(5, 1, 3);
    if let Record::DatabaseKey { key, .. } = &mut other {
        key.check = CheckValue::from_bytes([9; 16]);
    }
    let before = state.clone();
    let replaced = StateError::DatabaseKeyReplaced { scope: DATABASE, version: key_version(1) };
    assert_eq!(state.apply(other), Err(replaced));
    assert_eq!(state, before);
}

#[test]
fn a_provider_in_use_is_recognised() {
    let provider = |options: &str| Record::Provider {
        name: "disk".into(),
        kind: "file".into(),
        options: options.into(),
        programs: false,
    };
    let drop_it = Record::DropProvider { name: "disk".into() };
    let mut state = fold(&[provider("{}"), provider("{\"path\":\"/x\"}")]);
    assert_eq!(state.provider("disk").unwrap().options, "{\"path\":\"/x\"}");
    assert!(!state.uses_provider("disk"));
    state.apply(database_key(5, 1, 1)).unwrap();
    assert!(state.uses_provider("disk"));
    state.apply(drop_it.clone()).unwrap();
    state.apply(drop_it).unwrap();
    assert_eq!(state.providers().count(), 0);
}
