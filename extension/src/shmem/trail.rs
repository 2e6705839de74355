//! Where the audit trail stands; read and written under [`AuditLock`]. See [`crate::audit`].

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

use pagevault_keystore::audit::Place;

use super::text::{Text, load_bytes, store_bytes};
use crate::pg::locks::AuditLock;
use crate::pg::mapping::shared_struct;

shared_struct! {
    /// Where the trail stands.
    pub(crate) struct Trail {
        run: [AtomicU8; 16],
        seq: AtomicU64,
        link: [AtomicU8; 32],
        count: AtomicU64,
        /// Whether the lines of the start were repeated.
        are_repeated: AtomicBool,
        problem: Text<508>,
    }
}

impl Trail {
    /// Where the newest line stands in the chain.
    pub(crate) fn place(&self) -> Place {
        Place {
            link: load_bytes(&self.link),
            seq: self.seq.load(Relaxed),
            ..Place::before(load_bytes(&self.run))
        }
    }

    /// Remembers where the newest line stands in the chain.
    pub(crate) fn set_place(&self, place: &Place) {
        store_bytes(&self.run, &place.run);
        store_bytes(&self.link, &place.link);
        self.seq.store(place.seq, Relaxed);
    }

    /// Why the newest line could not be noted or written as it should have been; empty if it was.
    pub(crate) fn problem(&self) -> String {
        let _lock = AuditLock::acquire();
        self.problem.load()
    }

    /// Remembers why the newest line could not be noted or written.
    pub(crate) fn set_problem(&self, text: &str) {
        self.problem.store(text);
    }

    /// How many lines were noted since the keystore was made.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Remembers how many lines were noted.
    pub(crate) fn set_count(&self, count: u64) {
        self.count.store(count, Relaxed);
    }

    /// Whether lines of the start need not be repeated.
    pub(crate) fn set_repeated(&self, repeated: bool) {
        self.are_repeated.store(repeated, Relaxed);
    }

    /// True once: for who is to repeat the lines of the start.
    pub(crate) fn is_first_to_repeat(&self) -> bool {
        !self.are_repeated.swap(true, Relaxed)
    }
}
