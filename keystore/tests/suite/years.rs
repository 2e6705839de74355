//! Years of a busy table: it is truncated once a second, keys of every kind are rotated once a
//! week, a backup is made each day, the server is restarted each quarter, and keys are forgotten
//! one day after their files are gone. WAL keys are kept for ever, as by default, or forgotten like
//! the others.
//!
//! `PAGEVAULT_DAYS=3650` simulates ten years, `PAGEVAULT_TRUNCATIONS=4320` as many truncations a
//! day; otherwise a few short days. The clock is WAL: one byte for each truncation. Keys are
//! forgotten once a day, so there are those of two days. The server does it once an hour; but a
//! restart makes it wait for a day again.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pagevault_keystore::directory::Directory;
use pagevault_keystore::former::{Range, Table};
use pagevault_keystore::log::{self, Log};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::state::{FormerVersions, State};
use pagevault_keystore::storage::{Storage, StorageError};
use pagevault_keystore::{
    CheckValue, DataKeyVersion, DatabaseKey, Lsn, Record, Scope, Wrapping, compaction, wal,
    wrappings,
};

use crate::arbitrary::{DATABASE, current, data_key, file, key_version, sealed_only};

/// Files in memory.
#[derive(Default)]
struct Memory(RefCell<BTreeMap<String, Vec<u8>>>);

impl Storage for Memory {
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().keys().cloned().collect())
    }

    fn len(&self, name: &str) -> io::Result<Option<u64>> {
        Ok(self.0.borrow().get(name).map(|bytes| bytes.len() as u64))
    }

    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let read = |bytes: &Vec<u8>| {
            let from = bytes.len().min(from as usize);
            let end = bytes.len().min(from.saturating_add(limit as usize));
            bytes[from..end].to_vec()
        };
        Ok(self.0.borrow().get(name).map(read))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.borrow_mut().insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let mut files = self.0.borrow_mut();
        let file = files.get_mut(name).unwrap();
        assert_eq!(file.len() as u64, at);
        file.extend_from_slice(bytes);
        Ok(())
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        self.0.borrow_mut().get_mut(name).unwrap().truncate(length as usize);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        let mut files = self.0.borrow_mut();
        let file = files.remove(from).unwrap();
        files.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.borrow_mut().remove(name);
        Ok(())
    }

    fn sync_data(&self, _name: &str) -> Result<(), StorageError> {
        Ok(())
    }

    fn sync(&self, _name: &str) -> io::Result<()> {
        Ok(())
    }
}

const LOG: &str = "5.keys";
/// A log with more obsolete records is rewritten at a start (`extension/src/keys/load.rs`).
const OBSOLETE: usize = 1000;
/// Days between clean restarts, as for a minor version of PostgreSQL.
const QUARTER: u64 = 91;

struct World<'a> {
    storage: &'a Memory,
    log: Log<'a, Memory>,
    cluster_log: Log<'a, Memory>,
    memory: &'a [AtomicU32],
    directory: Directory<'a>,
    former: Table<'a>,
    /// Numbers of files in use, with their present versions. The first is the busy table's, the
    /// last stays for ever.
    in_use: Vec<(u32, DataKeyVersion)>,
    next: u32,
    /// Gone, with the last version and when.
    gone: VecDeque<(u32, DataKeyVersion, u64)>,
    now: u64,
    wrapped_by: u32,
    /// A backup, and what was logged since.
    backup: Option<Vec<u8>>,
    wal: Vec<Record>,
    /// Of both logs together, in bytes.
    largest: u64,
    most_keys: u32,
    replaced: FormerVersions,
    forgets_wal_keys: bool,
}

