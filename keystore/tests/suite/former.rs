//! Former files: what is known of them, and what is forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU32;

use pagevault_keystore::former::{FormerFiles, Full, Range, Table};
use pagevault_keystore::log::{Log, Trust};
use pagevault_keystore::state::State;
use pagevault_keystore::wal::key_place;
use pagevault_keystore::{Lsn, Record, RelFile, compaction, wrappings};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, current, data_key, destroyed, fewer, key_version, sealed_only, version,
};
use crate::faulty::FaultyStorage;

const fn range(first: u32, last: u32, through: u16, gone: u64) -> (u32, u32, u16, u64) {
    (first, last, through, gone)
}

fn of((first, last, through, gone): (u32, u32, u16, u64)) -> Range {
    Range { database: 5, first, last, through: version(through), gone: Lsn(gone) }
}

fn ranges(former: &FormerFiles) -> Vec<(u32, u32, u16, u64)> {
    let of = |range: Range| (range.first, range.last, range.through.get(), range.gone.0);
    former.ranges().map(of).collect()
}

fn formers(all: &[(u32, u32, u16, u64)]) -> FormerFiles {
    let mut former = FormerFiles::default();
    all.iter().for_each(|range| former.add(of(*range)));
    former
}

#[test]
fn neighbours_are_joined_and_the_highest_version_counts() {
    let mut former = formers(&[range(10, 19, 1, 5), range(20, 29, 1, 7)]);
    assert_eq!(ranges(&former), [range(10, 29, 1, 7)]);
    former.add(of(range(15, 16, 3, 9)));
    assert_eq!(ranges(&former), [range(10, 14, 1, 7), range(15, 16, 3, 9), range(17, 29, 1, 7)]);
    former.add(of(range(1, u32::MAX, 2, 8)));
    let expected = [range(1, 14, 2, 8), range(15, 16, 3, 9), range(17, u32::MAX, 2, 8)];
    assert_eq!(ranges(&former), expected);
    // Another database, with the next number.
    former.add(Range { database: 6, ..of(range(1, 1, 2, 8)) });
    assert_eq!(former.ranges().count(), 4);
    assert_eq!(former.find(5, 15).unwrap().through, version(3));
    assert_eq!(former.find(6, 2), None);
}

/// A number in the range of a file with thousands of versions would begin after these.
#[test]
fn a_file_with_many_versions_has_a_range_of_its_own() {
    let known = formers(&[range(5, 8, 4, 1), range(14, 14, 8000, 1)]);
    let gone: BTreeMap<u32, _> = [(10, 1), (12, 257), (16, 256), (20, 1)]
        .map(|(number, through)| (number, version(through)))
        .into();
    let found = known.with(5, &gone, &BTreeSet::new(), Lsn(9));
    assert_eq!(found, [of(range(5, 20, 256, 9)), of(range(12, 12, 257, 9))]);
    let mut all = known;
    found.into_iter().for_each(|range| all.add(range));
    let through = |number| all.find(5, number).map(|range| range.through.get());
    let found = [5, 11, 12, 13, 14, 15, 20, 21].map(through);
    let few = Some(256);
    assert_eq!(found, [few, few, Some(257), few, Some(8000), few, few, None]);
}

#[test]
fn files_in_use_divide_former_files() {
    let known = formers(&[range(5, 8, 4, 1), range(30, 30, 2, 1)]);
    let gone: BTreeMap<u32, _> = [(10, 1), (12, 3), (25, 1), (26, 1)]
        .map(|(number, through)| (number, version(through)))
        .into();
    let in_use: BTreeSet<u32> = [20, 28].into();
    let found = known.with(5, &gone, &in_use, Lsn(9));
    assert_eq!(found, [of(range(5, 12, 4, 9)), of(range(25, 26, 1, 9))]);
    // Nothing is in use: one range.
    let found = known.with(5, &gone, &BTreeSet::new(), Lsn(9));
    assert_eq!(found, [of(range(5, 30, 4, 9))]);
    // A known range contains a number that is in use again.
    let in_use: BTreeSet<u32> = [7, 11].into();
    let found = known.with(5, &gone, &in_use, Lsn(9));
    assert_eq!(found, [of(range(8, 10, 4, 9)), of(range(12, 30, 3, 9))]);
}

