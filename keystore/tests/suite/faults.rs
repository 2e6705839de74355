//! Whichever step fails, a log reopens as before or after one of the changes, nothing is lost that
//! was acknowledged as durable, and of the rest a clean prefix is found.

use pagevault_keystore::log::{Log, LogError, Position, Trust};
use pagevault_keystore::storage::Storage;
use pagevault_keystore::{Lsn, Record};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{DATABASE, current, data_key, plaintext};
use crate::faulty::{DONE, Fault, FaultyStorage};

/// The address of a staged batch's WAL record, or one before it.
const LOGGED: Lsn = Lsn(0x1000);

const ID: [u8; 16] = *b"0123456789abcdef";

#[derive(Debug, Clone)]
enum Change {
    Create(Vec<Record>),
    Append(Vec<Record>),
    Stage(Vec<Record>),
    Compact(Vec<Record>),
    /// The first half of settling; the second syncs again.
    Sync,
    Mark,
}
use Change::*;

/// The history of a log: created, grown, settled while it grows, rewritten, grown again.
fn history() -> Vec<Change> {
    let live = vec![data_key(2, 1, 1, 20), current(2, 1)];
    vec![
        Create(vec![data_key(1, 1, 1, 10), current(1, 1)]),
        Stage(vec![plaintext(1, 1), data_key(2, 1, 1, 20), current(2, 1)]),
        Stage(vec![data_key(3, 1, 1, 30)]),
        Sync,
        Stage(vec![data_key(3, 2, 1, 31)]),
        Mark,
        Sync,
        Append(vec![data_key(4, 1, 1, 40)]),
        Append(vec![data_key(5, 1, 1, 50)]),
        Stage(vec![current(5, 1)]),
        Append(vec![current(4, 1)]),
        Stage(vec![data_key(6, 1, 1, 60)]),
        Compact(live),
        Stage(vec![data_key(7, 1, 1, 70), current(7, 1)]),
        Append(vec![data_key(7, 2, 1, 71)]),
    ]
}

/// The expected contents of a log.
#[derive(Debug, Clone, Default)]
struct Model {
    /// `None`: there is no log.
    batches: Option<Vec<Vec<Record>>>,
    /// Number of durable batches.
    durable: usize,
}

type Found = Option<Vec<Record>>;

impl Model {
    fn after(&self, change: &Change) -> Self {
        let mut batches = self.batches.clone().unwrap_or_default();
        let mut durable = self.durable;
        match change {
            Create(records) | Compact(records) => (batches, durable) = (vec![records.clone()], 1),
            Append(records) => {
                batches.push(records.clone());
                durable = batches.len();
            }
            Stage(records) => batches.push(records.clone()),
            Sync => durable = batches.len(),
            Mark => {}
        }
        Self { batches: Some(batches), durable }
    }

    fn now(&self) -> Found {
        self.batches.as_ref().map(|batches| batches.concat())
    }

    /// The possible contents after a power failure.
    fn remains(&self) -> Vec<Found> {
        let Some(batches) = &self.batches else { return vec![None] };
        (self.durable..=batches.len()).map(|count| Some(batches[..count].concat())).collect()
    }
}

/// What all processes of a server know of a log.
#[derive(Debug, Clone, Default)]
struct Known {
    position: Option<Position>,
    synced: Option<Position>,
}

fn apply(storage: &FaultyStorage, change: &Change, known: &mut Known) -> Result<(), LogError> {
    if let Create(records) = change {
        known.position = Some(Log::create(storage, ID, DATABASE, records)?.position());
        return Ok(());
    }
    let mut log = Log::resume(storage, known.position.unwrap());
    match change {
        Append(records) => log.append(records)?,
        Stage(records) => log.stage(records, LOGGED)?,
        Compact(records) => log.compact(records)?,
        Sync => {
            log.sync()?;
            known.synced = known.position;
        }
        Mark => drop(log.append_settled(&known.synced.unwrap())?),
        Create(_) => {}
    }
    known.position = Some(log.position());
    Ok(())
}

fn records(storage: &FaultyStorage) -> Found {
    Log::open(storage, DATABASE, Trust::All).unwrap().map(|(_, contents)| contents.records)
}

