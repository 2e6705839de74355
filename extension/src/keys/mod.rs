//! Keys in the server: where they are kept, how they are found, made, unlocked and persisted.

pub(crate) mod audit;
pub(crate) mod cache;
pub(crate) mod copies;
pub(crate) mod data_keys;
pub(crate) mod destruction;
pub(crate) mod escrow;
pub(crate) mod gone;
pub(crate) mod health;
pub(crate) mod helper;
pub(crate) mod load;
pub(crate) mod master_keys;
pub(crate) mod persist;
pub(crate) mod provider_admin;
pub(crate) mod providers;
pub(crate) mod refusal;
pub(crate) mod revalidate;
pub(crate) mod revoked;
pub(crate) mod secrets;
pub(crate) mod shared;
pub(crate) mod temporary;
pub(crate) mod unlock;
mod upgrade;
pub(crate) mod wal;
pub(crate) mod wal_switch;
mod words;