proptest! {
    /// As if each number had a version and an address of its own, but for addresses of neighbours.
    #[test]
    fn ranges_say_what_was_added(
        added in vec((1..40_u32, 0..12_u32, 1..4_u16, 1..20_u64), 0..fewer(30)),
    ) {
        let mut former = FormerFiles::default();
        let mut naive: BTreeMap<u32, (u16, u64)> = BTreeMap::new();
        for (first, length, through, gone) in added {
            let last = first + length;
            let new = of(range(first, last, through, gone));
            former.add(new);
            prop_assert!(former.contains(&new));
            for number in first..=last {
                let (version, address) = naive.entry(number).or_default();
                (*version, *address) = ((*version).max(through), (*address).max(gone));
            }
        }
        let mut end = None;
        for range in former.ranges() {
            prop_assert!(range.first <= range.last && Some(range.first) > end, "{range:?}");
            end = Some(range.last);
        }
        for number in 0..60 {
            let found = former.find(5, number).map(|range| (range.through.get(), range.gone.0));
            let expected = naive.get(&number).copied();
            let versions = [found, expected].map(|known| known.map(|(version, _)| version));
            prop_assert_eq!(versions[0], versions[1]);
            prop_assert!(found.map(|(_, gone)| gone) >= expected.map(|(_, gone)| gone));
        }
        // In shared memory and back.
        let words: Vec<_> = (0..Table::words_needed(60)).map(|_| AtomicU32::new(0)).collect();
        let table = Table::new(&words);
        table.store(&former).unwrap();
        prop_assert_eq!(table.load(), former.clone());
        for number in 0..60 {
            let expected = former.find(5, number).map(|range| range.through);
            prop_assert_eq!(table.through(5, number), expected);
            prop_assert_eq!(table.through(4, number), None);
        }
        let small = Table::new(&words[..2]);
        prop_assert_eq!(small.store(&former).is_err(), former.ranges().next().is_some());
    }
}

#[test]
fn a_full_table_keeps_what_it_has() {
    let words: Vec<_> = (0..Table::words_needed(1)).map(|_| AtomicU32::new(0)).collect();
    let table = Table::new(&words);
    let one = formers(&[range(1, 2, 1, 1)]);
    table.store(&one).unwrap();
    assert_eq!(table.store(&formers(&[range(1, 2, 1, 1), range(4, 4, 1, 1)])), Err(Full));
    assert_eq!(table.load(), one);
    table.clear();
    assert_eq!(table.load(), FormerFiles::default());
}

/// What is forgotten: keys of files that were gone, with the versions that the record names.
#[test]
fn keys_of_former_files_are_forgotten() {
    let (place, place_version) = key_place(key_version(1));
    let wal_key = Record::DataKey {
        file: place,
        version: place_version,
        cipher: 1,
        scope: DATABASE,
        key_version: key_version(1),
        wrapped: vec![7; 92],
        created: 1,
    };
    let records = vec![
        wal_key,
        data_key(1, 1, 1, 1),
        current(1, 1),
        sealed_only(1, 1, false),
        data_key(2, 1, 1, 2),
        data_key(2, 2, 1, 3),
        destroyed(3, 4, 7),
        data_key(9, 1, 1, 4),
        Record::FormerFiles(of(range(1, 3, 1, 50))),
        Record::FormerFiles(of(range(3, 3, 4, 60))),
        Record::FormerFiles(Range { database: 0, ..of(range(1, 9, 9, 1)) }),
    ];
    let state = State::from_records(records).unwrap();
    let files = |state: &State| state.files().map(|(file, _)| file.relation).collect::<Vec<_>>();
    // Without 2, which has a later key than the record names.
    for (gone, left) in
        [(9..9, vec![1, 1, 2, 3, 9]), (1..3, vec![1, 2, 3, 9]), (1..9, vec![1, 2, 9])]
    {
        let mut state = state.clone();
        let is_gone = |file: RelFile| gone.contains(&file.relation);
        assert_eq!(state.forget_keys(5, Lsn(70), is_gone).len(), 5 - left.len());
        assert_eq!(files(&state), left);
        let forgotten = if left.len() < 5 { Lsn(70) } else { Lsn::INVALID };
        assert_eq!(state.forgotten(), forgotten);
        // Once is enough.
        assert_eq!(state.forget_keys(5, Lsn(80), is_gone), []);
        assert_eq!(state.forgotten(), forgotten);
        let again = State::from_records(state.records(DATABASE)).unwrap();
        assert_eq!(again.records(DATABASE), state.records(DATABASE));
        assert_eq!((again.forgotten(), again.former_files().ranges().count()), (forgotten, 2));
    }
    let mut state = state;
    assert_eq!(state.forget_keys(5, Lsn(60), |_| false), [], "they exist");
    assert_eq!(state.forgotten(), Lsn::INVALID);
    assert_eq!(state.forget_keys(0, Lsn(60), |_| true), [], "keys of WAL have no file");
}

