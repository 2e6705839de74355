//! Redo repeats old records to a keystore that has newer ones, or that lost some in a power
//! failure. It may be interrupted and start again. The final state is the same as without a crash.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::directory::{Directory, DirectoryError, FileInfo};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::state::State;
use pagevault_keystore::{DataKeyVersion, Record};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{DATABASE, current, data_key, destroyed, plaintext, rewriting, version};

/// The batch of one action of a server on keys. `last`: the file's last version.
fn batch(step: u8, relation: u32, fill: u8, lsn: u64, last: &mut u16) -> Vec<Record> {
    match step {
        10 if *last > 0 => return vec![destroyed(relation, *last, lsn)],
        4 | 5 if *last > 0 => return vec![plaintext(relation, *last)],
        6 | 11 if *last > 0 => return vec![rewriting(relation, *last, fill)],
        7 | 8 if *last > 0 => {
            return vec![data_key(relation, 1 + u16::from(fill) % *last, 2, fill)];
        }
        _ => {}
    }
    *last += 1;
    let mut records = vec![data_key(relation, *last, 1, fill)];
    // Some keys are never used.
    if step != 9 {
        records.push(current(relation, *last));
    }
    records
}

/// Batches as a server writes them: versions in order, destroyed keys among them.
pub(crate) fn any_history() -> impl Strategy<Value = Vec<Vec<Record>>> {
    vec((0..12_u8, 1..4_u32, any::<u8>()), 1..40).prop_map(|steps| {
        let mut last = [0; 4];
        let steps = (1..).zip(steps);
        steps
            .map(|(lsn, (step, file, fill))| batch(step, file, fill, lsn, &mut last[file as usize]))
            .collect()
    })
}

fn fold(batches: &[Vec<Record>]) -> State {
    State::from_records(batches.concat()).unwrap()
}

/// All that the directory returns, except the location of entries.
fn answers(directory: &Directory<'_>) -> Vec<(FileInfo, Vec<Vec<u8>>)> {
    let files = directory.files().unwrap().map(Result::unwrap);
    let answer = |info: FileInfo| {
        let last = directory.last_version(info.slot).unwrap();
        let keys = (1..=DataKeyVersion::get_or_zero(last)).map(version).map(|version| {
            let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
            let key = match directory.key(info.slot, version, &mut wrapped) {
                Err(DirectoryError::NoKey { .. }) if Some(version) <= info.destroyed => {
                    return vec![];
                }
                key => key.unwrap(),
            };
            [&wrapped[..key.length], &key.key_version.get().to_le_bytes()].concat()
        });
        (info, keys.collect())
    };
    files.map(answer).collect()
}

fn with_directory<T>(batches: &[Vec<Record>], act: impl FnOnce(&Directory<'_>) -> T) -> T {
    let memory: Vec<_> = (0..Directory::words_needed(100)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init_zeroed(&memory, 100).unwrap();
    batches.iter().flatten().for_each(|record| directory.apply(record).unwrap());
    act(&directory)
}

/// Redo on what a log holds: batches that change nothing are skipped.
fn redo(log: &mut Vec<Vec<Record>>, wal: &[Vec<Record>]) {
    let mut added = vec![];
    let redone = with_directory(log, |directory| {
        for batch in wal {
            if batch.iter().any(|record| directory.would_change(record).unwrap()) {
                batch.iter().for_each(|record| directory.apply(record).unwrap());
                added.push(batch.clone());
            }
        }
        answers(directory)
    });
    log.extend(added);
    assert_eq!(with_directory(log, answers), redone, "file and memory differ");
}

type Crash = [prop::sample::Index; 3];

proptest! {
    /// The log contains more than the last checkpoint settled. Then the server crashes repeatedly:
    /// each time the log loses a part of what is not settled, and redo gets to some point, perhaps
    /// to another checkpoint.
    #[test]
    fn crashes_do_not_change_the_final_state(
        history in any_history(),
        start: Crash,
        crashes in vec((any::<Crash>(), any::<bool>()), 0..6),
    ) {
        let among =
            |at: prop::sample::Index, from: usize, to: usize| from + at.index(to - from + 1);
        let mut log = history[..among(start[0], 0, history.len())].to_vec();
        let mut checkpoint = among(start[1], 0, log.len());
        let mut settled = checkpoint;
        for ([cut, reached, point], checkpoints) in crashes {
            log.truncate(among(cut, settled, log.len()));
            let reached = among(reached, checkpoint, history.len());
            redo(&mut log, &history[checkpoint..reached]);
            if checkpoints {
                checkpoint = among(point, checkpoint, reached);
                settled = log.len();
            }
        }
        redo(&mut log, &history[checkpoint..]);
        prop_assert_eq!(fold(&log), fold(&history));
        prop_assert_eq!(with_directory(&log, answers), with_directory(&history, answers));
    }

    /// Older records may come again at any time: destroyed keys do not come back.
    #[test]
    fn redo_does_not_restore_destroyed_keys(
        history in any_history(), again in vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let destroyed = (1..4).map(|n| destroyed(n, 60, 1000)).collect();
        let all = [history.clone(), vec![destroyed]].concat();
        let mut log = all.clone();
        for from in again {
            redo(&mut log, &all[from.index(all.len())..]);
        }
        let state = fold(&log);
        prop_assert!(state.files().all(|(_, file)| file.keys.is_empty()));
        let compact = [state.records(DATABASE)];
        prop_assert_eq!(with_directory(&compact, |directory| directory.counts().unwrap().keys), 0);
        for story in [&log[..], &compact] {
            with_directory(story, |directory| {
                for info in directory.files().unwrap().map(Result::unwrap) {
                    assert_eq!(directory.keys(info.slot).unwrap().count(), 0);
                    assert_eq!(directory.last_version(info.slot).unwrap(), Some(version(60)));
                }
            });
        }
    }

    /// The order of records other than keys does not matter.
    #[test]
    fn state_changes_may_come_in_any_order(
        (history, shuffled) in any_history().prop_flat_map(|history| {
            let steps = history.concat().into_iter();
            let steps: Vec<_> =
                steps.filter(|record| !matches!(record, Record::DataKey { .. })).collect();
            (Just(history), Just([steps.clone(), steps].concat()).prop_shuffle())
        }),
    ) {
        let keys = history.concat().into_iter().filter(|r| matches!(r, Record::DataKey { .. }));
        let log = [keys.collect(), shuffled];
        prop_assert_eq!(fold(&log), fold(&history));
        prop_assert_eq!(with_directory(&log, answers), with_directory(&history, answers));
    }
}

#[test]
fn an_earlier_state_does_not_come_back() {
    let history = [
        vec![data_key(1, 1, 1, 1), current(1, 1)],
        vec![plaintext(1, 1)],
        vec![rewriting(1, 1, 3)],
        vec![data_key(1, 2, 1, 2), current(1, 2)],
    ];
    let mut log = history.to_vec();
    redo(&mut log, &history[..3]);
    assert_eq!(log, history, "nothing was news");
    with_directory(&log, |directory| {
        let info = directory.files().unwrap().next().unwrap().unwrap();
        assert_eq!(info.current, Some((version(2), 1)));
    });
}
