//! Rekey jobs: requesting, claiming, controlling and ending them.
//!
//! Jobs are records of the keystore ([`pagevault_keystore::job`]) in the log of their database, and
//! a table in shared memory that all processes read. They are not in an SQL table, because a table
//! has an owner, triggers, rules and publications.

use std::collections::BTreeMap;

use pagevault_cipher::CipherId;
use pagevault_core::rekey::life::{
    self, JobConflict, Outcome, Refused, Submitted, Withdrawn, is_unfinished,
};
use pagevault_keystore::job::{JobId, JobState, Request};
use pagevault_keystore::job_table::{Head, JobTable, Known};
use pagevault_keystore::{Record, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::scheduled::{self, Reason};
use super::{Job, JobKind, launcher};
use crate::audit::{Operation, log_operation};
use crate::fault;
use crate::keys::store::persist::append;
use crate::pg::locks::KeystoreLock;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{Report, Result};
use crate::pg::xact;
use crate::pg::{catalog, clock, wal};
use crate::shmem;

pub(crate) use pagevault_core::rekey::life::{Order, ShownState};
pub(crate) use pagevault_keystore::job_table::Progress;

/// Result of a job.
pub(crate) enum End {
    Done,
    Failed(String),
}

pub(super) fn table() -> Result<JobTable<'static>> {
    Ok(shmem::required()?.jobs)
}

fn here(number: i64) -> JobId {
    JobId { database: process::my_database(), number: u64::try_from(number).unwrap_or(0) }
}

fn number_of(known: &Known) -> i64 {
    known.job.number as i64
}

pub(super) fn now() -> i64 {
    process::now_us() as i64
}

/// For delays: the time of day may be set. Never 0, which means that there is none.
pub(super) fn now_seconds() -> u32 {
    clock::since_boot().as_secs() as u32 + 1
}

/// State of the transaction that requested a job.
fn outcome(known: &Known) -> Outcome {
    life::outcome(known, xact::outcome)
}

/// The jobs of this database that are visible to this session, by number.
fn visible(wanted: impl Fn(&Head) -> bool) -> Result<Vec<Known>> {
    let database = process::my_database();
    let mut found = {
        let _lock = KeystoreLock::acquire();
        table()?.select(|head| head.job.database == database && wanted(head))
    };
    found.retain(|known| matches!(outcome(known), Outcome::Committed | Outcome::Mine));
    Ok(found)
}

/// All visible jobs.
pub(crate) fn all() -> Result<Vec<Known>> {
    visible(|_| true)
}

/// A job that is visible to this session.
fn require(number: i64) -> Result<Known> {
    let job = here(number);
    visible(|head| head.job == job)?.pop().ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            format!("rekey job {number} does not exist in this database"),
        )
        .hint("See pagevault.rekey_jobs.")
    })
}

/// Records for jobs whether their requesting transactions have committed, if that is known. True if
/// some transactions are still in progress.
pub(super) fn settle(jobs: &[Known]) -> Result<bool> {
    let mut any_open = false;
    let mut states: BTreeMap<u32, Vec<(JobId, JobState)>> = BTreeMap::new();
    for known in jobs.iter().filter(|known| known.step == 0) {
        match life::settled(xact::outcome(known.request.transaction)) {
            None => any_open = true,
            Some(state) => states.entry(known.job.database).or_default().push((known.job, state)),
        }
    }
    for (database, states) in states {
        let lock = KeystoreLock::acquire();
        let records = life::settle(&table()?, &states, now());
        if !records.is_empty() {
            append(&lock, Scope::database(database), &records)?;
        }
    }
    Ok(any_open)
}

/// Whether a relation has an unfinished job that does not give way to another.
pub(crate) fn is_rekeyed(relation: Oid) -> Result<bool> {
    Ok(unfinished_of(relation)?.iter().any(|known| !scheduled::gives_way(known)))
}

/// The number of an unfinished job of this kind for a relation, and those that follow it.
pub(crate) fn unfinished_of_kind(relation: Oid, kind: JobKind) -> Result<Option<i64>> {
    Ok(unfinished_of(relation)?.iter().find(|known| known.request.kind == kind).map(number_of))
}

fn unfinished_of(relation: Oid) -> Result<Vec<Known>> {
    let relation = relation.to_u32();
    visible(|head| head.relation == relation && is_unfinished(head.state))
}

