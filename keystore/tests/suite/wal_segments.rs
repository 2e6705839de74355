//! Any sequence of writes of ranges reads as from a plain file, and is encrypted.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;

use pagevault_cipher::wal::HEADER_SIZE;
use pagevault_cipher::{CipherId, DataKey, KeyVersion, Lsn, PageKey, wal};
use pagevault_keystore::transfer::{at_position, each_part};
use pagevault_keystore::wal::WalPhase;
use pagevault_keystore::wal_pages::{Cause, WalKeys};
use pagevault_keystore::wal_segments::{self, Name, Segment, parse_name};
use pagevault_keystore::wal_timelines;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::key_version;

const PAGE: usize = 8192;
const PAGES: usize = 8;
const BASE: Lsn = Lsn(0x1_2300_0000);

/// Encrypted with one key from the third page on.
struct Keys(PageKey);

impl WalKeys for Keys {
    type Error = Infallible;

    fn phase_at(&self, address: Lsn) -> WalPhase {
        WalPhase { version: Some(KeyVersion::FIRST), plaintext: address < BASE + 2 * PAGE as u64 }
    }

    fn with_key<R>(
        &self,
        _version: KeyVersion,
        f: impl FnOnce(&PageKey) -> R,
    ) -> Result<R, Infallible> {
        Ok(f(&self.0))
    }
}

fn keys() -> Keys {
    let key =
        DataKey::from_bytes(CipherId::Aes256Xts, &std::array::from_fn::<u8, 64, _>(|at| at as u8))
            .unwrap();
    Keys(PageKey::new(&key))
}

/// A file in memory whose calls transfer at most `most` bytes.
struct Memory {
    bytes: RefCell<Vec<u8>>,
    most: Cell<usize>,
    /// Number of calls that succeed before the next failure.
    calls: Cell<usize>,
}

impl Memory {
    fn new(most: usize) -> Self {
        Memory { bytes: RefCell::new(vec![]), most: Cell::new(most), calls: Cell::new(usize::MAX) }
    }

    fn fails(&self) -> bool {
        let left = self.calls.get();
        self.calls.set(left.saturating_sub(1));
        left == 0
    }
}

impl Segment for Memory {
    fn pread(&self, to: &mut [u8], at: u64) -> isize {
        if self.fails() {
            return -1;
        }
        let bytes = self.bytes.borrow();
        let from = bytes.get(at as usize..).unwrap_or_default();
        let count = from.len().min(to.len());
        to[..count].copy_from_slice(&from[..count]);
        count as isize
    }

    fn pwrite(&self, from: &[u8], at: u64) -> isize {
        if self.fails() {
            return -1;
        }
        let mut bytes = self.bytes.borrow_mut();
        let count = from.len().min(self.most.get());
        let end = at as usize + count;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at as usize..end].copy_from_slice(&from[..count]);
        count as isize
    }

    fn belongs(&self, address: Lsn, at: u64) -> bool {
        address == BASE + at
    }

    /// The segment is of timeline 2, which began in the second page.
    fn is_left_over(&self, timeline: u32, address: Lsn) -> bool {
        wal_timelines::is_left_over(timeline, address, 2, || Some(BASE + PAGE as u64 + 100))
    }

    fn address(&self, at: u64, _page: &[u8], _offset: usize, _bytes: &[u8]) -> Lsn {
        BASE + at
    }
}

/// Pages with headers, as PostgreSQL writes them.
fn plain() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..PAGE * PAGES).map(|at| (at / 5 % 251) as u8).collect();
    for (number, page) in bytes.chunks_exact_mut(PAGE).enumerate() {
        page[..HEADER_SIZE].fill(0);
        page[..2].copy_from_slice(&0xD116_u16.to_le_bytes());
        page[4..8].copy_from_slice(&(1 + u32::from(number > 1)).to_le_bytes());
        page[8..16].copy_from_slice(&(BASE + (number * PAGE) as u64).0.to_le_bytes());
        page[20..24].fill(0);
    }
    bytes
}

