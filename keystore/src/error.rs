//! Why stored bytes were not accepted, or a record was not stored.

use crate::scope::Scope;

/// Location and kind of a format error. Never holds content, so that it can be logged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem} at byte {offset}")]
pub struct FormatError {
    /// Bytes from the start of the file, or of the batch if there is no file.
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
    /// Not the beginning of a batch or file.
    #[error("wrong magic number")]
    Magic,
    /// A header does not match its checksum.
    #[error("wrong header checksum")]
    HeaderChecksum,
    /// A batch does not match its checksum.
    #[error("wrong checksum")]
    Checksum,
    /// Written by a later version of pagevault.
    #[error("unknown format version {0}, of a later pagevault,")]
    Version(u16),
    /// A record type that only later versions of pagevault know.
    #[error("unknown record type {0}, of a later pagevault,")]
    RecordType(u8),
    /// A known record type in a later version.
    #[error("unknown version {version} of record type {kind}, of a later pagevault,")]
    RecordVersion {
        /// Record type.
        kind: u8,
        /// Its version.
        version: u8,
    },
    /// A field outside its limits: its name, and what is wrong with it.
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
    /// A record of a database other than the file's.
    #[error("record belongs to database {found}, file to {expected}")]
    Misplaced {
        /// Scope of the file.
        expected: Scope,
        /// Scope of the record.
        found: Scope,
    },
}

impl Problem {
    /// Whether the bytes are intact, but of a later version that this one does not know.
    #[must_use]
    pub fn is_of_later_version(&self) -> bool {
        matches!(self, Self::Version(_) | Self::RecordType(_) | Self::RecordVersion { .. })
    }
}