/// Adds a job that workers begin when the transaction commits. If a job of the same kind is
/// waiting, returns that one's number; not if it has given the relation a new data key already.
pub(crate) fn submit(
    relation: Oid,
    name: &str,
    kind: JobKind,
    cipher: Option<CipherId>,
) -> Result<i64> {
    xact::require_writable(c"rekeying");
    require_extension()?;
    let requested_by = xact::session_user();
    loop {
        let request = request(requested_by, relation, kind, cipher);
        let other = match try_submit(request)? {
            Ok(job) => return Ok(job),
            Err(other) => other,
        };
        if scheduled::gives_way(&other) {
            scheduled::give_way(&other)?;
            continue;
        }
        match life::conflict(&other, has_begun_any(&other)?, outcome(&other), &request) {
            JobConflict::Same => return Ok(number_of(&other)),
            JobConflict::Wait => xact::wait_for(other.request.transaction),
            JobConflict::Settle => settle(&[other]).map(|_| ())?,
            JobConflict::InUse => return Err(in_use(name, &other)),
        }
    }
}

pub(super) fn request(
    requested_by: Oid,
    relation: Oid,
    kind: JobKind,
    cipher: Option<CipherId>,
) -> Request {
    Request {
        relation: relation.to_u32(),
        kind,
        cipher: cipher.map_or(0, |cipher| cipher as u8),
        requested_by: requested_by.to_u32(),
        at: now(),
        transaction: xact::number(),
    }
}

/// Adds a job, and returns its number, unless the relation has this other unfinished one.
pub(super) fn try_submit(request: Request) -> Result<std::result::Result<i64, Known>> {
    let database = process::my_database();
    let lock = KeystoreLock::acquire();
    match life::submit(&table()?, database, request) {
        Submitted::Other(other) => Ok(Err(other)),
        Submitted::New(job, record) => {
            append(&lock, Scope::database(database), &[record])?;
            drop(lock);
            launcher::wake_at_commit();
            fault::point("rekey.requested");
            Ok(Ok(job.number as i64))
        }
    }
}

fn in_use(name: &str, other: &Known) -> Report {
    let (id, kind, state) = (other.job.number, other.request.kind.name(), ShownState::of(other));
    Report::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, format!("{name} is being rekeyed already"))
        .detail(format!("Job {id} ({kind}) is {state}."))
        .hint(format!(
            "Wait with pagevault.wait_for_rekey({id}), or end it with pagevault.cancel_rekey({id})."
        ))
}

/// Without the extension, nobody could monitor or control a job.
fn require_extension() -> Result<()> {
    if catalog::has_extension() {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "cannot rekey in the background: extension pagevault is not installed in this database",
    )
    .detail("Relations that are larger than pagevault.rekey_threshold are encrypted by jobs; decryption and new data keys are always jobs.")
    .hint("CREATE EXTENSION pagevault, and try again."))
}

/// Claims an unfinished job of this worker's database that has no worker, until [`release`].
pub(crate) fn claim() -> Result<Option<Job>> {
    let (database, now_seconds) = (process::my_database(), now_seconds());
    let _lock = KeystoreLock::acquire();
    let table = table()?;
    UNSERVED.set(None);
    for known in life::claimable(&table, database, now_seconds, scheduled::held(&table)) {
        if let Some(slot) = table.take(known.job, std::process::id(), now()) {
            CLAIMED.with(|claimed| *claimed = Some(slot));
            return Ok(Some(Job {
                id: number_of(&known),
                relation: known.request.relation.into(),
                kind: known.request.kind,
                cipher: CipherId::try_from(known.request.cipher).ok(),
                reason: Reason::of(&known),
            }));
        }
    }
    Ok(None)
}

/// The database that this worker was started for, until it looks for a job there.
static UNSERVED: ProcessLocal<Option<u32>> = ProcessLocal::new(None);

/// This worker was started for the jobs of a database.
pub(crate) fn serve(database: u32) {
    UNSERVED.set(Some(database));
}

/// When this worker exits before it has looked for a job, because it cannot connect to the database
/// or read its catalogs: the next worker is to be started after a pause. Takes no lock and cannot
/// fail.
pub(crate) fn postpone() {
    if let (Some(database), Ok(table)) = (UNSERVED.take(), table()) {
        table.postpone(database, now_seconds() + life::CONNECT_DELAY - life::RETRY_DELAY);
    }
}

/// Slot of the claimed job in the table.
static CLAIMED: ProcessLocal<Option<usize>> = ProcessLocal::new(None);

/// Releases the claimed job.
pub(crate) fn release() {
    if let (Some(slot), Ok(table)) = (CLAIMED.with(Option::take), table()) {
        table.release(slot, std::process::id(), 0);
    }
}