proptest! {
    /// As a WAL receiver writes: consecutive ranges of any length; then again, as after a restart.
    #[test]
    fn written_bytes_are_read(
        lengths in vec(1_usize..3 * PAGE, 1..20),
        again in 0..PAGE * PAGES,
        most in prop_oneof![Just(usize::MAX), PAGE..3 * PAGE, 1..PAGE],
        run in 1_usize..5,
        reads in vec((0..PAGE * PAGES, 1_usize..3 * PAGE), 1..20),
    ) {
        let (keys, file, plain) = (keys(), Memory::new(most), plain());
        let mut scratch = vec![0; run * PAGE];
        let mut ends = Vec::new();
        for start in [0, again / 2, again] {
            let mut at = start.min(ends.last().copied().unwrap_or(0));
            for length in &lengths {
                let part = &plain[at..plain.len().min(at + length)];
                let wrote = wal_segments::write(&keys, &file, &mut scratch, PAGE, part, at as u64);
                prop_assert_eq!(wrote.unwrap(), part.len() as isize);
                at += part.len();
            }
            ends.push(at);
        }
        let end = ends.into_iter().max().unwrap();
        for (at, length) in reads {
            let mut to = vec![0; length];
            let got = wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut to, at as u64);
            let got = got.unwrap() as usize;
            let whole = end.next_multiple_of(PAGE);
            prop_assert_eq!(got, length.min(whole.saturating_sub(at)));
            // Bytes that were not written yet are zero.
            let known = got.min(end.saturating_sub(at));
            prop_assert_eq!(&to[..known], &plain[at..at + known]);
        }
        let bytes = file.bytes.borrow();
        for (number, page) in bytes.chunks_exact(PAGE).enumerate() {
            prop_assert_eq!(wal::mark_of(page).is_some(), number >= 2, "page {}", number);
        }
    }

    /// A failing call is reported with the number of bytes written before it; these can be read.
    #[test]
    fn a_failure_is_reported(good in 0_usize..12, most in 1..2 * PAGE, at in 0..PAGE) {
        let (keys, file, plain) = (keys(), Memory::new(usize::MAX), plain());
        let mut scratch = vec![0; 2 * PAGE];
        let write = |scratch: &mut [u8], from: usize, to: usize| {
            wal_segments::write(&keys, &file, scratch, PAGE, &plain[from..to], from as u64).unwrap()
        };
        write(&mut scratch, 0, at);
        file.most.set(most);
        file.calls.set(good);
        let wrote = write(&mut scratch, at, plain.len());
        prop_assert!(wrote != 0 && wrote >= -1);
        file.calls.set(usize::MAX);
        let known = at + usize::try_from(wrote).unwrap_or(0);
        let mut to = vec![0; known];
        let got = wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut to, 0).unwrap();
        prop_assert_eq!(got as usize, known);
        prop_assert_eq!(&to[..], &plain[..known]);
    }
}

/// Pages left by a parent timeline are passed on unchanged, without their mark, and overwritten as
/// if nothing were there; their key may be unknown.
#[test]
fn pages_left_by_a_parent_do_not_count() {
    /// Has only the key of version 1, and writes with it.
    struct One(Keys);
    impl WalKeys for One {
        type Error = KeyVersion;

        fn phase_at(&self, _address: Lsn) -> WalPhase {
            WalPhase::under(KeyVersion::FIRST)
        }

        fn with_key<R>(
            &self,
            version: KeyVersion,
            f: impl FnOnce(&PageKey) -> R,
        ) -> Result<R, KeyVersion> {
            if version == KeyVersion::FIRST { Ok(f(&self.0.0)) } else { Err(version) }
        }
    }
    let keys = One(keys());
    let plain = plain();
    let mut left = plain.clone();
    for page in left.chunks_exact_mut(PAGE) {
        page[4..8].copy_from_slice(&1_u32.to_le_bytes());
        wal::seal(page, &keys.0.0, wal::Mark::of_version(key_version(2)));
    }
    let mut scratch = vec![0; 2 * PAGE];
    let mut page = vec![0; PAGE];
    for number in 0..PAGES {
        let file = Memory::new(usize::MAX);
        file.bytes.borrow_mut().clone_from(&left);
        let at = number * PAGE;
        let got = wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut page, at as u64);
        if number < 2 {
            // Before the fork and in its page, the page counts.
            assert_eq!(got.unwrap_err().cause, Cause::Key(key_version(2)));
            continue;
        }
        assert_eq!(got, Ok(PAGE as isize));
        assert_eq!(wal::mark_of(&page), None);
        assert_eq!(page[HEADER_SIZE..], left[at + HEADER_SIZE..at + PAGE]);
        for (from, to) in [(0, 3), (3, 9), (9, 40), (40, 5000), (5000, PAGE)] {
            let part = &plain[at + from..at + to];
            let wrote =
                wal_segments::write(&keys, &file, &mut scratch, PAGE, part, (at + from) as u64);
            assert_eq!(wrote, Ok(part.len() as isize));
        }
        wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut page, at as u64).unwrap();
        assert_eq!(page, plain[at..at + PAGE]);
        assert!(wal::mark_of(&file.bytes.borrow()[at..]).is_some());
    }
}

