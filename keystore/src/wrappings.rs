//! Older wrappings of data keys, for copies of the keystore whose files were copied at different
//! moments.
//!
//! Suppose a base backup copies the cluster's log, then the database key is rotated, then the
//! backup copies a database's log. The data keys in the latter are wrapped by a version that the
//! copy of the cluster's log does not contain. WAL contains that version, but replay needs data
//! keys before it reaches it. The database's log still has older wrappings of them, by known
//! versions. So the logs of a running server keep all wrappings, and a server that is about to
//! replay uses the newest wrapping that it can unwrap, as if newer ones had not been written yet.

use std::collections::{HashMap, HashSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use crate::given_up::{AFTER_ALL_WAL, GivenUp};
use crate::record::{DatabaseKey, Record};
use crate::rel_file::RelFile;
use crate::scope::Scope;
use crate::state::State;

/// File and version of a data key record, and the database key that wraps it.
fn wrapping(record: &Record) -> Option<((RelFile, DataKeyVersion), (Scope, KeyVersion))> {
    match record {
        Record::DataKey { file, version, scope, key_version, .. } => {
            Some(((*file, *version), (*scope, *key_version)))
        }
        _ => None,
    }
}

/// Scope and version of each database key in these records.
pub fn database_keys(records: &[Record]) -> HashSet<(Scope, KeyVersion)> {
    let known = records.iter().filter_map(|record| match record {
        Record::DatabaseKey { scope, version, .. } => Some((*scope, *version)),
        _ => None,
    });
    known.collect()
}

/// Whether a data key is wrapped by an unknown database key.
pub fn has_unknown(records: &[Record], known: &HashSet<(Scope, KeyVersion)>) -> bool {
    records.iter().filter_map(wrapping).any(|(_, by)| !known.contains(&by))
}

/// Removes data keys that are wrapped by unknown database keys, and the records that put these keys
/// into use. Returns whether there were any. Replay brings them again: in WAL a data key comes
/// after the database key that wraps it.
pub fn leave_out_unknown(records: &mut Vec<Record>, known: &HashSet<(Scope, KeyVersion)>) -> bool {
    let is_known = |by: &(Scope, KeyVersion)| known.contains(by);
    let wrappings = || records.iter().filter_map(wrapping);
    let (mut openable, mut others) = (HashSet::new(), HashSet::new());
    for (key, by) in wrappings() {
        if is_known(&by) { &mut openable } else { &mut others }.insert(key);
    }
    let has_no_key =
        |key: (RelFile, DataKeyVersion)| others.contains(&key) && !openable.contains(&key);
    records.retain(|record| match record {
        Record::DataKey { .. } => wrapping(record).is_none_or(|(_, by)| is_known(&by)),
        Record::Current { file, version, .. } => !has_no_key((*file, *version)),
        Record::Plaintext { file, after } => !has_no_key((*file, *after)),
        Record::Rewriting { file, phase, .. }
        | Record::Switched { file, phase, .. }
        | Record::SealedOnly { file, phase } => {
            phase.version.is_none_or(|version| !has_no_key((*file, version)))
        }
        _ => true,
    });
    !others.is_empty()
}

/// The end of a key group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// When it ended, in seconds since 1970.
    pub at: i64,
    /// For tombstones of data keys under its key: no WAL record about pages under them is after
    /// this.
    pub lsn: Lsn,
}

/// The key groups that have ended, by their scopes.
pub type EndedKeyGroups = HashMap<Scope, Ended>;

/// The key groups that have ended, as these records of the cluster's log say, the last of which is
/// at this address: the records that destroyed keys under them are before that. It may be another
/// one for groups that were given up.
pub fn ended_key_groups(
    ended: impl Iterator<Item = (Scope, i64)>,
    logged: Lsn,
    given_up: &GivenUp,
) -> EndedKeyGroups {
    let ended = ended.map(|(scope, at)| (scope, Ended { at, lsn: logged }));
    let here = given_up.groups.iter();
    let here = here.map(|(group, at)| (group.scope(), Ended { at: *at, lsn: AFTER_ALL_WAL }));
    ended.chain(here).collect()
}

