//! Shared memory without locks: readers see whole entries whatever one writer does meanwhile, in
//! every order of events that the memory model allows. And each ordering in the sources is needed:
//! taken away, a model here breaks.

mod reuse;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use loom::thread::{self, JoinHandle};
use pagevault_keystore::{DataKeyVersion, KeyVersion, Lsn, Phase, Record, RelFile, Scope};
use pagevault_models::directory::{Directory, DirectoryError, FileSlot, KeyInfo};
use pagevault_models::shmem::{Notes, WriterMarks};
use pagevault_models::sync::{self, AtomicU32, Ordering, Place, fence};

const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 7 };
const OTHER: RelFile = RelFile { relation: 8, ..FILE };
const CAPACITY: u32 = 2;

#[derive(Clone)]
struct Memory(Arc<Vec<AtomicU32>>);

impl Memory {
    fn new() -> Self {
        let words = (0..Directory::words_needed(CAPACITY)).map(|_| AtomicU32::new(0));
        let words: Vec<_> = words.collect();
        assert!(Directory::init_zeroed(&words, CAPACITY).is_ok());
        Self(Arc::new(words))
    }

    /// With a key of [`FILE`].
    fn with_key() -> (Self, FileSlot) {
        let memory = Self::new();
        let slot = memory.insert(FILE, 1, 1);
        (memory, slot)
    }

    /// A process that reads. It is the thread that runs last: then it may read all that was stored.
    fn reader(&self, read: impl FnOnce(Self) + 'static) -> JoinHandle<()> {
        let memory = self.clone();
        thread::spawn(move || read(memory))
    }

