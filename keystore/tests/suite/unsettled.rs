//! Records that a start cuts off a log are kept beside it, whichever step fails.

use pagevault_keystore::log::{Log, Trust, unsettled};
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::state::State;
use pagevault_keystore::{Lsn, Record, RelFile, Scope};

use crate::arbitrary::{DATABASE, current, data_key, sealed_only, version};
use crate::faulty::{DONE, Fault, FaultyStorage};

const ID: [u8; 16] = *b"0123456789abcdef";
/// Where recovery begins, and an address behind it.
const REDO: Lsn = Lsn(0x1000);
const BEHIND: Lsn = Lsn(0x2000);

fn settled() -> Vec<Record> {
    vec![data_key(1, 1, 1, 10), current(1, 1)]
}

fn unsettled(relation: u32) -> Vec<Record> {
    vec![data_key(relation, 1, 1, 20), current(relation, 1)]
}

/// A log with two batches that no checkpoint has settled.
fn crashed() -> FaultyStorage {
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, DATABASE, &settled()).unwrap();
    log.stage(&unsettled(2), BEHIND).unwrap();
    log.stage(&unsettled(3), BEHIND + 8).unwrap();
    storage
}

fn recover(storage: &FaultyStorage) -> Result<(), pagevault_keystore::log::LogError> {
    let opened = Log::open(storage, DATABASE, Trust::Settled { redo: REDO })?;
    let (mut log, contents) = opened.unwrap();
    assert_eq!(contents.records, settled());
    log.compact(&contents.records)
}

fn beside(storage: &FaultyStorage) -> Vec<Record> {
    unsettled::read(storage, DATABASE, &ID).unwrap()
}

/// The records of the log and of the file beside it.
fn all(storage: &FaultyStorage) -> Vec<Record> {
    let (log, contents) = Log::open(storage, DATABASE, Trust::All).unwrap().unwrap();
    drop(log);
    let state = State::from_records(contents.records.clone()).unwrap();
    [contents.records, unsettled::missing(&state, beside(storage))].concat()
}

fn expected() -> Vec<Record> {
    [settled(), unsettled(2), unsettled(3)].concat()
}

#[test]
fn records_that_are_cut_off_are_kept_beside_the_log() {
    let storage = crashed();
    recover(&storage).unwrap();
    assert_eq!(beside(&storage), [unsettled(2), unsettled(3)].concat());
    assert_eq!(unsettled::scopes(&storage).unwrap(), [DATABASE]);
    for disk in storage.after_power_cut() {
        assert_eq!(all(&disk), expected());
    }
    unsettled::forget(&storage, DATABASE).unwrap();
    assert_eq!(unsettled::scopes(&storage).unwrap(), []);
    assert_eq!(beside(&storage), []);
}

#[test]
fn nothing_is_lost_at_any_step() {
    for step in 0.. {
        let mut hit = false;
        for (kill, done) in DONE.into_iter().flat_map(|done| [(true, done), (false, done)]) {
            let storage = crashed();
            // A power failure may lose what is not durable, but nothing else.
            storage.arm(Some(Fault { step, kill, done }));
            let _ = recover(&storage);
            hit |= storage.hit();
            storage.arm(None);
            let storage = storage.after_kill();
            assert_eq!(all(&storage), expected(), "step {step}, killed {kill}, {done}");
            recover(&storage).unwrap();
            assert_eq!(all(&storage), expected());
        }
        if !hit {
            assert!(step > 5, "the steps have come to an end early");
            return;
        }
    }
}

/// Redo of a failed start has staged a part of it again, and more.
#[test]
fn several_failed_starts_add_to_it() {
    let storage = crashed();
    recover(&storage).unwrap();
    let (mut log, _) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    log.stage(&unsettled(2), BEHIND).unwrap();
    log.stage(&unsettled(4), BEHIND + 16).unwrap();
    recover(&storage).unwrap();
    assert_eq!(beside(&storage), [unsettled(2), unsettled(3), unsettled(4)].concat());
    // Nothing was staged since.
    recover(&storage).unwrap();
    assert_eq!(beside(&storage).len(), 6);
}

#[test]
fn a_damaged_file_or_one_of_another_keystore_is_ignored() {
    let storage = crashed();
    recover(&storage).unwrap();
    assert_eq!(unsettled::read(&storage, DATABASE, b"another keystore").unwrap(), []);
    let mut bytes = storage.content(&unsettled::name(DATABASE));
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    storage.put(&unsettled::name(DATABASE), &bytes);
    assert!(unsettled::read(&storage, DATABASE, &ID).is_err());
    // The next start replaces it.
    let (mut log, _) = Log::open(&storage, DATABASE, Trust::All).unwrap().unwrap();
    log.stage(&unsettled(4), BEHIND).unwrap();
    recover(&storage).unwrap();
    assert_eq!(beside(&storage), unsettled(4));
}

#[test]
fn names_differ_from_those_of_logs() {
    for scope in [0, 5, u32::MAX].map(Scope::database) {
        let name = unsettled::name(scope);
        assert_eq!(unsettled::scope_of(&name), Some(scope));
        assert_eq!(pagevault_keystore::log::scope_of(&name), None);
    }
    for name in ["5.keys", "5.keys.new", "05.keys.unsettled", "5.keys.unsettled.new", ".unsettled"]
    {
        assert_eq!(unsettled::scope_of(name), None, "{name}");
    }
}

/// Newer records and those in the log stay; records about missing keys are ignored.
#[test]
fn only_missing_records_are_restored() {
    let file = |relation| RelFile { tablespace: 1663, database: 5, relation };
    let state = State::from_records(settled()).unwrap();
    let other = data_key(1, 1, 2, 99);
    let later = vec![data_key(1, 2, 1, 11), current(1, 2)];
    let job = Record::JobsForgotten { database: 5, through: 1, all: false };
    let orphan = current(9, 1);
    let plaintext = Record::Plaintext { file: file(1), after: version(2) };
    let rewriting =
        Record::Rewriting { file: file(1), phase: Phase::under(version(2)), done: false };
    let beside = [
        vec![other, job, orphan, rewriting.clone()],
        later.clone(),
        vec![sealed_only(1, 2, false)],
        vec![rewriting.clone(), plaintext.clone(), plaintext.clone()],
        settled(),
    ]
    .concat();
    let missing = unsettled::missing(&state, beside);
    let sealed_only = sealed_only(1, 2, false);
    assert_eq!(missing, [later, vec![sealed_only, rewriting, plaintext]].concat());
    let whole = State::from_records([settled(), missing].concat()).unwrap();
    assert_eq!(unsettled::missing(&whole, whole.records(DATABASE)), []);
}
