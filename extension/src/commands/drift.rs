//! What differs from the policy: labels decide for storage that is made after them.

use std::fmt;

use pagevault_cipher::CipherId;
use pagevault_keystore::job::{JobKind, JobState};
use pgrx::pg_sys::Oid;

use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::statement;
use crate::pg::survey::Survey;
use crate::pg::text::ServerText;
use crate::policy::label::Label;
use crate::policy::{Decision, describe, described, policy, root_of, wanted_encrypted};
use crate::rekey::jobs::{self, ShownState};
use crate::verify;

/// A relation that is not as it should be.
pub(crate) struct Drift {
    pub(crate) relation: Oid,
    pub(crate) expected: Expected,
    /// The label, setting or job that decides.
    pub(crate) reason: ServerText,
    pub(crate) actual: Actual,
    /// SQL that puts it right.
    pub(crate) fix: ServerText,
}

/// What a relation should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// As a label or setting wants it.
    Labelled(Label),
    /// What a job that was asked for makes of it.
    ByJob(JobKind),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Labelled(label) => label.fmt(f),
            Expected::ByJob(JobKind::Encrypt) => f.write_str("encrypted"),
            Expected::ByJob(JobKind::Decrypt) => f.write_str("plaintext"),
            Expected::ByJob(JobKind::Rotate) => f.write_str("encrypted with a new data key"),
        }
    }
}

/// What a relation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Actual {
    /// Written so, but for pages that are the opposite of what is expected.
    Written { cipher: Option<CipherId>, stray: i64, stray_are_plaintext: bool },
    /// Being rekeyed, or stopped in the middle of it.
    Rekeyed { state: ShownState, pages_done: i64, pages_total: i64 },
}

impl fmt::Display for Actual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actual::Written { cipher, stray, stray_are_plaintext } => {
                match cipher {
                    None => f.write_str("plaintext")?,
                    Some(cipher) => write!(f, "encrypted {cipher}")?,
                }
                let kind = if *stray_are_plaintext { "plaintext" } else { "encrypted" };
                if *stray > 0 { write!(f, ", {stray} {kind} pages") } else { Ok(()) }
            }
            Actual::Rekeyed { state, pages_done, pages_total } => {
                write!(f, "{state}, {pages_done} of {pages_total} pages done")
            }
        }
    }
}

impl Drift {
    /// True if it is to be sealed and is not, or not wholly, and no job has been asked to do that.
    pub(crate) fn wants_encryption(&self) -> bool {
        matches!(self.expected, Expected::Labelled(Label::Encrypted(_)))
    }
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
        let (id, progress) = (job.job.number, job.progress);
        let stopped = job.state != JobState::Waiting;
        if !stopped {
            at_work.extend(relation::with_partitions(relation).iter().map(|table| table.oid));
        }
        if stopped && job.request.kind == JobKind::Decrypt && is_wanted_encrypted(relation)? {
            continue; // nobody is to go on with it
        }
        let fix = if stopped { "resume_rekey" } else { "wait_for_rekey" };
        found.push(Drift {
            relation,
            expected: Expected::ByJob(job.request.kind),
            reason: ServerText::from_bytes(format!("rekey job {id}").as_bytes()),
            actual: Actual::Rekeyed {
                state: ShownState::of(&job),
                pages_done: progress.pages_done,
                pages_total: progress.pages_total,
            },
            fix: ServerText::from_bytes(format!("SELECT pagevault.{fix}({id})").as_bytes()),
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
    let wanted = found.wanted;
    Ok(Some(Drift {
        relation: facts.oid,
        expected: Expected::Labelled(wanted.label),
        reason: describe(wanted.source),
        actual: Actual::Written {
            cipher: found.current,
            stray: found.stray,
            stray_are_plaintext: wanted.is_encrypted(),
        },
        fix: fix(facts)?,
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
