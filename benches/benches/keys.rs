//! What a data key costs beside its pages: bytes in memory, in the key file and in WAL, and the
//! time of server starts, of the first access to a key, and of rewriting the key file.
//!
//! `cargo bench -p pagevault-benches --bench keys`, with numbers of keys as arguments if wanted.
//!
//! No server takes part: what the postmaster does at a start is repeated here step by step
//! (extension/src/keys/load.rs, store/persist.rs), in a process of its own, whose resident memory
//! counts. Times are processor time, the least of some rounds.
#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::collections::HashSet;
use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use pagevault_cipher::wrap::{self, WrapKey};
use pagevault_cipher::{CipherId, DataKey, PageKey};
use pagevault_keystore::directory::Directory;
use pagevault_keystore::former::Range;
use pagevault_keystore::log::{self, Contents, Log, Position, Trust};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::state::State;
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{
    DataKeyVersion, KeyVersion, Lsn, Phase, Record, RelFile, Scope, batch, compaction,
    data_key_aad, wrappings,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const ROUNDS: usize = 3;
const HOME: Scope = Scope::database(5);
const CIPHER: CipherId = CipherId::Aes256XtsAuth;
const VERSION: DataKeyVersion = DataKeyVersion::FIRST;
const WRAPPED_BY: (Scope, KeyVersion) = (Scope::CLUSTER, KeyVersion::FIRST);
const FIRST_FILE: u32 = 16_384;
const WRAP_KEY: [u8; 32] = [7; 32];

/// What one step takes.
#[derive(Clone, Copy)]
struct Cost {
    /// Processor time of this thread.
    milliseconds: f64,
    /// Bytes of resident memory that were added, beside the directory: the most at once, and what
    /// the C library keeps of it, which the server gives back (extension/src/pg/heap.rs).
    memory: [f64; 2],
}

impl Cost {
    fn of(work: impl FnOnce() -> Result<()>) -> Result<Self> {
        fs::write("/proc/self/clear_refs", "5")?; // resets the peak
        let before = resident("VmRSS:")?;
        let start = nanoseconds()?;
        work()?;
        let milliseconds = (nanoseconds()? - start) / 1e6;
        let memory = [resident("VmHWM:")? - before, resident("VmRSS:")? - before];
        Ok(Self { milliseconds, memory })
    }
}

fn nanoseconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split(' ').next().unwrap_or_default().parse()?)
}

fn resident(name: &str) -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)).ok_or("no such line")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

fn file(number: u32) -> RelFile {
    RelFile { tablespace: 1663, database: HOME.number(), relation: FIRST_FILE + number }
}

/// What is recorded of a new file.
fn records(number: u32, key: &WrapKey) -> Result<[Record; 3]> {
    let file = file(number);
    let mut wrapped = vec![0; MAX_WRAPPED_DATA_KEY];
    let aad = data_key_aad(file, VERSION, CIPHER as u8);
    wrap::wrap(key, &aad, DataKey::random(CIPHER)?.expose(), &mut wrapped)?;
    let (scope, key_version) = WRAPPED_BY;
    let (version, cipher, created) = (VERSION, CIPHER as u8, 7);
    Ok([
        Record::DataKey { file, version, cipher, scope, key_version, wrapped, created },
        Record::Current { file, version },
        Record::SealedOnly { file, phase: Phase::under(version) },
    ])
}

/// Bytes of a WAL record with this batch: header, length of the data, scope, keystore id, batch,
/// rounded up (xlogrecord.h, extension/src/pg/wal.rs).
fn wal_record(batch: &[u8]) -> usize {
    let data = 4 + 16 + batch.len();
    let length = if data <= 255 { 2 } else { 5 };
    (24 + length + data).next_multiple_of(8)
}

fn fill(directory: &Directory<'_>, contents: &Contents) -> Result<()> {
    Ok(contents.records.iter().try_for_each(|record| directory.apply(record))?)
}

/// A start after a clean shutdown.
fn start(storage: &FileStorage, path: &Path, directory: &Directory<'_>) -> Result<()> {
    let torn = log::replay(&fs::read(path)?, HOME)?.torn;
    assert_eq!(torn, 0);
    let (_, contents) = Log::open(storage, HOME, Trust::All)?.ok_or("no log")?;
    let state = State::from_records(contents.records.iter().cloned())?;
    assert_eq!(contents.records.len(), state.count(HOME));
    drop(state);
    fill(directory, &contents)
}

/// A start that replays WAL.
fn start_after_crash(storage: &FileStorage, directory: &Directory<'_>) -> Result<()> {
    let trust = Trust::Settled { redo: Lsn::MAX };
    let (mut log, mut contents) = Log::open(storage, HOME, trust)?.ok_or("no log")?;
    assert!(!wrappings::has_unknown(&contents.records, &HashSet::from([WRAPPED_BY])));
    contents.records = State::from_records(contents.records)?.records(HOME);
    log.compact(&contents.records)?;
    fill(directory, &contents)
}

/// Forgets the keys of an hour of one TRUNCATE a second.
fn forget(log: &mut Log<'_, FileStorage>, path: &Path) -> Result<()> {
    let range = Range {
        database: HOME.number(),
        first: FIRST_FILE,
        last: FIRST_FILE + 3599,
        through: VERSION,
        gone: Lsn(1),
    };
    let batches = log::batches(&fs::read(path)?, HOME)?;
    let mut state = State::from_records(batches.iter().flatten().cloned())?;
    state.apply(Record::FormerFiles(range))?;
    assert_eq!(state.forget_keys(range.database, range.gone, |_| true).len(), 3600);
    let folded = state.records(HOME);
    drop(state);
    let kept = wrappings::with_older(&folded, batches.iter().flatten());
    Ok(log.compact_to(&compaction::in_place(&kept, &batches))?)
}

