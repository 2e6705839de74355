//! Where the audit trail stands; read and written under [`AuditLock`]. See [`crate::audit`].

use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_keystore::audit::Place;

use super::words::{load_text, load_u64, store_text, store_u64};
use crate::pg::locks::AuditLock;

const RUN: std::ops::Range<usize> = 0..4;
const SEQ: std::ops::Range<usize> = 4..6;
const LINK: std::ops::Range<usize> = 6..14;
const COUNT: std::ops::Range<usize> = 14..16;
/// Whether the lines of the start were repeated.
const REPEATED: usize = 16;
const PROBLEM: std::ops::Range<usize> = 18..146;

/// Words of memory that [`Trail`] needs.
pub(crate) const WORDS: usize = PROBLEM.end;

/// Where the trail stands.
#[derive(Clone, Copy)]
pub(crate) struct Trail {
    words: &'static [AtomicU32],
}

impl Trail {
    /// The trail in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Trail {
        assert!(words.len() >= WORDS);
        Trail { words }
    }

    /// Where the newest line stands in the chain.
    pub(crate) fn place(&self) -> Place {
        let mut place = Place::before([0; 16]);
        load_bytes(&self.words[RUN], &mut place.run);
        load_bytes(&self.words[LINK], &mut place.link);
        place.seq = load_u64(&self.words[SEQ]);
        place
    }

    /// Remembers where the newest line stands in the chain.
    pub(crate) fn set_place(&self, place: &Place) {
        store_bytes(&self.words[RUN], &place.run);
        store_bytes(&self.words[LINK], &place.link);
        store_u64(&self.words[SEQ], place.seq);
    }

    /// Why the newest line could not be noted or written as it should have been; empty if it was.
    pub(crate) fn problem(&self) -> String {
        let _lock = AuditLock::acquire();
        load_text(&self.words[PROBLEM])
    }

    /// Remembers why the newest line could not be noted or written.
    pub(crate) fn set_problem(&self, text: &str) {
        store_text(&self.words[PROBLEM], text);
    }

    /// How many lines were noted since the keystore was made.
    pub(crate) fn count(&self) -> u64 {
        load_u64(&self.words[COUNT])
    }

    /// Remembers how many lines were noted.
    pub(crate) fn set_count(&self, count: u64) {
        store_u64(&self.words[COUNT], count);
    }

    /// Whether lines of the start need not be repeated.
    pub(crate) fn set_repeated(&self, repeated: bool) {
        self.words[REPEATED].store(u32::from(repeated), Relaxed);
    }

    /// True once: for who is to repeat the lines of the start.
    pub(crate) fn is_first_to_repeat(&self) -> bool {
        self.words[REPEATED].swap(1, Relaxed) == 0
    }
}

fn load_bytes(words: &[AtomicU32], bytes: &mut [u8]) {
    for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
    }
}

fn store_bytes(words: &[AtomicU32], bytes: &[u8]) {
    for (bytes, word) in bytes.as_chunks::<4>().0.iter().zip(words) {
        word.store(u32::from_le_bytes(*bytes), Relaxed);
    }
}
