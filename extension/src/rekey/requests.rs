//! What users ask for: at once where that takes no time, else by a job.

use pagevault_cipher::CipherId;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use pgrx::prelude::PgLogLevel;

use super::{Kind, jobs};
use crate::hooks::utility;
use crate::keys::shared;
use crate::page_io;
use crate::pg::guc;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::policy;
use crate::rewrite;

/// Has a relation sealed that is labelled so. Returns the number of the job, if it takes one.
pub(crate) fn encrypt(facts: &Facts, cipher: Option<CipherId>) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    if takes_a_job(facts) {
        policy::catalogs::note_encryption();
        let name = cipher.map(|cipher| cipher.to_string());
        return submit(facts, Kind::Encrypt, name.as_deref()).map(Some);
    }
    if facts.kind.has_storage() {
        rewrite::encrypt(facts.oid, cipher)?;
        jobs::forget_stopped(facts.oid)?;
    }
    Ok(None)
}

/// Has a relation written in plaintext; as [`encrypt`]. Pages cannot be rolled back, jobs can: so within a
/// transaction block it is always a job.
pub(crate) fn decrypt(facts: &Facts) -> Result<Option<i64>> {
    refuse_destroyed(facts)?;
    let any_sealed = || {
        let mut files = members(facts).into_iter().map(|member| member.file);
        files.any(shared::is_known)
    };
    if takes_a_job(facts) || (utility::in_transaction_block() && any_sealed()) {
        return submit(facts, Kind::Decrypt, None).map(Some);
    }
    if facts.kind.has_storage() {
        rewrite::decrypt(facts.oid)?;
        jobs::forget_stopped(facts.oid)?;
    }
    Ok(None)
}

/// What was shredded cannot be rewritten, in a job neither.
pub(crate) fn refuse_destroyed(facts: &Facts) -> Result<()> {
    match members(facts).iter().find(|member| shared::is_destroyed(member.file)) {
        Some(member) => Err(page_io::destroyed(&relation::quoted_name(member))),
        None => Ok(()),
    }
}

fn submit(facts: &Facts, kind: Kind, cipher: Option<&str>) -> Result<i64> {
    let name = relation::qualified_name(facts.oid);
    let job = jobs::submit(facts.oid, &name, kind, cipher)?;
    let done = match kind {
        Kind::Encrypt => "encrypted",
        Kind::Rotate => "given new data keys",
        Kind::Decrypt => "decrypted",
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("{name} will be {done} in the background by rekey job {job}"),
    )
    .hint(format!("See pagevault.rekey_progress, or wait with pagevault.rekey_wait({job})."))
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

/// Has a relation, and what follows it, written as labels and settings want it. Returns the number of the job,
/// if it takes one.
pub(crate) fn reconcile(facts: &Facts) -> Result<Option<i64>> {
    let root = policy::drift::root_of(facts)?;
    match policy::drift::wanted_of(&root)? {
        Some(wanted) if wanted.is_encrypted() => encrypt(&root, wanted.named_cipher()),
        Some(_) => decrypt(&root),
        None => Ok(None),
    }
}

/// Has everything sealed in this database that is wanted so and is not. Returns the number of relations.
pub(crate) fn encrypt_all_wanted() -> Result<i64> {
    let mut roots: Vec<Oid> = Vec::new();
    for drift in policy::drift::find(false)? {
        let root = policy::drift::root_of(&relation::require(drift.relation)?)?;
        if drift.wants_encryption
            && root.user_made
            && !roots.contains(&root.oid)
            && refuse_destroyed(&root).is_ok()
        {
            roots.push(root.oid);
        }
    }
    for root in &roots {
        reconcile(&relation::require(*root)?)?;
    }
    policy::catalogs::encrypt_wanted().map(|catalogs| catalogs + roots.len() as i64)
}

/// Has everything in this database written in plaintext that nothing wants encrypted any more. Returns the
/// number of jobs. Catalogs that hold values stay sealed: `pagevault.protect_statistics`.
pub(crate) fn decrypt_all() -> Result<i64> {
    let mut count = 0;
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        let is_sealed =
            |member: &Facts| shared::is_sealed(member.file) && !shared::is_destroyed(member.file);
        if !facts.is_stored()
            || !relation::leads(&facts)
            || policy::catalogs::is_shared(&facts)
            || !members(&facts).iter().any(is_sealed)
        {
            continue;
        }
        match policy::decision::wanted(&facts)? {
            Some(wanted) if wanted.is_encrypted() && facts.user_made => {
                return Err(still_wanted(&facts, &wanted.source.describe()));
            }
            Some(wanted) if wanted.is_encrypted() => {}
            _ => {
                submit(&facts, Kind::Decrypt, None)?;
                count += 1;
            }
        }
    }
    Ok(count)
}

fn still_wanted(facts: &Facts, why: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} is to be encrypted", relation::quoted_name(facts)),
    )
    .detail(format!("What says so is not part of this database: {why}."))
    .hint("Change that first.")
}