/// Finds, copies, unwraps and expands the key of each file once, in an order without locality, as
/// the first access of a process to a file does. Returns nanoseconds for one.
fn first_access(directory: &Directory<'_>, keys: u32, key: &WrapKey) -> Result<f64> {
    // A prime number.
    const STEP: u64 = 4_294_967_291;
    let (mut wrapped, mut plain) = ([0; MAX_WRAPPED_DATA_KEY], [0; 64]);
    let cost = Cost::of(|| {
        for n in 0..u64::from(keys) {
            let file = file((n * STEP % u64::from(keys)) as u32);
            let slot = directory.find(file)?.ok_or("no file")?;
            let found = directory.key(slot, VERSION, &mut wrapped)?;
            let aad = data_key_aad(file, VERSION, found.cipher);
            let length = wrap::unwrap(key, &aad, &wrapped[..found.length], &mut plain)?;
            black_box(PageKey::new(&DataKey::from_bytes(CIPHER, &plain[..length])?));
        }
        Ok(())
    })?;
    Ok(cost.milliseconds * 1e6 / f64::from(keys))
}

const STEPS: [&str; 3] = ["start", "start after a crash", "forgetting 3600 keys, under the lock"];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [step, keys, directory] = &arguments[..]
        && let Ok(keys) = keys.parse()
    {
        return take_step(step, keys, Path::new(directory));
    }
    let numbers: Vec<u32> = arguments.iter().filter_map(|text| text.parse().ok()).collect();
    let numbers = if numbers.is_empty() { vec![90_010, 100_000, 1_000_000] } else { numbers };
    let key = WrapKey::new(&WRAP_KEY);
    let one = batch::encode(&records(0, &key)?)?;
    let rewrapped: Vec<Record> =
        (0..10_000).map(|n| Ok(records(n, &key)?[0].clone())).collect::<Result<_>>()?;
    let of_batch = wal_record(&batch::encode(&rewrapped)?) as f64 / rewrapped.len() as f64;
    println!("WAL, bytes a key: {} of a new file, {of_batch:.1} in a rewrapping", wal_record(&one));
    numbers.into_iter().try_for_each(|keys| measure(keys, &key))
}

/// In a process of its own.
fn take_step(step: &str, keys: u32, place: &Path) -> Result<()> {
    let storage = FileStorage::new(place)?;
    let path = place.join(log::file_name(HOME));
    let words: Vec<_> = (0..Directory::words_needed(keys)).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init_zeroed(&words, keys)?;
    // Is not to be counted as added.
    words.iter().for_each(|word| word.store(0, Relaxed));
    let contents = log::replay(&fs::read(&path)?[..log::HEADER], HOME)?;
    let end = fs::metadata(&path)?.len();
    let mut log = Log::resume(&storage, Position { end, ..contents.position });
    let cost = Cost::of(|| match STEPS.iter().position(|known| *known == step) {
        Some(0) => start(&storage, &path, &directory),
        Some(1) => start_after_crash(&storage, &directory),
        _ => forget(&mut log, &path),
    })?;
    let Cost { milliseconds, memory: [most, stays] } = cost;
    let access = match step == STEPS[0] {
        true => first_access(&directory, keys, &WrapKey::new(&WRAP_KEY))?,
        false => 0.0,
    };
    println!("{milliseconds} {most} {stays} {access}");
    Ok(())
}

/// What the processes say that take the step, for each figure the least.
fn rounds(step: &str, keys: u32, place: &Path, content: &[u8]) -> Result<[f64; 4]> {
    let mut least = [f64::MAX; 4];
    for _ in 0..ROUNDS {
        fs::write(place.join(log::file_name(HOME)), content)?;
        let program = std::env::current_exe()?;
        let output = Command::new(program).args([step, &keys.to_string()]).arg(place).output()?;
        let text = String::from_utf8(output.stdout)?;
        let figures: Vec<f64> =
            text.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?;
        if figures.len() != least.len() {
            return Err(String::from_utf8(output.stderr)?.into());
        }
        least.iter_mut().zip(figures).for_each(|(least, figure)| *least = least.min(figure));
    }
    Ok(least)
}

fn measure(keys: u32, key: &WrapKey) -> Result<()> {
    let place = tempfile::tempdir()?;
    let place = place.path();
    let path = place.join(log::file_name(HOME));
    let storage = FileStorage::new(place)?;
    let mut log = Log::create(&storage, [7; 16], HOME, &[])?;
    for number in 0..keys {
        log.stage(&records(number, key)?, Lsn(1))?;
    }
    let staged = fs::read(&path)?;
    let each = |bytes: f64| bytes / f64::from(keys);
    let line = |name: &str, bytes: f64| println!("{name:<40} {:>8.1} bytes a key", each(bytes));
    println!("\n{keys} keys");
    line("directory in shared memory", Directory::words_needed(keys) as f64 * 4.0);
    line("key file, one change a file", staged.len() as f64);
    let mut access = f64::MAX;
    for step in STEPS {
        let [milliseconds, most, stays, found] = rounds(step, keys, place, &staged)?;
        println!(
            "{step:<40} {milliseconds:>8.0} ms; heap {:>5.0} bytes a key, {:.0} of them kept",
            each(most),
            each(stays)
        );
        if step == STEPS[0] {
            access = found;
        }
        if step == STEPS[1] {
            line("key file, rewritten", fs::metadata(&path)?.len() as f64);
        }
    }
    println!("{:<40} {access:>8.0} ns", "first access to a key");
    Ok(())
}
