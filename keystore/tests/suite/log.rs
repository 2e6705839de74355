use std::fs;
use std::os::unix::fs::PermissionsExt;

use pagevault_keystore::log::{self, HEADER, Log, LogError, Trust, file_name, replay, scopes};
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::{Lsn, Problem, Record, Scope, batch};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{DATABASE, any_record, current, data_key, plaintext};
use crate::batch::sealed;
use crate::faulty::FaultyStorage;

/// The address of a staged batch's WAL record, or one before it.
const LOGGED: Lsn = Lsn(0x1000);

const ID: [u8; 16] = [7; 16];

/// A log of three batches, and the offset of each.
fn three() -> (Vec<u8>, [usize; 3], Vec<Vec<Record>>) {
    let storage = FaultyStorage::default();
    let batches = vec![
        vec![data_key(1, 1, 1, 1), current(1, 1)],
        vec![data_key(2, 1, 1, 2), current(2, 1)],
        vec![plaintext(1, 1)],
    ];
    let mut log = Log::create(&storage, ID, DATABASE, &[]).unwrap();
    let starts: Vec<usize> = batches
        .iter()
        .map(|batch| {
            let start = log.position().end as usize;
            log.append(batch).unwrap();
            start
        })
        .collect();
    (storage.content("5.keys"), starts.try_into().unwrap(), batches)
}

#[test]
fn appended_batches_are_replayed() {
    let (bytes, starts, batches) = three();
    assert_eq!(starts[0], HEADER + batch::HEADER);
    let contents = replay(&bytes, DATABASE).unwrap();
    assert_eq!(contents.records, batches.concat());
    assert_eq!((contents.torn, contents.position.keystore_id), (0, ID));
}

#[test]
fn a_log_cut_anywhere_keeps_its_whole_batches() {
    let (bytes, starts, batches) = three();
    for length in HEADER + batch::HEADER..bytes.len() {
        let contents = replay(&bytes[..length], DATABASE).unwrap();
        let ends = [starts[1], starts[2], bytes.len()];
        let whole = ends.iter().filter(|end| **end <= length).count();
        assert_eq!(contents.records, batches[..whole].concat(), "cut at {length}");
        assert_eq!(contents.position.end + contents.torn, length as u64);
    }
    // It has never been so short.
    for length in 0..HEADER + batch::HEADER {
        let error = replay(&bytes[..length], DATABASE).unwrap_err();
        assert_eq!(error.problem, Problem::Short, "cut at {length}");
    }
}

#[test]
fn a_damaged_byte_stops_the_middle_and_cuts_the_end() {
    let (bytes, starts, batches) = three();
    for at in 0..bytes.len() {
        for mask in [1, 0x80, 0xFF] {
            let mut damaged = bytes.clone();
            damaged[at] ^= mask;
            let result = replay(&damaged, DATABASE);
            if at < starts[2] {
                let error = result.unwrap_err();
                let begins = [starts[1], starts[0], HEADER];
                let start = begins.iter().find(|start| **start <= at).unwrap_or(&0);
                assert_eq!(error.offset, *start as u64, "damage at {at}: {error}");
            } else {
                let contents = result.unwrap();
                assert_eq!(contents.records, batches[..2].concat(), "damage at {at}");
                assert_eq!(contents.torn, (bytes.len() - starts[2]) as u64);
            }
        }
    }
}

#[test]
fn a_garbled_end_is_torn() {
    let (bytes, starts, batches) = three();
    let garbled: [&dyn Fn(usize) -> u8; 3] = [&|_| 0, &|_| 0xFF, &|at| (at * 37) as u8];
    for fill in garbled {
        for from in starts[2]..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[from..].iter_mut().enumerate().for_each(|(at, byte)| *byte = fill(at));
            if damaged == bytes {
                // The end is as in this case.
                continue;
            }
            assert_eq!(replay(&damaged, DATABASE).unwrap().records, batches[..2].concat());
        }
    }
}

