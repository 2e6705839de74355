//! Why stored bytes were not accepted, or a record not stored.

use crate::scope::Scope;

/// Where something is wrong, and what. Never holds content, so that it can be logged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem} at byte {offset}")]
pub struct FormatError {
    /// Bytes from the start of the file, or of the batch when there is no file.
    pub offset: u64,
    /// What is wrong there.
    pub problem: Problem,
}

/// What can be wrong with stored bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A field or frame goes past the end.
    #[error("unexpected end of data")]
    Short,
    /// No batch or file begins here.
    #[error("wrong magic number")]
    Magic,
    /// A header does not match its checksum.
    #[error("wrong header checksum")]
    HeaderChecksum,
    /// A batch does not match its checksum.
    #[error("wrong checksum")]
    Checksum,
    /// Written by a later pagevault.
    #[error("unknown format version {0}, of a later pagevault,")]
    Version(u16),
    /// A record type of a later pagevault.
    #[error("unknown record type {0}, of a later pagevault,")]
    RecordType(u8),
    /// A known record in a later version.
    #[error("unknown version {version} of record type {kind}, of a later pagevault,")]
    RecordVersion {
        /// Record type.
        kind: u8,
        /// Its version.
        version: u8,
    },
    /// A field outside its limits: its name and what is wrong.
    #[error("{0}: {1}")]
    Field(&'static str, &'static str),
    /// More bytes than a record's fields need.
    #[error("record is longer than its fields")]
    Trailing,
    /// A batch without records.
    #[error("batch is empty")]
    Empty,
    /// Too many bytes or records for one batch or file.
    #[error("larger than the limit of {0}")]
    TooLarge(u64),
    /// A record of another database than the file's.
    #[error("record belongs to database {found}, file to {expected}")]
    Misplaced {
        /// Scope of the file.
        expected: Scope,
        /// Scope the record belongs to.
        found: Scope,
    },
}

impl Problem {
    /// Whether the bytes are whole, and it is this version that does not know them.
    #[must_use]
    pub fn is_of_later_version(&self) -> bool {
        matches!(self, Self::Version(_) | Self::RecordType(_) | Self::RecordVersion { .. })
    }
}
