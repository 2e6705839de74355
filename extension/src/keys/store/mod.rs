//! Where keys are kept: key files and WAL, and the directory in shared memory that is made of them.

pub(crate) mod directory;
pub(crate) mod escrow;
pub(crate) mod persist;
pub(crate) mod unsettled;
