//! SQL functions for rekeying: new data keys, and rekey jobs.

use std::time::{Duration, Instant};

use pagevault_core::policy::Mixture;
use pagevault_keystore::job::{JobKind, JobState};
use pgrx::datum::Interval;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;

use super::{audited, audited_on, require_primary};
use crate::audit::{self, Operation};
use crate::commands::requests;
use crate::keys::store::directory;
use crate::pg::inheritance;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::{locks, process};
use crate::rekey::jobs::{self, Order, ShownState};
use crate::{policy, preload, roles};

/// Puts a relation, and those that follow it, under new data keys, online. Returns the job's
/// number.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.rotate_data_key(relation regclass) RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn rotate_data_key(oid: Oid) -> i64 {
    let rotate = || {
        preload::require_active()?;
        let facts = relation::require(oid)?;
        let name = relation::qualified_name(oid);
        roles::require_owner_or_admin(oid, &name)?;
        require_primary("rotate data keys")?;
        if !any_sealed(&facts) {
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("{name} is not encrypted"),
            )
            .hint("Use pagevault.encrypt()."));
        }
        requests::refuse_destroyed(&facts)?;
        jobs::submit(oid, &name, JobKind::Rotate, None)
    };
    audited_on("rotate_data_key", oid, rotate).or_raise()
}

/// Brings a relation, and those that follow it, to the state that labels and settings require,
/// online. Returns the number of the rekey job, or NULL if none is needed.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.reconcile(relation regclass) RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn reconcile(oid: Oid) -> Option<i64> {
    let reconcile = || {
        preload::require_active()?;
        relation::require(oid)?;
        // The lock that SECURITY LABEL takes.
        relation::lock(oid, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
        let facts = relation::require(oid)?;
        let name = relation::qualified_name(oid);
        roles::require_owner_or_admin(oid, &name)?;
        require_primary("change encryption")?;
        if !facts.user_made {
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
                format!("{name} is a system catalog"),
            )
            .hint("Use pagevault.encrypt() or pagevault.encrypt_catalogs()."));
        }
        requests::reconcile(&facts)
    };
    audited_on("reconcile", oid, reconcile).or_raise()
}

/// Puts all encrypted relations of this database under new data keys, online. Returns the jobs.
/// Relations that are being rekeyed are skipped.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.rotate_all_data_keys() RETURNS TABLE (relation regclass, job bigint)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn rotate_all_data_keys() -> TableIterator<'static, (name!(relation, Oid), name!(job, i64))> {
    let rotate = || {
        preload::require_active()?;
        roles::require_admin("rotate all data keys")?;
        require_primary("rotate data keys")?;
        let mut submitted = Vec::new();
        for facts in relation::all().into_iter().filter_map(relation::facts) {
            if facts.is_stored()
                && relation::is_independent(&facts)
                && any_sealed(&facts)
                && !directory::is_destroyed(facts.file)
                && !jobs::is_rekeyed(facts.oid)?
            {
                let name = relation::quoted_name(&facts);
                submitted.push((facts.oid, jobs::submit(facts.oid, &name, JobKind::Rotate, None)?));
            }
        }
        Ok(submitted)
    };
    TableIterator::new(audited("rotate_all_data_keys", rotate).or_raise())
}

/// Whether a table or one of its partitions is encrypted, or a sequence of a partitioned table.
fn any_sealed(facts: &Facts) -> bool {
    let is_sealed = |one: &Facts| one.is_stored() && directory::is_sealed(one.file);
    inheritance::with_partitions(facts.oid).iter().any(|table| match table.kind {
        RelationKind::PartitionedTable => {
            relation::family_unlocked(table.oid).iter().any(is_sealed)
        }
        _ => is_sealed(table),
    })
}

/// Pauses a job until it is resumed.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.pause_rekey(job bigint) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn pause_rekey(job: i64) {
    audit_order("pause_rekey", job, Order::Pause).or_raise();
}

/// Resumes a job that was paused, was cancelled or has failed.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.resume_rekey(job bigint) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn resume_rekey(job: i64) {
    audit_order("resume_rekey", job, Order::Resume).or_raise();
}

/// Cancels a job. The relation stays readable; its pages are a mixture.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.cancel_rekey(job bigint) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn cancel_rekey(job: i64) {
    audit_order("cancel_rekey", job, Order::Cancel).or_raise();
}

/// Waits for a job. True when it is done; false on timeout, or if it was paused or cancelled.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.wait_for_rekey(job bigint, timeout interval DEFAULT NULL) RETURNS boolean
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn wait_for_rekey(job: Option<i64>, timeout: Option<Interval>) -> Option<bool> {
    let waited = |job| {
        require_access(job)?;
        jobs::subject_of(job)?;
        wait(job, limit_of(timeout))
    };
    job.map(|job| waited(job).or_raise())
}