/// A page under another key with the same version is not passed on as random bytes, and not written
/// over in part.
#[test]
fn a_page_under_another_key_is_an_error() {
    let (keys, file, plain) = (keys(), Memory::new(usize::MAX), plain());
    let bytes = std::array::from_fn::<u8, 64, _>(|at| at as u8 ^ 0x55);
    let other = DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap();
    let mut pages = plain.clone();
    for page in pages.chunks_exact_mut(PAGE) {
        page[4..8].copy_from_slice(&2_u32.to_le_bytes());
        wal::seal(page, &PageKey::new(&other), wal::Mark::of_version(KeyVersion::FIRST));
    }
    file.bytes.borrow_mut().clone_from(&pages);
    let mut scratch = vec![0; 2 * PAGE];
    let mut page = vec![0; PAGE];
    for at in (0..PAGES).map(|number| (number * PAGE) as u64) {
        let got = wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut page, at);
        let fault = got.unwrap_err();
        assert_eq!((fault.address, fault.cause), (BASE + at, Cause::OtherKey));
        let part = &plain[at as usize + 50..at as usize + 60];
        let wrote = wal_segments::write(&keys, &file, &mut scratch, PAGE, part, at + 50);
        assert_eq!(wrote.unwrap_err().cause, Cause::OtherKey);
    }
    assert_eq!(*file.bytes.borrow(), pages);
    // Of a page that is written as a whole nothing is needed.
    let wrote = wal_segments::write(&keys, &file, &mut scratch, PAGE, &plain, 0);
    assert_eq!(wrote.unwrap(), plain.len() as isize);
    let mut all = vec![0; plain.len()];
    wal_segments::read(&keys, &file, &mut scratch, PAGE, &mut all, 0).unwrap();
    assert_eq!(all, plain);
}

#[test]
fn segment_names_are_parsed() {
    let name = Name { timeline: 10, number: (1, 255) };
    assert_eq!(parse_name(b"0000000A00000001000000ff"), Some(name));
    for name in [
        "00000001000000010000000",
        "0000000100000001000000010",
        "0000000100000001+0000001",
        "history",
        "",
    ] {
        assert_eq!(parse_name(name.as_bytes()), None, "{name}");
    }
}

#[test]
fn a_vector_stops_at_the_first_incomplete_part() {
    let transfer = |answers: &[isize]| {
        let mut answers = answers.iter();
        let mut before = vec![];
        let done = each_part(
            [10_usize, 20, 30],
            |part| *part,
            |_, done| {
                before.push(done);
                *answers.next().unwrap()
            },
        );
        (done, before)
    };
    assert_eq!(transfer(&[10, 20, 30]), (60, vec![0, 10, 30]));
    assert_eq!(transfer(&[10, 5]), (15, vec![0, 10]));
    assert_eq!(transfer(&[10, -1]), (10, vec![0, 10]));
    assert_eq!(transfer(&[-1]), (-1, vec![0]));
    assert_eq!(transfer(&[0]), (0, vec![0]));
}

#[test]
fn a_position_advances_by_the_bytes_transferred() {
    let moved = Cell::new(None);
    let run = |at: i64, done: isize| {
        moved.set(None);
        let seek = |to| {
            moved.set(Some(to));
            to
        };
        (at_position(|| at, seek, |_| done), moved.get())
    };
    assert_eq!(run(100, 10), (10, Some(110)));
    assert_eq!(run(100, 0), (0, None));
    assert_eq!(run(100, -1), (-1, None));
    assert_eq!(run(-1, 10), (-1, None));
    assert_eq!(at_position(|| 0, |_| -1, |_| 5), -1);
}
