//! What differs from the policy: labels decide for storage that is made after them.

use pgrx::pg_sys::Oid;

use super::decision::{self, Decision, Source};
use super::label::Label;
use crate::keys::shared;
use crate::pg::catalog;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::Result;
use crate::rekey::jobs;
use crate::verify::{self, PageState};

/// A relation that is not as it should be.
pub(crate) struct Drift {
    pub(crate) relation: Oid,
    pub(crate) wanted: String,
    /// The label or setting that decides.
    pub(crate) why: String,
    pub(crate) actual: String,
    /// SQL that puts it right.
    pub(crate) heal: String,
    /// True if it is to be sealed and is not, or not wholly, and no job has been asked to do that.
    pub(crate) wants_encryption: bool,
}

/// Every relation of this database that differs from the policy; with `check_files` also those that hold
/// pages which are not what they should be, and for that all files are read.
pub(crate) fn find(check_files: bool) -> Result<Vec<Drift>> {
    let (mut found, at_work) = drift_of_jobs()?;
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if facts.is_stored()
            && let Some(drift) = drift_of(&facts, check_files)?
            && !at_work.contains(&root_of(&facts)?.oid)
            && !relation::owner_of_sequence(facts.oid).is_some_and(|owner| at_work.contains(&owner))
        {
            found.push(drift);
        }
    }
    Ok(found)
}

/// Relations whose rekeying was asked for and is not done; and those of which nothing else needs saying,
/// because a job is on its way.
fn drift_of_jobs() -> Result<(Vec<Drift>, Vec<Oid>)> {
    let (mut found, mut at_work) = (Vec::new(), Vec::new());
    for job in jobs::unsettled()? {
        if relation::facts(job.relation).is_none() {
            continue; // dropped meanwhile
        }
        let stopped = matches!(job.state.as_str(), "paused" | "cancelled" | "failed");
        if !stopped {
            at_work.extend(relation::with_partitions(job.relation).iter().map(|table| table.oid));
        }
        let wanted = match job.kind.as_str() {
            "encrypt" => "encrypted",
            "decrypt" => "plain",
            _ => "encrypted with a new data key",
        };
        let heal = if stopped { "rekey_resume" } else { "rekey_wait" };
        found.push(Drift {
            relation: job.relation,
            wanted: wanted.to_owned(),
            why: format!("rekey job {}", job.id),
            actual: format!("{}, {} of {} pages done", job.state, job.pages_done, job.pages_total),
            heal: format!("SELECT pagevault.{heal}({})", job.id),
            wants_encryption: false,
        });
    }
    Ok((found, at_work))
}

fn drift_of(facts: &Facts, check_files: bool) -> Result<Option<Drift>> {
    let current = shared::current_cipher(facts.file);
    let Some(decision) = wanted_of(facts)? else {
        return Ok(None);
    };
    let stray = if check_files { stray_pages(facts, &decision)? } else { 0 };
    if decision.is_met_by(current) && stray == 0 {
        return Ok(None);
    }
    let mut actual = current.map_or_else(|| "plain".to_owned(), |c| format!("encrypted {c}"));
    if stray > 0 {
        let kind = if decision.is_encrypted() { "plaintext" } else { "sealed" };
        actual.push_str(&format!(", {stray} {kind} pages"));
    }
    Ok(Some(Drift {
        relation: facts.oid,
        wanted: decision.label.to_string(),
        why: decision.source.describe(),
        actual,
        heal: heal(facts)?,
        wants_encryption: decision.is_encrypted(),
    }))
}

/// The number of pages on disk that are in plaintext where they should be sealed, or the other way round.
fn stray_pages(facts: &Facts, decision: &Decision) -> Result<i64> {
    let is_stray = |state: PageState| match state {
        PageState::Empty => false,
        PageState::Plaintext => decision.is_encrypted(),
        PageState::Sealed(_) => !decision.is_encrypted(),
    };
    let counts = verify::count_pages(facts.file)?;
    Ok(counts.iter().filter(|count| is_stray(count.state)).map(|count| count.pages).sum())
}

/// Online, and without a label that stays behind. Catalogs have none anyway.
fn heal(facts: &Facts) -> Result<String> {
    let function = if facts.user_made { "reconcile" } else { "encrypt" };
    let name = catalog::quoted_literal(&relation::quoted_name(&root_of(facts)?));
    Ok(format!("SELECT pagevault.{function}({name})"))
}

/// The relation that an index or TOAST table belongs to in the end.
pub(crate) fn root_of(facts: &Facts) -> Result<Facts> {
    let mut root = facts.clone();
    while matches!(root.kind, Kind::Index | Kind::Toast) {
        let leader = decision::leader_of(&root)?.and_then(relation::facts);
        let Some(leader) = leader else { break };
        root = leader;
    }
    Ok(root)
}

/// What is wanted of a relation, be it only that it stay encrypted throughout.
pub(crate) fn wanted_of(facts: &Facts) -> Result<Option<Decision>> {
    Ok(decision::wanted(facts)?.or_else(|| Decision::as_it_is(facts)))
}

impl Decision {
    /// Where nothing is wanted, a relation that is encrypted is to be so throughout.
    fn as_it_is(facts: &Facts) -> Option<Decision> {
        shared::is_sealed(facts.file)
            .then(|| Decision::new(Label::Encrypted(None), Source::Own(facts.oid)))
    }
}
