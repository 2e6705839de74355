//! What differs from the policy: labels decide for storage that is made after them.

use pagevault_keystore::job::{JobKind, JobState};
use pgrx::pg_sys::Oid;

use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::statement;
use crate::pg::survey::Survey;
use crate::pg::text::ServerText;
use crate::policy::{Decision, describe, described, policy, root_of, wanted_encrypted};
use crate::rekey::jobs;
use crate::verify;

/// A relation that is not as it should be.
pub(crate) struct Drift {
    pub(crate) relation: Oid,
    pub(crate) expected: String,
    /// The label or setting that decides.
    pub(crate) reason: ServerText,
    pub(crate) actual: String,
    /// SQL that puts it right.
    pub(crate) fix: ServerText,
    /// True if it is to be sealed and is not, or not wholly, and no job has been asked to do that.
    pub(crate) wants_encryption: bool,
}

/// Every relation of this database that differs from the policy; with `check_files` also those that
/// hold pages which are not what they should be, and for that all files are read.
pub(crate) fn find(check_files: bool) -> Result<Vec<Drift>> {
    let survey = Survey::make();
    let (mut found, at_work) = drift_of_jobs()?;
    for facts in survey.relations() {
        if facts.is_stored()
            && let Some(drift) = drift_of(facts, check_files)?
            && !at_work.contains(&root_of(facts)?.oid)
            && !relation::owner_of_sequence(facts.oid).is_some_and(|owner| at_work.contains(&owner))
        {
            found.push(drift);
        }
    }
    Ok(found)
}

/// Relations whose rekeying was asked for and is not done; and those of which nothing else needs
/// saying, because a job is on its way.
fn drift_of_jobs() -> Result<(Vec<Drift>, Vec<Oid>)> {
    let (mut found, mut at_work) = (Vec::new(), Vec::new());
    for job in jobs::unsettled()? {
        let relation: Oid = job.request.relation.into();
        if relation::facts(relation).is_none() {
            continue; // dropped meanwhile
        }
        let (id, state, progress) = (job.job.number, jobs::shown_state(&job), job.progress);
        let stopped = job.state != JobState::Waiting;
        if !stopped {
            at_work.extend(relation::with_partitions(relation).iter().map(|table| table.oid));
        }
        if stopped && job.request.kind == JobKind::Decrypt && is_wanted_encrypted(relation)? {
            continue; // nobody is to go on with it
        }
        let expected = match job.request.kind {
            JobKind::Encrypt => "encrypted",
            JobKind::Decrypt => "plaintext",
            JobKind::Rotate => "encrypted with a new data key",
        };
        let fix = if stopped { "resume_rekey" } else { "wait_for_rekey" };
        found.push(Drift {
            relation,
            expected: expected.to_owned(),
            reason: ServerText::from_bytes(format!("rekey job {id}").as_bytes()),
            actual: format!(
                "{state}, {} of {} pages done",
                progress.pages_done, progress.pages_total
            ),
            fix: ServerText::from_bytes(format!("SELECT pagevault.{fix}({id})").as_bytes()),
            wants_encryption: false,
        });
    }
    Ok((found, at_work))
}

fn is_wanted_encrypted(relation: Oid) -> Result<bool> {
    let Some(facts) = relation::facts(relation) else { return Ok(false) };
    Ok(wanted_encrypted(&facts)?.is_some())
}

fn drift_of(facts: &Facts, check_files: bool) -> Result<Option<Drift>> {
    let stray = |wanted: &Decision| if check_files { stray_pages(facts, wanted) } else { Ok(0) };
    let Some(found) = policy().drift_of(&described(facts), stray)? else { return Ok(None) };
    let (wanted, stray) = (found.wanted, found.stray);
    let mut actual = found
        .current
        .map_or_else(|| "plaintext".to_owned(), |cipher| format!("encrypted {cipher}"));
    if stray > 0 {
        let kind = if wanted.is_encrypted() { "plaintext" } else { "encrypted" };
        actual.push_str(&format!(", {stray} {kind} pages"));
    }
    Ok(Some(Drift {
        relation: facts.oid,
        expected: wanted.label.to_string(),
        reason: describe(wanted.source),
        actual,
        fix: fix(facts)?,
        wants_encryption: wanted.is_encrypted(),
    }))
}

/// The number of pages on disk that are in plaintext where they should be sealed, or the other way
/// round.
fn stray_pages(facts: &Facts, wanted: &Decision) -> Result<i64> {
    let counts = verify::count_pages(facts.file)?;
    Ok(counts.iter().filter(|count| wanted.is_stray(count.state)).map(|count| count.pages).sum())
}

/// Online, and without a label that stays behind. Catalogs have none anyway.
fn fix(facts: &Facts) -> Result<ServerText> {
    let function: &[u8] = if facts.user_made { b"reconcile" } else { b"encrypt" };
    let name = statement::quoted_literal(&relation::sql_name(&root_of(facts)?));
    Ok(ServerText::join(&[b"SELECT pagevault.", function, b"(", name.bytes(), b")"]))
}
