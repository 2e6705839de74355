//! Counters of all processes: what was sealed and opened, and how long that took. Each process has
//! a slot of its own; see [`crate::stats`], which counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::mapping::{Region, shared_struct};

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

shared_struct! {
    /// What one process has counted of one kind; a cache line, which it alone writes.
    #[repr(align(64))]
    pub(crate) struct Line {
        pub(crate) sealed: Amount,
        pub(crate) opened: Amount,
        pub(crate) failures: AtomicU64,
    }
}

shared_struct! {
    /// How much was sealed, or opened.
    pub(crate) struct Amount {
        pub(crate) pages: AtomicU64,
        pub(crate) bytes: AtomicU64,
        pub(crate) ticks: AtomicU64,
    }
}

/// What one process has counted.
pub(crate) type Slot = [Line; StatsKind::ALL.len()];

/// The counters of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Counters {
    memory: Region<(), Slot>,
    /// Milliseconds.
    tick: f64,
}

/// Slots for so many processes, and one for those without a number: the postmaster, and who is
/// about to end.
pub(crate) fn slots_needed(processes: usize) -> usize {
    processes + 1
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
    /// Counters in this memory, zero at first; times are counted in ticks of so many milliseconds.
    pub(crate) fn new(memory: Region<(), Slot>, tick: f64) -> Counters {
        Counters { memory, tick }
    }

    /// Where a process counts.
    #[inline]
    pub(crate) fn line(&self, process: Option<usize>, kind: StatsKind) -> Option<&'static Line> {
        let slots = self.memory.entries;
        let slot = process.and_then(|process| slots.get(process + 1)).or_else(|| slots.first())?;
        slot.get(kind as usize)
    }

    /// What all processes have counted.
    pub(crate) fn totals(&self, kind: StatsKind) -> Totals {
        let sum = |counter: fn(&Line) -> &AtomicU64| -> u64 {
            let lines = self.memory.entries.iter().map(|slot| &slot[kind as usize]);
            lines.map(|line| counter(line).load(Relaxed)).sum()
        };
        Totals {
            sealed: sum(|line| &line.sealed.pages),
            opened: sum(|line| &line.opened.pages),
            bytes_sealed: sum(|line| &line.sealed.bytes),
            bytes_opened: sum(|line| &line.opened.bytes),
            seal_time: sum(|line| &line.sealed.ticks) as f64 * self.tick,
            open_time: sum(|line| &line.opened.ticks) as f64 * self.tick,
            failures: sum(|line| &line.failures),
        }
    }
}
