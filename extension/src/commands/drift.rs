//! Differences between the policy and the actual state: labels decide only about storage created
//! after them.

use std::fmt;

use pagevault_cipher::CipherId;
use pagevault_core::policy::Named;
use pagevault_keystore::KeyGroup;
use pagevault_keystore::job::{JobKind, JobState};
use pgrx::pg_sys::Oid;

use crate::keys::store::{directory, key_groups};
use crate::pg::inheritance;
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::statement;
use crate::pg::survey::Survey;
use crate::pg::text::ServerText;
use crate::policy::label::Label;
use crate::policy::{
    Decision, describe, described, named_key_group, policy, root_of, wanted_encrypted,
};
use crate::rekey::jobs::{self, ShownState};
use crate::verify;

/// A relation that differs from the policy.
pub(crate) struct Drift {
    pub(crate) relation: Oid,
    pub(crate) expected: Expected,
    /// The label, setting or job that decides.
    pub(crate) reason: ServerText,
    pub(crate) actual: Actual,
    /// SQL that corrects it.
    pub(crate) fix: ServerText,
}

/// The required state of a relation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The state that a label or setting requires, and the name of the key group.
    Labelled(Label, Option<String>),
    /// The state that a requested job will produce.
    ByJob(JobKind),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Labelled(label, group) => {
                label.fmt(f)?;
                group.iter().try_for_each(|group| write!(f, " key_group={group}"))
            }
            Expected::ByJob(JobKind::Encrypt) => f.write_str("encrypted"),
            Expected::ByJob(JobKind::Decrypt) => f.write_str("plaintext"),
            Expected::ByJob(JobKind::Rotate) => f.write_str("encrypted with a new data key"),
        }
    }
}

/// The actual state of a relation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Actual {
    /// Written in this state, except for `stray` pages in the opposite state.
    Written {
        cipher: Option<CipherId>,
        /// The name of its key group.
        group: Option<String>,
        stray: i64,
        stray_are_plaintext: bool,
        /// Not all pages have been rewritten.
        unfinished: bool,
    },
    /// Being rekeyed, or stopped before the end.
    Rekeyed { state: ShownState, pages_done: i64, pages_total: i64 },
}