impl World<'_> {
    fn stage(&mut self, records: impl Into<Vec<Record>>) {
        let records = records.into();
        self.log.stage(&records, Lsn(self.now)).unwrap();
        records.iter().for_each(|record| self.directory.apply(record).unwrap());
        if self.backup.is_some() {
            self.wal.extend(records);
        }
        self.measure();
    }

    fn stage_in_cluster(&mut self, records: &[Record]) {
        self.cluster_log.stage(records, Lsn(self.now)).unwrap();
        records.iter().for_each(|record| self.directory.apply(record).unwrap());
        self.measure();
    }

    fn measure(&mut self) {
        let bytes = self.log.position().end + self.cluster_log.position().end;
        self.largest = self.largest.max(bytes);
    }

    /// The records of a new file, with a version that its number never had.
    fn new_file(&mut self) -> (u32, DataKeyVersion, [Record; 3]) {
        let number = self.next;
        self.next += 1;
        let through = self.former.through(5, number);
        let version = DataKeyVersion::after(through).unwrap();
        let (of, fill) = (version.get(), number as u8);
        let key = data_key(number, of, self.wrapped_by, fill);
        (number, version, [key, current(number, of), sealed_only(number, of, false)])
    }

    /// A new file takes the place of one in use.
    fn replace(&mut self, place: usize) {
        let (number, version, new) = self.new_file();
        let (old, last) = std::mem::replace(&mut self.in_use[place], (number, version));
        self.gone.push_back((old, last, self.now));
        self.stage(new);
    }

    fn truncate(&mut self, times: u64) {
        for _ in 0..times {
            self.replace(0);
            self.now += 1;
        }
    }

    /// New data keys for all files in use, a file that takes the place of another one, and a new
    /// key of the database, of WAL, and a new master key.
    fn rotate(&mut self) {
        for place in 1..self.in_use.len() {
            let (number, last) = self.in_use[place];
            let next = DataKeyVersion::after(Some(last)).unwrap();
            let key = data_key(number, next.get(), self.wrapped_by, number as u8);
            let proven = sealed_only(number, next.get(), false);
            self.stage([key, current(number, next.get()), proven]);
            self.in_use[place] = (number, next);
            self.replaced.data_keys.insert((file(number), last));
        }
        self.replace(1 + (self.wrapped_by as usize) % (self.in_use.len() - 2));
        self.wrapped_by += 1;
        let by = self.wrapped_by;
        self.stage_in_cluster(&[database_key(by, by)]);
        let state = self.state();
        let keys = state.files().flat_map(|(file, entry)| {
            entry.keys.keys().map(move |version| (file.relation, version.get()))
        });
        let rewrapped: Vec<_> =
            keys.map(|(number, of)| data_key(number, of, by, number as u8)).collect();
        rewrapped.chunks(10_000).for_each(|records| self.stage(records));
        self.stage_in_cluster(&[wal_key(by, by)]);
        self.stage_in_cluster(&[switch(by, self.now)]);
        // Only the last ones are not forgotten.
        let known = by.max(3) - 1..by;
        let wal_keys = if self.forgets_wal_keys { known.clone() } else { 2..by };
        let rewrapped: Vec<_> = wal_keys.map(|version| wal_key(version, by)).collect();
        let rewrapped_by_master: Vec<_> =
            known.clone().map(|version| database_key(version, by)).collect();
        let replaced = known.clone().map(|version| (Scope::CLUSTER, key_version(version)));
        self.replaced.database_keys.extend(replaced);
        self.replaced.wal_keys = known.last().map(key_version).filter(|_| self.forgets_wal_keys);
        for records in [rewrapped, rewrapped_by_master] {
            records.chunks(10_000).for_each(|records| self.stage_in_cluster(records));
        }
    }

    /// Forgets the keys that the last rotation has replaced. Nothing is under them any more.
    fn forget_replaced(&mut self) {
        let replaced = FormerVersions { gone: Lsn(self.now), ..std::mem::take(&mut self.replaced) };
        if replaced.is_empty() {
            return;
        }
        for scope in [Scope::CLUSTER, DATABASE] {
            let batches = log::batches(&self.content(&log::file_name(scope)), scope).unwrap();
            let mut state = State::from_records(batches.iter().flatten().cloned()).unwrap();
            let mut gone = replaced.clone();
            state.forget_versions(scope, &mut gone);
            self.directory.forget_versions(&gone.data_keys).unwrap();
            let folded = state.records(scope);
            let kept = wrappings::with_older(&folded, batches.iter().flatten());
            let log = if scope.is_cluster() { &mut self.cluster_log } else { &mut self.log };
            log.compact_to(&compaction::in_place(&kept, &batches)).unwrap();
        }
    }

    fn content(&self, name: &str) -> Vec<u8> {
        self.storage.0.borrow().get(name).cloned().unwrap()
    }

    fn state(&self) -> State {
        let contents = log::replay(&self.content(LOG), DATABASE).unwrap();
        State::from_records(contents.records).unwrap()
    }

    /// Forgets files that were gone before `until`, and by the last checkpoint, which is now.
    fn forget(&mut self, until: u64) {
        let mut due = BTreeMap::new();
        while let Some(&(number, last, at)) = self.gone.front().filter(|(.., at)| *at < until) {
            due.insert(number, last);
            self.gone.pop_front();
            assert!(at < self.now);
        }
        if due.is_empty() {
            return;
        }
        let in_use: BTreeSet<u32> = self.in_use.iter().map(|(number, _)| *number).collect();
        let waiting = self.gone.iter().map(|(number, ..)| *number);
        let others = in_use.iter().copied().chain(waiting).collect();
        let mut former = self.former.load();
        let ranges: Vec<Range> = former.with(5, &due, &others, Lsn(until));
        ranges.iter().for_each(|range| former.add(*range));
        assert!(former.ranges().count() <= others.len() + 1);
        self.former.store(&former).unwrap();
        self.stage(ranges.into_iter().map(Record::FormerFiles).collect::<Vec<_>>());
        let batches = log::batches(&self.content(LOG), DATABASE).unwrap();
        let mut state = State::from_records(batches.iter().flatten().cloned()).unwrap();
        let forgotten =
            state.forget_keys(5, Lsn(self.now), |file| !in_use.contains(&file.relation));
        assert_eq!(forgotten.len(), due.len());
        let folded = state.records(DATABASE);
        drop(state);
        let kept = wrappings::with_older(&folded, batches.iter().flatten());
        self.log.compact_to(&compaction::in_place(&kept, &batches)).unwrap();
        let forgotten: HashSet<u32> = forgotten.iter().map(|file| file.relation).collect();
        self.most_keys = self.most_keys.max(self.directory.counts().unwrap().keys);
        self.directory.forget(|file, _| forgotten.contains(&file.relation)).unwrap();
    }

    /// The files in use have their keys: in memory, and in a restore of the backup that replays all
    /// WAL since.
    fn check(&mut self) {
        let restored = self.backup.take().map(|backup| {
            let records = log::replay(&backup, DATABASE).unwrap().records;
            let mut restored = State::from_records(records).unwrap();
            self.wal.drain(..).for_each(|record| drop(restored.apply(record)));
            restored
        });
        for &(number, last) in &self.in_use {
            let slot = self.directory.find(file(number)).unwrap().unwrap();
            let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
            let found = self.directory.key(slot, last, &mut wrapped).unwrap();
            assert_eq!(self.directory.current(slot).unwrap().map(|(v, _)| v), Some(last));
            if let Some(restored) = &restored {
                let entry = restored.file(file(number)).unwrap();
                assert_eq!((entry.phase.current(), entry.last_version()), (Some(last), Some(last)));
                assert_eq!(entry.keys[&last].wrapped, wrapped[..found.length]);
            }
        }
    }

    /// A clean restart: what is obsolete leaves the logs and memory, and all keys are there.
    fn restart(&mut self) {
        let capacity = self.directory.counts().unwrap().capacity;
        self.memory.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.directory = Directory::init_zeroed(self.memory, capacity).unwrap();
        for scope in [DATABASE, Scope::CLUSTER] {
            let content = self.content(&log::file_name(scope));
            let records = log::replay(&content, scope).unwrap().records;
            let count = records.len();
            records.iter().for_each(|record| self.directory.apply(record).unwrap());
            let state = State::from_records(records).unwrap();
            if scope.is_cluster() && self.wrapped_by > 1 {
                // Those in use, and those that the last rotation has replaced.
                let wal_keys = state.files().map(|(_, place)| place.keys.len()).sum::<usize>();
                let switches = state.wal_switches().count();
                let most = if self.forgets_wal_keys { 2 } else { self.wrapped_by as usize - 1 };
                assert!(state.database_keys().count() <= 2);
                assert!([switches, wal_keys].iter().all(|n| *n <= most));
            }
            let folded = state.records(scope);
            let log = if scope.is_cluster() { &mut self.cluster_log } else { &mut self.log };
            if count > folded.len() + OBSOLETE {
                log.compact(&folded).unwrap();
            }
        }
    }

    /// The number of keys of files in memory.
    fn keys(&self) -> usize {
        let files = self.directory.files().unwrap().map(Result::unwrap);
        let files = files.filter(|info| !wal::is_key_place(info.file));
        files.map(|info| self.directory.keys(info.slot).unwrap().count()).sum()
    }

    /// Reads the database's log into an empty directory, as a start does.
    fn load(&self) -> (u32, Duration) {
        let start = Instant::now();
        let contents = log::replay(&self.content(LOG), DATABASE).unwrap();
        let capacity = contents.records.len() as u32;
        let words = words(Directory::words_needed(capacity));
        let directory = Directory::init_zeroed(&words, capacity).unwrap();
        contents.records.iter().for_each(|record| directory.apply(record).unwrap());
        (directory.counts().unwrap().keys, start.elapsed())
    }
}

