//! Compacting a log while a backup may be in progress.
//!
//! A backup lists files first and copies them later; many programs copy no more bytes of each file
//! than it had when it was listed. If the log is compacted in between and has grown since, the copy
//! lacks its end. WAL contains what was added after the backup began, but nothing older; so older
//! records must not be in that end. Hence records keep the order and the batches of the old log,
//! and no kept record moves away from the beginning. Tombstones move to the place of the first
//! record of their file, and what is said of forgotten keys takes the place of such keys. Each is
//! shorter than what it replaces.

use std::collections::{BTreeMap, HashMap};

use crate::former::Range;
use crate::log::COMPACT_BATCH;
use crate::record::Record;
use crate::rel_file::RelFile;
use crate::state::State;

/// Returns the records of `kept` in batches, in the order of `log`, from which they are taken.
/// Records that `log` does not contain in this form come last.
pub fn in_place(kept: Vec<Record>, log: &[Vec<Record>]) -> Vec<Vec<Record>> {
    let mut wanted: HashMap<Vec<u8>, usize> = HashMap::new();
    for record in &kept {
        *wanted.entry(bytes(record)).or_default() += 1;
    }
    let mut take = |record: &Record| match wanted.get_mut(&bytes(record)) {
        Some(left) if *left > 0 => {
            *left -= 1;
            true
        }
        _ => false,
    };
    // Backwards: if the log contains a record twice, the last one counts.
    let mut places: Vec<Vec<Place<'_>>> = Vec::new();
    for batch in log.iter().rev() {
        let place = |record| Place { record, stays: take(record) };
        let mut batch: Vec<_> = batch.iter().rev().map(place).collect();
        batch.reverse();
        places.push(batch);
    }
    places.reverse();
    let others = kept.iter().filter(|record| take(record)).cloned();
    let (about_forgotten, others): (Vec<_>, Vec<_>) = others.partition(|record| {
        matches!(record, Record::FormerFiles(_) | Record::KeysForgotten { .. })
    });
    for batch in others.chunks(COMPACT_BATCH) {
        places.push(batch.iter().map(|record| Place { record, stays: true }).collect());
    }
    let mut about_forgotten = AboutForgotten::new(about_forgotten);
    let mut batches = tombstones_first(places, &mut about_forgotten);
    batches.extend(about_forgotten.rest().chunks(COMPACT_BATCH).map(<[_]>::to_vec));
    // Records that correct others depend on the order, so the state must be the same.
    let arranged = State::from_records(batches.iter().flatten().cloned());
    if arranged == State::from_records(kept.iter().cloned()) {
        batches
    } else {
        kept.chunks(COMPACT_BATCH).map(<[_]>::to_vec).collect()
    }
}

/// A record in the log.
struct Place<'a> {
    record: &'a Record,
    /// Whether it is kept.
    stays: bool,
}

/// Records about forgotten keys that the log does not have yet.
struct AboutForgotten {
    ranges: BTreeMap<(u32, u32), Range>,
    others: Vec<Record>,
}

impl AboutForgotten {
    fn new(records: Vec<Record>) -> Self {
        let (mut ranges, mut others) = (BTreeMap::new(), Vec::new());
        for record in records {
            match record {
                Record::FormerFiles(range) => {
                    ranges.insert((range.database, range.first), range);
                }
                other => others.push(other),
            }
        }
        Self { ranges, others }
    }

    /// Those that take the place of a record that is not kept.
    fn in_place_of(&mut self, left_out: &Record) -> Vec<Record> {
        let (database, first, last) = match left_out {
            Record::DataKey { file, .. } | Record::Destroyed { file, .. } => {
                (file.database, file.relation, file.relation)
            }
            Record::FormerFiles(range) => (range.database, range.first, range.last),
            Record::KeysForgotten { .. } => return std::mem::take(&mut self.others),
            _ => return Vec::new(),
        };
        let before = self.ranges.range(..=(database, last)).next_back();
        let before = before.filter(|((of, _), range)| *of == database && range.last >= first);
        let range = before.map(|(place, _)| *place).and_then(|place| self.ranges.remove(&place));
        let mut records: Vec<_> = range.map(Record::FormerFiles).into_iter().collect();
        // A key is longer than both.
        if matches!(left_out, Record::DataKey { .. }) {
            records.append(&mut self.others);
        }
        records
    }

    fn rest(self) -> Vec<Record> {
        self.ranges.into_values().map(Record::FormerFiles).chain(self.others).collect()
    }
}

/// The kept records, without empty batches. The tombstone of each file is moved to the place of the
/// first record of the file, kept or not.
fn tombstones_first(
    places: Vec<Vec<Place<'_>>>,
    about_forgotten: &mut AboutForgotten,
) -> Vec<Vec<Record>> {
    let is_tombstone = |record: &Record| matches!(record, Record::Destroyed { .. });
    let mut tombstones: HashMap<RelFile, Vec<&Record>> = HashMap::new();
    for Place { record, .. } in places.iter().flatten().filter(|place| place.stays) {
        if let Some(file) = file(record).filter(|_| is_tombstone(record)) {
            tombstones.entry(file).or_default().push(record);
        }
    }
    let batches = places.into_iter().map(|batch| {
        let mut records = Vec::new();
        for Place { record, stays } in batch {
            let first = file(record).and_then(|file| tombstones.remove(&file));
            records.extend(first.into_iter().flatten().cloned());
            if stays && !is_tombstone(record) {
                records.push(record.clone());
            } else if !stays {
                records.extend(about_forgotten.in_place_of(record));
            }
        }
        records
    });
    batches.filter(|batch| !batch.is_empty()).collect()
}

