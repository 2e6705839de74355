//! Whether a relation may still be decrypted by a job.

use pgrx::pg_sys::{self, Oid};

use super::{Job, jobs};
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::policy;

/// The present policy for a relation that a job is to decrypt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Plaintext,
    Otherwise,
    /// Unknown: a session holds the lock that is taken for labelling.
    Unknown,
}

/// Checks that the policy still permits the decryption of a relation by a job; if not, ends the
/// job. Called in the transaction that switches the file to plaintext, under a lock that conflicts
/// with labelling: a label set before is seen here, and a label set afterwards finds a plaintext
/// file. Does not wait for the lock, because its holder may be waiting for this job.
pub(super) fn policy_for_decryption(job: &Job, oid: Oid) -> Result<Wanted> {
    let Some(facts) = relation::facts(oid) else { return Ok(Wanted::Otherwise) };
    let root = policy::root_of(&facts)?;
    let table = relation::owner_of_sequence(root.oid).unwrap_or(root.oid);
    // The lock that SECURITY LABEL takes (get_object_address, objectaddress.c).
    let lock = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
    if [table, root.oid].into_iter().any(|oid| !relation::try_lock(oid, lock)) {
        return Ok(Wanted::Unknown);
    }
    let Some(facts) = relation::facts(oid) else { return Ok(Wanted::Otherwise) };
    // It may have been detached since the job has listed it.
    if job.relation != oid && !policy::leaders(&facts)?.contains(&job.relation) {
        return Ok(Wanted::Otherwise);
    }
    match refusal(&facts)? {
        None => Ok(Wanted::Plaintext),
        // A partition or sequence with a label of its own keeps its state, independently of its
        // table.
        Some(_) if job.relation != table && job.relation != root.oid => Ok(Wanted::Otherwise),
        Some(why) => jobs::abandon(job, &why).map(|()| Wanted::Otherwise),
    }
}

/// The reason why a job in progress, or a resumed one, must not decrypt a relation.
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
