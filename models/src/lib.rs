//! Models of the parts of pagevault that can be checked in every possible order of events.
//!
//! [`protocol`] is the life of data keys, for the model checker stateright. The other modules stand
//! where the crates `keystore` and `extension` have theirs: the sources of shared memory are
//! compiled here a second time, unchanged, with the atomics of [`sync`], which try every order of
//! events that the memory model of C++11 and Rust allows. What these sources use of their crates is
//! imported here.

#![forbid(unsafe_code)]

pub mod protocol;
pub mod sync;

#[path = "../../keystore/src/directory/mod.rs"]
#[allow(unreachable_pub, reason = "private here, public there")]
pub mod directory;

mod error {
    pub(crate) use pagevault_keystore::Problem;
}
mod record {
    pub(crate) use pagevault_keystore::Record;
    /// One word, behind the two that name the database key: every word more multiplies the orders
    /// of events.
    pub(crate) const MAX_WRAPPED_DATA_KEY: usize = 4;
}
mod rel_file {
    pub(crate) use pagevault_keystore::rel_file::{Phase, RelFile};
}
mod scope {
    pub(crate) use pagevault_keystore::Scope;
}
mod wal {
    pub(crate) use pagevault_keystore::wal::{Switch, key_place};
}

pub mod shmem;

mod pg {
    pub(crate) mod mapping;
}