#[test]
fn an_unreadable_batch_before_others_is_damage() {
    let (bytes, starts, _) = three();
    let body = starts[1] + batch::HEADER + 9;
    // Followed by an intact batch, by a damaged one with an intact header, by such a header alone.
    let mut damaged = bytes.clone();
    damaged[body] ^= 1;
    assert_eq!(replay(&damaged, DATABASE).unwrap_err().offset, starts[1] as u64);
    damaged[starts[2] + batch::HEADER] ^= 1;
    assert_eq!(replay(&damaged, DATABASE).unwrap_err().offset, starts[1] as u64);
    damaged.truncate(starts[2] + batch::HEADER);
    let error = replay(&damaged, DATABASE).unwrap_err();
    assert_eq!((error.offset, error.problem), (starts[1] as u64, Problem::Checksum));
    // Even an unreadable header is damage if an intact one follows.
    let mut damaged = bytes.clone();
    damaged[starts[1]..starts[1] + 8].fill(0);
    let error = replay(&damaged, DATABASE).unwrap_err();
    assert_eq!((error.offset, error.problem), (starts[1] as u64, Problem::Magic));
    // At the end of the log, the same is a torn end.
    damaged.truncate(starts[2]);
    assert_eq!(replay(&damaged, DATABASE).unwrap().position.end, starts[1] as u64);
}

#[test]
fn a_last_batch_of_a_later_version_is_not_a_torn_end() {
    let (mut bytes, ..) = three();
    let end = bytes.len();
    bytes.extend(sealed(&[77, 1, 0, 0, 0, 0]));
    let error = replay(&bytes, DATABASE).unwrap_err();
    assert_eq!(error.problem, Problem::RecordType(77));
    assert_eq!(error.offset, (end + batch::HEADER) as u64);

    bytes[end + 4] = 2;
    reseal(&mut bytes, end);
    assert_eq!(replay(&bytes, DATABASE).unwrap_err().problem, Problem::Version(2));
    bytes.truncate(end + batch::HEADER);
    assert_eq!(replay(&bytes, DATABASE).unwrap_err().problem, Problem::Version(2));
}

/// Corrects the checksum of a changed header.
fn reseal(bytes: &mut [u8], start: usize) {
    let checksum = crc32c::crc32c(&bytes[start..start + 32]).to_le_bytes();
    bytes[start + 32..start + 36].copy_from_slice(&checksum);
}

/// A log of three unsettled batches behind a first one, and the offset of each.
fn unsettled(storage: &FaultyStorage) -> (Log<'_, FaultyStorage>, [usize; 3]) {
    let mut log = Log::create(storage, ID, DATABASE, &[data_key(1, 1, 1, 1)]).unwrap();
    let starts = [2, 3, 4].map(|relation| {
        let start = log.position().end as usize;
        log.stage(&[data_key(relation, 1, 1, relation as u8)], LOGGED).unwrap();
        start
    });
    (log, starts)
}

/// Settles as a checkpoint does.
fn settle(log: &mut Log<'_, FaultyStorage>) -> bool {
    let position = log.position();
    log.sync().unwrap();
    let marked = log.append_settled(&position).unwrap();
    log.sync().unwrap();
    marked
}

#[test]
fn an_unsettled_end_is_cut_at_its_first_hole() {
    let storage = FaultyStorage::default();
    let (_, starts) = unsettled(&storage);
    let bytes = storage.content("5.keys");
    for (whole, start) in starts.into_iter().enumerate() {
        // A hole of any length; what follows is there.
        for end in start + 1..bytes.len() {
            let mut holed = bytes.clone();
            holed[start..end].fill(0);
            let contents = replay(&holed, DATABASE).unwrap();
            assert_eq!(contents.position.end, start as u64);
            assert_eq!(contents.torn, (bytes.len() - start) as u64);
            assert_eq!(contents.records.len(), 1 + whole);
        }
    }
}

/// After a crash those batches count that are settled, or logged before replay begins.
#[test]
fn staged_batches_do_not_count_until_they_are_settled() {
    for (redo, expected) in [(Lsn::INVALID, 1), (LOGGED, 1), (LOGGED + 1, 4)] {
        let storage = FaultyStorage::default();
        let (log, starts) = unsettled(&storage);
        let whole = log.position().end;
        let (_, all) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
        assert_eq!((all.records.len(), all.unbelieved), (4, 0));
        let trust = Trust::Settled { redo };
        let (mut log, contents) = Log::open(&storage, DATABASE, trust).unwrap().unwrap();
        assert_eq!(contents.records.len(), expected, "{redo}");
        let end = if expected == 1 { starts[0] as u64 } else { whole };
        assert_eq!((contents.position.end, contents.unbelieved), (end, whole - end));
        assert_eq!(storage.content("5.keys").len() as u64, end);
        // The batches that do not count have no effect.
        log.stage(&[current(1, 1)], LOGGED).unwrap();
        assert!(settle(&mut log));
        log.stage(&[plaintext(1, 1)], LOGGED).unwrap();
        let (_, contents) = Log::open(&storage, DATABASE, trust).unwrap().unwrap();
        let staged = usize::from(LOGGED < redo);
        assert_eq!(contents.records.len(), expected + 1 + staged);
    }
}

