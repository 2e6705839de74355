//! Files of relations, and how each is written.

use std::fmt;

use pagevault_cipher::DataKeyVersion;

use crate::scope::Scope;

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

impl RelFile {
    /// Whose log records about the file are in.
    pub const fn scope(&self) -> Scope {
        Scope::database(self.database)
    }
}

/// As in PostgreSQL's own WAL descriptions.
impl fmt::Display for RelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tablespace, self.database, self.relation)
    }
}

/// How a file is written: a step of its life, ordered as the steps follow one another.
///
/// Sealed with version n, in plaintext after version n, sealed with version n + 1, and so on; a
/// version that is past never comes back. So it does not matter in which order, or how often, the
/// records are heard: the latest step is what is so. Redo relies on that, as it repeats old records
/// to a keystore that has newer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Phase {
    /// Of the key; `None` before all others: nothing was decided yet.
    pub version: Option<DataKeyVersion>,
    /// Written in plaintext, although it has keys up to `version`.
    pub plaintext: bool,
}

impl Phase {
    /// Sealed under this version.
    pub const fn under(version: DataKeyVersion) -> Self {
        Self { version: Some(version), plaintext: false }
    }

    /// In plaintext after this version.
    pub const fn plaintext_after(version: DataKeyVersion) -> Self {
        Self { version: Some(version), plaintext: true }
    }

    /// The version to write with, `None` for plaintext.
    pub fn current(self) -> Option<DataKeyVersion> {
        self.version.filter(|_| !self.plaintext)
    }
}