    fn directory(&self) -> Directory<'_> {
        Directory::at(&self.0, CAPACITY).unwrap_or_else(|error| panic!("{error}"))
    }

    fn insert(&self, file: RelFile, number: u16, mark: u8) -> FileSlot {
        let slot = self.directory().insert(file, &info(number, mark), &[mark; 4]);
        slot.unwrap_or_else(|error| panic!("{error}"))
    }

    fn rewrap(&self, slot: FileSlot, number: u16, mark: u8) {
        let rewrapped = self.directory().replace_wrapping(slot, &info(number, mark), &[mark; 4]);
        assert_eq!(rewrapped, Ok(()));
    }

    fn destroy(&self, slot: FileSlot, through: u16, lsn: u64) {
        assert_eq!(self.directory().destroy(slot, version(through), 1, Lsn(lsn)), Ok(()));
    }

    fn forget(&self, file: RelFile) {
        assert_eq!(self.directory().forget(|other, _| other == file), Ok(1));
    }

    /// The mark of a key, all parts of which must have the same.
    fn key(&self, file: RelFile, number: u16) -> Option<u8> {
        let slot = self.directory().find(file).unwrap_or_else(|error| panic!("{error}"))?;
        self.key_at(slot, number)
    }

    fn key_at(&self, slot: FileSlot, number: u16) -> Option<u8> {
        let mut wrapped = [0; 4];
        match self.directory().key(slot, version(number), &mut wrapped) {
            Ok(found) => {
                let [mark, ..] = wrapped;
                assert_ne!(mark, 0, "wiped");
                assert_eq!((found, wrapped), (info(number, mark), [mark; 4]), "torn");
                Some(mark)
            }
            Err(DirectoryError::NoKey { .. } | DirectoryError::Gone) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

const fn version(number: u16) -> DataKeyVersion {
    match DataKeyVersion::new(number) {
        Some(version) => version,
        None => DataKeyVersion::LAST,
    }
}

fn info(number: u16, mark: u8) -> KeyInfo {
    let scope = Scope::database(mark.into());
    let key_version = KeyVersion::new(mark.into()).unwrap_or(KeyVersion::LAST);
    KeyInfo { version: version(number), cipher: 1, scope, key_version, length: 4 }
}

/// A key is wrapped again, and again, while it is read: the second time its first body is used.
fn key_is_rewrapped() {
    let (memory, slot) = Memory::with_key();
    let reader = memory.reader(|memory| assert!(memory.key(FILE, 1).is_some()));
    (2..=3).for_each(|mark| memory.rewrap(slot, 1, mark));
    let _ = reader.join();
}

/// The body that a key leaves is used by another key, while somebody still reads it.
fn body_changes_hands() {
    let (memory, slot) = Memory::with_key();
    memory.insert(FILE, 2, 10);
    let reader = memory.reader(|memory| assert!(memory.key(FILE, 1).is_some_and(|mark| mark < 10)));
    memory.rewrap(slot, 1, 2);
    memory.rewrap(slot, 2, 20);
    let _ = reader.join();
}

/// A file and its key are added in front of a file that is looked for, or that is looked for
/// itself.
fn file_is_added() {
    let (memory, _) = Memory::with_key();
    let reader = memory.reader(|memory| {
        assert!(memory.key(OTHER, 1).is_none_or(|mark| mark == 2));
        assert_eq!(memory.key(FILE, 1), Some(1));
    });
    memory.insert(OTHER, 1, 2);
    let _ = reader.join();
}

/// Who goes by the number of files sees whole ones.
fn files_are_listed() {
    let memory = Memory::new();
    let reader = memory.reader(|memory| {
        let files = memory.directory().files().into_iter().flatten();
        assert!(files.flatten().all(|info| info.file == FILE));
    });
    memory.insert(FILE, 1, 1);
    let _ = reader.join();
}

/// A file gets another key, and is written with it: who sees that finds the key.
fn file_gets_another_key() {
    let (memory, slot) = Memory::with_key();
    let reader = memory.reader(move |memory| {
        if let Ok(Some((current, _))) = memory.directory().current(slot) {
            assert_eq!(memory.key(FILE, current.get()), Some(2));
        }
    });
    memory.insert(FILE, 2, 2);
    let phase = Phase { version: Some(version(2)), plaintext: false };
    assert_eq!(memory.directory().enter(slot, phase), Ok(()));
    let _ = reader.join();
}

/// Who sees a new phase of a file in use also sees that pages may lie there otherwise.
fn file_is_rewritten() {
    let (memory, slot) = Memory::with_key();
    let reader = memory.reader(move |memory| {
        let writing = memory.directory().writing(slot);
        assert!(writing.is_ok_and(|writing| writing.current.is_none() || writing.mixed));
    });
    let phase = Phase { version: Some(version(1)), plaintext: false };
    let announced = Record::Rewriting { file: FILE, phase, done: false };
    let entered = Record::Current { file: FILE, version: version(1) };
    assert_eq!(memory.directory().apply(&announced), Ok(()));
    assert_eq!(memory.directory().apply(&entered), Ok(()));
    let _ = reader.join();
}

/// A key is destroyed while it is read: it is had as a whole, or not at all.
fn key_is_destroyed() {
    let (memory, slot) = Memory::with_key();
    let reader = memory.reader(|memory| {
        assert!(memory.key(FILE, 1).is_none_or(|mark| mark == 1));
    });
    memory.destroy(slot, 1, 8);
    let _ = reader.join();
    assert_eq!(memory.key(FILE, 1), None);
}

/// The same with a key that was wrapped again just before: its former wrapping is wiped as well.
fn rewrapped_key_is_destroyed() {
    let (memory, slot) = Memory::with_key();
    let reader = memory.reader(|memory| {
        assert!(memory.key(FILE, 1).is_none_or(|mark| mark <= 2));
    });
    memory.rewrap(slot, 1, 2);
    memory.destroy(slot, 1, 8);
    let _ = reader.join();
}

/// Where a key is gone, it is known up to where its pages were changed, though more keys of the
/// file are destroyed at the same time: low and high half of an LSN belong together.
fn more_keys_are_destroyed() {
    const FIRST: u64 = 1 << 32 | 7;
    const SECOND: u64 = 2 << 32 | 3;
    const THIRD: u64 = 3 << 32 | 1;
    let (memory, slot) = Memory::with_key();
    memory.destroy(slot, 1, FIRST);
    let reader = memory.reader(move |memory| {
        let destroyed = memory.directory().destroyed(slot);
        let ever = [(1, FIRST), (2, SECOND), (3, THIRD)];
        let ever = ever.map(|(through, lsn)| Ok((Some(version(through)), Lsn(lsn))));
        assert!(ever.contains(&destroyed), "{destroyed:x?}");
    });
    memory.destroy(slot, 2, SECOND);
    memory.destroy(slot, 3, THIRD);
    let _ = reader.join();
}

/// A process keeps a key that it has unwrapped until destructions are counted:
/// `keys/usage/cache.rs` asks first, and `persist::apply` counts last.
fn destruction_reaches_caches() {
    let (memory, slot) = Memory::with_key();
    let destructions = Arc::new(AtomicU32::new(0));
    let counted = destructions.clone();
    let reader = memory.reader(move |memory| {
        let (mut cached, mut asked) = (None, 0);
        for _ in 0..2 {
            let now = counted.load(Ordering::Acquire);
            if now != asked {
                (cached, asked) = (None, now);
            }
            cached = cached.or_else(|| memory.key(FILE, 1));
            assert!(now == 0 || cached.is_none(), "a destroyed key is used");
        }
    });
    memory.destroy(slot, 1, 8);
    destructions.store(1, Ordering::Release);
    let _ = reader.join();
}

/// Who changes a file's key waits for everybody who may have seen the former one, and then sees
/// what they have written.
fn writers_are_awaited() {
    let turns = WriterMarks::default();
    let (key, page) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicU32::new(0)));
    let writer = {
        let (key, page) = (key.clone(), page.clone());
        thread::spawn(move || {
            turns.begin(0, FILE.relation);
            let seen = key.load(Ordering::Relaxed);
            page.store(seen, Ordering::Relaxed);
            turns.end(0);
            // Another file comes next.
            turns.begin(0, OTHER.relation);
            turns.end(0);
        })
    };
    key.store(2, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    if let Some(number) = turns.set_for(0, FILE.relation) {
        while turns.has(0, number) {
            sync::spin_loop();
        }
    }
    fence(Ordering::SeqCst);
    // Of the page as it is now: no more comes under the former key.
    let proven = page.load(Ordering::Relaxed);
    let _ = writer.join();
    let last = page.load(Ordering::Relaxed);
    assert!(proven == last || last == 2, "a page under key {last} came after {proven} was proven");
}

/// The same, with all orders in which a writer that has begun once, and ends, can be met.
fn writer_is_met() {
    let turns = WriterMarks::default();
    let (key, page) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicU32::new(0)));
    let writer = {
        let (key, page) = (key.clone(), page.clone());
        thread::spawn(move || {
            turns.begin(0, FILE.relation);
            page.store(key.load(Ordering::Relaxed), Ordering::Relaxed);
            turns.end(0);
        })
    };
    key.store(2, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let done = turns.set_for(0, FILE.relation).is_none_or(|number| !turns.has(0, number));
    fence(Ordering::SeqCst);
    let proven = page.load(Ordering::Relaxed);
    let _ = writer.join();
    let last = page.load(Ordering::Relaxed);
    assert!(!done || proven == last || last == 2, "key {last} came after {proven} was proven");
}