#[test]
fn any_hole_before_a_mark_is_damage() {
    let storage = FaultyStorage::default();
    let (mut log, starts) = unsettled(&storage);
    let mark = log.position().end as usize;
    assert!(settle(&mut log));
    assert!(log.position().is_settled());
    log.stage(&[current(2, 1)], LOGGED).unwrap();
    let bytes = storage.content("5.keys");
    for at in HEADER..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let result = replay(&damaged, DATABASE);
        if at < mark {
            let first = [starts[2], starts[1], starts[0]].into_iter().find(|start| *start <= at);
            assert!(first.is_none_or(|start| result.unwrap_err().offset == start as u64), "{at}");
        } else {
            assert_eq!(result.unwrap().records.len(), 4);
        }
    }
    // One of two headers that state it suffices.
    let mut damaged = bytes.clone();
    damaged[starts[0]] ^= 1;
    damaged[mark] ^= 1;
    assert_eq!(replay(&damaged, DATABASE).unwrap_err().offset, starts[0] as u64);
    damaged.truncate(mark + batch::HEADER);
    assert_eq!(replay(&damaged, DATABASE).unwrap().position.end, starts[0] as u64);
}

#[test]
fn a_settled_log_needs_no_second_mark() {
    let storage = FaultyStorage::default();
    let (mut log, _) = unsettled(&storage);
    assert!(settle(&mut log));
    assert!(!settle(&mut log));
    let end = log.position().end;
    // The same after reopening, and for a rewritten or new log.
    let (mut log, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert_eq!((log.position(), contents.position.end), (contents.position, end));
    assert!(!settle(&mut log));
    log.compact(&[data_key(1, 1, 1, 1)]).unwrap();
    assert!(!settle(&mut log));
    let (mut log, _) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert!(!settle(&mut log));
    // A synced append is durable, and the mark states it.
    log.append(&[current(1, 1)]).unwrap();
    assert_eq!(log.position().settled, log.position().end);
    assert!(settle(&mut log));
    // What is found at the start is durable, and the first checkpoint states it.
    log.stage(&[plaintext(1, 1)], LOGGED).unwrap();
    let (mut log, _) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert_eq!(log.position().settled, log.position().end);
    assert!(settle(&mut log));
}

#[test]
fn a_mark_covers_only_what_was_synced() {
    let storage = FaultyStorage::default();
    let (mut log, _) = unsettled(&storage);
    let synced = log.position();
    log.sync().unwrap();
    // Another process adds to the log before the mark is written.
    log.stage(&[current(2, 1)], LOGGED).unwrap();
    assert!(log.append_settled(&synced).unwrap());
    assert_eq!(log.position().settled, synced.end);
    assert!(!log.position().is_settled());
    let mut bytes = storage.content("5.keys");
    bytes[synced.end as usize] ^= 1;
    assert_eq!(replay(&bytes, DATABASE).unwrap().position.end, synced.end);
    bytes[synced.end as usize - 1] ^= 1;
    assert!(replay(&bytes, DATABASE).is_err());
    // A synced append may settle more.
    log.append(&[current(3, 1)]).unwrap();
    let more = log.position();
    assert!(log.append_settled(&synced).unwrap());
    assert_eq!(log.position().settled, more.end);
    // Another process rewrites it, and then there is nothing to mark.
    log.stage(&[current(4, 1)], LOGGED).unwrap();
    let synced = log.position();
    log.compact(&[data_key(1, 1, 1, 1)]).unwrap();
    log.stage(&[current(1, 1)], LOGGED).unwrap();
    let before = log.position();
    assert!(!log.append_settled(&synced).unwrap());
    assert_eq!(log.position(), before);
    // Or removes it.
    let ahead = log::Position { end: before.end + 1, ..before };
    assert!(matches!(log.append_settled(&ahead), Err(LogError::Moved { .. })));
    storage.remove(&log::file_name(DATABASE)).unwrap();
    assert!(matches!(log.sync(), Err(LogError::Missing { .. })));
}

#[test]
fn a_batch_that_settles_what_follows_it_is_refused() {
    let (bytes, starts, _) = three();
    for (settled, right) in [(starts[1], true), (starts[1] + 1, false)] {
        let mut bytes = bytes.clone();
        bytes[starts[1] + 16..starts[1] + 24].copy_from_slice(&(settled as u64).to_le_bytes());
        reseal(&mut bytes, starts[1]);
        assert_eq!(replay(&bytes, DATABASE).is_ok(), right);
    }
}

proptest! {
    #[test]
    fn any_file_replays_without_panic(bytes in vec(any::<u8>(), 0..300), headed in any::<bool>()) {
        let (log, ..) = three();
        let start = if headed { &log[..HEADER] } else { &[] };
        let _ = replay(&[start, &bytes].concat(), DATABASE);
    }

    #[test]
    fn any_records_are_read_again(batches in vec(vec(any_record(), 1..5), 0..8)) {
        let storage = FaultyStorage::default();
        let mut log = Log::create(&storage, ID, DATABASE, &[]).unwrap();
        let mut all = Vec::new();
        for mut batch in batches {
            batch.retain(|record| record.home() == DATABASE);
            if !batch.is_empty() {
                log.append(&batch).unwrap();
                all.extend(batch);
            }
        }
        let (_, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
        prop_assert_eq!(&contents.records, &all);
        log.compact(&all).unwrap();
        prop_assert_eq!(Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap().1.records, all);
    }
}

#[test]
fn opening_truncates_a_torn_end() {
    let (bytes, starts, _) = three();
    let storage = FaultyStorage::default();
    storage.put("5.keys", &bytes[..bytes.len() - 1]);
    let (mut log, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert_eq!(contents.torn, (bytes.len() - 1 - starts[2]) as u64);
    assert_eq!(storage.content("5.keys").len(), starts[2]);
    log.append(&[plaintext(1, 1)]).unwrap();
    assert_eq!(storage.content("5.keys"), bytes);
}

#[test]
fn damage_is_not_changed() {
    let (mut bytes, starts, _) = three();
    bytes[starts[0] + batch::HEADER + 2] ^= 1;
    let storage = FaultyStorage::default();
    storage.put("5.keys", &bytes);
    let error = Log::open(&storage, DATABASE, Trust::All).unwrap_err();
    assert_eq!(error.to_string(), "key file \"5.keys\" is not readable: wrong checksum at byte 76");
    assert_eq!(storage.content("5.keys"), bytes);
}

#[test]
fn a_position_that_is_not_the_end_is_refused() {
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, DATABASE, &[data_key(1, 1, 1, 1)]).unwrap();
    let stale = log.position();
    log.append(&[data_key(2, 1, 1, 2)]).unwrap();
    let newest = log.position();
    let moved = |position| {
        let before = storage.content("5.keys");
        let result = Log::resume(&storage, position).append(&[plaintext(1, 1)]);
        assert!(matches!(result, Err(LogError::Moved { .. })), "{result:?}");
        let result = Log::resume(&storage, position).compact::<Record>(&[]);
        assert!(matches!(result, Err(LogError::Moved { .. })), "{result:?}");
        assert_eq!(storage.content("5.keys"), before);
    };
    moved(stale);
    moved(log::Position { end: newest.end + 1, ..newest });
    moved(log::Position { keystore_id: [8; 16], ..newest });
    // In the middle of the last batch of a log that was rewritten since: only the generation
    // differs.
    log.compact(&[data_key(1, 1, 1, 1), data_key(2, 1, 1, 2), data_key(3, 1, 1, 3)]).unwrap();
    assert!(log.position().end > newest.end);
    moved(newest);
}

#[test]
fn remains_of_a_failed_append_are_cut_off_by_the_next() {
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, DATABASE, &[data_key(1, 1, 1, 1)]).unwrap();
    let mut bytes = storage.content("5.keys");
    let clean = bytes.len();
    bytes.extend(&batch::encode(&[data_key(2, 1, 1, 2)]).unwrap()[..50]);
    storage.put("5.keys", &bytes);
    log.append(&[plaintext(1, 1)]).unwrap();
    let (_, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert_eq!(contents.records, [data_key(1, 1, 1, 1), plaintext(1, 1)]);
    assert_eq!(storage.content("5.keys")[..clean], bytes[..clean]);
}

#[test]
fn a_record_of_another_database_is_refused() {
    let storage = FaultyStorage::default();
    let mut cluster = Log::create(&storage, ID, Scope::CLUSTER, &[]).unwrap();
    let record = data_key(1, 1, 1, 1);
    assert!(matches!(cluster.append(std::slice::from_ref(&record)), Err(LogError::Record(_))));
    let batch = batch::encode(&[record]).unwrap();
    assert!(matches!(cluster.stage_batch(&batch, LOGGED), Err(LogError::Record(_))));
    // And a log with the name of another.
    let (bytes, ..) = three();
    storage.put("6.keys", &bytes);
    let error = Log::open(&storage, Scope::database(6), Trust::All).unwrap_err();
    let misplaced = Problem::Misplaced { expected: Scope::database(6), found: DATABASE };
    assert!(matches!(error, LogError::Format { error, .. } if error.problem == misplaced));
}

#[test]
fn scopes_are_known_by_their_names() {
    assert_eq!(
        (file_name(Scope::CLUSTER), file_name(Scope::database(16384))),
        ("cluster.keys".into(), "16384.keys".into())
    );
    let storage = FaultyStorage::default();
    for name in ["5.keys", "cluster.keys", "16384.keys", "5.keys.new", "0.keys", "007.keys", "x"] {
        storage.put(name, b"");
    }
    assert_eq!(scopes(&storage).unwrap(), [0, 5, 16384].map(Scope::database));
}

#[test]
fn files_on_disk_are_private_and_replaced_atomically() {
    let parent = tempfile::tempdir().unwrap();
    fs::set_permissions(parent.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let directory = parent.path().join("pagevault");
    let storage = FileStorage::new(&directory).unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(directory.clone()), 0o700);
    assert!(Log::open(&storage, DATABASE, Trust::All).unwrap().is_none());

    let mut log = Log::create(&storage, ID, DATABASE, &[data_key(1, 1, 1, 1)]).unwrap();
    assert!(matches!(Log::create(&storage, ID, DATABASE, &[]), Err(LogError::Exists { .. })));
    assert_eq!(mode(directory.join("5.keys")), 0o600);
    log.append(&[current(1, 1)]).unwrap();
    // A file left by a failed attempt that others could read does not pass on its mode.
    fs::write(directory.join("5.keys.new"), "old").unwrap();
    fs::set_permissions(directory.join("5.keys.new"), PermissionsExt::from_mode(0o644)).unwrap();
    log.compact(&[data_key(1, 1, 1, 1), current(1, 1)]).unwrap();
    assert_eq!(mode(directory.join("5.keys")), 0o600);
    assert_eq!(storage.names().unwrap(), ["5.keys"]);

    // A second process continues from the position alone; then a torn end.
    let storage = FileStorage::new(&directory).unwrap();
    Log::resume(&storage, log.position()).append(&[plaintext(1, 1)]).unwrap();
    let path = directory.join("5.keys");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 2]).unwrap();
    let (_, contents) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    assert_eq!(contents.records, [data_key(1, 1, 1, 1), current(1, 1)]);
    assert_eq!(fs::metadata(&path).unwrap().len(), contents.position.end);

    storage.remove("5.keys").unwrap();
    storage.remove("5.keys").unwrap();
    assert!(Log::open(&storage, DATABASE, Trust::All).unwrap().is_none());
}

