//! Counters of all processes: what was sealed and opened, and how long that took. Each process has
//! a slot of its own; see [`crate::stats`], which counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What is sealed and opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StatsKind {
    /// Pages of relations that are not temporary.
    Relation,
    /// Pages of WAL.
    Wal,
    /// Pages of temporary relations, and up to 8 kB each of temporary files.
    Temporary,
}

impl StatsKind {
    /// In the order of the view, with the names in it.
    pub(crate) const ALL: [(StatsKind, &'static str); 3] = [
        (StatsKind::Relation, "relation"),
        (StatsKind::Wal, "wal"),
        (StatsKind::Temporary, "temporary"),
    ];
}

/// Words of a process for one kind; they fill a cache line.
pub(crate) const SEALED: usize = 0;
pub(crate) const OPENED: usize = 1;
pub(crate) const BYTES_SEALED: usize = 2;
pub(crate) const BYTES_OPENED: usize = 3;
pub(crate) const SEAL_TICKS: usize = 4;
pub(crate) const OPEN_TICKS: usize = 5;
pub(crate) const FAILURES: usize = 6;
pub(crate) const LINE: usize = 8;
const SLOT: usize = StatsKind::ALL.len() * LINE;

/// The counters of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Counters {
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

impl Counters {
    /// Counters in `words`, which are zero, for as many processes as there is room for; times are
    /// counted in ticks of so many milliseconds.
    pub(crate) fn new(words: &'static [AtomicU64], tick: f64) -> Counters {
        Counters { words, tick }
    }

    /// The words of a process for one kind.
    #[inline]
    pub(crate) fn line(
        &self,
        process: Option<usize>,
        kind: StatsKind,
    ) -> Option<&'static [AtomicU64; LINE]> {
        let slots = self.words.as_chunks::<SLOT>().0;
        let slot = process.and_then(|process| slots.get(process + 1)).or_else(|| slots.first())?;
        slot.as_chunks::<LINE>().0.get(kind as usize)
    }

    /// What all processes have counted.
    pub(crate) fn totals(&self, kind: StatsKind) -> Totals {
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