fn words(count: usize) -> Vec<AtomicU32> {
    (0..count).map(|_| AtomicU32::new(0)).collect()
}

/// Versions begin with 2: the first one wraps the keys of the first week, and is not in the log.
fn database_key(version: u32, master_version: u32) -> Record {
    Record::DatabaseKey {
        scope: Scope::CLUSTER,
        version: key_version(version),
        key: DatabaseKey::new(
            CheckValue::from_bytes([version as u8; 16]),
            Wrapping::new(("vault", "main"), master_version.into(), vec![version as u8; 101], 7),
        ),
    }
}

fn wal_key(version: u32, wrapped_by: u32) -> Record {
    let (file, place) = wal::key_place(key_version(version));
    Record::DataKey {
        file,
        version: place,
        cipher: 1,
        scope: Scope::CLUSTER,
        key_version: key_version(wrapped_by),
        wrapped: vec![version as u8; 92],
        created: 7,
    }
}

fn switch(version: u32, start: u64) -> Record {
    let phase = wal::WalPhase { version: Some(key_version(version)), plaintext: false };
    Record::WalSwitch(wal::Switch { step: version, start: Lsn(start), phase })
}

fn simulate(days: u64, truncations: u64, forgets_wal_keys: bool) {
    let (capacity, start) = (truncations as u32 * 3 + 2000, Instant::now());
    let (directory, former) =
        (words(Directory::words_needed(capacity)), words(Table::words_needed(1000)));
    let storage = Memory::default();
    let mut world = World {
        storage: &storage,
        log: Log::create(&storage, [7; 16], DATABASE, &[]).unwrap(),
        cluster_log: Log::create(&storage, [7; 16], Scope::CLUSTER, &[]).unwrap(),
        memory: &directory,
        directory: Directory::init_zeroed(&directory, capacity).unwrap(),
        former: Table::new(&former),
        in_use: Vec::new(),
        next: 16_384,
        gone: VecDeque::new(),
        now: 1,
        wrapped_by: 1,
        backup: None,
        wal: Vec::new(),
        largest: 0,
        most_keys: 0,
        replaced: FormerVersions::default(),
        forgets_wal_keys,
    };
    for _ in 0..20 {
        let (number, version, new) = world.new_file();
        world.in_use.push((number, version));
        world.stage(new);
    }
    for day in 0..days {
        let morning = world.now;
        world.truncate(truncations);
        if day % 7 == 6 {
            world.rotate();
        }
        world.check();
        // A restore takes as long as a day. Later only two a week: before and after the rotation.
        if day < 21 || day % 7 >= 5 {
            world.backup = Some(world.content(LOG));
        }
        world.now += 1;
        world.forget(morning);
        // Some days after the rotation.
        if day % 7 == 2 {
            world.forget_replaced();
        }
        if day % QUARTER == QUARTER - 1 {
            world.restart();
        }
        if day % 365 == 364 || day == days - 1 {
            let World { largest, most_keys, .. } = world;
            let (passed, ranges) = (day + 1, world.former.load().ranges().count());
            eprintln!(
                "{passed} days: at most {largest} bytes, {most_keys} keys; {ranges} ranges; {:.0?}",
                start.elapsed()
            );
        }
    }
    world.truncate(truncations);
    world.check();
    let (loaded, took) = world.load();
    eprintln!("{loaded} keys loaded in {took:.1?}");
    assert_eq!(loaded as usize, world.keys());
    let rotations = days / 7;
    assert_eq!(u64::from(world.in_use.last().unwrap().1.get()), 1 + rotations);
    // Keys of two days and of files in use, with those that were replaced since the last restart.
    let (keys, largest) = (u64::from(world.most_keys), world.largest);
    assert!(keys <= 2 * truncations + 1000, "{keys} keys");
    // With a rewrapping of all of them. Each WAL key is wrapped anew in each week of a quarter.
    let wal_keys = if forgets_wal_keys { 2 } else { rotations };
    assert!(largest <= 700 * truncations + 200_000 + 14 * 200 * wal_keys, "{largest} bytes");
    if truncations == A_SECOND {
        assert!(largest < 64 << 20, "{largest} bytes");
    }
}

/// Truncations in a day.
const A_SECOND: u64 = 86_400;

#[test]
fn keys_do_not_add_up_over_the_years() {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse().ok());
    for forgets_wal_keys in [false, true] {
        let truncations = number("PAGEVAULT_TRUNCATIONS").unwrap_or(A_SECOND);
        match number("PAGEVAULT_DAYS") {
            Some(days) => simulate(days, truncations, forgets_wal_keys),
            None if cfg!(miri) => simulate(3, 10, forgets_wal_keys),
            None => simulate(30, 200, forgets_wal_keys),
        }
    }
}
