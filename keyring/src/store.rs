//! The interface of all stores of notes ([`pagevault_keystore::anchor`]).

pub use pagevault_keystore::protocol::StoredNote;

use crate::failure::Failure;

/// Keeps one note of one cluster outside of its data directory.
///
/// As with [`Provider`](crate::provider::Provider), an implementation makes one attempt per call;
/// the caller repeats attempts and enforces the deadline. A failure is an outage: the store has not
/// said what the note is. What it returns is not verified yet.
pub trait Store {
    /// The newest note, if there is one.
    fn read(&self) -> Result<Option<StoredNote>, Failure>;

    /// Replaces the note of this version (`None`: writes the first note), unless the store has
    /// another one.
    fn write(&self, note: &str, replaces: Option<u64>) -> Result<Written, Failure>;
}

/// Result of [`Store::write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The note was written and has this version.
    Done(u64),
    /// The store has another note. Nothing was written.
    Overtaken,
}
