//! Where a log ends, how much of it counts, and what was found in it.

use pagevault_cipher::Lsn;

use crate::batch;
use crate::record::Record;
use crate::scope::Scope;

/// Bytes of a mark.
const MARK: u64 = batch::HEADER as u64;

/// Where a log ends: all a process needs to know to append to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The keystore the log belongs to.
    pub keystore_id: [u8; 16],
    /// Whose log it is.
    pub scope: Scope,
    /// Compactions so far (wraps).
    pub generation: u32,
    /// Bytes, marks included.
    pub end: u64,
    /// How many of them are known to be durable.
    pub settled: u64,
    /// All that WAL says about this log before this address is in it.
    pub logged: Lsn,
}

impl Position {
    /// Whether the log ends in a mark that everything before it is durable: nothing to settle.
    pub fn is_settled(&self) -> bool {
        // No batch is as short as a mark.
        self.end == self.settled + MARK
    }

    /// Whether every record is durable, though perhaps not testified.
    pub(super) fn is_durable(&self) -> bool {
        self.settled == self.end || self.is_settled()
    }
}

/// How much of a log counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// All that is readable: the server was shut down cleanly, or nothing is done with it but
    /// looking.
    All,
    /// What is settled, or logged before this WAL address, where replay begins: the rest is WAL's
    /// to say.
    Settled {
        /// Where replay begins.
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

/// A log as it was found.
#[derive(Debug)]
pub struct Contents {
    /// All records, in order.
    pub records: Vec<Record>,
    /// End of the last intact batch.
    pub position: Position,
    /// Bytes behind it that are not a whole batch, and were never settled.
    pub torn: u64,
    /// Bytes of intact batches before these that are not believed; see [`Trust`].
    pub unbelieved: u64,
}
