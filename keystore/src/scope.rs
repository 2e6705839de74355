//! What a database key serves, and to what a key log belongs.

use std::fmt;

/// The cluster, or one database. Ordered by number, so the cluster comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Scope(u32);

impl Scope {
    /// The cluster: shared relations, and databases without their own master key.
    pub const CLUSTER: Self = Self(0);

    /// The database with this OID; the cluster for 0 (`InvalidOid`), which shared relations have as
    /// their database.
    #[inline]
    #[must_use]
    pub const fn database(oid: u32) -> Self {
        Self(oid)
    }

    /// The database's OID, 0 for the cluster, as in files, WAL, shared memory and SQL.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Whether it is the cluster.
    #[inline]
    #[must_use]
    pub const fn is_cluster(self) -> bool {
        self.0 == 0
    }

    /// The name in messages: "the cluster", or "database" with its OID.
    #[must_use]
    pub fn name(self) -> String {
        if self.is_cluster() { "the cluster".to_owned() } else { format!("database {self}") }
    }
}

/// Its number.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
