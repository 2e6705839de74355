//! Consequences of commands: labels are set; relations and files are created, replaced, attached
//! and moved; databases are copied; users request encryption. Called by hooks and SQL functions.
//! [`crate::policy`] decides what is to be encrypted, [`crate::rekey`] rewrites pages.

pub(crate) mod altered;
pub(crate) mod catalogs;
pub(crate) mod databases;
pub(crate) mod drift;
mod enforce;
pub(crate) mod labels;
pub(crate) mod removal;
pub(crate) mod requests;
mod shared_labels;
pub(crate) mod storage;
