use std::collections::{BTreeSet, HashMap};

use pagevault_keystore::state::State;
use pagevault_keystore::{Record, batch, compaction, wrappings};
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