/// Without this overload, an integer without a cast would be ambiguous between the other two.
#[pg_extern(
    name = "wait_for_rekey",
    sql = "
    CREATE FUNCTION pagevault.wait_for_rekey(job integer, timeout interval DEFAULT NULL) RETURNS boolean
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
"
)]
fn wait_for_rekey_of_integer(job: Option<i32>, timeout: Option<Interval>) -> Option<bool> {
    wait_for_rekey(job.map(i64::from), timeout)
}

/// Waits for the job of a relation. True also if there never was one.
#[pg_extern(
    name = "wait_for_rekey",
    sql = "
    CREATE FUNCTION pagevault.wait_for_rekey(relation regclass, timeout interval DEFAULT NULL) RETURNS boolean
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
"
)]
fn wait_for_rekey_of_relation(oid: Option<Oid>, timeout: Option<Interval>) -> Option<bool> {
    let oid = oid?;
    let waited = || {
        preload::require_active()?;
        let name = relation::quoted_name(&relation::require(oid)?);
        roles::require_owner_or_admin(oid, &name)?;
        let (start, limit) = (Instant::now(), limit_of(timeout));
        let left = || limit.map(|limit| limit.saturating_sub(start.elapsed()));
        let own = jobs::last_of(oid)?;
        // Jobs of those that it belongs to include it.
        for leader in policy::leaders(&relation::require(oid)?)? {
            if let Some(job) = jobs::last_of(leader)?
                && let Some((state, _)) = jobs::state_of(job)?
                && (is_at_work(state) || own < Some(job) && is_left(oid, job, state)?)
                && !wait(job, left())?
            {
                return Ok(false);
            }
        }
        match own {
            Some(job) => wait(job, left()),
            None => Ok(true),
        }
    };
    Some(waited().or_raise())
}

fn is_at_work(state: ShownState) -> bool {
    matches!(state, ShownState::Running | ShownState::Recorded(JobState::Waiting))
}

/// Whether a job was stopped before it has brought this relation, which it includes, to its state.
/// Of a rotation that is not known.
fn is_left(oid: Oid, job: i64, state: ShownState) -> Result<bool> {
    use JobState::{Cancelled, Failed, Paused};
    if !matches!(state, ShownState::Recorded(Paused | Cancelled | Failed)) {
        return Ok(false);
    }
    let (_, kind) = jobs::subject_of(job)?;
    let is_exempt = policy::wanted(&relation::require(oid)?)?
        .is_some_and(|wanted| wanted.is_plaintext_by_own_label());
    let is_left = |member: &Facts| {
        let (is_sealed, mixture) =
            (directory::is_sealed(member.file), directory::mixture(member.file));
        match kind {
            JobKind::Encrypt => !is_exempt && (!is_sealed || mixture == Mixture::WithPlaintext),
            JobKind::Decrypt => is_sealed || mixture == Mixture::WithSealed,
            JobKind::Rotate => true,
        }
    };
    Ok(relation::family_unlocked(oid).iter().filter(|member| member.is_stored()).any(is_left))
}

fn limit_of(timeout: Option<Interval>) -> Option<Duration> {
    let limit = timeout?.as_micros().max(0);
    Some(Duration::from_micros(u64::try_from(limit).unwrap_or(u64::MAX)))
}

/// Polling interval of a waiting session.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

fn wait(job: i64, limit: Option<Duration>) -> Result<bool> {
    let start = Instant::now();
    loop {
        // The job is void: its work was done in another way.
        let Some((state, error)) = jobs::state_of(job)? else { return Ok(false) };
        match state {
            ShownState::Recorded(JobState::Done) => return Ok(true),
            ShownState::Recorded(JobState::Paused | JobState::Cancelled) => return Ok(false),
            ShownState::Recorded(JobState::Failed) => {
                return Err(Report::new(
                    PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
                    format!("rekey job {job} has failed"),
                )
                .detail(error)
                .hint(format!(
                    "Nothing is lost. Remove the cause, then use pagevault.resume_rekey({job})."
                )));
            }
            ShownState::Running | ShownState::Recorded(JobState::Waiting | JobState::Void) => {
                refuse_own_locks(job, state)?;
            }
        }
        let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
        match left {
            Some(Duration::ZERO) => return Ok(false),
            // The resolution of latch timeouts is one millisecond.
            Some(left) => process::sleep(left.clamp(Duration::from_millis(1), POLL_INTERVAL)),
            None => process::sleep(POLL_INTERVAL),
        }
    }
}

/// Refuses to wait for a job that waits for a lock of this transaction. The deadlock detector does
/// not see that, and sessions would queue behind both.
fn refuse_own_locks(job: i64, state: ShownState) -> Result<()> {
    let weak = locks::relations_locked_against_maintenance();
    if weak.is_empty() {
        return Ok(());
    }
    let strong = locks::relations_locked_against_all();
    let (rel, kind) = jobs::subject_of(job)?;
    let locked_member = |table: Facts| {
        let members = relation::family_unlocked(table.oid);
        let locked = if locks_like_maintenance(kind, state, &members) { &weak } else { &strong };
        members.into_iter().find(|member| locked.contains(&member.oid))
    };
    let mut tables = inheritance::with_partitions(rel).into_iter();
    let Some(member) = tables.find_map(locked_member) else { return Ok(()) };
    let name = relation::quoted_name(&member);
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
        format!("rekey job {job} waits for this transaction"),
    )
    .detail(format!("The transaction has locked {name}."))
    .hint("Commit before you wait."))
}

