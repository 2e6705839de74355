//! Requests of users: small relations are encrypted at once, everything else is done by a job.

use pagevault_cipher::CipherId;
use pagevault_core::policy::Named;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use pgrx::prelude::PgLogLevel;

use super::{catalogs, drift, storage};
use crate::keys::store::directory;
use crate::page;
use crate::pg::guc;
use crate::pg::inheritance;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::pg::session;
use crate::policy::{self, pending};
use crate::rekey::{JobKind, at_once, jobs};
use crate::roles;

/// Encrypts a relation that is labelled so. Returns the number of the rekey job, if one is needed.
/// Jobs that are decrypting it, or would, are cancelled, even if this transaction is rolled back.
pub(crate) fn encrypt(facts: &Facts, cipher: Option<CipherId>) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    refuse_rewritten(facts)?;
    refuse_repacked(facts)?;
    jobs::cancel_decryption(facts.oid)?;
    if takes_a_job(facts) || moves_revocably(facts)? {
        pending::note_encryption();
        return submit(facts, JobKind::Encrypt, cipher).map(Some);
    }
    if facts.kind.has_storage() {
        at_once::encrypt(facts.oid, cipher)?;
    } else {
        for member in members(facts) {
            if let Some(wanted) = policy::wanted_encrypted(&member)?
                && relation::is_independent(&member)
            {
                at_once::encrypt(member.oid, wanted.named_cipher())?;
            }
        }
    }
    jobs::forget_stopped(facts.oid)?;
    Ok(None)
}

/// Decrypts a relation; returns like [`encrypt`]. This is always a job, if any file has or had a
/// key, or a job has begun that is about to make one: pages cannot be rolled back, and an abort of
/// the transaction after rewriting them (an error later in a pipeline, a signal, a promotion) would
/// leave plaintext under a label that says otherwise. Jobs can be rolled back.
pub(crate) fn decrypt(facts: &Facts) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    let members = members(facts);
    let oids: Vec<Oid> = members.iter().map(|member| member.oid).chain([facts.oid]).collect();
    if members.iter().any(|member| directory::is_known(member.file))
        || jobs::any_unfinished(&oids)?.is_some()
    {
        // Also if somebody may call the function that asks for this.
        let name = relation::quoted_name(facts);
        roles::require_admin(&format!("remove the encryption of {name}"))?;
        return submit(facts, JobKind::Decrypt, None).map(Some);
    }
    jobs::forget_stopped(facts.oid)?;
    Ok(None)
}

/// Refuses to resume the decryption of a relation for which encryption is required by now.
pub(crate) fn refuse_wanted(facts: &Facts) -> Result<()> {
    let relation = policy::described(facts);
    let Some(decision) = policy::policy().against_resuming_decryption(&relation)? else {
        return Ok(());
    };
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} is to be encrypted", relation::quoted_name(facts)),
    )
    .detail(format!("Decided by: {}.", policy::describe(decision.source)))
    .hint("Change the policy first, or leave the job as it is."))
}

/// Refuses shredded relations: they cannot be rewritten, not by a job either.
pub(crate) fn refuse_destroyed(facts: &Facts) -> Result<()> {
    match members(facts).iter().find(|member| directory::is_destroyed(member.file)) {
        Some(member) => Err(page::errors::destroyed(&relation::quoted_name(member), "")),
        None => Ok(()),
    }
}

/// Refuses to encrypt a relation while a command of this session rewrites it, and has called the
/// function that asks for this: in the end the relation gets new storage that was created before.
/// Commands of other sessions have a lock that excludes this one.
fn refuse_rewritten(facts: &Facts) -> Result<()> {
    let tables = inheritance::with_partitions(facts.oid);
    match tables.iter().find(|table| storage::is_being_rewritten(table.oid)) {
        Some(table) => Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("{} is being rewritten", relation::quoted_name(table)),
        )
        .detail("A command of this session fills new storage of it.")
        .hint("Set the label before or after that command.")),
        None => Ok(()),
    }
}

/// Refuses to encrypt a table of which pg_repack has a plaintext copy or log of changes. While
/// pg_repack fills these, it holds no lock on the table that would exclude this command (before
/// 1.5.3: ACCESS SHARE, repack_one_table in its bin/pg_repack.c), and in the end the table gets the
/// copy's file.
/// What pg_repack creates afterwards follows the table: it creates the log under ACCESS EXCLUSIVE,
/// so before or after the caller holds its lock.
fn refuse_repacked(facts: &Facts) -> Result<()> {
    for table in inheritance::with_partitions(facts.oid) {
        for copy in policy::repack::copies_of(&table)? {
            let family = relation::family_unlocked(copy.oid);
            if !family.iter().any(|member| member.is_stored() && !directory::is_sealed(member.file))
            {
                continue;
            }
            let name = relation::quoted_name(&table);
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
                format!("{name} is being repacked"),
            )
            .detail(format!(
                "pg_repack has rows of it in {}, in plaintext.",
                relation::quoted_name(&copy)
            ))
            .hint("Wait until pg_repack is done, or, if it was interrupted, drop what it has left with its extension; then repeat the command."));
        }
    }
    Ok(())
}

