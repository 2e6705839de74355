//! Years of a busy table: it is truncated once a second, keys of every kind are rotated once a
//! week, a backup is made each day, and keys are forgotten one day after their files are gone.
//!
//! `PAGEVAULT_DAYS=3650` (`make models`) simulates ten years; otherwise a few short days. The clock
//! is WAL: one byte a second.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::former::{Range, Table};
use pagevault_keystore::log::{self, Log};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::state::State;
use pagevault_keystore::storage::{Storage, SyncError};
use pagevault_keystore::{DataKeyVersion, Lsn, Record, compaction, wrappings};

use crate::arbitrary::{DATABASE, current, data_key, file, sealed_only, version};

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

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
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

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        let file = files.remove(from).unwrap();
        files.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.borrow_mut().remove(name);
        Ok(())
    }

    fn sync_data(&self, _name: &str) -> Result<(), SyncError> {
        Ok(())
    }

    fn sync(&self, _name: &str) -> io::Result<()> {
        Ok(())
    }
}

const LOG: &str = "5.keys";

struct World<'a> {
    storage: &'a Memory,
    log: Log<'a, Memory>,
    directory: Directory<'a>,
    former: Table<'a>,
    /// Numbers of files in use, with their present versions. The first is the busy table's.
    in_use: Vec<(u32, DataKeyVersion)>,
    next: u32,
    /// Gone, with the last version and when.
    gone: VecDeque<(u32, DataKeyVersion, u64)>,
    now: u64,
    wrapped_by: u32,
    /// What was logged, by day, for the last two days.
    wal: VecDeque<Vec<Record>>,
    largest: u64,
    most_keys: u32,
}

impl World<'_> {
    fn stage(&mut self, records: Vec<Record>) {
        self.log.stage(&records, Lsn(self.now)).unwrap();
        records.iter().for_each(|record| self.directory.apply(record).unwrap());
        self.wal.back_mut().unwrap().extend(records);
        self.largest = self.largest.max(self.log.position().end);
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

    fn truncate(&mut self, times: u64) {
        // In batches, as if of one transaction.
        const AT_ONCE: u64 = 64;
        let mut left = times;
        while left > 0 {
            let mut records = Vec::new();
            for _ in 0..left.min(AT_ONCE) {
                let (number, version, new) = self.new_file();
                let (old, last) = std::mem::replace(&mut self.in_use[0], (number, version));
                self.gone.push_back((old, last, self.now));
                records.extend(new);
                self.now += 1;
            }
            left -= left.min(AT_ONCE);
            self.stage(records);
        }
    }

    /// New data keys for all files in use, a file that takes the place of another one, and a new
    /// database key.
    fn rotate(&mut self) {
        for place in 1..self.in_use.len() {
            let (number, last) = self.in_use[place];
            let next = DataKeyVersion::after(Some(last)).unwrap();
            let key = data_key(number, next.get(), self.wrapped_by, number as u8);
            self.stage(vec![key, current(number, next.get())]);
            self.in_use[place] = (number, next);
        }
        let (number, version, new) = self.new_file();
        let replaced = 1 + (self.wrapped_by as usize) % (self.in_use.len() - 1);
        let (old, last) = std::mem::replace(&mut self.in_use[replaced], (number, version));
        self.gone.push_back((old, last, self.now));
        self.stage(new.into());
        self.wrapped_by += 1;
        let state = self.state();
        let keys = state.files().flat_map(|(file, entry)| {
            entry.keys.keys().map(move |version| (file.relation, version.get()))
        });
        let rewrapped: Vec<_> =
            keys.map(|(number, of)| data_key(number, of, self.wrapped_by, number as u8)).collect();
        rewrapped.chunks(10_000).for_each(|records| self.stage(records.to_vec()));
    }

    fn content(&self) -> Vec<u8> {
        self.storage.0.borrow().get(LOG).cloned().unwrap()
    }

    fn state(&self) -> State {
        let contents = log::replay(&self.content(), DATABASE).unwrap();
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
        let in_use: BTreeSet<u32> =
            self.in_use.iter().chain(&[]).map(|(number, _)| *number).collect();
        let waiting = self.gone.iter().map(|(number, ..)| *number);
        let others = in_use.iter().copied().chain(waiting).collect();
        let mut former = self.former.load();
        let ranges: Vec<Range> = former.with(5, &due, &others, Lsn(until));
        ranges.iter().for_each(|range| former.add(*range));
        assert!(former.ranges().count() <= others.len() + 1);
        self.former.store(&former).unwrap();
        self.stage(ranges.into_iter().map(Record::FormerFiles).collect());
        let batches = log::batches(&self.content(), DATABASE).unwrap();
        let mut state = State::from_records(batches.iter().flatten().cloned()).unwrap();
        let forgotten =
            state.forget_keys(5, Lsn(self.now), |file| !in_use.contains(&file.relation));
        assert_eq!(forgotten.len(), due.len());
        let folded = state.records(DATABASE);
        drop(state);
        let kept = wrappings::with_older(&folded, batches.iter().flatten());
        self.log.compact_to(&compaction::in_place(&kept, &batches)).unwrap();
        let forgotten: BTreeSet<u32> = forgotten.iter().map(|file| file.relation).collect();
        self.most_keys = self.most_keys.max(self.directory.counts().unwrap().keys);
        self.directory.forget(|file, _| forgotten.contains(&file.relation)).unwrap();
    }

    /// The files in use have their keys: in memory, and in a restore of `backup` that replays all
    /// WAL since.
    fn check(&self, backup: &[u8]) {
        let mut restored =
            State::from_records(log::replay(backup, DATABASE).unwrap().records).unwrap();
        let wal = self.wal.iter().flatten().cloned();
        wal.for_each(|record| drop(restored.apply(record)));
        for &(number, last) in &self.in_use {
            let slot = self.directory.find(file(number)).unwrap().unwrap();
            let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
            let found = self.directory.key(slot, last, &mut wrapped).unwrap();
            let entry = restored.file(file(number)).unwrap();
            assert_eq!((entry.phase.current(), entry.last_version()), (Some(last), Some(last)));
            assert_eq!(entry.keys[&last].wrapped, wrapped[..found.length]);
            assert_eq!(self.directory.current(slot).unwrap().map(|(v, _)| v), Some(last));
        }
    }
}