/// What the cluster's log says about keys in the other logs.
#[derive(Debug, Default)]
pub struct OfCluster {
    known: HashSet<(Scope, KeyVersion)>,
    ended: EndedKeyGroups,
    logged: Lsn,
}

impl OfCluster {
    /// By the records of the cluster's log. `logged`: the address of the last one.
    pub fn new(records: &[Record], logged: Lsn, given_up: &GivenUp) -> Self {
        let ended = records.iter().filter_map(|record| match record {
            Record::EndedKeyGroup { group, at } => Some((group.scope(), *at)),
            _ => None,
        });
        let ended = ended_key_groups(ended, logged, given_up);
        Self { known: database_keys(records), ended, logged }
    }

    /// Scope and version of each database key.
    pub fn database_keys(&self) -> &HashSet<(Scope, KeyVersion)> {
        &self.known
    }

    /// Brings the records of a log into line with the cluster's log, which may be of a later time:
    /// after a crash, and in a backup.
    pub fn bring_into_line(&self, records: &mut Vec<Record>) {
        leave_out_forgotten(records, &self.known);
        self.bury(records);
    }

    /// The tombstones of the data keys in a log that are under keys of ended key groups, except
    /// those that it has.
    pub fn tombstones(&self, records: &[Record]) -> Vec<Record> {
        let buried = self.buried(records).into_iter();
        buried.filter(|(_, is_new, _)| *is_new).map(|(_, _, tombstone)| tombstone).collect()
    }

    /// Puts tombstones in the place of data keys that are wrapped by keys of ended key groups. A
    /// backup that copies a database's log, and the cluster's log after a group has ended, has such
    /// keys. What is replayed until then is about pages that nobody can open any more. Without a
    /// tombstone they would have no key at all, and be written in plaintext.
    fn bury(&self, records: &mut [Record]) {
        for (place, _, tombstone) in self.buried(records) {
            if let Some(record) = records.get_mut(place) {
                *record = tombstone;
            }
        }
    }

    /// The places of such data keys, whether the log lacks their tombstones, and these.
    fn buried(&self, records: &[Record]) -> Vec<(usize, bool, Record)> {
        let found = records.iter().enumerate().filter_map(|(place, record)| {
            tombstone(record, &self.ended).map(|tombstone| (place, true, tombstone))
        });
        let mut found: Vec<_> = found.collect();
        if found.is_empty() {
            return found;
        }
        let state = State::from_records(records.iter().cloned()).unwrap_or_default();
        for (_, is_new, tombstone) in &mut found {
            let Record::Destroyed { file, through, lsn, .. } = tombstone else { continue };
            let Some(known) = state.file(*file) else { continue };
            *is_new = !known.is_destroyed(*through);
            // It has left the group: no server has a page under the key.
            if !known.is_mixed() && known.floor() > Some(*through) {
                *lsn = self.logged;
            }
        }
        found
    }
}

/// The tombstone of a data key that is wrapped by the key of an ended key group.
pub fn tombstone(record: &Record, ended: &EndedKeyGroups) -> Option<Record> {
    let Record::DataKey { file, version, cipher, scope, .. } = record else { return None };
    let Ended { at, lsn } = *ended.get(scope)?;
    let (file, through, cipher) = (*file, *version, *cipher);
    Some(Record::Destroyed { file, through, cipher, whole: false, lsn, at })
}

