//! What pagevault decides without a server: which relations are to be encrypted, and the steps by
//! which a file in use is rewritten under another key.
//!
//! The code is pure. It reads facts and requests actions through traits. The extension implements
//! them with PostgreSQL; the tests implement them with models that try all combinations, or let
//! other events happen between two steps.
//!
//! | module | subject |
//! |---|---|
//! | [`page`] | state of a page on disk, and the target of a rewrite |
//! | [`policy`] | which relations are to be encrypted, and why |
//! | [`rekey`] | rekey jobs, and the steps that rewrite a file |
//! | [`rotation`] | when the server may rotate keys by itself |
//! | [`wal_lead`] | how much later than its record a switch of WAL begins |

#![forbid(unsafe_code)]

pub mod page;
pub mod policy;
pub mod rekey;
pub mod rotation;
pub mod wal_lead;
