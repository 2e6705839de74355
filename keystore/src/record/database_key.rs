//! Database keys and their wrappings.

use std::iter;

use crate::check_value::CheckValue;

/// Most master keys that wrap one database key.
pub const MAX_MASTER_KEYS: usize = 8;

/// A database key, wrapped by a master key. Times are in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wrapping {
    /// Provider of the master key.
    pub provider: String,
    /// Name of the master key at the provider.
    pub master_key: String,
    /// Version of the master key that wrapped it.
    pub master_version: u64,
    /// Opaque.
    pub wrapped: Vec<u8>,
    /// When it was wrapped so.
    pub at: i64,
    /// When that version of the master key was first used for the scope.
    pub since: i64,
}

impl Wrapping {
    /// A wrapping by a version of a master key that is new at that time.
    #[must_use]
    pub fn new(
        (provider, master_key): (&str, &str),
        master_version: u64,
        wrapped: Vec<u8>,
        at: i64,
    ) -> Self {
        let (provider, master_key) = (provider.to_owned(), master_key.to_owned());
        Self { provider, master_key, master_version, wrapped, at, since: at }
    }

    /// Whether it is by this master key.
    #[must_use]
    pub fn is_by(&self, provider: &str, master_key: &str) -> bool {
        self.provider == provider && self.master_key == master_key
    }
}

/// A database key, wrapped by one or several master keys, each of which unlocks it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DatabaseKey {
    /// Its key check value.
    pub check: CheckValue,
    /// When it was made, in seconds since 1970.
    pub made: i64,
    /// By the master key that is asked first.
    pub first: Wrapping,
    /// By others, in the order in which they are asked.
    pub others: Vec<Wrapping>,
}

impl DatabaseKey {
    /// A key that is wrapped as it was when it was made.
    #[must_use]
    pub fn new(check: CheckValue, first: Wrapping) -> Self {
        Self { check, made: first.at, first, others: Vec::new() }
    }

    /// All wrappings, in the order in which master keys are asked.
    pub fn wrappings(&self) -> impl Iterator<Item = &Wrapping> + Clone {
        iter::once(&self.first).chain(&self.others)
    }
}