/// Removes older wrappings by database keys that are forgotten: unknown, although a later version
/// is known. The first other wrapping of the key takes the place of the first one, because records
/// about the key follow it.
fn leave_out_forgotten(records: &mut Vec<Record>, known: &HashSet<(Scope, KeyVersion)>) {
    let mut newest: HashMap<Scope, KeyVersion> = HashMap::new();
    for &(scope, version) in known {
        let last = newest.entry(scope).or_insert(version);
        *last = version.max(*last);
    }
    let is_forgotten = |by: &(Scope, KeyVersion)| {
        !known.contains(by) && newest.get(&by.0).is_some_and(|last| by.1 < *last)
    };
    let mut first_other = HashMap::new();
    let mut any = false;
    for record in records.iter() {
        let Some((key, by)) = wrapping(record) else { continue };
        if is_forgotten(&by) {
            any = true;
        } else {
            first_other.entry(key).or_insert_with(|| record.clone());
        }
    }
    if !any {
        return;
    }
    let mut placed = HashSet::new();
    records.retain_mut(|record| {
        let Some((key, by)) = wrapping(record) else { return true };
        let is_first = placed.insert(key);
        // Without another one it stays, and whoever needs the key says what is missing.
        let Some(other) = first_other.get(&key).filter(|_| is_forgotten(&by)) else { return true };
        if is_first {
            *record = other.clone();
        }
        is_first
    });
}

/// Whether a log has a wrapping of a database key that is not in force any more: whoever can use
/// the master key that made it can open what is under the database key.
pub fn has_former_of_database_keys<'a>(log: impl Iterator<Item = &'a Record> + Clone) -> bool {
    let mut keys = log.filter_map(|record| match record {
        Record::DatabaseKey { scope, version, key } => Some(((*scope, *version), key)),
        _ => None,
    });
    let now: HashMap<_, _> = keys.clone().collect();
    let is_former = |(name, key): ((Scope, KeyVersion), &DatabaseKey)| {
        let now = now.get(&name);
        key.wrappings().any(|by| now.is_none_or(|now| now.wrappings().all(|other| other != by)))
    };
    keys.any(is_former)
}

