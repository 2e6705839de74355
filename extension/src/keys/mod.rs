//! Keys in the server: storage, look-up, creation, unlocking, recovery.

pub(crate) mod load;
pub(crate) mod names;
pub(crate) mod provider;
pub(crate) mod redo;
pub(crate) mod store;
pub(crate) mod usage;