/// A copy of a log with the length that it had before keys were forgotten contains all records that
/// still matter, and so does each shorter one that contains them before.
#[test]
fn nothing_moves_away_from_the_beginning_when_keys_are_forgotten() {
    let log = [
        vec![data_key(1, 1, 1, 1), current(1, 1)],
        vec![data_key(2, 1, 1, 1), current(2, 1)],
        vec![data_key(2, 1, 2, 1)],
        vec![data_key(8, 1, 1, 1), current(8, 1)],
        vec![Record::FormerFiles(of(range(2, 2, 1, 50)))],
        vec![data_key(9, 1, 1, 1), current(9, 1)],
        vec![Record::FormerFiles(of(range(8, 8, 1, 50)))],
    ];
    let mut state = State::from_records(log.concat()).unwrap();
    let compacted = |state: &State, log: &[Vec<Record>]| -> Vec<Vec<Record>> {
        let folded = state.records(DATABASE);
        let kept = wrappings::with_older(&folded, log.iter().flatten());
        let batches = compaction::in_place(&kept, log).into_iter();
        batches.map(|batch| batch.into_iter().cloned().collect()).collect()
    };
    assert_eq!(state.forget_keys(5, Lsn(50), |_| true).len(), 2);
    let first = compacted(&state, &log);
    let forgotten = |by| Record::KeysForgotten { database: 5, by: Lsn(by) };
    let former = |first, last, gone| Record::FormerFiles(of(range(first, last, 1, gone)));
    assert_eq!(
        first,
        [
            vec![data_key(1, 1, 1, 1), current(1, 1)],
            // The record of the range is in the log already, and stays where it is.
            vec![forgotten(50)],
            vec![former(2, 2, 50)],
            vec![data_key(9, 1, 1, 1), current(9, 1)],
            vec![former(8, 8, 50)],
        ]
    );
    // The next time, what it says takes the place of what was said.
    let between = vec![data_key(1, 2, 1, 7)];
    let (start, end) = first.split_at(3);
    let log = [start, std::slice::from_ref(&between), end, &[vec![former(2, 9, 60)]]].concat();
    let mut state = State::from_records(log.concat()).unwrap();
    assert_eq!(state.forget_keys(5, Lsn(60), |_| true).len(), 1);
    assert_eq!(
        compacted(&state, &log),
        [
            vec![data_key(1, 1, 1, 1), current(1, 1)],
            vec![forgotten(60)],
            between,
            vec![former(2, 9, 60)],
        ]
    );
}

/// A table is truncated once a second, for days, while other files stay: the log, with the records
/// of a day, has one range more for each file that stays.
#[test]
fn a_log_does_not_grow_with_files_that_are_gone() {
    const TRUNCATIONS: u32 = if cfg!(miri) { 60 } else { 20_000 };
    const STAY: u32 = 5;
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, [7; 16], DATABASE, &[]).unwrap();
    let mut most = 0;
    let make = |log: &mut Log<'_, FaultyStorage>, relation| {
        let fill = relation as u8;
        let records = [data_key(relation, 1, 1, fill), current(relation, 1)];
        log.stage(&records, Lsn(u64::from(relation))).unwrap();
    };
    let step = TRUNCATIONS / STAY;
    let stays = |relation: u32| relation % step == 1;
    for relation in 1..=TRUNCATIONS {
        make(&mut log, relation);
        if relation % (TRUNCATIONS / 20) != 0 {
            continue;
        }
        let batches =
            pagevault_keystore::log::batches(&storage.content("5.keys"), DATABASE).unwrap();
        let mut state = State::from_records(batches.concat()).unwrap();
        let (in_use, gone): (Vec<_>, Vec<_>) =
            state.files().map(|(file, _)| file.relation).partition(|number| stays(*number));
        let gone = gone.into_iter().map(|number| (number, version(1))).collect();
        let lsn = Lsn(relation.into());
        let found = state.former_files().with(5, &gone, &in_use.into_iter().collect(), lsn);
        found.into_iter().for_each(|range| state.apply(Record::FormerFiles(range)).unwrap());
        assert_eq!(state.forget_keys(5, lsn, |_| true).len(), gone.len());
        let folded = state.records(DATABASE);
        let kept = wrappings::with_older(&folded, batches.iter().flatten());
        log.compact_to(&compaction::in_place(&kept, &batches)).unwrap();
        most = most.max(log.position().end);
    }
    drop(log);
    let (_, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    let state = State::from_records(contents.records).unwrap();
    let left: Vec<_> = state.files().map(|(file, _)| file.relation).collect();
    assert_eq!(left, (0..STAY).map(|n| n * step + 1).collect::<Vec<_>>());
    assert!(state.former_files().ranges().count() <= left.len() + 1);
    assert!(most < 2_000, "{most} bytes");
    for relation in 1..=TRUNCATIONS {
        let known = state.former_files().find(5, relation).is_some();
        assert!(known || stays(relation), "{relation}");
    }
}
