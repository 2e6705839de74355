//! Storage of keys: key files and WAL, and the directory in shared memory that is built from them.

pub(crate) mod compact;
pub(crate) mod database_keys;
pub(crate) mod directory;
pub(crate) mod escrow;
pub(crate) mod failures;
pub(crate) mod former;
pub(crate) mod given_up;
pub(crate) mod key_groups;
pub(crate) mod persist;
pub(crate) mod presence;
pub(crate) mod rewound;
pub(crate) mod unsettled;
