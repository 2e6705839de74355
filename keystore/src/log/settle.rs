//! When a batch is settled.

use pagevault_cipher::DataKeyVersion;

use crate::record::Record;
use crate::wal;

/// When a batch is settled in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settle {
    /// Before it is used.
    Now,
    /// By the next checkpoint; until then it is in WAL.
    AtCheckpoint,
}

impl Settle {
    /// For records that a server logs. Records that unlock the server and open WAL are needed
    /// before WAL is read.
    pub fn of(records: &[Record]) -> Self {
        let can_wait = |r: &Record| match r {
            Record::DataKey { file, .. } => !wal::is_key_place(*file),
            Record::Current { .. }
            | Record::Plaintext { .. }
            | Record::Rewriting { .. }
            | Record::Switched { .. }
            | Record::SealedOnly { .. }
            | Record::Job { .. }
            | Record::JobStep { .. }
            | Record::JobBegun { .. }
            | Record::JobsForgotten { .. }
            | Record::FormerFiles(_) => true,
            _ => false,
        };
        if records.iter().all(can_wait) { Self::AtCheckpoint } else { Self::Now }
    }

    /// For records in redo. Keys of files that existed before them are settled at once: a restarted
    /// server may read pages under such keys before it replays the keys again. So is the end of
    /// [`Record::SealedOnly`]: pages are written in plaintext after it.
    pub fn in_redo(records: &[Record]) -> Self {
        let is_needed_early = |r: &Record| match r {
            Record::DataKey { version, .. } => *version > DataKeyVersion::FIRST,
            Record::Rewriting { .. } | Record::Plaintext { .. } => true,
            Record::SealedOnly { phase, .. } => phase.plaintext,
            _ => false,
        };
        if records.iter().any(is_needed_early) { Self::Now } else { Self::of(records) }
    }
}
