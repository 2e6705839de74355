//! The policy: `pagevault_core::policy` with facts from PostgreSQL ([`server`]), a cache of them
//! ([`memo`]), and the work that commands leave pending ([`pending`]).

pub(crate) mod label;
pub(crate) mod memo;
pub(crate) mod pending;
pub(crate) mod repack;
pub(crate) mod server;

pub(crate) use server::{
    Decision, Server, Setting, Source, cipher_wanted_of, describe, described,
    is_in_other_key_group, labelled, leaders, named_key_group, object_of, policy, root_of,
    sealing_with, wanted, wanted_encrypted,
};

use crate::pg::guc;
use crate::shmem;

/// True if there is nothing to decide: without a master key nothing is encrypted and labels that
/// say encrypted are refused; and the setting does not require encryption.
pub(crate) fn is_idle() -> bool {
    !shmem::any_database_key() && !guc::default_encryption()
}
