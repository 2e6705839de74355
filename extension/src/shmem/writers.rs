//! What each process is writing at this moment; see [`crate::writers`].

use std::sync::atomic::{AtomicU32, Ordering::*};

/// Words of a process; they fill a cache line.
pub(crate) const SLOT: usize = 16;

/// The words of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Writers {
    words: &'static [AtomicU32],
}

/// Words of memory for so many processes.
pub(crate) fn words_needed(processes: usize) -> usize {
    processes * SLOT
}

impl Writers {
    /// For as many processes as there is room for in `words`, which are zero.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Writers {
        Writers { words }
    }

    /// After a crash: nobody is writing.
    pub(crate) fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// The words of one process.
    #[inline]
    pub(crate) fn slot(&self, process: usize) -> Option<&'static [AtomicU32; SLOT]> {
        self.slots().get(process)
    }

    /// The words of each process.
    pub(crate) fn slots(&self) -> &'static [[AtomicU32; SLOT]] {
        self.words.as_chunks::<SLOT>().0
    }
}