/// Adds to the records of a compacted log the older wrappings that `log` has of the keys in it.
/// Idempotent. `folded`: in the order of [`State::records`](crate::state::State::records).
pub fn with_older<'a>(
    folded: &'a [Record],
    log: impl IntoIterator<Item = &'a Record>,
) -> Vec<&'a Record> {
    let key_of = |record: &Record| wrapping(record).map(|(key, _)| key);
    let in_log = log.into_iter().filter_map(|record| Some((key_of(record)?, record)));
    let mut in_log: Vec<_> = in_log.collect();
    // As `folded` is. Wrappings of a key stay in their order.
    in_log.sort_by_key(|(key, _)| *key);
    let mut in_log = in_log.into_iter().peekable();
    let mut all = Vec::with_capacity(folded.len());
    for record in folded {
        if let Some(key) = key_of(record) {
            while in_log.next_if(|(other, _)| *other < key).is_some() {}
            while let Some((_, older)) = in_log.next_if(|(other, _)| *other == key) {
                if older != record {
                    all.push(older);
                }
            }
        }
        all.push(record);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{
        AFTER_ALL_WAL, GivenUp, OfCluster, database_keys, has_former_of_database_keys, has_unknown,
        leave_out_forgotten, leave_out_unknown, with_older,
    };
    use crate::record::Record;
    use crate::rel_file::{Phase, RelFile};
    use crate::state::State;
    use crate::{DataKeyVersion, DatabaseKey, KeyGroup, KeyVersion, Lsn, Scope, Wrapping};

    fn file(relation: u32) -> RelFile {
        RelFile { tablespace: 1663, database: 5, relation }
    }

    fn data_key(relation: u32, key_version: u32) -> Record {
        Record::DataKey {
            file: file(relation),
            version: DataKeyVersion::FIRST,
            cipher: 1,
            scope: Scope::CLUSTER,
            key_version: KeyVersion::new(key_version).unwrap(),
            wrapped: vec![key_version as u8; 60],
            created: 7,
        }
    }

    fn database_key(version: u32) -> Record {
        Record::DatabaseKey {
            scope: Scope::CLUSTER,
            version: KeyVersion::new(version).unwrap(),
            key: DatabaseKey::new(
                crate::CheckValue::from_bytes([version as u8; 16]),
                Wrapping::new(("local", "main"), 1, vec![1; 60], 7),
            ),
        }
    }

    fn current(relation: u32) -> Record {
        Record::Current { file: file(relation), version: DataKeyVersion::FIRST }
    }

    fn rewriting(relation: u32) -> Record {
        let phase = Phase::under(DataKeyVersion::FIRST);
        Record::Rewriting { file: file(relation), phase, done: false }
    }

    #[test]
    fn keys_of_ended_groups_are_buried() {
        let group = KeyGroup::new(100).unwrap();
        let cluster = [
            Record::KeyGroup { group: KeyGroup::new(101).unwrap(), name: "b".into(), at: 1 },
            Record::EndedKeyGroup { group, at: 9 },
        ];
        let under = |relation: u32, of: Scope| {
            let mut record = data_key(relation, 1);
            if let Record::DataKey { scope, .. } = &mut record {
                *scope = of;
            }
            record
        };
        let destroyed_before = |relation: u32, lsn: Lsn| Record::Destroyed {
            file: file(relation),
            through: DataKeyVersion::FIRST,
            cipher: 1,
            whole: false,
            lsn,
            at: 9,
        };
        let destroyed = |relation| destroyed_before(relation, Lsn(70));
        let alive = under(2, KeyGroup::new(101).unwrap().scope());
        let log =
            vec![under(1, group.scope()), current(1), alive.clone(), current(2), data_key(3, 1)];
        let none = GivenUp::default();
        let of_cluster = OfCluster::new(&cluster, Lsn(70), &none);
        let mut records = log.clone();
        of_cluster.bring_into_line(&mut records);
        assert_eq!(records, [destroyed(1), current(1), alive, current(2), data_key(3, 1)]);
        assert_eq!(of_cluster.tombstones(&log), [destroyed(1)]);
        assert_eq!(of_cluster.tombstones(&[log.clone(), vec![destroyed(1)]].concat()), []);
        // WAL about groups that were given up is still to come, but for files that have left them.
        let given_up = GivenUp { keystore: [1; 16], groups: vec![(group, 9)] };
        let later = |relation: u32| {
            let mut record = data_key(relation, 1);
            if let Record::DataKey { version, .. } = &mut record {
                *version = DataKeyVersion::new(2).unwrap();
            }
            let phase = Phase::under(DataKeyVersion::new(2).unwrap());
            [record, Record::Current { file: file(relation), version: phase.version.unwrap() }]
        };
        let second = Phase::under(DataKeyVersion::new(2).unwrap());
        let proven = Record::SealedOnly { file: file(4), phase: second };
        let rewriting = |done| Record::Rewriting { file: file(4), phase: second, done };
        let left = |relation| [vec![under(relation, group.scope())], later(relation).to_vec()];
        for records in [&cluster[..1], &cluster[..]] {
            let of_cluster = OfCluster::new(records, Lsn(70), &given_up);
            let log = [log.clone(), left(4).concat(), vec![proven.clone()], left(5).concat()];
            let [one, four, five] = [(1, AFTER_ALL_WAL), (4, Lsn(70)), (5, AFTER_ALL_WAL)]
                .map(|(relation, lsn)| destroyed_before(relation, lsn));
            let expected = [one.clone(), four, five.clone()];
            assert_eq!(of_cluster.tombstones(&log.concat()), expected);
            let all_done = [log.concat(), vec![rewriting(true)]].concat();
            assert_eq!(of_cluster.tombstones(&all_done), expected);
            let again = [log.concat(), vec![rewriting(false)]].concat();
            let four = destroyed_before(4, AFTER_ALL_WAL);
            assert_eq!(of_cluster.tombstones(&again), [one, four, five]);
        }
        let state = State::from_records(records).unwrap();
        let buried = state.file(file(1)).unwrap();
        assert!(buried.keys.is_empty() && buried.is_destroyed(DataKeyVersion::FIRST));
        assert_eq!(buried.phase, Phase::under(DataKeyVersion::FIRST));
    }

    #[test]
    fn former_wrappings_of_database_keys_are_noticed() {
        let with = |version: u32, names: &[&str]| {
            let Record::DatabaseKey { scope, version, mut key } = database_key(version) else {
                unreachable!()
            };
            let by = |name: &&str| Wrapping::new(("local", name), 1, vec![1; 60], 7);
            let mut all = names.iter().map(by);
            key.first = all.next().unwrap();
            key.others = all.collect();
            Record::DatabaseKey { scope, version, key }
        };
        let notices = |log: &[Record]| has_former_of_database_keys(log.iter());
        // Others are added, and asked first.
        let added = [with(1, &["a"]), with(2, &["c"]), with(1, &["a", "b"]), with(1, &["b", "a"])];
        assert!(!notices(&added) && !notices(&[]) && !notices(&[data_key(1, 1), current(1)]));
        assert!(notices(&[&added[..], &[with(1, &["b"])]].concat()));
        assert!(notices(&[with(1, &["a"]), with(1, &["b"]), with(2, &["a"])]));
    }

    #[test]
    fn the_newest_wrapping_that_can_be_unwrapped_counts() {
        let known = database_keys(&[database_key(1), database_key(2), current(9)]);
        let log = [
            data_key(1, 1),
            current(1),
            data_key(1, 2),
            data_key(2, 2),
            data_key(1, 3),
            data_key(3, 3),
            current(3),
            rewriting(3),
            Record::Plaintext { file: file(3), after: DataKeyVersion::FIRST },
            data_key(1, 4),
            rewriting(1),
        ];
        let mut records = log.to_vec();
        assert!(has_unknown(&records, &known));
        assert!(leave_out_unknown(&mut records, &known));
        assert!(!has_unknown(&records, &known));
        assert_eq!(
            records,
            [data_key(1, 1), current(1), data_key(1, 2), data_key(2, 2), rewriting(1)]
        );
        assert!(State::from_records(records).is_ok());
        // Nothing unknown, nothing removed.
        let all = database_keys(&[1, 2, 3, 4].map(database_key));
        let mut records = log.to_vec();
        assert!(!leave_out_unknown(&mut records, &all));
        assert_eq!(records, log);
    }

    #[test]
    fn wrappings_by_forgotten_database_keys_are_left_out() {
        let known = database_keys(&[database_key(3)]);
        let mut records = vec![
            data_key(1, 1),
            current(1),
            data_key(2, 1),
            data_key(1, 2),
            current(2),
            data_key(1, 3),
            data_key(3, 3),
            data_key(2, 3),
            // Not known yet, and lost.
            data_key(1, 4),
            data_key(9, 2),
        ];
        leave_out_forgotten(&mut records, &known);
        let left = [
            data_key(1, 3),
            current(1),
            data_key(2, 3),
            current(2),
            data_key(1, 3),
            data_key(3, 3),
            data_key(2, 3),
            data_key(1, 4),
            data_key(9, 2),
        ];
        assert_eq!(records, left);
        leave_out_forgotten(&mut records, &known);
        assert_eq!(records, left);
        assert!(leave_out_unknown(&mut records, &known));
        assert_eq!(records, left[..7]);
        assert!(State::from_records(records).is_ok());
        // Another scope, and one without keys.
        let mut records = vec![data_key(1, 1)];
        leave_out_forgotten(&mut records, &database_keys(&[]));
        assert_eq!(records, [data_key(1, 1)]);
    }

    #[test]
    fn a_compacted_log_keeps_older_wrappings_and_the_state() {
        let log = [
            data_key(1, 1),
            current(1),
            data_key(2, 1),
            current(2),
            data_key(1, 2),
            data_key(2, 2),
            Record::Destroyed {
                file: file(2),
                through: DataKeyVersion::FIRST,
                lsn: Lsn(1),
                cipher: 1,
                whole: false,
                at: 7,
            },
        ];
        let state = State::from_records(log.to_vec()).unwrap();
        let folded = state.records(Scope::database(5));
        let compacted: Vec<_> = with_older(&folded, &log).into_iter().cloned().collect();
        let keys: Vec<_> =
            compacted.iter().filter(|r| matches!(r, Record::DataKey { .. })).collect();
        assert_eq!(keys, [&data_key(1, 1), &data_key(1, 2)]);
        assert_eq!(State::from_records(compacted.clone()).unwrap(), state);
        assert!(with_older(&folded, &compacted).into_iter().eq(&compacted));
    }
}
