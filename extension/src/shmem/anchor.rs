//! What this server knows of its anchor ([`crate::anchor`]).
//!
//! In a mapping of its own that survives a crash restart: what was found out at the start of the
//! server is not found out again. Written by the postmaster at the start, and then by one worker.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use pagevault_keystore::Lsn;
use pagevault_keystore::anchor::{Note, Position};

use crate::pg::mapping::shared_struct;

shared_struct! {
    /// See its functions.
    pub(crate) struct Anchor {
        generation: AtomicU64,
        attempt_us: AtomicU64,
        is_unchecked: AtomicBool,
        timeline: AtomicU32,
        lsn: AtomicU64,
    }
}

impl Anchor {
    /// The note that this server has written, or that it went on from; 0 if there is none yet.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Acquire)
    }

    /// This server goes on from this note.
    pub(crate) fn go_on_from(&self, note: &Note) {
        self.generation.store(note.generation, Release);
        self.is_unchecked.store(false, Release);
    }

    /// The time in the note that this server tried to write last, in microseconds since 1970.
    pub(crate) fn attempt_us(&self) -> u64 {
        self.attempt_us.load(Acquire)
    }

    /// This server is about to write a note with this time.
    pub(crate) fn set_attempt_us(&self, time: u64) {
        self.attempt_us.store(time, Release);
    }

    /// What the data directory contained when the server started, if no note could be read then.
    pub(crate) fn unchecked(&self) -> Option<Position> {
        let position =
            Position { timeline: self.timeline.load(Acquire), lsn: Lsn(self.lsn.load(Acquire)) };
        self.is_unchecked.load(Acquire).then_some(position)
    }

    /// No note can be read, and this is what the data directory contains.
    pub(crate) fn set_unchecked(&self, position: Position) {
        self.timeline.store(position.timeline, Release);
        self.lsn.store(position.lsn.0, Release);
        self.is_unchecked.store(true, Release);
    }
}
