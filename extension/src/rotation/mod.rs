//! Rotation of keys by the server itself, when they have reached the age that
//! `pagevault.rotate_..._key_after` names: on a primary, within `pagevault.rotation_window`, one
//! key at a time.
//!
//! The launcher of rekey workers looks at the ages ([`schedule`]), and starts a worker for what is
//! due ([`perform`]). For data keys that worker requests jobs like those of
//! `rotate_all_data_keys()`, which run within the window, one at a time. Relations with pages under
//! interim keys get such jobs whatever the settings, when their key group is unlocked.

pub(crate) mod ages;
pub(crate) mod perform;
pub(crate) mod schedule;

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;

/// What is to be rotated next. In the order in which tasks are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    /// The master key of a scope.
    MasterKey(Scope),
    /// The database key of a scope.
    DatabaseKey(Scope),
    /// The WAL key.
    WalKey,
    /// Data keys of a database (OID).
    DataKeys(u32),
    /// Data keys of files that all databases share, seen to by this one.
    SharedDataKeys(u32),
    /// Looking for pages under interim keys in files that are not marked.
    FindInterimPages,
    /// Data keys of a database (OID) for files that have pages under their interim keys.
    InterimPages(u32),
}

impl Task {
    /// In the argument of a worker.
    pub(crate) fn encode(self) -> u64 {
        let (kind, number) = match self {
            Task::MasterKey(scope) => (1, scope.number()),
            Task::DatabaseKey(scope) => (2, scope.number()),
            Task::WalKey => (3, 0),
            Task::DataKeys(database) => (4, database),
            Task::SharedDataKeys(database) => (5, database),
            Task::InterimPages(database) => (6, database),
            Task::FindInterimPages => (7, 0),
        };
        kind << 32 | u64::from(number)
    }

    /// What [`Task::encode`] has made.
    pub(crate) fn decode(argument: u64) -> Option<Task> {
        let number = argument as u32;
        match argument >> 32 {
            1 => Some(Task::MasterKey(Scope::from_number(number))),
            2 => Some(Task::DatabaseKey(Scope::from_number(number))),
            3 => Some(Task::WalKey),
            4 => Some(Task::DataKeys(number)),
            5 => Some(Task::SharedDataKeys(number)),
            6 => Some(Task::InterimPages(number)),
            7 => Some(Task::FindInterimPages),
            _ => None,
        }
    }
}

/// A version as SQL has it.
fn number(version: KeyVersion) -> i64 {
    version.get().into()
}
