//! What users ask for: encryption at once where that takes no time, all else by a job.

use pagevault_cipher::CipherId;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use pgrx::prelude::PgLogLevel;

use super::{catalogs, drift};
use crate::keys::store::directory;
use crate::page;
use crate::pg::guc;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::policy::{self, pending};
use crate::rekey::{JobKind, at_once, jobs};

/// Has a relation sealed that is labelled so. Returns the number of the job, if it takes one.
/// Whoever is decrypting it, or is about to, does that no more, be this rolled back or not.
pub(crate) fn encrypt(facts: &Facts, cipher: Option<CipherId>) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    refuse_repacked(facts)?;
    jobs::cancel_decryption(facts.oid)?;
    if takes_a_job(facts) {
        pending::note_encryption();
        return submit(facts, JobKind::Encrypt, cipher).map(Some);
    }
    if facts.kind.has_storage() {
        at_once::encrypt(facts.oid, cipher)?;
        jobs::forget_stopped(facts.oid)?;
    }
    Ok(None)
}

/// Has a relation written in plaintext; as [`encrypt`]. Pages cannot be rolled back, and whatever
/// ends the transaction after them (an error later in a pipeline, a signal, a promotion) would
/// leave them so under a label that says otherwise; jobs can. So it is always a job, if any file
/// has or had a key.
pub(crate) fn decrypt(facts: &Facts) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    if members(facts).into_iter().any(|member| directory::is_known(member.file)) {
        return submit(facts, JobKind::Decrypt, None).map(Some);
    }
    jobs::forget_stopped(facts.oid)?;
    Ok(None)
}

/// Refuses to go on with the decryption of a relation that is wanted encrypted by now.
pub(crate) fn refuse_wanted(facts: &Facts) -> Result<()> {
    let relation = policy::described(facts);
    let Some(decision) = policy::policy().against_resuming_decryption(&relation)? else {
        return Ok(());
    };
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} is to be encrypted", relation::quoted_name(facts)),
    )
    .detail(format!("What says so: {}.", policy::describe(decision.source)))
    .hint("Change that first, or let the job be."))
}

/// What was shredded cannot be rewritten, in a job neither.
pub(crate) fn refuse_destroyed(facts: &Facts) -> Result<()> {
    match members(facts).iter().find(|member| directory::is_destroyed(member.file)) {
        Some(member) => Err(page::errors::destroyed(&relation::quoted_name(member), "")),
        None => Ok(()),
    }
}

/// Refuses to encrypt a table of which pg_repack has a copy in plaintext, or a log of changes.
/// While it fills them it has no lock on the table that would keep this away (ACCESS SHARE,
/// repack_one_table in its bin/pg_repack.c); and the copy's file is the table's in the end. What it
/// makes after this follows the table: it makes the log under ACCESS EXCLUSIVE, and so before the
/// lock that the caller has or after it.
fn refuse_repacked(facts: &Facts) -> Result<()> {
    for table in relation::with_partitions(facts.oid) {
        for copy in policy::repack::copies_of(&table)? {
            let family = relation::family_as_it_is(copy.oid);
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

/// True if there is much to rewrite, and workers can see it.
fn takes_a_job(facts: &Facts) -> bool {
    let members = members(facts);
    let blocks: u64 = members.iter().map(|member| u64::from(relation::blocks(member.oid))).sum();
    blocks > guc::rekey_threshold() && !relation::is_new_here(facts.oid)
}

/// The files of a relation and of what follows it, partitions included, without locks.
fn members(facts: &Facts) -> Vec<Facts> {
    let tables = relation::with_partitions(facts.oid).into_iter();
    let members = tables.flat_map(|table| relation::family_as_it_is(table.oid));
    members.filter(Facts::is_stored).collect()
}

/// Has a relation, and what follows it, written as labels and settings want it. Returns the number
/// of the job, if it takes one.
pub(crate) fn reconcile(facts: &Facts) -> Result<Option<i64>> {
    let root = policy::root_of(facts)?;
    match policy::policy().wanted_or_kept(&policy::described(&root))? {
        Some(wanted) if wanted.is_encrypted() => encrypt(&root, wanted.named_cipher()),
        Some(_) => decrypt(&root),
        None => Ok(None),
    }
}

/// Has all relations sealed in this database, and all catalogs, that are wanted so and are not.
/// Returns these relations, with the numbers of the jobs where it takes one.
pub(crate) fn encrypt_all_wanted() -> Result<Vec<(Oid, Option<i64>)>> {
    let mut roots: Vec<Oid> = Vec::new();
    for drift in drift::find(false)? {
        let root = policy::root_of(&relation::require(drift.relation)?)?;
        if drift.wants_encryption()
            && root.user_made
            && !roots.contains(&root.oid)
            && refuse_destroyed(&root).is_ok()
        {
            roots.push(root.oid);
        }
    }
    let mut changed = Vec::with_capacity(roots.len());
    for root in roots {
        changed.push((root, reconcile(&relation::require(root)?)?));
    }
    catalogs::encrypt_wanted()?;
    Ok(changed)
}

/// Has everything in this database written in plaintext that nothing wants encrypted any more.
/// Returns these relations, with the numbers of their jobs. Catalogs that hold values stay sealed:
/// `pagevault.data_catalog_encryption`.
pub(crate) fn decrypt_all() -> Result<Vec<(Oid, i64)>> {
    let mut jobs = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        let is_sealed = |member: &Facts| {
            directory::is_sealed(member.file) && !directory::is_destroyed(member.file)
        };
        if !facts.is_stored()
            || !relation::leads(&facts)
            || facts.is_shared()
            || !members(&facts).iter().any(is_sealed)
        {
            continue;
        }
        match policy::wanted(&facts)? {
            Some(wanted) if wanted.is_encrypted() && facts.user_made => {
                return Err(still_wanted(&facts, &policy::describe(wanted.source).to_string()));
            }
            Some(wanted) if wanted.is_encrypted() => {}
            _ => {
                jobs.push((facts.oid, submit(&facts, JobKind::Decrypt, None)?));
            }
        }
    }
    Ok(jobs)
}

fn still_wanted(facts: &Facts, why: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} is to be encrypted", relation::quoted_name(facts)),
    )
    .detail(format!("What says so is not part of this database: {why}."))
    .hint("Change that first.")
}
