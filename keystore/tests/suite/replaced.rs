//! Keys that were replaced by later ones are forgotten, and what is still needed is not.

use std::collections::HashSet;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::state::{FormerVersions, State};
use pagevault_keystore::wal::{Switch, WalPhase, before_all, key_place, stretch_at};
use pagevault_keystore::{
    CheckValue, DatabaseKey, KeyVersion, Lsn, Record, Scope, Wrapping, compaction, wrappings,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, current, data_key, fewer, file, key_version, rewriting, sealed_only, version,
};
use crate::directory::{key, memory};

fn database_key(scope: Scope, number: u32) -> Record {
    Record::DatabaseKey {
        scope,
        version: key_version(number),
        key: DatabaseKey::new(
            CheckValue::from_bytes([number as u8; 16]),
            Wrapping::new(("local", "main"), 1, vec![1; 60], 7),
        ),
    }
}

fn wal_key(number: u32) -> Record {
    let (file, version) = key_place(key_version(number));
    Record::DataKey {
        file,
        version,
        cipher: 1,
        scope: Scope::CLUSTER,
        key_version: key_version(3),
        wrapped: vec![number as u8; 92],
        created: 1,
    }
}

fn switch(step: u32, start: u64, number: u32, plaintext: bool) -> Switch {
    let phase = WalPhase { version: Some(key_version(number)), plaintext };
    Switch { step, start: Lsn(start), phase }
}

proptest! {
    /// Without the switches to versions that no WAL from an address on is under, everything there
    /// is as before, and under a later version.
    #[test]
    fn wal_behind_an_address_does_not_change(
        found in vec((1..9_u32, 0..60_u64, any::<bool>()), 0..fewer(12)),
        address in 0..70_u64,
    ) {
        let switches: Vec<_> = (1..)
            .zip(found)
            .map(|(step, (number, start, plaintext))| switch(step, start, number, plaintext))
            .collect();
        let all = || switches.iter().copied();
        let through = before_all(all(), Lsn(address));
        let left: Vec<_> = all().filter(|switch| switch.phase.version > through).collect();
        for at in address..80 {
            let before = stretch_at(all(), Lsn(at));
            let after = stretch_at(left.iter().copied(), Lsn(at));
            prop_assert_eq!((before.phase, before.to), (after.phase, after.to));
            prop_assert!(through.is_none() || after.phase.version > through);
        }
        // No more than that: the next version is of some page there.
        if let Some(through) = through {
            let next = KeyVersion::after(Some(through));
            let mut addresses = address..80;
            let there = addresses.any(|at| stretch_at(all(), Lsn(at)).phase.version == next);
            let is_later = |switch: &Switch| switch.start > Lsn(address);
            let later = all().filter(is_later).any(|switch| switch.phase.version == next);
            prop_assert!(there || later);
        }
    }
}

#[test]
fn wal_keys_and_their_switches_end_together() {
    let mut records: Vec<_> = (1..=4).map(wal_key).collect();
    records.extend(
        [
            switch(1, 100, 1, false),
            switch(2, 200, 2, false),
            switch(3, 300, 2, true),
            switch(4, 400, 4, false),
        ]
        .map(Record::WalSwitch),
    );
    let state = State::from_records(records).unwrap();
    let through = |address| before_all(state.wal_switches(), Lsn(address)).map(KeyVersion::get);
    let found = [50, 100, 199, 200, 399, 400, 900].map(through);
    assert_eq!(found, [None, None, None, Some(1), Some(1), Some(3), Some(3)]);
    for (number, left) in [(1, vec![2, 3, 4]), (3, vec![4]), (4, vec![1, 2, 3, 4])] {
        let mut state = state.clone();
        let wal_keys = Some(key_version(number));
        let mut former = FormerVersions { wal_keys, gone: Lsn(9), ..FormerVersions::default() };
        let count = state.forget_versions(Scope::CLUSTER, &mut former);
        assert_eq!(count, 4 - left.len());
        // The newest one is in use, whoever says the contrary.
        assert_eq!(former.wal_keys.is_some(), number != 4);
        assert_eq!(former.data_keys.len(), count);
        let (place, _) = key_place(KeyVersion::FIRST);
        let keys: Vec<_> = state.file(place).unwrap().keys.keys().map(|v| v.get()).collect();
        assert_eq!(keys, left);
        let again = State::from_records(state.records(Scope::CLUSTER)).unwrap();
        assert_eq!(again.records(Scope::CLUSTER), state.records(Scope::CLUSTER));
        assert_eq!(again.forgotten(), if count > 0 { Lsn(9) } else { Lsn::INVALID });
    }
}

#[test]
fn database_keys_end_when_they_wrap_nothing_and_are_not_the_newest() {
    let own = DATABASE;
    let keys = (1..=4).map(|number| database_key(Scope::CLUSTER, number));
    let keys = keys.chain((1..=2).map(|number| database_key(own, number)));
    // Version 3 of the cluster's wraps a WAL key.
    let mut state = State::from_records(keys.chain([wal_key(1)])).unwrap();
    let all = [(Scope::CLUSTER, [1, 3, 4, 9]), (own, [1, 2, 9, 9]), (Scope::database(7), [1; 4])];
    let named = all
        .into_iter()
        .flat_map(|(scope, numbers)| numbers.map(|number| (scope, key_version(number))));
    let mut former = FormerVersions {
        database_keys: named.collect(),
        gone: Lsn(9),
        ..FormerVersions::default()
    };
    assert_eq!(state.forget_versions(DATABASE, &mut former.clone()), 0, "they are not of this log");
    assert_eq!(state.forget_versions(Scope::CLUSTER, &mut former), 2);
    let gone = [(Scope::CLUSTER, key_version(1)), (own, key_version(1))];
    assert_eq!(former.database_keys, HashSet::from(gone));
    let left: Vec<_> = state.database_keys().map(|(s, v, _)| (s.number(), v.get())).collect();
    assert_eq!(left, [(0, 2), (0, 3), (0, 4), (5, 2)]);
    assert_eq!(state.forgotten(), Lsn(9));
}

