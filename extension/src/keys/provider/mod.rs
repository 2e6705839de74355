//! Key providers, and the master keys in them: asked by way of a program of its own, for everything
//! that wraps and unwraps database keys.

pub(crate) mod admin;
pub(crate) mod gone;
pub(crate) mod helper;
pub(crate) mod master_keys;
pub(crate) mod operations;
mod proof;
pub(crate) mod refusal;
pub(crate) mod revalidate;
pub(crate) mod revoked;
pub(crate) mod unlock;
