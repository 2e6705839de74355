//! Compacting a log while a backup may be in progress.
//!
//! A backup lists files first and copies them later; many programs copy no more bytes of each file
//! than it had when it was listed. If the log is compacted in between and has grown since, the copy
//! lacks its end. WAL contains what was added after the backup began, but nothing older; so older
//! records must not be in that end. Hence records keep the order and the batches of the old log,
//! and no kept record moves away from the beginning. Tombstones move to the place of the first
//! record of their file or key group, and what is said of forgotten keys takes the place of such
//! keys. Each is shorter than what it replaces.
//!
//! A database key that is wrapped again, and a provider that is set again, take the place of the
//! first record that they make obsolete. They may be longer. If there is no room, because nothing
//! before them is left out, the obsolete record stays, too, unless no backup is in progress
//! ([`Room`]).

mod successors;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use self::successors::Successors;
use crate::former::Range;
use crate::log::COMPACT_BATCH;
use crate::record::Record;
use crate::rel_file::RelFile;
use crate::scope::KeyGroup;
use crate::state::State;
use crate::wal;

/// Whether records may move away from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// No: a backup may be in progress.
    AsBefore,
    /// Yes.
    Any,
}

/// Returns the records of `kept` in batches, in the order of `log`, from which they are taken.
/// Empty batches of `log` are marks. Records that `log` does not contain in this form come last.
/// For lack of room there are obsolete records as well; the state is the same.
pub fn in_place<'a>(kept: &[&'a Record], log: &'a [Vec<Record>]) -> Vec<Vec<&'a Record>> {
    arrange(kept, log, Room::AsBefore)
}

/// Like [`in_place`], with as much room as `room` says.
pub fn arrange<'a>(
    kept: &[&'a Record],
    log: &'a [Vec<Record>],
    room: Room,
) -> Vec<Vec<&'a Record>> {
    let (stays, others) = find(kept, log);
    let (about_forgotten, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|record| {
        matches!(record, Record::FormerFiles(_) | Record::KeysForgotten { .. })
    });
    let mut about_forgotten = AboutForgotten::new(about_forgotten);
    let places = log.iter().flatten().zip(stays.iter().copied());
    let tombstones = Tombstones::among(places.chain(others.iter().map(|record| (*record, true))));
    let successors = Successors::among(log.iter().flatten().zip(stays.iter().copied()), room);
    let mut arranged = Arranged { tombstones, successors, batches: Vec::new() };
    let mut stays = stays.into_iter();
    for batch in log {
        arranged.batch(batch.iter().zip(stays.by_ref()), &mut about_forgotten);
    }
    for batch in others.chunks(COMPACT_BATCH) {
        let batch = batch.iter().map(|record| (*record, true));
        arranged.batch(batch, &mut about_forgotten);
    }
    let Arranged { mut batches, successors, .. } = arranged;
    batches.extend(in_batches(&about_forgotten.rest()));
    let number = kept.len() + successors.obsolete;
    if means_the_same(&batches, kept, number) { batches } else { in_batches(kept).collect() }
}

fn in_batches<'r, 'a>(records: &'r [&'a Record]) -> impl Iterator<Item = Vec<&'a Record>> + 'r {
    records.chunks(COMPACT_BATCH).map(<[_]>::to_vec)
}

/// Which of the log's records are kept, and the kept records that are not in the log. Both lists
/// are sorted first. They nearly are already, so this is faster than any map.
fn find<'a>(kept: &[&'a Record], log: &'a [Vec<Record>]) -> (Vec<bool>, Vec<&'a Record>) {
    let sorted = |mut records: Vec<(&'a Record, usize)>| {
        records.sort_by(|(a, _), (b, _)| by_file(a, b));
        records.into_iter().rev()
    };
    let in_log: Vec<_> = log.iter().flatten().zip(0..).collect();
    let mut stays = vec![false; in_log.len()];
    let mut others = Vec::new();
    // Backwards: if the log contains a record twice, the last one counts.
    let mut in_log = sorted(in_log).peekable();
    for (record, place) in sorted(kept.iter().copied().zip(0..).collect()) {
        while in_log.next_if(|(other, _)| by_file(other, record).is_gt()).is_some() {}
        match in_log.next_if(|(other, _)| *other == record) {
            Some((_, found)) => stays[found] = true,
            None => others.push((place, record)),
        }
    }
    others.sort_unstable_by_key(|(place, _)| *place);
    (stays, others.into_iter().map(|(_, record)| record).collect())
}

/// An order in which the records of a log mostly are.
fn by_file(a: &Record, b: &Record) -> Ordering {
    file(a).cmp(&file(b)).then_with(|| a.cmp(b))
}