/// Like [`release`], when this worker exits in the middle of the job, or cannot get a lock on its
/// relation. Takes no lock and cannot fail. Other jobs come first before this one is claimed again.
pub(crate) fn give_up() {
    if let (Some(slot), Ok(table)) = (CLAIMED.with(Option::take), table()) {
        table.release(slot, std::process::id(), now_seconds());
    }
}

/// The job, unless it was paused or cancelled.
fn still_claimed(table: &JobTable<'_>, job: &Job) -> Option<Known> {
    life::still_claimed_by(table, here(job.id), std::process::id())
}

/// Stores the progress of a job. False if it was paused, cancelled or forgotten.
pub(crate) fn note(job: &Job, progress: &Progress) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let table = table()?;
    let continues = still_claimed(&table, job).is_some();
    if continues {
        table.note(here(job.id), progress);
    }
    Ok(continues)
}

/// Stores why the job waits for what ends by itself; nothing if it waits no longer. Returns whether
/// the waiting begins or ends.
pub(crate) fn note_waiting(job: &Job, why: &str) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    Ok(table()?.note_waiting(here(job.id), why))
}

/// Whether the job was neither paused nor cancelled, and may run now.
pub(crate) fn continues(job: &Job) -> Result<bool> {
    if job.reason.is_some_and(|reason| !reason.may_run()) {
        return Ok(false);
    }
    let _lock = KeystoreLock::acquire();
    Ok(still_claimed(&table()?, job).is_some())
}

/// Whether the job has already switched the file of `relation` to another key.
pub(crate) fn has_begun(job: &Job, relation: Oid) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    Ok(table()?.has_begun(here(job.id), relation.to_u32()))
}

/// Whether a job has already switched the file of any relation to another key.
fn has_begun_any(known: &Known) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    Ok(table()?.has_begun_any(known.job))
}

/// Records the fact for [`has_begun`]. Durable on return, as the new key is: if a crash lost this
/// record, the relation would be rewritten under yet another key.
pub(crate) fn note_begun(job: &Job, relation: Oid) -> Result<()> {
    let end = {
        let lock = KeystoreLock::acquire();
        let (job, relation) = (here(job.id), relation.to_u32());
        append(&lock, job.scope(), &[Record::JobBegun { job, relation }])?
    };
    wal::flush(end);
    Ok(())
}

/// Ends a job, unless it was cancelled or paused.
pub(crate) fn finish(job: &Job, end: &End) -> Result<()> {
    let (state, error) = match end {
        End::Done => (JobState::Done, ""),
        End::Failed(error) => (JobState::Failed, error.as_str()),
    };
    end_as(job, state, error)
}

/// Cancels the claimed job, because the policy does not permit it any more.
pub(crate) fn abandon(job: &Job, why: &str) -> Result<()> {
    end_as(job, JobState::Cancelled, why)
}

fn end_as(job: &Job, state: JobState, error: &str) -> Result<()> {
    {
        let lock = KeystoreLock::acquire();
        let (id, process) = (here(job.id), std::process::id());
        let record = life::end(&table()?, id, process, (state, error), now());
        let Some(record) = record else { return Ok(()) };
        append(&lock, id.scope(), &[record])?;
    }
    let outcome = match state {
        JobState::Done => "ok",
        JobState::Failed => "failed",
        _ => "cancelled",
    };
    let (action, by) = (job.kind.name(), "rekey_worker");
    let (relation, database) = (job.relation.to_u32(), process::my_database());
    let relation = format!("relation {relation} of database {database}, job {}", job.id);
    log_operation(&Operation { action, by, ..Operation::default() }.on(relation), outcome);
    Ok(())
}

/// Relation and kind of a job.
pub(crate) fn subject_of(number: i64) -> Result<(Oid, JobKind)> {
    require(number).map(|known| (known.request.relation.into(), known.request.kind))
}

/// Pauses, resumes or cancels a job at once; an error if its state does not permit that.
pub(crate) fn apply_order(number: i64, order: Order) -> Result<()> {
    let known = require(number)?;
    let is_mine = outcome(&known) == Outcome::Mine;
    let written = {
        let lock = KeystoreLock::acquire();
        match life::apply_order(&table()?, known.job, order, is_mine, now()) {
            Ok(record) => Ok(append(&lock, known.job.scope(), &[record])?),
            Err(refused) => Err(refused),
        }
    };
    let end = match written {
        Ok(end) => end,
        Err(Refused::NotBegun) => return Err(begins_at_commit(number)),
        Err(Refused::Other(other)) => {
            return Err(in_use(&format!("the relation of rekey job {number}"), &other));
        }
        Err(Refused::State) => {
            let (done, state) = (order.done(), ShownState::of(&require(number)?));
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("rekey job {number} cannot be {done}: it is {state}"),
            ));
        }
    };
    wal::flush(end);
    if order == Order::Resume {
        launcher::wake();
    }
    Ok(())
}