fn file(record: &Record) -> Option<RelFile> {
    match record {
        Record::DataKey { file, .. }
        | Record::Current { file, .. }
        | Record::Plaintext { file, .. }
        | Record::Rewriting { file, .. }
        | Record::SealedOnly { file, .. }
        | Record::Destroyed { file, .. } => Some(*file),
        _ => None,
    }
}

fn bytes(record: &Record) -> Vec<u8> {
    let mut out = Vec::new();
    record.put(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::in_place;
    use crate::record::Record;
    use crate::rel_file::{Phase, RelFile};
    use crate::state::State;
    use crate::{DataKeyVersion, KeyVersion, Lsn, Scope};

    fn file(relation: u32) -> RelFile {
        RelFile { tablespace: 1663, database: 5, relation }
    }

    fn version(number: u16) -> DataKeyVersion {
        DataKeyVersion::new(number).unwrap()
    }

    fn data_key(relation: u32, number: u16) -> Record {
        Record::DataKey {
            file: file(relation),
            version: version(number),
            cipher: 1,
            scope: Scope::CLUSTER,
            key_version: KeyVersion::FIRST,
            wrapped: vec![relation as u8; 60],
            created: 7,
        }
    }

    fn current(relation: u32, number: u16) -> Record {
        Record::Current { file: file(relation), version: version(number) }
    }

    fn destroyed(relation: u32) -> Record {
        Record::Destroyed {
            file: file(relation),
            through: version(1),
            cipher: 1,
            whole: true,
            lsn: Lsn(9),
            at: 9,
        }
    }

    fn rewriting(relation: u32, done: bool) -> Record {
        let phase = Phase::under(version(2));
        Record::Rewriting { file: file(relation), phase, done }
    }

    fn folded(log: &[Vec<Record>]) -> Vec<Record> {
        State::from_records(log.iter().flatten().cloned()).unwrap().records(Scope::database(5))
    }

    /// Newer files have lower numbers here, so that their records come first in `folded`.
    #[test]
    fn kept_records_keep_their_places() {
        let log = [
            vec![data_key(9, 1), current(9, 1)],
            vec![data_key(8, 1), current(8, 1)],
            vec![data_key(9, 2), current(9, 2), rewriting(9, false)],
            vec![rewriting(9, true)],
            vec![data_key(3, 1), current(3, 1)],
            vec![destroyed(8)],
        ];
        let batches = in_place(folded(&log), &log);
        assert_eq!(
            batches,
            [
                vec![data_key(9, 1)],
                vec![destroyed(8), current(8, 1)],
                vec![data_key(9, 2), current(9, 2)],
                vec![rewriting(9, true)],
                vec![data_key(3, 1), current(3, 1)],
            ]
        );
        assert_eq!(folded(&batches), folded(&log));
        assert_eq!(in_place(folded(&batches), &batches), batches);
    }

    /// The former keys of a live file are gone, and the tombstone is in their place: a copy that
    /// ends before the present key must not end before the tombstone.
    #[test]
    fn a_tombstone_takes_the_place_of_the_keys() {
        let log = [
            vec![data_key(9, 1), current(9, 1)],
            vec![data_key(8, 1), current(8, 1)],
            vec![data_key(9, 2), current(9, 2)],
            vec![destroyed(9)],
        ];
        let batches = in_place(folded(&log), &log);
        let expected = [
            vec![destroyed(9)],
            vec![data_key(8, 1), current(8, 1)],
            vec![data_key(9, 2), current(9, 2)],
        ];
        assert_eq!(batches, expected);
        assert_eq!(in_place(folded(&batches), &batches), batches);
    }

    #[test]
    fn records_that_are_not_in_the_log_come_last() {
        let log = [vec![data_key(9, 1), current(9, 1)], vec![data_key(3, 1)]];
        let mut kept = folded(&log);
        kept.push(data_key(2, 1));
        let mut expected = log.to_vec();
        expected.push(vec![data_key(2, 1)]);
        assert_eq!(in_place(kept, &log), expected);
    }

    /// Here the order of the log would give another state than `kept`.
    #[test]
    fn the_state_counts_more_than_the_order() {
        let log = [vec![data_key(9, 1), data_key(9, 2)], vec![current(9, 2)], vec![current(9, 1)]];
        let kept = vec![data_key(9, 1), data_key(9, 2), current(9, 1), current(9, 2)];
        let batches = in_place(kept.clone(), &log);
        let means = |records: Vec<Record>| State::from_records(records).unwrap();
        assert_eq!(means(batches.concat()), means(kept));
    }
}
