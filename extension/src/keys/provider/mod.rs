//! Key providers and their master keys. A separate helper program makes all requests that wrap and
//! unwrap database keys.

pub(crate) mod admin;
mod creation;
pub(crate) mod gone;
pub(crate) mod helper;
pub(crate) mod master_keys;
pub(crate) mod operations;
mod proof;
pub(crate) mod refusal;
pub(crate) mod revalidate;
pub(crate) mod revoked;
pub(crate) mod unlock;
