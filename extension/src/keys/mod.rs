//! Keys in the server: where they are kept, how they are found, made, unlocked and persisted.

pub(crate) mod cache;
pub(crate) mod data_keys;
pub(crate) mod helper;
pub(crate) mod load;
pub(crate) mod manage;
pub(crate) mod persist;
pub(crate) mod secrets;
pub(crate) mod shared;
pub(crate) mod unlock;