/// Opens the log after a crash and checks it, and checks that what is then found and acknowledged
/// survives a power failure.
fn check_reboot(storage: &FaultyStorage, allowed: &[Found]) {
    let storage = storage.after_kill();
    let opened = Log::open(&storage, DATABASE, Trust::All).unwrap();
    let position = opened.as_ref().map(|(log, _)| log.position());
    let found = opened.map(|(_, contents)| contents.records);
    assert!(allowed.contains(&found), "{found:?} is none of {allowed:?}");
    let extra = vec![data_key(99, 1, 1, 99)];
    let change = if found.is_some() { Append(extra.clone()) } else { Create(extra.clone()) };
    apply(&storage, &change, &mut Known { position, synced: None }).unwrap();
    let expected = Some([found.unwrap_or_default(), extra].concat());
    for disk in storage.after_power_cut() {
        assert_eq!(records(&disk), expected, "an acknowledged record is lost");
    }
}

/// Another fault during recovery leads to allowed states only.
fn check_recovery(storage: &FaultyStorage, allowed: &[Found]) {
    for step in 0.. {
        let mut hit = false;
        // Recovery's sync and truncation are done or not.
        for done in [0, 4] {
            let disk = storage.after_kill();
            disk.arm(Some(Fault { step, kill: true, done }));
            let _ = Log::open(&disk, DATABASE, Trust::All);
            hit |= disk.hit();
            check_reboot(&disk.after_kill(), allowed);
            disk.after_power_cut().iter().for_each(|disk| check_reboot(disk, allowed));
        }
        if !hit {
            return;
        }
    }
}

/// Recovery of every `RECOVERIES`th state is also disturbed.
const RECOVERIES: usize = 37;

/// Applies the changes with a fault at one step. Returns whether the fault was reached.
fn run(fault: Fault) -> bool {
    let storage = FaultyStorage::default();
    storage.arm(Some(fault));
    let (mut old, mut known) = (Model::default(), Known::default());
    for change in history() {
        let new = old.after(&change);
        let result = apply(&storage, &change, &mut known);
        let either = [old.now(), new.now()];
        let remains = [old.remains(), new.remains()].concat();
        match result {
            Err(error) if storage.dead() || matches!(error, LogError::Unsettled { .. }) => {
                // Killed; or it stops by itself, as after any failed fsync.
                for (count, disk) in storage.after_power_cut().iter().enumerate() {
                    check_reboot(disk, &remains);
                    if storage.dead() && count % RECOVERIES == fault.step % RECOVERIES {
                        check_recovery(disk, &remains);
                    }
                }
                check_reboot(&storage.after_kill(), &either);
                if storage.dead() {
                    // Unsynced data can be lost while it recovers.
                    check_recovery(&storage.after_kill(), &[remains, either.to_vec()].concat());
                }
                return true;
            }
            Ok(()) => {}
            Err(error) => {
                // All other errors guarantee that nothing has changed and that a retry works.
                assert!(storage.hit(), "{error}");
                check_reboot(&storage.after_kill(), &[old.now()]);
                for disk in storage.after_power_cut() {
                    assert!(old.remains().contains(&records(&disk)), "{error}");
                }
                apply(&storage, &change, &mut known).unwrap();
            }
        }
        for disk in storage.after_power_cut() {
            assert!(new.remains().contains(&records(&disk)), "acknowledged and lost");
        }
        old = new;
    }
    let hit = storage.hit();
    storage.arm(None);
    assert_eq!(records(&storage), old.now());
    hit
}

/// All faults; `run` reports when there are no more steps.
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
fn a_kill_at_any_step_leaves_the_old_or_the_new_state() {
    // Fifteen changes of about two steps each, in five ways: a smaller number means that the
    // enumeration has stopped early.
    assert!(enumerate(true) >= 120);
}

#[test]
fn a_failure_at_any_step_changes_nothing_or_is_reported() {
    assert!(enumerate(false) >= 120);
}

