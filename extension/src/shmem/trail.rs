//! Position and state of the audit trail; accessed under [`AuditLock`]. See [`crate::audit`].

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

use pagevault_keystore::audit::Place;

use super::text::{Text, load_bytes, store_bytes};
use crate::pg::locks::AuditLock;
use crate::pg::mapping::shared_struct;

shared_struct! {
    /// State of the audit trail.
    pub(crate) struct Trail {
        run: [AtomicU8; 16],
        seq: AtomicU64,
        link: [AtomicU8; 32],
        count: AtomicU64,
        /// Whether the lines of server start were repeated.
        are_repeated: AtomicBool,
        problem: Text<508>,
    }
}

impl Trail {
    /// Position of the newest line in the chain.
    pub(crate) fn place(&self) -> Place {
        Place {
            link: load_bytes(&self.link),
            seq: self.seq.load(Relaxed),
            ..Place::before(load_bytes(&self.run))
        }
    }

    /// Stores the position of the newest line in the chain.
    pub(crate) fn set_place(&self, place: &Place) {
        store_bytes(&self.run, &place.run);
        store_bytes(&self.link, &place.link);
        self.seq.store(place.seq, Relaxed);
    }

    /// Why the newest line was not stored or written properly; empty if it was.
    pub(crate) fn problem(&self) -> String {
        let _lock = AuditLock::acquire();
        self.problem.load()
    }

    /// Stores why the newest line was not stored or written.
    pub(crate) fn set_problem(&self, text: &str) {
        self.problem.store(text);
    }

    /// Number of lines since the keystore was created.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Stores the number of lines.
    pub(crate) fn set_count(&self, count: u64) {
        self.count.store(count, Relaxed);
    }

    /// Sets whether the lines of server start were repeated already.
    pub(crate) fn set_repeated(&self, repeated: bool) {
        self.are_repeated.store(repeated, Relaxed);
    }

    /// True once: for the process that must repeat the lines of server start.
    pub(crate) fn is_first_to_repeat(&self) -> bool {
        !self.are_repeated.swap(true, Relaxed)
    }
}
