//! Files of relations, and how each is written.

use std::fmt;

use pagevault_cipher::Epoch;

/// Highest epoch that fits a page's 13 bits.
pub const MAX_EPOCH: u16 = Epoch::LAST.get();

/// A relation's file, as PostgreSQL's `RelFileLocator` (`RelFileNode` before 16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelFile {
    /// Tablespace OID.
    pub tablespace: u32,
    /// Database OID, 0 for shared relations.
    pub database: u32,
    /// Relation file number.
    pub relation: u32,
}

/// As in PostgreSQL's own WAL descriptions.
impl fmt::Display for RelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tablespace, self.database, self.relation)
    }
}

/// How a file is written: a step of its life, ordered as the steps follow one another.
///
/// Sealed with epoch n, in plaintext after epoch n, sealed with epoch n + 1, and so on; an epoch
/// that is past never comes back. So it does not matter in which order, or how often, the records
/// are heard: the latest step is what is so. Redo relies on that, as it repeats old records to a
/// keystore that has newer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Phase {
    /// Of the key; 0 before all others: nothing was decided yet.
    pub epoch: u16,
    /// Written in plaintext, although it has keys up to `epoch`.
    pub plaintext: bool,
}

impl Phase {
    /// The epoch to write with, `None` for plaintext.
    pub fn current(self) -> Option<u16> {
        Some(self.epoch).filter(|epoch| *epoch != 0 && !self.plaintext)
    }
}