impl fmt::Display for Actual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actual::Written { cipher, group, stray, stray_are_plaintext, unfinished } => {
                match cipher {
                    None => f.write_str("plaintext")?,
                    Some(cipher) => write!(f, "encrypted {cipher}")?,
                }
                group.iter().try_for_each(|group| write!(f, " key_group={group}"))?;
                if *unfinished {
                    f.write_str(", not all pages rewritten")?;
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
    /// True if encryption is required and missing or incomplete, and no job will do it unless it is
    /// resumed.
    pub(crate) fn wants_encryption(&self) -> Result<bool> {
        use JobState::{Cancelled, Failed, Paused};
        match (&self.expected, &self.actual) {
            (Expected::Labelled(label, _), _) => Ok(matches!(label, Label::Encrypted(_))),
            (
                Expected::ByJob(JobKind::Encrypt),
                Actual::Rekeyed {
                    state: ShownState::Recorded(Paused | Cancelled | Failed), ..
                },
            ) => is_wanted_encrypted(self.relation),
            (Expected::ByJob(_), _) => Ok(false),
        }
    }

    /// True if new pages are as required, and only earlier ones perhaps not.
    fn is_unfinished(&self) -> bool {
        matches!(self.actual, Actual::Written { unfinished: true, .. })
    }

    /// The kind of job that corrects it.
    fn remedy(&self) -> JobKind {
        match self.expected {
            Expected::Labelled(Label::Encrypted(_), _) => JobKind::Encrypt,
            Expected::Labelled(Label::Plaintext, _) => JobKind::Decrypt,
            Expected::ByJob(kind) => kind,
        }
    }
}

/// All relations of this database that differ from the policy. With `check_files` also those with
/// pages on disk that differ, for which all files are read. Not those that were shredded: no
/// command brings them to another state, and new storage follows the policy.
pub(crate) fn find(check_files: bool) -> Result<Vec<Drift>> {
    let survey = Survey::make();
    let (mut found, of_jobs) = drift_of_jobs()?;
    for facts in survey.relations() {
        if facts.is_stored()
            && !directory::is_destroyed(facts.file)
            && let Some(drift) = drift_of(facts, check_files)?
        {
            let root = root_of(facts)?.oid;
            let roots = [Some(root), relation::owner_of_sequence(facts.oid)];
            let is_of_root = |job: &&OfJob| roots.contains(&Some(job.table));
            if !of_jobs.iter().filter(is_of_root).any(|job| job.takes_the_place_of(&drift)) {
                found.push(drift);
            }
        }
    }
    Ok(found)
}

/// A table with a row for this unfinished or stopped job, or one of its partitions.
struct OfJob {
    table: Oid,
    kind: JobKind,
    is_stopped: bool,
}

impl OfJob {
    /// Whether a row of what belongs to the table says nothing that the row of the job does not: it
    /// is at work, and corrects that. A rotation corrects only what was left unfinished. A stopped
    /// job has left that.
    fn takes_the_place_of(&self, drift: &Drift) -> bool {
        let is_its = self.kind == drift.remedy();
        match (drift.is_unfinished(), self.is_stopped) {
            (true, false) => true,
            (true, true) => is_its,
            (false, is_stopped) => is_its && !is_stopped,
        }
    }
}

/// Relations with requested and unfinished rekeying; and the tables of these jobs.
fn drift_of_jobs() -> Result<(Vec<Drift>, Vec<OfJob>)> {
    let (mut found, mut of_jobs) = (Vec::new(), Vec::new());
    for job in jobs::unsettled()? {
        let relation: Oid = job.request.relation.into();
        if relation::facts(relation).is_none() {
            continue; // dropped meanwhile
        }
        let (id, progress) = (job.job.number, job.progress);
        let stopped = job.state != JobState::Waiting;
        if stopped && job.request.kind == JobKind::Decrypt && is_wanted_encrypted(relation)? {
            continue; // must not be resumed
        }
        of_jobs.extend(inheritance::with_partitions(relation).iter().map(|table| OfJob {
            table: table.oid,
            kind: job.request.kind,
            is_stopped: stopped,
        }));
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
    Ok((found, of_jobs))
}

fn is_wanted_encrypted(relation: Oid) -> Result<bool> {
    let Some(facts) = relation::facts(relation) else { return Ok(false) };
    Ok(wanted_encrypted(&facts)?.is_some())
}

fn drift_of(facts: &Facts, check_files: bool) -> Result<Option<Drift>> {
    let stray = |wanted: &Decision| if check_files { stray_pages(facts, wanted) } else { Ok(0) };
    let mixture = directory::mixture(facts.file);
    let found = policy().drift_of(&described(facts), mixture, stray)?;
    let Some(found) = found else { return Ok(None) };
    let wanted = found.wanted;
    let name =
        |group: KeyGroup| key_groups::name_of(group).unwrap_or_else(|| format!("(number {group})"));
    let expected = match named_key_group(facts)? {
        Some(Named::Group(group)) => Some(name(group)),
        Some(Named::Missing(_)) => Some("(missing)".to_owned()),
        None => None,
    };
    let group = directory::current_key_group(facts.file);
    Ok(Some(Drift {
        relation: facts.oid,
        expected: Expected::Labelled(wanted.label, expected.filter(|_| wanted.is_encrypted())),
        reason: describe(wanted.source),
        actual: Actual::Written {
            cipher: found.current,
            group: group.map(name),
            stray: found.stray,
            unfinished: found.unfinished,
            stray_are_plaintext: wanted.is_encrypted(),
        },
        fix: fix(facts)?,
    }))
}

/// Number of pages on disk that are plaintext but should be encrypted, or the reverse.
fn stray_pages(facts: &Facts, wanted: &Decision) -> Result<i64> {
    let counts = match verify::count_pages_of(facts) {
        Err(missing) => {
            relation::accept_invalidations();
            if relation::facts(facts.oid).is_some_and(|now| now.file == facts.file) {
                return Err(missing);
            }
            return Ok(0); // dropped or replaced meanwhile
        }
        counts => counts?,
    };
    Ok(counts.iter().filter(|count| wanted.is_stray(count.state)).map(|count| count.pages).sum())
}

/// A correction that works online and leaves no label behind. Catalogs have no labels. Where reads
/// of pages are refused, it fails, and its HINT says what would accept them: whoever runs the fixes
/// of all relations must not accept forged pages unseen.
fn fix(facts: &Facts) -> Result<ServerText> {
    let function: &[u8] = if facts.user_made { b"reconcile" } else { b"encrypt" };
    let name = statement::quoted_literal(&relation::sql_name(&root_of(facts)?));
    Ok(ServerText::join(&[b"SELECT pagevault.", function, b"(", name.bytes(), b")"]))
}
