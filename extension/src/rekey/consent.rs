//! Whether a relation that a job is to decrypt may be decrypted still.

use pgrx::pg_sys::{self, Oid};

use super::{Job, jobs};
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::policy;

/// What is wanted of a relation that a job is to decrypt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Plaintext,
    Otherwise,
    /// Somebody has locked it as who labels it does.
    NotSaidYet,
}

/// Whether a relation that a job is to decrypt is still not wanted encrypted; else the job is over.
/// Asked in the transaction that has its files written in plaintext from then on, under a lock with
/// which nobody labels it meanwhile: who does so before is seen, who does so after finds a
/// plaintext file. The lock is not waited for: who has it may wait for this job.
pub(super) fn is_still_to_be_plaintext(job: &Job, oid: Oid) -> Result<Wanted> {
    let Some(facts) = relation::facts(oid) else { return Ok(Wanted::Otherwise) };
    let root = policy::root_of(&facts)?;
    let table = relation::owner_of_sequence(root.oid).unwrap_or(root.oid);
    // As SECURITY LABEL locks what it labels (get_object_address, objectaddress.c).
    let lock = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
    if [table, root.oid].into_iter().any(|oid| !relation::try_lock(oid, lock)) {
        return Ok(Wanted::NotSaidYet);
    }
    let Some(facts) = relation::facts(oid) else { return Ok(Wanted::Otherwise) };
    match refusal(&facts)? {
        None => Ok(Wanted::Plaintext),
        // A partition or sequence with a label of its own stays as it is, whatever its table
        // becomes.
        Some(_) if job.relation != table && job.relation != root.oid => Ok(Wanted::Otherwise),
        Some(why) => jobs::abandon(job, &why).map(|()| Wanted::Otherwise),
    }
}

/// Why a relation must not be decrypted by a job that is under way, or resumed.
fn refusal(facts: &Facts) -> Result<Option<String>> {
    let wanted = policy::policy().against_decrypting(&policy::described(facts))?;
    Ok(wanted.map(|decision| {
        format!(
            "{} is to be encrypted: {}",
            relation::quoted_name(facts),
            policy::describe(decision.source)
        )
    }))
}
