//! Whatever goes wrong at whichever step, a log reopens as wholly old or wholly new, and what was
//! acknowledged is there.

use pagevault_keystore::Record;
use pagevault_keystore::log::{Log, LogError};

use crate::arbitrary::{current, data_key, retired};
use crate::faulty::{DONE, Fault, FaultyStorage};

const ID: [u8; 16] = *b"0123456789abcdef";

#[derive(Debug, Clone)]
enum Change {
    Create(Vec<Record>),
    Append(Vec<Record>),
    Compact(Vec<Record>),
}

/// A life of a log: made, grown, rewritten, grown again.
fn life() -> Vec<Change> {
    let live = vec![data_key(2, 1, 1, 20), current(2, 1)];
    vec![
        Change::Create(vec![data_key(1, 1, 1, 10), current(1, 1)]),
        Change::Append(vec![retired(1), data_key(2, 1, 1, 20), current(2, 1)]),
        Change::Append(vec![data_key(3, 1, 1, 30)]),
        Change::Compact(live),
        Change::Append(vec![data_key(4, 1, 1, 40), current(4, 1)]),
        Change::Append(vec![data_key(4, 2, 1, 41)]),
    ]
}

/// What the log says after a change to what it said before.
fn after(before: Option<&Vec<Record>>, change: &Change) -> Vec<Record> {
    match change {
        Change::Create(records) | Change::Compact(records) => records.clone(),
        Change::Append(records) => [before.cloned().unwrap_or_default(), records.clone()].concat(),
    }
}

fn apply(storage: &FaultyStorage, change: &Change) -> Result<(), LogError> {
    if let Change::Create(records) = change {
        return Log::create(storage, ID, 5, records).map(drop);
    }
    let (log, _) = Log::open(storage, 5)?.expect("log exists");
    // As another process would, from the position alone.
    let mut log = Log::resume(storage, log.position());
    match change {
        Change::Append(records) => log.append(records),
        Change::Compact(records) => log.compact(records),
        Change::Create(_) => Ok(()),
    }
}

fn records(storage: &FaultyStorage) -> Option<Vec<Record>> {
    Log::open(storage, 5).unwrap().map(|(_, contents)| contents.records)
}

/// Opens what a crash left, checks it, and checks that what is then acknowledged survives a power cut.
fn check_reboot(storage: &FaultyStorage, old: &Option<Vec<Record>>, new: &Option<Vec<Record>>) {
    let storage = storage.after_kill();
    let found = records(&storage);
    assert!(found == *old || found == *new, "neither old nor new: {found:?}");
    let extra = vec![data_key(99, 1, 1, 99)];
    let change = if found.is_some() { Change::Append(extra) } else { Change::Create(extra) };
    apply(&storage, &change).unwrap();
    let expected = Some(after(found.as_ref(), &change));
    for disk in storage.after_power_cut() {
        assert_eq!(records(&disk), expected, "an acknowledged record is lost");
    }
}

/// Every state that one more fault during recovery can lead to is as good as the first.
fn check_recovery(storage: &FaultyStorage, old: &Option<Vec<Record>>, new: &Option<Vec<Record>>) {
    for step in 0.. {
        let mut hit = false;
        // Recovery syncs and truncates, which is done or not.
        for done in [0, 4] {
            let disk = storage.after_kill();
            disk.arm(Some(Fault { step, kill: true, done }));
            let _ = Log::open(&disk, 5);
            hit |= disk.hit();
            check_reboot(&disk.after_kill(), old, new);
            disk.after_power_cut().iter().for_each(|disk| check_reboot(disk, old, new));
        }
        if !hit {
            return;
        }
    }
}

/// Runs the life of a log with a fault at one step. Returns whether the fault was reached.
fn run(fault: Fault) -> bool {
    let storage = FaultyStorage::default();
    storage.arm(Some(fault));
    let mut old: Option<Vec<Record>> = None;
    for change in life() {
        let new = Some(after(old.as_ref(), &change));
        let result = apply(&storage, &change);
        if storage.dead() {
            assert!(result.is_err());
            for disk in storage.after_power_cut() {
                check_reboot(&disk, &old, &new);
                check_recovery(&disk, &old, &new);
            }
            check_reboot(&storage.after_kill(), &old, &new);
            check_recovery(&storage.after_kill(), &old, &new);
            return true;
        }
        match result {
            Ok(()) => {
                storage.after_power_cut().iter().for_each(|disk| {
                    assert_eq!(records(disk), new, "acknowledged and lost");
                });
                old = new;
            }
            Err(LogError::Unsettled { .. }) => {
                // The caller stops, as after any failed fsync; what is found is old or new.
                check_reboot(&storage.after_kill(), &old, &new);
                storage.after_power_cut().iter().for_each(|disk| check_reboot(disk, &old, &new));
                return true;
            }
            Err(error) => {
                // The promise of all other errors: nothing has changed, and it works next time.
                assert!(storage.hit(), "{error}");
                assert_eq!(records(&storage), old, "{error}");
                storage.after_power_cut().iter().for_each(|disk| {
                    assert_eq!(records(disk), old, "{error}");
                });
                apply(&storage, &change).unwrap();
                assert_eq!(records(&storage), new);
                old = new;
            }
        }
    }
    let hit = storage.hit();
    storage.arm(None);
    assert_eq!(records(&storage), old);
    hit
}

/// All faults there are; `run` says when the steps have come to an end.
fn enumerate(kill: bool) -> usize {
    let mut faults = 0;
    for step in 0.. {
        let hits = DONE.into_iter().filter(|&done| run(Fault { step, kill, done })).count();
        if hits == 0 {
            break;
        }
        faults += hits;
    }
    faults
}

#[test]
fn a_kill_at_any_step_leaves_old_or_new() {
    // Six changes of at least two steps each, five ways each: a smaller number means that the
    // enumeration has stopped early.
    assert!(enumerate(true) >= 100);
}

#[test]
fn a_failure_at_any_step_changes_nothing_or_says_so() {
    assert!(enumerate(false) >= 100);
}