#[test]
fn data_keys_end_below_the_floor() {
    let records = vec![
        data_key(1, 1, 1, 1),
        data_key(1, 2, 1, 2),
        data_key(1, 3, 1, 3),
        rewriting(1, 2, 2),
        current(1, 3),
        sealed_only(1, 3, false),
        // No floor: pages may be under all of them.
        data_key(2, 1, 1, 1),
        data_key(2, 2, 1, 2),
        current(2, 2),
        // In plaintext.
        data_key(3, 1, 1, 1),
        sealed_only(3, 1, true),
    ];
    let mut state = State::from_records(records).unwrap();
    let named = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (8, 1)];
    let named = named.map(|(relation, number)| (file(relation), version(number)));
    let data_keys = HashSet::from(named);
    let mut former = FormerVersions { data_keys, gone: Lsn(9), ..FormerVersions::default() };
    assert_eq!(state.forget_versions(Scope::CLUSTER, &mut former.clone()), 0);
    // The record of a rewriting names version 2.
    assert_eq!(state.forget_versions(DATABASE, &mut former), 1);
    let gone = HashSet::from([(file(1), version(1)), (file(8), version(1))]);
    assert_eq!(former.data_keys, gone, "or was not there");
    let again = State::from_records(state.records(DATABASE)).unwrap();
    assert_eq!(again, state);
}

/// A copy of the cluster's log with its former length has all that matters.
#[test]
fn nothing_moves_away_from_the_beginning() {
    let cluster = Scope::CLUSTER;
    let log = [
        vec![database_key(cluster, 1)],
        vec![wal_key(1)],
        vec![database_key(cluster, 2), database_key(cluster, 3)],
    ];
    let mut state = State::from_records(log.concat()).unwrap();
    let mut former = FormerVersions {
        database_keys: [1, 2].map(|number| (cluster, key_version(number))).into(),
        gone: Lsn(9),
        ..FormerVersions::default()
    };
    assert_eq!(state.forget_versions(cluster, &mut former), 2);
    let folded = state.records(cluster);
    let kept = wrappings::with_older(&folded, log.iter().flatten());
    let batches = compaction::in_place(&kept, &log).into_iter();
    let batches: Vec<Vec<_>> = batches.map(|b| b.into_iter().cloned().collect()).collect();
    let forgotten = Record::KeysForgotten { database: 0, by: Lsn(9) };
    let expected = [vec![forgotten], vec![wal_key(1)], vec![database_key(cluster, 3)]];
    assert_eq!(batches, expected);
}

#[test]
fn forgotten_versions_are_wiped_in_memory() {
    let memory = memory(8);
    let directory = Directory::init(&memory, 8).unwrap();
    for number in 1..=3 {
        directory.apply(&data_key(1, number, 1, 0x50 + number as u8)).unwrap();
    }
    directory.apply(&data_key(2, 1, 1, 0x51)).unwrap();
    directory.apply(&current(1, 3)).unwrap();
    // The spare body has an older wrapping.
    directory.apply(&data_key(1, 1, 2, 0x51)).unwrap();
    let named = [(1, 1), (1, 2), (2, 9), (9, 1)];
    let named = named.map(|(relation, number)| (file(relation), version(number)));
    assert_eq!(directory.forget_versions(&named), Ok(2));
    assert_eq!(directory.forget_versions(&named), Ok(0));
    let slot = directory.find(file(1)).unwrap().unwrap();
    let versions: Vec<_> = directory.keys(slot).unwrap().map(|k| k.unwrap().version).collect();
    assert_eq!(versions, [version(3)]);
    assert!(directory.key(slot, version(1), &mut [0; MAX_WRAPPED_DATA_KEY]).is_err());
    assert_eq!(directory.last_version(slot), Ok(Some(version(3))));
    assert_eq!(key(&directory, 2, 1).0, [0x51; 92]);
    for byte in [0x51, 0x52] {
        let pattern = u32::from_le_bytes([byte; 4]);
        let left =
            memory.iter().filter(|w| w.load(std::sync::atomic::Ordering::Relaxed) == pattern);
        assert_eq!(left.count(), if byte == 0x51 { 23 } else { 0 });
    }
    // WAL may bring it again, wrapped by another key.
    directory.apply(&data_key(1, 1, 7, 0x51)).unwrap();
    let (wrapped, info) = key(&directory, 1, 1);
    assert_eq!((wrapped, info.key_version), (vec![0x51; 92], key_version(7)));
    assert_eq!(directory.forget_versions(&named), Ok(1));
    assert_eq!(directory.forget(|_, _| true), Ok(2));
    assert_eq!(directory.counts().unwrap().keys, 0);
}