fn simulate(days: u64, truncations: u64) -> (u64, u32, usize) {
    let capacity = truncations as u32 * 3 + 100;
    let words = |count| (0..count).map(|_| AtomicU32::new(0)).collect::<Vec<_>>();
    let (directory, former) =
        (words(Directory::words_needed(capacity)), words(Table::words_needed(1000)));
    let storage = Memory::default();
    let mut world = World {
        storage: &storage,
        log: Log::create(&storage, [7; 16], DATABASE, &[]).unwrap(),
        directory: Directory::init_zeroed(&directory, capacity).unwrap(),
        former: Table::new(&former),
        in_use: Vec::new(),
        next: 16_384,
        gone: VecDeque::new(),
        now: 1,
        wrapped_by: 1,
        wal: VecDeque::from([Vec::new()]),
        largest: 0,
        most_keys: 0,
    };
    for _ in 0..20 {
        let (number, version, new) = world.new_file();
        world.in_use.push((number, version));
        world.stage(new.into());
    }
    let mut backup = world.content();
    for day in 0..days {
        let morning = world.now;
        world.truncate(truncations);
        if day % 7 == 6 {
            world.rotate();
        }
        world.check(&backup);
        backup = world.content();
        // What is logged from now on is needed by this backup only.
        world.wal = VecDeque::from([Vec::new()]);
        world.now += 1;
        world.forget(morning);
    }
    world.truncate(truncations);
    world.check(&backup);
    assert!(world.in_use.iter().skip(1).any(|(_, last)| days < 14 || *last > version(1)));
    (world.largest, world.most_keys, world.former.load().ranges().count())
}

#[test]
fn keys_do_not_add_up_over_the_years() {
    let days = std::env::var("PAGEVAULT_DAYS").ok().and_then(|days| days.parse().ok());
    let (days, truncations) = match days {
        Some(days) => (days, 86_400),
        None => (if cfg!(miri) { 3 } else { 30 }, if cfg!(miri) { 10 } else { 200 }),
    };
    let start = Instant::now();
    let (largest, keys, ranges) = simulate(days, truncations);
    eprintln!(
        "{days} days, {truncations} truncations each: log at most {largest} bytes, {keys} keys, \
         {ranges} ranges, in {:.0?}",
        start.elapsed()
    );
    // With keys of two days, and a rewrapping of all of them: a former day's, and today's.
    assert!(u64::from(keys) <= 2 * truncations + 1000, "{keys} keys");
    assert!(largest <= 800 * truncations + 100_000, "{largest} bytes");
}
