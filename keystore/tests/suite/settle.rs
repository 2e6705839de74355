//! Which records may wait for a checkpoint until they are in their file, and how they are settled.

use pagevault_keystore::log::{Log, Settle};
use pagevault_keystore::{Lsn, Record, wal};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, any_record, current, data_key, destroyed, plaintext, rewriting, sealed_only,
};
use crate::faulty::FaultyStorage;

fn settles(record: &Record) -> (Settle, Settle) {
    let records = std::slice::from_ref(record);
    (Settle::of(records), Settle::in_redo(records))
}

#[test]
fn what_wal_repeats_can_wait_but_in_redo_no_key_of_a_file_in_use() {
    use Settle::{AtCheckpoint, Now};
    // The first key of a file: pages under it come after it in WAL, and are never read before.
    assert_eq!(settles(&data_key(7, 1, 1, 3)), (AtCheckpoint, AtCheckpoint));
    assert_eq!(settles(&data_key(7, 2, 1, 3)), (AtCheckpoint, Now));
    assert_eq!(settles(&rewriting(7, 2, 0)), (AtCheckpoint, Now));
    assert_eq!(settles(&current(7, 2)), (AtCheckpoint, AtCheckpoint));
    // Pages in plaintext may follow, some with an older LSN.
    assert_eq!(settles(&plaintext(7, 2)), (AtCheckpoint, Now));
    assert_eq!(settles(&sealed_only(7, 2, false)), (AtCheckpoint, AtCheckpoint));
    assert_eq!(settles(&sealed_only(7, 2, true)), (AtCheckpoint, Now));
    // Nothing else can make a destroyed key unreadable.
    assert_eq!(settles(&destroyed(7, 2, 100)), (Now, Now));
}

/// Records without which a server cannot begin to read WAL.
fn is_needed_before_wal(record: &Record) -> bool {
    match record {
        Record::DataKey { file, .. } => wal::is_key_place(*file),
        Record::Provider { .. } | Record::DropProvider { .. } | Record::DatabaseKey { .. } => true,
        _ => false,
    }
}

/// A server whose disk is full cannot take back what is in WAL.
#[test]
fn what_is_staged_is_settled_without_more_room() {
    let sector = |length: u64| length.div_ceil(512);
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, [7; 16], DATABASE, &[]).unwrap();
    let mut ends = std::collections::HashSet::new();
    for relation in 1..2000 {
        let records = [data_key(relation, 1, 1, 1), current(relation, 1), plaintext(relation, 1)];
        log.stage(&records[..1 + relation as usize % 3], Lsn(0x1000)).unwrap();
        let staged = log.position();
        log.append_settled(&staged).unwrap();
        let settled = log.position();
        assert!(settled.is_settled() && settled.settled == staged.end);
        assert_eq!(sector(settled.end), sector(staged.end), "at {}", staged.end);
        ends.insert(staged.end % 512);
    }
    assert!(ends.len() > 100, "only {} different ends", ends.len());
}

proptest! {
    #[test]
    fn one_record_that_cannot_wait_decides_for_all(records in vec(any_record(), 1..6)) {
        for settle in [Settle::of, Settle::in_redo] {
            let alone = |record: &Record| settle(std::slice::from_ref(record)) == Settle::Now;
            prop_assert_eq!(settle(&records) == Settle::Now, records.iter().any(alone));
        }
        if records.iter().any(is_needed_before_wal) {
            prop_assert_eq!(Settle::of(&records), Settle::Now);
        }
        if Settle::of(&records) == Settle::Now {
            prop_assert_eq!(Settle::in_redo(&records), Settle::Now);
        }
    }
}
