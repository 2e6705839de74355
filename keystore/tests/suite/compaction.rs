use std::collections::{BTreeSet, HashMap};

use pagevault_keystore::compaction::Room;
use pagevault_keystore::state::State;
use pagevault_keystore::{
    CheckValue, DatabaseKey, KeyVersion, Record, Scope, Wrapping, batch, compaction, wrappings,
};
use proptest::prelude::*;

use crate::redo::any_history;

/// A record encoded as a batch.
fn bytes(record: &Record) -> Vec<u8> {
    batch::encode(std::slice::from_ref(record)).unwrap()
}

/// The offset of each record's end, in bytes from the first batch; of equal records, that of the
/// last.
fn ends(batches: &[Vec<Record>]) -> HashMap<Vec<u8>, usize> {
    let mut ends = HashMap::new();
    let mut at = 0;
    for records in batches {
        at += batch::HEADER;
        for record in records {
            let bytes = bytes(record);
            at += bytes.len() - batch::HEADER;
            ends.insert(bytes, at);
        }
    }
    ends
}

proptest! {
    /// A copy with the length of the old log contains all records of the old log that still matter.
    #[test]
    fn no_record_moves_away_from_the_beginning(log in any_history()) {
        let state = State::from_records(log.concat()).unwrap();
        for home in log.iter().flatten().map(Record::home).collect::<BTreeSet<_>>() {
            let log: Vec<Vec<Record>> = log
                .iter()
                .map(|batch| batch.iter().filter(|record| record.home() == home).cloned().collect())
                .filter(|batch: &Vec<Record>| !batch.is_empty())
                .collect();
            let folded = state.records(home);
            let kept = wrappings::with_older(&folded, log.iter().flatten());
            let batches = compaction::in_place(&kept, &log);
            let batches: Vec<Vec<Record>> =
                batches.into_iter().map(|batch| batch.into_iter().cloned().collect()).collect();
            let kept: Vec<Record> = kept.into_iter().cloned().collect();
            let (mut before, mut after) = (kept.clone(), batches.concat());
            before.sort_by_cached_key(bytes);
            after.sort_by_cached_key(bytes);
            prop_assert_eq!(before, after);
            prop_assert_eq!(State::from_records(batches.concat()), State::from_records(kept));
            let (were, are) = (ends(&log), ends(&batches));
            for (record, end) in &are {
                if let Some(was) = were.get(record) {
                    prop_assert!(end <= was, "a record moved from {} to {}", was, end);
                }
            }
        }
    }
}

/// Histories of providers and database keys: names of different lengths, some of them often.
fn any_wrappings() -> impl Strategy<Value = Vec<Vec<Record>>> {
    let provider = (0..3_u8, 0..40_usize).prop_map(|(name, length)| Record::Provider {
        name: format!("p{name}"),
        kind: "file".to_owned(),
        options: "x".repeat(length),
        programs: false,
    });
    let dropped = (0..3_u8).prop_map(|name| Record::DropProvider { name: format!("p{name}") });
    let key = (1..4_u32, 0..3_u8, 1..80_usize).prop_map(|(version, by, length)| {
        let provider = format!("p{by}");
        let by = Wrapping::new((&provider, "key"), 1, vec![by; length], 7);
        Record::DatabaseKey {
            scope: Scope::CLUSTER,
            version: KeyVersion::new(version).unwrap(),
            key: DatabaseKey::new(CheckValue::from_bytes([version as u8; 16]), by),
        }
    });
    let record = prop_oneof![2 => provider, 1 => dropped, 4 => key];
    // A mark is an empty batch.
    prop::collection::vec(prop::collection::vec(record, 0..4), 1..12)
}

proptest! {
    /// Whatever part of the old log a copy has the length of: each database key and provider that
    /// it would have had is there, as it was by then or as it is now.
    #[test]
    fn a_copy_of_any_length_has_what_it_had(log in any_wrappings()) {
        let now = State::from_records(log.concat()).unwrap();
        let folded = now.records(Scope::CLUSTER);
        let kept: Vec<_> = folded.iter().collect();
        let batches: Vec<Vec<Record>> = compaction::arrange(&kept, &log, Room::AsBefore)
            .into_iter()
            .map(|batch| batch.into_iter().cloned().collect())
            .collect();
        prop_assert_eq!(&State::from_records(batches.concat()).unwrap(), &now);
        let length = |batch: &Vec<Record>| {
            batch::encode(batch).map_or(batch::HEADER, |bytes| bytes.len())
        };
        let all = |log: &[Vec<Record>]| log.iter().map(length).sum::<usize>();
        prop_assert!(all(&batches) <= all(&log));
        for end in 0..=log.len() {
            let then = State::from_records(log[..end].concat()).unwrap();
            let mut room = all(&log[..end]);
            let copied = batches.iter().take_while(|batch| {
                let fits = length(batch) <= room;
                room = room.saturating_sub(length(batch));
                fits
            });
            let copied = State::from_records(copied.flatten().cloned()).unwrap();
            for (scope, version, key) in then.database_keys() {
                let found = copied.database_key(scope, version);
                let is_now = found == now.database_key(scope, version);
                prop_assert!(found.is_some() && (found == Some(key) || is_now), "{:?}", found);
            }
            for (name, provider) in then.providers() {
                let (found, is) = (copied.provider(name), now.provider(name));
                prop_assert!(found == Some(provider) || found == is, "{:?}", found);
            }
        }
    }

    /// Without a backup in progress nothing obsolete is left.
    #[test]
    fn with_room_nothing_obsolete_is_left(log in any_wrappings()) {
        let now = State::from_records(log.concat()).unwrap();
        let folded = now.records(Scope::CLUSTER);
        let kept: Vec<_> = folded.iter().collect();
        let batches = compaction::arrange(&kept, &log, Room::Any).concat();
        prop_assert_eq!(batches.len(), kept.len());
        let batches = batches.into_iter().cloned();
        prop_assert_eq!(State::from_records(batches).unwrap(), now);
    }
}
