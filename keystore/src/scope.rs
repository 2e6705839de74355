//! What a database key serves, and to what a key log belongs.

use std::fmt;

/// The first and the last number of a key group.
///
/// No database has such an OID: PostgreSQL assigns OIDs below 12000 to objects of its catalogs
/// (transam.h, `FirstUnpinnedObjectId`), those of its databases are 1, 4 and 5 (pg_database.dat),
/// and `createdb` (dbcommands.c) refuses others below 16384.
const KEY_GROUPS: (u32, u32) = (100, 11_999);

/// The cluster, one database, or a key group. Ordered by number, so the cluster comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Scope(u32);

impl Scope {
    /// The cluster: shared relations, and databases without their own master key.
    pub const CLUSTER: Self = Self(0);

    /// The scope with this number, as in files, WAL, shared memory and SQL.
    #[inline]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// The database with this OID; the cluster for 0 (`InvalidOid`), which shared relations have as
    /// their database.
    #[inline]
    #[must_use]
    pub const fn database(oid: u32) -> Self {
        Self(oid)
    }

    /// The database's OID, that of a key group, or 0 for the cluster.
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

    /// Whether it is a database.
    #[inline]
    #[must_use]
    pub const fn is_database(self) -> bool {
        !self.is_cluster() && self.key_group().is_none()
    }

    /// The key group, if it is one.
    #[inline]
    #[must_use]
    pub const fn key_group(self) -> Option<KeyGroup> {
        KeyGroup::new(self.0)
    }

    /// The name in messages: "the cluster", "database" with its OID, or "key group" with its
    /// number.
    #[must_use]
    pub fn name(self) -> String {
        match self.key_group() {
            _ if self.is_cluster() => "the cluster".to_owned(),
            Some(group) => format!("key group {group}"),
            None => format!("database {self}"),
        }
    }
}

/// Its number.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a key group: relations under a database key of their own. It is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct KeyGroup(u32);

impl KeyGroup {
    /// The group with this number; `None` if it is not that of a group.
    #[inline]
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        let (first, last) = KEY_GROUPS;
        if first <= number && number <= last { Some(Self(number)) } else { None }
    }

    /// The number after that of the last group; `None` if there is none left.
    #[must_use]
    pub const fn after(last: Option<Self>) -> Option<Self> {
        match last {
            Some(last) => Self::new(last.0 + 1),
            None => Self::new(KEY_GROUPS.0),
        }
    }

    /// Its number.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The scope of its database key.
    #[inline]
    #[must_use]
    pub const fn scope(self) -> Scope {
        Scope(self.0)
    }
}

/// Its number.
impl fmt::Display for KeyGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_databases_and_key_groups_are_told_apart() {
        for oid in [1, 4, 5, 99, 12_000, 16_384, u32::MAX] {
            assert!(Scope::database(oid).is_database());
            assert_eq!(KeyGroup::new(oid), None);
        }
        for number in [100, 11_999] {
            let group = KeyGroup::new(number).unwrap();
            assert_eq!(group.scope().key_group(), Some(group));
            assert!(!group.scope().is_database() && !group.scope().is_cluster());
        }
        assert!(Scope::CLUSTER.is_cluster() && !Scope::CLUSTER.is_database());
        assert_eq!(KeyGroup::after(None), KeyGroup::new(100));
        assert_eq!(KeyGroup::after(KeyGroup::new(100)), KeyGroup::new(101));
        assert_eq!(KeyGroup::after(KeyGroup::new(11_999)), None);
    }
}
