//! The end of a log, the part of it that counts, and its contents.

use pagevault_cipher::Lsn;

use crate::batch;
use crate::record::Record;
use crate::scope::Scope;

/// Length of a mark in bytes.
const MARK: u64 = batch::HEADER as u64;
/// The smallest unit in which a file system gives out room, in bytes.
const SECTOR: u64 = 512;

/// Whether a mark fits into the sector in which a log of this length ends.
pub(super) fn has_room_for_mark(end: u64) -> bool {
    (end - 1) / SECTOR == (end - 1 + MARK) / SECTOR
}

/// The end of a log: all that a process needs to append to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// The keystore of the log.
    pub keystore_id: [u8; 16],
    /// The scope of the log.
    pub scope: Scope,
    /// Number of compactions so far (wraps).
    pub generation: u32,
    /// Length in bytes, including marks.
    pub end: u64,
    /// Number of these bytes that are known to be durable.
    pub settled: u64,
    /// All WAL records about this log before this address are in it.
    pub logged: Lsn,
}

impl Position {
    /// Of a log that has nothing yet.
    pub(super) fn before_all(keystore_id: [u8; 16], scope: Scope) -> Position {
        let logged = Lsn::INVALID;
        Position { keystore_id, scope, generation: 0, end: 0, settled: 0, logged }
    }

    /// Whether the log ends in a mark that everything before it is durable, so that nothing is to
    /// be settled.
    pub fn is_settled(&self) -> bool {
        // No batch is as short as a mark.
        self.end == self.settled + MARK
    }

    /// Whether every record is durable, though perhaps not yet stated in the log.
    pub(super) fn is_durable(&self) -> bool {
        self.settled == self.end || self.is_settled()
    }
}

/// Which batches of a log count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// All readable ones: the server was shut down cleanly, or the log is only inspected.
    All,
    /// Those that are settled, or logged before this WAL address, where replay begins. WAL contains
    /// the others.
    Settled {
        /// The address where replay begins.
        redo: Lsn,
    },
}

impl Trust {
    pub(super) fn believes(self, end: u64, settled: u64, logged: Lsn) -> bool {
        match self {
            Trust::All => true,
            Trust::Settled { redo } => end <= settled || logged == Lsn::INVALID || logged < redo,
        }
    }
}

/// Contents of a log.
#[derive(Debug)]
pub struct Contents {
    /// All records, in order.
    pub records: Vec<Record>,
    /// The end of the last intact batch that counts.
    pub position: Position,
    /// Number of bytes behind the intact batches. They are not a complete batch and were never
    /// settled.
    pub torn: u64,
    /// Number of bytes of intact batches that do not count; see [`Trust`].
    pub unbelieved: u64,
}
