//! How much was sealed and opened since the server started, and how long that took.
//!
//! Every process has a slot of its own in shared memory, by its number among the server's
//! processes, and nobody else writes there: counting is an addition to memory that is in this
//! core's cache, without lock or atomic instruction. Readers add all slots up. A slot is never
//! cleared: the next process with that number goes on counting. All this outlives a crash restart.
//!
//! Called inside critical sections: nothing here allocates, waits or raises.

mod clock;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::compat;
use crate::shmem;

/// What is sealed and opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Pages of relations that are not temporary.
    Relation,
    /// Pages of WAL.
    Wal,
    /// Pages of temporary relations, and up to 8 kB each of temporary files.
    Temporary,
}

impl Kind {
    /// In the order of the view, with the names in it.
    pub(crate) const ALL: [(Kind, &'static str); 3] =
        [(Kind::Relation, "relation"), (Kind::Wal, "wal"), (Kind::Temporary, "temporary")];
}

/// Words of a process for one kind; they fill a cache line.
const SEALED: usize = 0;
const OPENED: usize = 1;
const BYTES_SEALED: usize = 2;
const BYTES_OPENED: usize = 3;
const SEAL_TICKS: usize = 4;
const OPEN_TICKS: usize = 5;
const FAILURES: usize = 6;
const LINE: usize = 8;
const SLOT: usize = Kind::ALL.len() * LINE;

/// The counters of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Stats {
    words: &'static [AtomicU64],
    /// Milliseconds.
    tick: f64,
}

/// Words of memory for so many processes, and one slot for those without a number: the postmaster,
/// and who is about to end.
pub(crate) fn words_needed(processes: usize) -> usize {
    (processes + 1) * SLOT
}

/// The sum for one kind. Times are in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) sealed: u64,
    pub(crate) opened: u64,
    pub(crate) bytes_sealed: u64,
    pub(crate) bytes_opened: u64,
    pub(crate) seal_time: f64,
    pub(crate) open_time: f64,
    pub(crate) failures: u64,
}

impl Stats {
    /// Counters in `words`, which are zero, for as many processes as there is room for.
    pub(crate) fn new(words: &'static [AtomicU64]) -> Stats {
        Stats { words, tick: clock::choose() }
    }

    fn line(&self, process: Option<usize>, kind: Kind) -> Option<&'static [AtomicU64; LINE]> {
        let slots = self.words.as_chunks::<SLOT>().0;
        let slot = process.and_then(|process| slots.get(process + 1)).or_else(|| slots.first())?;
        slot.as_chunks::<LINE>().0.get(kind as usize)
    }

    /// What all processes have counted.
    pub(crate) fn totals(&self, kind: Kind) -> Totals {
        let mut sums = [0u64; LINE];
        for slot in self.words.as_chunks::<SLOT>().0 {
            let line = &slot.as_chunks::<LINE>().0[kind as usize];
            sums.iter_mut().zip(line).for_each(|(sum, word)| *sum += word.load(Relaxed));
        }
        Totals {
            sealed: sums[SEALED],
            opened: sums[OPENED],
            bytes_sealed: sums[BYTES_SEALED],
            bytes_opened: sums[BYTES_OPENED],
            seal_time: sums[SEAL_TICKS] as f64 * self.tick,
            open_time: sums[OPEN_TICKS] as f64 * self.tick,
            failures: sums[FAILURES],
        }
    }
}

/// Nobody else writes here, so this need not be one instruction. (Processes without a number share
/// a slot, and may lose a count.)
#[inline]
fn add(word: &AtomicU64, amount: u64) {
    word.store(word.load(Relaxed).wrapping_add(amount), Relaxed);
}

#[inline]
fn line(kind: Kind) -> Option<&'static [AtomicU64; LINE]> {
    shmem::get()?.stats.line(compat::process_number(), kind)
}

/// Sealing or opening that has begun: a moment, put off by what is not to be counted.
#[derive(Clone, Copy)]
#[must_use]
pub(crate) struct Work {
    began: u64,
}

impl Work {
    /// Begins now.
    #[inline]
    pub(crate) fn begin() -> Work {
        Work { began: clock::ticks() }
    }

    /// Work whose time is counted elsewhere.
    pub(crate) fn none() -> Work {
        Work { began: u64::MAX }
    }

    /// Does something that is neither.
    #[inline]
    pub(crate) fn pause<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let paused = clock::ticks();
        let result = f();
        self.began += clock::ticks().saturating_sub(paused);
        result
    }

    /// `pages` of `bytes` in all were sealed since it began. None: not counted at all.
    #[inline]
    pub(crate) fn sealed(self, kind: Kind, pages: u64, bytes: u64) {
        self.done(kind, [(SEALED, pages), (BYTES_SEALED, bytes)], SEAL_TICKS);
    }

    /// `pages` of `bytes` in all were opened since it began.
    #[inline]
    pub(crate) fn opened(self, kind: Kind, pages: u64, bytes: u64) {
        self.done(kind, [(OPENED, pages), (BYTES_OPENED, bytes)], OPEN_TICKS);
    }

    #[inline]
    fn done(self, kind: Kind, amounts: [(usize, u64); 2], time: usize) {
        let passed = clock::ticks().saturating_sub(self.began);
        if let Some(line) = line(kind).filter(|_| amounts[1].1 != 0) {
            for (word, amount) in amounts {
                add(&line[word], amount);
            }
            add(&line[time], passed);
        }
    }
}

/// A page could not be opened, because its key could not be had.
#[cold]
pub(crate) fn count_failure(kind: Kind) {
    if let Some(line) = line(kind) {
        add(&line[FAILURES], 1);
    }
}
