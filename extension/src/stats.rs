//! Counters of encrypted and decrypted pages since the server started, and of the time spent.
//!
//! Each process has its own slot in shared memory, by its number among the server's processes, and
//! is the only writer of it. So counting is an addition to memory in this core's cache, without
//! locks or atomic instructions. Readers add up all slots. Slots are never cleared: the next
//! process with the same number continues. Counters survive a crash restart.
//!
//! Called in critical sections: nothing here allocates, waits or raises an error.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pg::{clock, compat};
use crate::shmem;
use crate::shmem::counters::{Amount, Line, StatsKind};

/// No other process writes here, so this need not be an atomic addition. (Processes without a
/// number share a slot, and may lose counts.)
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

#[inline]
fn line(kind: StatsKind) -> Option<&'static Line> {
    shmem::get()?.counters.line(compat::process_number(), kind)
}

/// Measures the time of encrypting or decrypting. Pauses are added to the start time.
#[derive(Clone, Copy)]
#[must_use]
pub(crate) struct Timing {
    began: u64,
}

impl Timing {
    /// Starts now.
    #[inline]
    pub(crate) fn begin() -> Timing {
        Timing { began: clock::ticks() }
    }

    /// For time that is counted elsewhere.
    pub(crate) fn none() -> Timing {
        Timing { began: u64::MAX }
    }

    /// Runs something whose time is not to be counted.
    #[inline]
    pub(crate) fn pause<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let paused = clock::ticks();
        let result = f();
        self.began += clock::ticks().saturating_sub(paused);
        result
    }

    /// Counts `pages` of `bytes` in total, encrypted since the start. Without bytes nothing is
    /// counted.
    #[inline]
    pub(crate) fn sealed(self, kind: StatsKind, pages: u64, bytes: u64) {
        self.done(kind, |line| &line.sealed, pages, bytes);
    }

    /// Counts `pages` of `bytes` in total, decrypted since the start.
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

/// Counts a page that could not be decrypted because its key was not available.
#[cold]
pub(crate) fn count_failure(kind: StatsKind) {
    if let Some(line) = line(kind) {
        add(&line.failures, 1);
    }
}