fn begins_at_commit(number: i64) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
        format!("rekey job {number} begins when this transaction commits"),
    )
}

/// State and error text of a job; `None` if there is no such job. An error if this transaction has
/// requested it, because no worker can see it before the commit.
pub(crate) fn state_of(number: i64) -> Result<Option<(ShownState, String)>> {
    let job = here(number);
    let Some(known) = visible(|head| head.job == job)?.pop() else { return Ok(None) };
    if is_unfinished(known.state) && outcome(&known) == Outcome::Mine {
        return Err(begins_at_commit(number).hint("Commit before you wait."));
    }
    Ok(Some((ShownState::of(&known), known.error)))
}

/// The unfinished job of a relation, or else its last one.
pub(crate) fn last_known(relation: Oid) -> Result<Option<Known>> {
    let relation = relation.to_u32();
    let mut found = visible(|head| head.relation == relation)?;
    let unfinished = found.iter().position(|known| is_unfinished(known.state));
    Ok(unfinished.map(|at| found.swap_remove(at)).or_else(|| found.pop()))
}

/// The number of [`last_known`].
pub(crate) fn last_of(relation: Oid) -> Result<Option<i64>> {
    Ok(last_known(relation)?.as_ref().map(number_of))
}

/// The same with its kind.
pub(crate) fn last_with_kind(relation: Oid) -> Result<Option<(i64, JobKind)>> {
    Ok(last_known(relation)?.map(|known| (number_of(&known), known.request.kind)))
}

/// The first unfinished job of any of these relations. Those that give way do.
pub(crate) fn any_unfinished(relations: &[Oid]) -> Result<Option<i64>> {
    let found =
        visible(|head| is_unfinished(head.state) && relations.contains(&head.relation.into()))?;
    found.iter().filter(|known| scheduled::gives_way(known)).try_for_each(scheduled::give_way)?;
    Ok(found.iter().find(|known| !scheduled::gives_way(known)).map(number_of))
}

/// The last job of each relation, if it is not done.
pub(crate) fn unsettled() -> Result<Vec<Known>> {
    let mut last: BTreeMap<u32, Known> = BTreeMap::new();
    for known in all()? {
        last.insert(known.request.relation, known);
    }
    let mut found: Vec<_> =
        last.into_values().filter(|known| known.state != JobState::Done).collect();
    found.sort_by_key(|known| known.job);
    Ok(found)
}

/// Cancels or forgets the remaining jobs of a relation in this database.
fn withdraw(relation: Oid, what: Withdrawn) -> Result<()> {
    let relation = relation.to_u32();
    let found: Vec<_> = visible(|head| head.relation == relation && head.state != JobState::Done)?
        .into_iter()
        .map(|known| (known.job, outcome(&known) == Outcome::Mine))
        .collect();
    if found.is_empty() {
        return Ok(());
    }
    let lock = KeystoreLock::acquire();
    let records = life::withdraw(&table()?, &found, what, now());
    if !records.is_empty() {
        let end = append(&lock, Scope::database(process::my_database()), &records)?;
        drop(lock);
        wal::flush(end);
    }
    Ok(())
}

/// Cancels jobs that would decrypt a relation that is to be encrypted from now on.
pub(crate) fn cancel_decryption(relation: Oid) -> Result<()> {
    withdraw(relation, Withdrawn::Decryption)
}

/// Forgets a stopped job, because its work was completed at once.
pub(crate) fn forget_stopped(relation: Oid) -> Result<()> {
    withdraw(relation, Withdrawn::Stopped)
}

/// Ends all jobs of this worker's database.
pub(crate) fn cancel_all(why: &str) -> Result<()> {
    let database = process::my_database();
    let lock = KeystoreLock::acquire();
    let wanted =
        |head: &Head| head.job.database == database && is_unfinished(head.state) && head.step > 0;
    let found = table()?.select(wanted);
    let steps = found.iter().map(|known| life::step(known, JobState::Cancelled, why, now()));
    let steps: Vec<_> = steps.collect();
    if steps.is_empty() {
        Ok(())
    } else {
        append(&lock, Scope::database(database), &steps).map(|_| ())
    }
}
