//! What commands make us do: labels are set, relations and their files are made, replaced, attached
//! and moved, databases are copied, users ask for encryption. The hooks and the SQL functions call
//! these; what is wanted says [`crate::policy`], and pages are rewritten by [`crate::rekey`].

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
