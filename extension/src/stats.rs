//! Counters: how much was sealed and opened since the server started, and how long that took.
//!
//! Every process has its own slot in shared memory, by process number, which no other process
//! writes. So counting is an addition to cached memory, without a lock or atomic instruction.
//! Readers add up all slots. A slot is never cleared: the next process with that number continues
//! it. All slots survive a crash restart.
//!
//! Called in critical sections: nothing here allocates, waits or raises errors.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::{clock, compat};
use crate::shmem;
use crate::shmem::counters::{Amount, Line, StatsKind};

/// Adds without an atomic instruction, because a slot has one writer. (Processes without a number
/// share a slot, and may lose a count.)
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

#[inline]
fn line(kind: StatsKind) -> Option<&'static Line> {
    shmem::get()?.counters.line(compat::process_number(), kind)
}

/// Measures the time of sealing or opening: the start time, plus the length of pauses.
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

    /// A timing whose time is counted elsewhere.
    pub(crate) fn none() -> Timing {
        Timing { began: u64::MAX }
    }

    /// Runs something that is not to be counted.
    #[inline]
    pub(crate) fn pause<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let paused = clock::ticks();
        let result = f();
        self.began += clock::ticks().saturating_sub(paused);
        result
    }

    /// Counts `pages` sealed pages of `bytes` bytes in all, and the time since the start. Counts
    /// nothing if `bytes` is 0.
    #[inline]
    pub(crate) fn sealed(self, kind: StatsKind, pages: u64, bytes: u64) {
        self.done(kind, |line| &line.sealed, pages, bytes);
    }

    /// Counts `pages` opened pages of `bytes` bytes in all, and the time since the start. Counts
    /// nothing if `bytes` is 0.
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

/// Counts a page that could not be opened because its key was not available.
#[cold]
pub(crate) fn count_failure(kind: StatsKind) {
    if let Some(line) = line(kind) {
        add(&line.failures, 1);
    }
}
