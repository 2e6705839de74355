//! What is to be encrypted: `pagevault_core::policy`, with PostgreSQL's answers ([`server`]), what
//! is remembered of them ([`memo`]), and what commands leave to be done ([`pending`]).

pub(crate) mod label;
pub(crate) mod memo;
pub(crate) mod pending;
pub(crate) mod repack;
pub(crate) mod server;

pub(crate) use server::{
    Decision, Setting, Source, cipher_wanted_of, describe, described, labelled, object_of, policy,
    root_of, wanted, wanted_encrypted,
};

use crate::pg::guc;
use crate::shmem;

/// True where there is nothing to decide: without a master key nothing is encrypted and no label
/// says that it should be (they are refused), and the setting asks for nothing.
pub(crate) fn is_idle() -> bool {
    !shmem::any_database_key() && !guc::default_encryption()
}
