//! Relation files, and their states.

use std::fmt;

use pagevault_cipher::DataKeyVersion;

use crate::scope::Scope;

/// A relation file, as PostgreSQL's `RelFileLocator` (`RelFileNode` before 16).
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
    /// The log that holds the file's records.
    pub const fn scope(&self) -> Scope {
        Scope::database(self.database)
    }
}

/// As in PostgreSQL's WAL descriptions.
impl fmt::Display for RelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tablespace, self.database, self.relation)
    }
}

/// State of a file: whether and under which key version its pages are written. States are ordered.
///
/// A file is encrypted with version n, then plaintext after version n, then encrypted with version
/// n + 1, and so on; an earlier version never comes back. So the order and the number of times in
/// which records are applied do not matter: the latest state counts. Redo relies on that, because
/// it applies old records to a keystore that contains newer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Phase {
    /// Version of the key; `None`: nothing was decided yet, the lowest state.
    pub version: Option<DataKeyVersion>,
    /// Written as plaintext, although there are keys up to `version`.
    pub plaintext: bool,
}

impl Phase {
    /// Encrypted under this version.
    pub const fn under(version: DataKeyVersion) -> Self {
        Self { version: Some(version), plaintext: false }
    }

    /// Plaintext after this version.
    pub const fn plaintext_after(version: DataKeyVersion) -> Self {
        Self { version: Some(version), plaintext: true }
    }

    /// The version to write with, `None` for plaintext.
    pub fn current(self) -> Option<DataKeyVersion> {
        self.version.filter(|_| !self.plaintext)
    }
}