/// Whether records have the same meaning in both orders, and there are as many. Records that
/// correct others depend on the order, but only on that among the records of a file: other files do
/// not matter to it.
fn means_the_same(batches: &[Vec<&Record>], kept: &[&Record], number: usize) -> bool {
    // Switches of WAL need the keys.
    let part = |record: &Record| file(record).filter(|file| !wal::is_key_place(*file));
    let mut arranged = batches.concat();
    let mut kept = kept.to_vec();
    for records in [&mut arranged, &mut kept] {
        records.sort_by_key(|record| part(record));
    }
    let state = |records: &[&Record]| State::from_records(records.iter().copied().cloned());
    arranged.len() == number
        && arranged
            .chunk_by(|a, b| part(a) == part(b))
            .zip(kept.chunk_by(|a, b| part(a) == part(b)))
            .all(|(arranged, kept)| arranged == kept || state(arranged) == state(kept))
}

/// Records about forgotten keys that the log does not have yet.
struct AboutForgotten<'a> {
    ranges: BTreeMap<(u32, u32), (Range, &'a Record)>,
    others: Vec<&'a Record>,
}

impl<'a> AboutForgotten<'a> {
    fn new(records: Vec<&'a Record>) -> Self {
        let (mut ranges, mut others) = (BTreeMap::new(), Vec::new());
        for record in records {
            match record {
                Record::FormerFiles(range) => {
                    ranges.insert((range.database, range.first), (*range, record));
                }
                other => others.push(other),
            }
        }
        Self { ranges, others }
    }

    /// Adds those that take the place of a record that is not kept.
    fn put_in_place_of(&mut self, left_out: &Record, records: &mut Vec<&'a Record>) {
        let (database, first, last) = match left_out {
            Record::DataKey { file, .. } | Record::Destroyed { file, .. } => {
                (file.database, file.relation, file.relation)
            }
            Record::FormerFiles(range) => (range.database, range.first, range.last),
            // A database key is longer, too.
            Record::KeysForgotten { .. } | Record::DatabaseKey { .. } => {
                return records.append(&mut self.others);
            }
            _ => return,
        };
        let before = self.ranges.range(..=(database, last)).next_back();
        let before = before.filter(|((of, _), (range, _))| *of == database && range.last >= first);
        let found = before.map(|(place, _)| *place).and_then(|place| self.ranges.remove(&place));
        records.extend(found.map(|(_, record)| record));
        // A key is longer than both.
        if matches!(left_out, Record::DataKey { .. }) {
            records.append(&mut self.others);
        }
    }

    fn rest(self) -> Vec<&'a Record> {
        self.ranges.into_values().map(|(_, record)| record).chain(self.others).collect()
    }
}

/// The tombstones that are kept, by what they are about.
struct Tombstones<'a>(BTreeMap<About, Vec<&'a Record>>);

impl<'a> Tombstones<'a> {
    /// Of records, and whether each is kept.
    fn among(records: impl Iterator<Item = (&'a Record, bool)>) -> Self {
        let mut by_subject: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (record, stays) in records {
            if is_tombstone(record)
                && stays
                && let Some(about) = About::of(record)
            {
                by_subject.entry(about).or_default().push(record);
            }
        }
        Self(by_subject)
    }
}

fn is_tombstone(record: &Record) -> bool {
    matches!(record, Record::Destroyed { .. } | Record::EndedKeyGroup { .. })
}

/// What a record is about, if that may get a tombstone.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum About {
    File(RelFile),
    KeyGroup(KeyGroup),
}

impl About {
    fn of(record: &Record) -> Option<Self> {
        match record {
            Record::KeyGroup { group, .. } | Record::EndedKeyGroup { group, .. } => {
                Some(Self::KeyGroup(*group))
            }
            Record::DatabaseKey { scope, .. } => scope.key_group().map(Self::KeyGroup),
            _ => file(record).map(Self::File),
        }
    }
}

/// The kept records, without empty batches. Each tombstone is moved to the place of the first
/// record about the same file or key group, kept or not.
struct Arranged<'a> {
    tombstones: Tombstones<'a>,
    successors: Successors<'a>,
    batches: Vec<Vec<&'a Record>>,
}