/// A page that must not be written over is noted, or its writer hears that no key will come.
fn notes_are_not_missed() {
    let notes = Notes::default();
    let writer = thread::spawn(move || notes.note(FILE, version(1), 3));
    let found = notes.settle();
    assert!(found.iter().all(|note| *note == (FILE, version(1), 3)), "{found:?}");
    let may_come = writer.join().unwrap_or(true);
    assert!(!may_come || !found.is_empty(), "nobody heard of it");
}

/// Two processes note at the same time: both notes are whole.
fn two_processes_note() {
    let notes = Notes::default();
    let one = thread::spawn(move || notes.note(FILE, version(1), 3));
    notes.note(OTHER, version(1), 4);
    let _ = one.join();
    let mut found = notes.notes();
    found.sort_unstable();
    assert_eq!(found, [(FILE, version(1), 3), (OTHER, version(1), 4)]);
}

const MODELS: &[(&str, fn())] = &[
    ("key_is_rewrapped", key_is_rewrapped),
    ("body_changes_hands", body_changes_hands),
    ("file_is_added", file_is_added),
    ("files_are_listed", files_are_listed),
    ("file_gets_another_key", file_gets_another_key),
    ("file_is_rewritten", file_is_rewritten),
    ("key_is_destroyed", key_is_destroyed),
    ("rewrapped_key_is_destroyed", rewrapped_key_is_destroyed),
    ("more_keys_are_destroyed", more_keys_are_destroyed),
    ("entry_in_the_way_is_used_again", reuse::entry_in_the_way_is_used_again),
    ("slot_is_used_again", reuse::slot_is_used_again),
    ("files_are_listed_while_one_is_forgotten", reuse::files_are_listed_while_one_is_forgotten),
    ("destruction_reaches_caches", destruction_reaches_caches),
    ("writers_are_awaited", writers_are_awaited),
    ("writer_is_met", writer_is_met),
    ("notes_are_not_missed", notes_are_not_missed),
    ("two_processes_note", two_processes_note),
];

/// Models in which more than one thread stores.
const BOTH_STORE: &[&str] = &["writer_is_met", "notes_are_not_missed", "two_processes_note"];

/// Every order of events, or so many; how many there were.
fn explore(name: &str, model: fn(), most: Option<usize>) -> usize {
    let orders = Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_permutations = most;
    let check = || {
        let counted = counted.clone();
        builder.check(move || {
            counted.fetch_add(1, Relaxed);
            model();
        });
    };
    if BOTH_STORE.contains(&name) {
        sync::meeting(check)
    } else {
        check()
    }
    orders.load(Relaxed)
}

