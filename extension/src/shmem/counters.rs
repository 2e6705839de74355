//! Counters of all processes: what was sealed and opened, and how long that took. Each process has
//! its own slot; see [`crate::stats`], which writes them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::mapping::{Region, shared_struct};

/// Kinds of sealed data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StatsKind {
    /// Pages of relations that are not temporary.
    Relation,
    /// Pages of WAL.
    Wal,
    /// Pages of temporary relations; in temporary files, units of up to 8 kB.
    Temporary,
}

impl StatsKind {
    /// In the order of the view, with its names.
    pub(crate) const ALL: [(StatsKind, &'static str); 3] = [
        (StatsKind::Relation, "relation"),
        (StatsKind::Wal, "wal"),
        (StatsKind::Temporary, "temporary"),
    ];
}

shared_struct! {
    /// Counters of one process for one kind, on a cache line that only this process writes.
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

/// Counters of one process.
pub(crate) type Slot = [Line; StatsKind::ALL.len()];

/// The counters of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Counters {
    memory: Region<(), Slot>,
    /// Length of a tick in milliseconds.
    tick: f64,
}

/// Slots for this many processes, and one for those without a number: the postmaster, and processes
/// that are about to end.
pub(crate) fn slots_needed(processes: usize) -> usize {
    processes + 1
}

/// Sums for one kind. Times are in milliseconds.
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
    /// Counters in this memory, which is zero at first, with ticks of `tick` milliseconds.
    pub(crate) fn new(memory: Region<(), Slot>, tick: f64) -> Counters {
        Counters { memory, tick }
    }

    /// The counters of a process for one kind.
    #[inline]
    pub(crate) fn line(&self, process: Option<usize>, kind: StatsKind) -> Option<&'static Line> {
        let slots = self.memory.entries;
        let slot = process.and_then(|process| slots.get(process + 1)).or_else(|| slots.first())?;
        slot.get(kind as usize)
    }

    /// The sums over all processes.
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