fn submit(facts: &Facts, kind: JobKind, cipher: Option<CipherId>) -> Result<i64> {
    let name = relation::qualified_name(facts.oid);
    let job = jobs::submit(facts.oid, &name, kind, cipher)?;
    let done = match kind {
        JobKind::Encrypt => "encrypted",
        JobKind::Rotate => "given new data keys",
        JobKind::Decrypt => "decrypted",
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("{name} will be {done} in the background by rekey job {job}"),
    )
    .hint(format!("See pagevault.rekey_jobs, or wait with pagevault.wait_for_rekey({job})."))
    .send(PgLogLevel::NOTICE);
    Ok(job)
}

/// True if there is much to rewrite in files that workers can see.
fn takes_a_job(facts: &Facts) -> bool {
    let members = members(facts).into_iter().filter(|member| !relation::is_new_here(member.oid));
    let blocks: u64 = members.map(|member| u64::from(relation::blocks(member.oid))).sum();
    blocks > guc::rekey_threshold()
}

/// Whether a relation may be put into a key group, or taken out of one, by a statement that is
/// rolled back later. Keys are not rolled back, and a key group ends with what is in it; jobs are.
pub(super) fn moves_revocably(facts: &Facts) -> Result<bool> {
    if !session::may_be_rolled_back() {
        return Ok(false);
    }
    for member in members(facts) {
        if relation::is_new_here(member.oid) {
            continue; // its file is gone then
        }
        let has = directory::current_key_group(member.file);
        if policy::named_key_group(&member)? != has.map(Named::Group) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The files of a relation and of those that follow it, including partitions, without locks.
fn members(facts: &Facts) -> Vec<Facts> {
    let tables = inheritance::with_partitions(facts.oid).into_iter();
    let members = tables.flat_map(|table| relation::family_unlocked(table.oid));
    members.filter(Facts::is_stored).collect()
}

/// Brings a relation, and those that follow it, to the state that labels and settings require.
/// Returns the number of the rekey job, if one is needed.
pub(crate) fn reconcile(facts: &Facts) -> Result<Option<i64>> {
    let root = policy::root_of(facts)?;
    match policy::policy().wanted_or_kept(&policy::described(&root))? {
        Some(wanted) if wanted.is_encrypted() => encrypt(&root, wanted.named_cipher()),
        Some(_) => decrypt(&root),
        None => Ok(None),
    }
}

/// Encrypts a relation, and those that follow it, if labels and settings require it. Decrypts
/// nothing: a label around an encrypted table does not, so what follows that table is encrypted.
/// Returns like [`reconcile`].
pub(super) fn encrypt_if_wanted(facts: &Facts) -> Result<Option<i64>> {
    let root = policy::root_of(facts)?;
    match policy::policy().wanted_or_kept(&policy::described(&root))? {
        Some(wanted) if wanted.is_encrypted() => encrypt(&root, wanted.named_cipher()),
        _ if root.is_stored() && directory::is_sealed(root.file) => encrypt(&root, None),
        _ => Ok(None),
    }
}

/// Encrypts all relations of this database, and all catalogs, for which encryption is required and
/// missing. Returns these relations, with the numbers of jobs where needed.
pub(crate) fn encrypt_all_wanted() -> Result<Vec<(Oid, Option<i64>)>> {
    let mut roots: Vec<Oid> = Vec::new();
    for drift in drift::find(false)? {
        let root = policy::root_of(&relation::require(drift.relation)?)?;
        if drift.wants_encryption()?
            && root.user_made
            && !roots.contains(&root.oid)
            && refuse_destroyed(&root).is_ok()
        {
            roots.push(root.oid);
        }
    }
    let mut changed = Vec::with_capacity(roots.len());
    for root in roots {
        let facts = relation::require(root)?;
        if let Some(job) = jobs::any_unfinished(&[root])? {
            let name = relation::quoted_name(&facts);
            Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
                format!("{name} is left out: rekey job {job} has not ended"),
            )
            .hint("Call this once more when it has.")
            .send(PgLogLevel::NOTICE);
            continue;
        }
        changed.push((root, encrypt_if_wanted(&facts)?));
    }
    catalogs::encrypt_wanted()?;
    Ok(changed)
}

/// Decrypts everything in this database for which encryption is not required any more. Returns
/// these relations and the numbers of their jobs. Catalogs with values of user tables stay
/// encrypted while `pagevault.data_catalog_encryption` is on.
pub(crate) fn decrypt_all() -> Result<Vec<(Oid, i64)>> {
    let mut jobs = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        let is_sealed = |member: &Facts| {
            directory::is_sealed(member.file) && !directory::is_destroyed(member.file)
        };
        if !facts.is_stored()
            || !relation::is_independent(&facts)
            || facts.is_shared()
            || !members(&facts).iter().any(is_sealed)
        {
            continue;
        }
        match policy::wanted(&facts)? {
            Some(wanted) if wanted.is_encrypted() && facts.user_made => {
                return Err(must_be_encrypted(
                    &facts,
                    &policy::describe(wanted.source).to_string(),
                ));
            }
            Some(wanted) if wanted.is_encrypted() => {}
            _ => {
                jobs.push((facts.oid, submit(&facts, JobKind::Decrypt, None)?));
            }
        }
    }
    Ok(jobs)
}

fn must_be_encrypted(facts: &Facts, why: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} is to be encrypted", relation::quoted_name(facts)),
    )
    .detail(format!("The decision is made outside this database: {why}."))
    .hint("Change that first.")
}