/// `PAGEVAULT_MODELS=deep` (`make models`) leaves out nothing.
#[test]
fn every_order_of_events_is_right() {
    const SHORT: usize = 20_000;
    let is_deep = std::env::var("PAGEVAULT_MODELS").is_ok_and(|depth| depth == "deep");
    for (name, model) in MODELS {
        let start = Instant::now();
        let orders = explore(name, *model, (!is_deep).then_some(SHORT));
        eprintln!("shared memory, {name}: {orders} orders of events in {:.1?}", start.elapsed());
        assert!(orders > 5, "{name}: {orders}");
    }
}
/// Orderings without which a model breaks: the model, the source, the operation, and what its line
/// says.
const NEEDED: &[(&str, &str, &str, &str)] = &[
    ("file_is_added", "directory/write.rs", "store", "bucket.store(index + 1, Ordering::Release)"),
    (
        "files_are_listed",
        "directory/write.rs",
        "store",
        "count.store(index + 1, Ordering::Release)",
    ),
    ("file_gets_another_key", "directory/write.rs", "store", "entry[file::PHASE].store("),
    ("key_is_rewrapped", "directory/write.rs", "store", "entry[key::BODY].store(new"),
    ("key_is_rewrapped", "directory/write.rs", "fence", "fence(Ordering::Release)"),
    ("key_is_rewrapped", "directory/read.rs", "fence", "fence(Ordering::Acquire)"),
    ("key_is_destroyed", "directory/write.rs", "fence", "fence(Ordering::Release)"),
    ("more_keys_are_destroyed", "directory/write.rs", "store", "destroyed.pack()"),
    ("more_keys_are_destroyed", "directory/read.rs", "fence", "fence(Ordering::Acquire)"),
    ("entry_in_the_way_is_used_again", "directory/read.rs", "load", "entry[file::NEXT].load("),
    ("entry_in_the_way_is_used_again", "directory/reuse.rs", "fence", "fence(Ordering::Release)"),
    ("slot_is_used_again", "directory/read.rs", "load", "entry[file::PHASE].load("),
    (
        "files_are_listed_while_one_is_forgotten",
        "directory/write.rs",
        "store",
        "entry[file::GENERATION].store(generation",
    ),
    ("writers_are_awaited", "shmem/writers.rs", "store", "self.file.store(file, Release)"),
    ("writers_are_awaited", "shmem/writers.rs", "store", "& !1, Release)"),
    ("writers_are_awaited", "shmem/writers.rs", "fence", "fence(SeqCst)"),
    ("notes_are_not_missed", "shmem/written_over.rs", "store", "place.version.store("),
];

/// The source at a place.
fn line_of((file, line, _): Place) -> String {
    let source = std::fs::read_to_string(Path::new("..").join(file)).unwrap_or_default();
    source.lines().nth(line as usize - 1).unwrap_or_default().to_owned()
}

#[test]
fn an_ordering_that_is_missing_is_found() {
    /// Enough for each of them, and a bound for what is looked for in vain.
    const MOST: Option<usize> = Some(3000);
    for (name, file, operation, text) in NEEDED {
        let model = MODELS.iter().find(|(other, _)| other == name).map(|(_, model)| *model);
        let model = model.unwrap_or_else(|| panic!("no model {name}"));
        let met = sync::places(|| {
            explore(name, model, Some(50));
        });
        let is_meant = |place: &&Place| {
            place.0.ends_with(file) && place.2 == *operation && line_of(**place).contains(text)
        };
        let mut places = met.iter().filter(is_meant);
        let breaks = |place: &Place| {
            let explored = || catch_unwind(AssertUnwindSafe(|| explore(name, model, MOST)));
            sync::weakened(*place, explored).is_err()
        };
        assert!(places.any(breaks), "{name} does without {operation} of {file}: {text}");
        eprintln!("{name} needs {operation} of {file}: {text}");
    }
}

/// Why [`sync::meeting`] exists. Once this fails, loom has learned it, and that can go.
#[test]
fn a_load_before_a_store_hides_another() {
    fn model() {
        let word = Arc::new(AtomicU32::new(0));
        let other = word.clone();
        let adds = thread::spawn(move || {
            let before = other.load(Ordering::Relaxed);
            other.store(before + 1, Ordering::Relaxed);
        });
        word.load(Ordering::Relaxed);
        let _ = adds.join();
    }
    assert_eq!(explore("", model, None), 1, "orders of events");
    assert!(sync::meeting(|| explore("", model, None)) > 1, "orders of events");
}