impl<'a> Arranged<'a> {
    fn batch(
        &mut self,
        batch: impl Iterator<Item = (&'a Record, bool)>,
        about_forgotten: &mut AboutForgotten<'a>,
    ) {
        let mut records = Vec::new();
        let successors = &mut self.successors;
        successors.begin_batch();
        for (record, stays) in batch {
            successors.pass(record);
            let arranged = records.len();
            let first = About::of(record).and_then(|about| self.tombstones.0.remove(&about));
            records.extend(first.into_iter().flatten());
            if !stays {
                match successors.in_place_of(record) {
                    Some(successor) => records.extend(successor),
                    None => about_forgotten.put_in_place_of(record, &mut records),
                }
            } else if !is_tombstone(record) && successors.is_here(record) {
                records.push(record);
            }
            successors.add(&records[arranged..]);
        }
        successors.end_batch(records.is_empty());
        if !records.is_empty() {
            self.batches.push(records);
        }
    }
}

fn file(record: &Record) -> Option<RelFile> {
    match record {
        Record::DataKey { file, .. }
        | Record::Current { file, .. }
        | Record::Plaintext { file, .. }
        | Record::Rewriting { file, .. }
        | Record::Switched { file, .. }
        | Record::SealedOnly { file, .. }
        | Record::Destroyed { file, .. } => Some(*file),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::record::Record;
    use crate::rel_file::{Phase, RelFile};
    use crate::state::State;
    use crate::{CheckValue, DataKeyVersion, DatabaseKey, KeyVersion, Lsn, Scope, Wrapping};

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

    /// A copy that ends before the tombstone of a key group would have neither its key nor that.
    #[test]
    fn the_tombstone_of_a_key_group_takes_its_place() {
        let group = |number| crate::KeyGroup::new(number).unwrap();
        let made = |number| {
            let name = format!("group{number}");
            vec![Record::KeyGroup { group: group(number), name, at: 1 }]
        };
        let key = |number| {
            let wrapping = crate::Wrapping::new(("local", "main"), 1, vec![1; 60], 7);
            let check = crate::CheckValue::from_bytes([1; 16]);
            let (scope, version) = (group(number).scope(), KeyVersion::FIRST);
            let key = crate::DatabaseKey::new(check, wrapping);
            vec![Record::DatabaseKey { scope, version, key }]
        };
        let ended = vec![Record::EndedKeyGroup { group: group(101), at: 2 }];
        let log = [made(101), key(101), made(102), key(102), ended.clone()];
        let state = State::from_records(log.iter().flatten().cloned()).unwrap();
        let batches = in_place(state.records(Scope::CLUSTER), &log);
        assert_eq!(batches, [ended, made(102), key(102)]);
        assert_eq!(State::from_records(batches.concat()), Ok(state));
    }

    fn folded(log: &[Vec<Record>]) -> Vec<Record> {
        State::from_records(log.iter().flatten().cloned()).unwrap().records(Scope::database(5))
    }

    fn in_place(kept: Vec<Record>, log: &[Vec<Record>]) -> Vec<Vec<Record>> {
        arrange(kept, log, super::Room::AsBefore)
    }

    fn arrange(kept: Vec<Record>, log: &[Vec<Record>], room: super::Room) -> Vec<Vec<Record>> {
        let kept: Vec<_> = kept.iter().collect();
        let batches = super::arrange(&kept, log, room).into_iter();
        batches.map(|batch| batch.into_iter().cloned().collect()).collect()
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

    fn database_key(version: u32, master_key: &str) -> Record {
        let by = Wrapping::new(("provider", master_key), 1, vec![7; 60], 7);
        let key = DatabaseKey::new(CheckValue::from_bytes([version as u8; 16]), by);
        let version = KeyVersion::new(version).unwrap();
        Record::DatabaseKey { scope: Scope::CLUSTER, version, key }
    }

    fn provider(options: &str) -> Record {
        let (name, kind) = ("provider".to_owned(), "file".to_owned());
        Record::Provider { name, kind, options: options.to_owned(), programs: false }
    }

    fn cluster_folded(log: &[Vec<Record>]) -> Vec<Record> {
        State::from_records(log.iter().flatten().cloned()).unwrap().records(Scope::CLUSTER)
    }

    #[test]
    fn a_new_wrapping_takes_the_place_of_the_first_one() {
        let log = [
            vec![provider("{}")],
            vec![database_key(1, "old"), database_key(2, "old")],
            vec![database_key(1, "mid")],
            vec![provider("{1}"), database_key(3, "new")],
            vec![database_key(1, "new"), database_key(2, "new")],
            vec![provider("[]")],
        ];
        let batches = in_place(cluster_folded(&log), &log);
        let expected = [
            vec![provider("[]")],
            vec![database_key(1, "new"), database_key(2, "new")],
            vec![database_key(3, "new")],
        ];
        assert_eq!(batches, expected);
        assert_eq!(in_place(cluster_folded(&batches), &batches), batches);
    }

    /// A longer one would push others away from the beginning.
    #[test]
    fn a_longer_wrapping_waits_for_room() {
        let log = [
            vec![database_key(1, "old")],
            vec![database_key(2, "same")],
            vec![database_key(1, "longer")],
        ];
        assert_eq!(in_place(cluster_folded(&log), &log), log);
        let packed = vec![vec![database_key(1, "longer")], vec![database_key(2, "same")]];
        let any = |log: &[_]| arrange(cluster_folded(log), log, super::Room::Any);
        assert_eq!(any(&log), packed);
        // What is left out before it makes room.
        let log = [vec![vec![provider("{}"), provider("{}")]], log.to_vec()].concat();
        let expected = [vec![vec![provider("{}")]], packed].concat();
        assert_eq!(in_place(cluster_folded(&log), &log), expected);
        // Where there was room for a copy between the two, there is one of them.
        let log = [
            vec![database_key(1, "old")],
            vec![database_key(2, "same")],
            vec![database_key(1, "longer still")],
            vec![database_key(1, "longer")],
        ];
        let expected = [&log[..2], &[log[3].clone()]].concat();
        assert_eq!(in_place(cluster_folded(&log), &log), expected);
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