/// Whether a job takes a ShareUpdateExclusiveLock on a table with these members. It begins under
/// that if it encrypts, or if an index is not ready (`members_of` in the engine); one that decrypts
/// needs it for each relation (`policy_for_decryption`).
fn locks_like_maintenance(kind: JobKind, state: ShownState, members: &[Facts]) -> bool {
    let begins = state == ShownState::Recorded(JobState::Waiting);
    match kind {
        JobKind::Encrypt => begins,
        JobKind::Decrypt => true,
        JobKind::Rotate => begins && !members.iter().all(|member| relation::is_ready(member.oid)),
    }
}

fn audit_order(function: &'static str, job: i64, which: Order) -> Result<()> {
    let operation = Operation::function(function).on(format!("job {job}"));
    audit::audited(operation, || order(job, which))
}

fn order(job: i64, order: Order) -> Result<()> {
    require_access(job)?;
    require_primary("change rekey jobs")?;
    if order == Order::Resume {
        let (rel, kind) = jobs::subject_of(job)?;
        if kind != JobKind::Decrypt
            && let Some((last, JobKind::Decrypt)) = jobs::last_with_kind(rel)?
            && last > job
        {
            return Err(replaced(job, last));
        }
        if kind == JobKind::Decrypt && relation::facts(rel).is_some() {
            require_right_to_decrypt(rel)?;
        }
    }
    jobs::apply_order(job, order)
}

/// It would encrypt again what was decrypted since.
fn replaced(job: i64, later: i64) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("rekey job {job} cannot be resumed: its relation was to be decrypted later"),
    )
    .detail(format!("By job {later}."))
}

/// Resuming a decryption requires the same rights as requesting it: to remove encryption, and to
/// label the relation. The policy may also have changed in the meantime.
fn require_right_to_decrypt(rel: Oid) -> Result<()> {
    let name = relation::qualified_name(rel);
    roles::require_admin(&format!("remove the encryption of {name}"))?;
    if !relation::is_owned_by_caller(rel) {
        return Err(roles::not_owner(&name));
    }
    requests::refuse_wanted(&relation::require(rel)?)
}

/// Refuses callers who are neither administrators nor owners of the job's relation.
fn require_access(job: i64) -> Result<()> {
    preload::require_active()?;
    if roles::is_admin() {
        return Ok(());
    }
    let (rel, _) = jobs::subject_of(job)?;
    match relation::facts(rel) {
        Some(_) => roles::require_owner_or_admin(rel, &relation::qualified_name(rel)),
        None => roles::require_admin("change rekey jobs of relations that are gone"),
    }
}

/// Rows of the view `pagevault.rekey_jobs`. Takes no lock on the relations.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.rekey_job_rows()
    RETURNS TABLE (job bigint, relation oid, kind text, state text, pages_done bigint, pages_total bigint,
                   bytes_per_second double precision, requested_by oid, requested_at timestamptz,
                   started_at timestamptz, finished_at timestamptz, error text, worker integer)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn rekey_job_rows() -> TableIterator<
    'static,
    (
        name!(job, i64),
        name!(relation, Oid),
        name!(kind, &'static str),
        name!(state, &'static str),
        name!(pages_done, i64),
        name!(pages_total, i64),
        name!(bytes_per_second, f64),
        name!(requested_by, Oid),
        name!(requested_at, Option<TimestampWithTimeZone>),
        name!(started_at, Option<TimestampWithTimeZone>),
        name!(finished_at, Option<TimestampWithTimeZone>),
        name!(error, Option<String>),
        name!(worker, Option<i32>),
    ),
> {
    let jobs = preload::require_active().and_then(|()| jobs::all()).or_raise();
    let rows = jobs.into_iter().map(|known| {
        (
            known.job.number as i64,
            known.request.relation.into(),
            known.request.kind.name(),
            ShownState::of(&known).name(),
            known.progress.pages_done,
            known.progress.pages_total,
            known.progress.bytes_per_second,
            known.request.requested_by.into(),
            timestamp(known.request.at),
            timestamp(known.started),
            timestamp(known.ended),
            Some(known.error).filter(|error| !error.is_empty()),
            i32::try_from(known.process).ok().filter(|process| *process != 0),
        )
    });
    TableIterator::new(rows)
}

/// Converts microseconds since 1970; `None` for 0.
fn timestamp(us_since_1970: i64) -> Option<TimestampWithTimeZone> {
    const EPOCH: i64 = (pg_sys::POSTGRES_EPOCH_JDATE as i64 - pg_sys::UNIX_EPOCH_JDATE as i64)
        * pg_sys::SECS_PER_DAY as i64
        * 1_000_000;
    let timestamp = Some(us_since_1970).filter(|us| *us != 0)?;
    TimestampWithTimeZone::try_from(timestamp - EPOCH).ok()
}
