//! Keys in the server: where they are kept, how they are found, made, unlocked and persisted.

pub(crate) mod load;
pub(crate) mod names;
pub(crate) mod provider;
pub(crate) mod redo;
pub(crate) mod store;
pub(crate) mod usage;