/// A process was killed while it appended. The next one cuts off what is left of that, behind
/// batches that are not settled yet. If the sync fails that this includes, they may be lost, and no
/// later sync may settle them.
#[test]
fn a_sync_that_fails_while_remains_are_cut_off_settles_nothing() {
    let mut failures = 0;
    for step in 0..4 {
        let storage = FaultyStorage::default();
        let mut known = Known::default();
        let staged = vec![data_key(1, 1, 1, 10), current(1, 1)];
        apply(&storage, &Create(vec![current(2, 1)]), &mut known).unwrap();
        apply(&storage, &Stage(staged.clone()), &mut known).unwrap();
        storage.append("5.keys", known.position.unwrap().end, b"remains").unwrap();
        storage.arm(Some(Fault { step, kill: false, done: 0 }));
        let next = apply(&storage, &Stage(vec![plaintext(3, 1)]), &mut known);
        storage.arm(None);
        match next {
            Ok(()) => {}
            Err(LogError::Unsettled { .. }) => {
                failures += 1;
                continue;
            }
            Err(_) => failures += 1,
        }
        apply(&storage, &Sync, &mut known).unwrap();
        for disk in storage.after_power_cut() {
            let found = records(&disk).unwrap_or_default();
            assert!(staged.iter().all(|record| found.contains(record)), "settled and lost");
        }
    }
    assert!(failures >= 3, "only {failures} steps failed");
}

/// Nothing is written to a file that cannot be opened: the change is refused, and the server goes
/// on.
#[test]
fn a_change_of_a_log_that_cannot_be_opened_is_refused() {
    let storage = FaultyStorage::default();
    let mut known = Known::default();
    let (first, second) = (vec![data_key(1, 1, 1, 10)], vec![current(1, 1)]);
    apply(&storage, &Create(first.clone()), &mut known).unwrap();
    apply(&storage, &Stage(second.clone()), &mut known).unwrap();
    apply(&storage, &Sync, &mut known).unwrap();
    storage.close("5.keys");
    let more = vec![plaintext(2, 1)];
    for change in [Stage(more.clone()), Mark, Append(more.clone()), Sync] {
        let error = apply(&storage, &change, &mut known).unwrap_err();
        assert!(matches!(error, LogError::Io { .. }), "{change:?}: {error}");
    }
    // Nor is the log replaced if the directory cannot be opened to make that durable.
    storage.reopen();
    storage.close(".");
    let error = apply(&storage, &Compact(second.clone()), &mut known).unwrap_err();
    assert!(matches!(error, LogError::Io { .. }), "{error}");
    storage.reopen();
    assert_eq!(records(&storage), Some([first.clone(), second.clone()].concat()));
    for change in [Mark, Stage(more.clone()), Compact([first, second, more].concat())] {
        apply(&storage, &change, &mut known).unwrap();
    }
}

fn any_change() -> impl Strategy<Value = Change> {
    let records = (1..9_u32, 1..9_u16, any::<u8>())
        .prop_map(|(relation, version, fill)| vec![data_key(relation, version, 1, fill)]);
    prop_oneof![
        1 => records.clone().prop_map(Append),
        4 => records.prop_map(Stage),
        2 => Just(Sync),
        2 => Just(Mark),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 32 }))]

    /// After a power failure at any moment of any history, including holes; then the disk damages a
    /// byte.
    #[test]
    fn settled_batches_survive_or_their_loss_is_detected(
        history in vec(any_change(), 1..24), at in any::<prop::sample::Index>(),
    ) {
        let storage = FaultyStorage::default();
        let (mut model, mut known) = (Model::default(), Known::default());
        let (mut marked, mut marked_settled) = (None, 0);
        for change in [vec![Create(vec![current(1, 1)]), Sync], history].concat() {
            apply(&storage, &change, &mut known).unwrap();
            model = model.after(&change);
            match change {
                Create(_) | Mark => marked = known.position.map(|position| position.settled),
                Sync | Append(_) => marked_settled = marked_settled.max(marked.unwrap_or(0)),
                _ => {}
            }
            for disk in storage.after_power_cut() {
                let mut bytes = disk.content("5.keys");
                prop_assert!(model.remains().contains(&records(&disk)));
                if marked_settled > 0 {
                    bytes[at.index(marked_settled as usize)] ^= 0x40;
                    disk.put("5.keys", &bytes);
                    let opened = Log::open(&disk, DATABASE, Trust::All);
                    prop_assert!(opened.is_err(), "damage before {}", marked_settled);
                }
            }
        }
    }
}
