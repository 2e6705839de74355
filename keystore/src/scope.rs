//! Whom a database key serves, and whose records a key log holds.

use std::fmt;

/// The cluster, or one database. Ordered by number, so the cluster comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Scope(u32);

impl Scope {
    /// The cluster: shared relations, and databases without a master key of their own.
    pub const CLUSTER: Self = Self(0);

    /// The database of this OID; the cluster for 0 (`InvalidOid`), which shared relations have in
    /// its place.
    #[inline]
    #[must_use]
    pub const fn database(oid: u32) -> Self {
        Self(oid)
    }

    /// The database's OID, 0 for the cluster: as files, WAL, shared memory and SQL have it.
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

    /// As messages name it: "the cluster", or "database" with its OID.
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