#[test]
fn files_are_readable_by_the_group_if_the_data_directory_is() {
    for (of_parent, of_directory, of_file) in
        [(0o700, 0o700, 0o600), (0o740, 0o700, 0o600), (0o755, 0o750, 0o640), (0o750, 0o750, 0o640)]
    {
        let parent = tempfile::tempdir().unwrap();
        fs::set_permissions(parent.path(), PermissionsExt::from_mode(of_parent)).unwrap();
        let directory = parent.path().join("pagevault");
        let storage = FileStorage::new(&directory).unwrap();
        let mut log = Log::create(&storage, ID, DATABASE, &[data_key(1, 1, 1, 1)]).unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(directory.clone()), of_directory, "in {of_parent:o}");
        assert_eq!(mode(directory.join("5.keys")), of_file, "in {of_parent:o}");
        log.compact(&[data_key(1, 1, 1, 1)]).unwrap();
        assert_eq!(mode(directory.join("5.keys")), of_file, "in {of_parent:o}");
    }
}

#[test]
fn names_cannot_leave_the_directory() {
    let parent = tempfile::tempdir().unwrap();
    let storage = FileStorage::new(&parent.path().join("pagevault")).unwrap();
    for name in ["", ".", "..", "../x", "a/b", "/etc/passwd"] {
        assert!(storage.create(name, b"x").is_err(), "{name}");
        assert!(storage.read(name, 0, 1).is_err(), "{name}");
    }
    fs::create_dir(parent.path().join("pagevault/dir")).unwrap();
    assert!(storage.read("dir", 0, 1).is_err());
    fs::write(parent.path().join("file"), "").unwrap();
    assert!(FileStorage::new(&parent.path().join("file")).is_err());
}
