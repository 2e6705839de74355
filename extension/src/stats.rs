//! How much was sealed and opened since the server started, and how long that took.
//!
//! Every process has a slot of its own in shared memory, by its number among the server's
//! processes, and nobody else writes there: counting is an addition to memory that is in this
//! core's cache, without lock or atomic instruction. Readers add all slots up. A slot is never
//! cleared: the next process with that number goes on counting. All this outlives a crash restart.
//!
//! Called inside critical sections: nothing here allocates, waits or raises.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::{clock, compat};
use crate::shmem;
use crate::shmem::counters::{Amount, Line, StatsKind};

/// Nobody else writes here, so this need not be one instruction. (Processes without a number share
/// a slot, and may lose a count.)
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

#[inline]
fn line(kind: StatsKind) -> Option<&'static Line> {
    shmem::get()?.counters.line(compat::process_number(), kind)
}

/// The time of sealing or opening that has begun: a moment, put off by what is not to be counted.
#[derive(Clone, Copy)]
#[must_use]
pub(crate) struct Timing {
    began: u64,
}

impl Timing {
    /// Begins now.
    #[inline]
    pub(crate) fn begin() -> Timing {
        Timing { began: clock::ticks() }
    }

    /// Timing whose time is counted elsewhere.
    pub(crate) fn none() -> Timing {
        Timing { began: u64::MAX }
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
    pub(crate) fn sealed(self, kind: StatsKind, pages: u64, bytes: u64) {
        self.done(kind, |line| &line.sealed, pages, bytes);
    }

    /// `pages` of `bytes` in all were opened since it began.
    #[inline]
    pub(crate) fn opened(self, kind: StatsKind, pages: u64, bytes: u64) {
        self.done(kind, |line| &line.opened, pages, bytes);
    }

    #[inline]
    fn done(self, kind: StatsKind, amount: fn(&Line) -> &Amount, pages: u64, bytes: u64) {
        let passed = clock::ticks().saturating_sub(self.began);
        if let Some(line) = line(kind).filter(|_| bytes != 0) {
            let amount = amount(line);
            add(&amount.pages, pages);
            add(&amount.bytes, bytes);
            add(&amount.ticks, passed);
        }
    }
}

/// A page could not be opened, because its key could not be had.
#[cold]
pub(crate) fn count_failure(kind: StatsKind) {
    if let Some(line) = line(kind) {
        add(&line.failures, 1);
    }
}
