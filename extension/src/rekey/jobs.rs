//! The table of jobs. Every function runs in a transaction of the relation's database.

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys::Oid;
use pgrx::spi::{SpiClient, SpiError, SpiTupleTable};
use pgrx::{
    FromDatum, IntoDatum, PgSqlErrorCode, PgXactCallbackEvent, Spi, register_xact_callback,
};

use super::{Job, Kind, wishes};
use crate::fault;
use crate::keys::persist::internal;
use crate::pg::report::{Report, Result};
use crate::pg::{locks, process, session};

/// How far a running job is.
#[derive(Clone, Copy, Default)]
pub(crate) struct Progress {
    pub(crate) pages_done: i64,
    pub(crate) pages_total: i64,
    /// Of the last while.
    pub(crate) bytes_per_second: f64,
}

/// How a job ended.
pub(crate) enum End {
    Done,
    Failed(String),
}

impl From<SpiError> for Report {
    fn from(error: SpiError) -> Report {
        internal(format!("the table of rekey jobs could not be used: {error}"))
    }
}

/// Runs statements on the table as its owner may, whoever asks.
fn with_table<R>(
    work: impl FnOnce(&mut SpiClient<'_>) -> std::result::Result<R, SpiError>,
) -> Result<R> {
    session::as_owner_of_the_cluster(|| Spi::connect_mut(work)).map_err(Report::from)
}

/// What `read` makes of the first row that a statement yields, as of now; `None` if there is no row.
fn row_of<R>(
    statement: &str,
    arguments: &[DatumWithOid],
    read: impl FnOnce(&SpiTupleTable<'_>) -> std::result::Result<R, SpiError>,
) -> Result<Option<R>> {
    with_table(|spi| {
        let rows = spi.update(statement, Some(1), arguments)?;
        if rows.is_empty() { Ok(None) } else { read(&rows.first()).map(Some) }
    })
}

/// The first value of that row.
fn value_of<T: FromDatum + IntoDatum>(
    statement: &str,
    arguments: &[DatumWithOid],
) -> Result<Option<T>> {
    row_of(statement, arguments, |row| row.get_one::<T>()).map(Option::flatten)
}

/// Number of rows that a statement changes.
fn change(statement: &str, arguments: &[DatumWithOid]) -> Result<usize> {
    with_table(|spi| spi.update(statement, None, arguments).map(|rows| rows.len()))
}

/// Number, kind and state of the job of a relation that is not at its end.
pub(crate) fn unfinished_of(relation: Oid) -> Result<Option<(i64, String, String)>> {
    row_of(
        "SELECT id, kind, state FROM pagevault.rekey_jobs
          WHERE relation = $1 AND state IN ('waiting', 'running', 'paused')",
        &[relation.into()],
        |row| Ok(row.get(1)?.zip(row.get(2)?).zip(row.get(3)?)),
    )
    .map(|found| found.flatten().map(|((id, kind), state)| (id, kind, state)))
}

/// Adds a job that workers take up when the transaction commits. Of a job of the same kind that waits
/// already the number is returned.
pub(crate) fn submit(relation: Oid, name: &str, kind: Kind, cipher: Option<&str>) -> Result<i64> {
    if let Some((id, other, state)) = unfinished_of(relation)? {
        if other == kind.name() && state == "waiting" {
            return Ok(id);
        }
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("{name} is being rekeyed already"),
        )
        .detail(format!("Job {id} ({other}) is {state}."))
        .hint(format!(
            "Wait with pagevault.rekey_wait({id}), or end it with pagevault.rekey_cancel({id})."
        )));
    }
    let id = value_of::<i64>(
        "INSERT INTO pagevault.rekey_jobs (relation, relation_name, kind, cipher)
         VALUES ($1, $2, $3, $4) RETURNING id",
        &[relation.into(), name.into(), kind.name().into(), cipher.into()],
    )?;
    wish_at_commit();
    fault::point("rekey.asked");
    id.ok_or_else(|| internal("a rekey job got no number".to_owned()))
}

/// Workers are asked for once the job can be seen.
fn wish_at_commit() {
    let database = process::my_database();
    register_xact_callback(PgXactCallbackEvent::Commit, move || wishes::wish(database));
}

/// True if this database has the table.
pub(crate) fn exist() -> Result<bool> {
    // By `select`: all other ways of SPI take a transaction number, and workers ask in every database at each start.
    let found = Spi::connect(|spi| {
        let query = "SELECT pg_catalog.to_regclass('pagevault.rekey_jobs') IS NOT NULL";
        spi.select(query, Some(1), &[])?.first().get_one::<bool>()
    });
    Ok(found? == Some(true))
}

/// Takes an unfinished job that no other worker does; ours until [`release`].
pub(crate) fn claim() -> Result<Option<Job>> {
    let ids = with_table(|spi| {
        spi.select(
            "SELECT id FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running') ORDER BY id",
            None,
            &[],
        )?
        .map(|row| row.get::<i64>(1))
        .collect::<std::result::Result<Vec<_>, _>>()
    })?;
    for id in ids.into_iter().flatten() {
        if !locks::try_lock_job(id) {
            continue;
        }
        // Another worker may have ended it just before we had the lock.
        let row = row_of(
            "UPDATE pagevault.rekey_jobs
                SET state = 'running', error = NULL,
                    started_at = coalesce(started_at, pg_catalog.clock_timestamp())
              WHERE id = $1 AND state IN ('waiting', 'running')
              RETURNING relation, kind, cipher",
            &[id.into()],
            |row| Ok((row.get::<Oid>(1)?, row.get::<String>(2)?, row.get::<String>(3)?)),
        )?;
        if let Some((Some(relation), Some(kind), cipher)) = row
            && let Some(kind) = Kind::parse(&kind)
        {
            let cipher = cipher.and_then(|name| name.parse().ok());
            return Ok(Some(Job { id, relation, kind, cipher }));
        }
        locks::unlock_job(id);
    }
    Ok(None)
}

/// Makes a job this worker's own, if it is nobody's.
pub(crate) fn lock(job: &Job) -> bool {
    locks::try_lock_job(job.id)
}

/// Gives a claimed job back.
pub(crate) fn release(job: &Job) {
    locks::unlock_job(job.id);
}

/// Notes how far a job is. False if it is not to go on: paused, cancelled, or its row is gone.
pub(crate) fn note(job: &Job, progress: &Progress) -> Result<bool> {
    let updated = change(
        "UPDATE pagevault.rekey_jobs
            SET pages_done = $2, pages_total = $3, bytes_per_second = $4
          WHERE id = $1 AND state = 'running' RETURNING id",
        &[
            job.id.into(),
            progress.pages_done.into(),
            progress.pages_total.into(),
            progress.bytes_per_second.into(),
        ],
    )?;
    Ok(updated == 1)
}

/// True while nobody has paused or cancelled the job.
pub(crate) fn goes_on(job: &Job) -> Result<bool> {
    let state = value_of::<String>(
        "SELECT state FROM pagevault.rekey_jobs WHERE id = $1",
        &[job.id.into()],
    )?;
    Ok(state.as_deref() == Some("running"))
}

/// True if the job has switched a file of `relation` to another key already.
pub(crate) fn has_begun(job: &Job, relation: Oid) -> Result<bool> {
    let found = value_of::<bool>(
        "SELECT begun ? $2 FROM pagevault.rekey_jobs WHERE id = $1",
        &[job.id.into(), relation.to_u32().to_string().into()],
    )?;
    Ok(found == Some(true))
}

/// Remembers what [`has_begun`] tells.
pub(crate) fn note_begun(job: &Job, relation: Oid, file: u32) -> Result<()> {
    change(
        "UPDATE pagevault.rekey_jobs
            SET begun = begun || pg_catalog.jsonb_build_object($2, $3) WHERE id = $1",
        &[job.id.into(), relation.to_u32().to_string().into(), i64::from(file).into()],
    )
    .map(|_| ())
}

/// Ends a job, unless somebody has cancelled it.
pub(crate) fn finish(job: &Job, end: &End) -> Result<()> {
    let (state, error) = match end {
        End::Done => ("done", None),
        End::Failed(error) => ("failed", Some(error.as_str())),
    };
    change(
        "UPDATE pagevault.rekey_jobs
            SET state = $2, error = $3, finished_at = pg_catalog.clock_timestamp()
          WHERE id = $1 AND state = 'running'",
        &[job.id.into(), state.into(), error.into()],
    )
    .map(|_| ())
}

/// What a user may have done to a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Pause,
    Resume,
    Cancel,
}

/// The relation of a job.
pub(crate) fn relation_of(id: i64) -> Result<Oid> {
    let found =
        value_of::<Oid>("SELECT relation FROM pagevault.rekey_jobs WHERE id = $1", &[id.into()])?;
    found.ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            format!("rekey job {id} does not exist in this database"),
        )
        .hint("See pagevault.rekey_progress.")
    })
}

/// Carries out an order; an error if the job's state has no room for it.
pub(crate) fn obey(id: i64, order: Order) -> Result<()> {
    let (state, from, done) = match order {
        Order::Pause => ("paused", "waiting running", "paused"),
        Order::Resume => ("waiting", "paused cancelled failed", "resumed"),
        Order::Cancel => ("cancelled", "waiting running paused failed", "cancelled"),
    };
    let updated = change(
        "UPDATE pagevault.rekey_jobs
            SET state = $2, finished_at = CASE WHEN $2 = 'cancelled' THEN pg_catalog.clock_timestamp() END
          WHERE id = $1 AND state = ANY (pg_catalog.string_to_array($3, ' ')) RETURNING id",
        &[id.into(), state.into(), from.into()],
    )?;
    if updated == 1 {
        if order == Order::Resume {
            wish_at_commit();
        }
        return Ok(());
    }
    let (state, _) = state_of(id)?;
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("rekey job {id} cannot be {done}: it is {state}"),
    ))
}

/// State and error text of a job, as of now.
pub(crate) fn state_of(id: i64) -> Result<(String, Option<String>)> {
    relation_of(id)?;
    let row = row_of(
        "SELECT state, error FROM pagevault.rekey_jobs WHERE id = $1",
        &[id.into()],
        |row| Ok((row.get::<String>(1)?, row.get::<String>(2)?)),
    )?;
    Ok(row.map(|(state, error)| (state.unwrap_or_default(), error)).unwrap_or_default())
}

/// The unfinished job of a relation, or else its last one.
pub(crate) fn last_of(relation: Oid) -> Result<Option<i64>> {
    value_of(
        "SELECT id FROM pagevault.rekey_jobs WHERE relation = $1
          ORDER BY state IN ('waiting', 'running', 'paused') DESC, id DESC LIMIT 1",
        &[relation.into()],
    )
}

/// The first unfinished job of any of these relations.
pub(crate) fn any_unfinished(relations: &[Oid]) -> Result<Option<i64>> {
    if !exist()? {
        return Ok(None);
    }
    value_of(
        "SELECT id FROM pagevault.rekey_jobs
          WHERE relation = ANY ($1) AND state IN ('waiting', 'running', 'paused') ORDER BY id",
        &[relations.to_vec().into()],
    )
}

/// A job that is not done.
pub(crate) struct Unsettled {
    pub(crate) id: i64,
    pub(crate) relation: Oid,
    pub(crate) kind: String,
    pub(crate) state: String,
    pub(crate) pages_done: i64,
    pub(crate) pages_total: i64,
}

/// The last job of each relation, if it is not done.
pub(crate) fn unsettled() -> Result<Vec<Unsettled>> {
    if !exist()? {
        return Ok(Vec::new());
    }
    with_table(|spi| {
        let rows = spi.select(
            "SELECT * FROM (
                 SELECT DISTINCT ON (relation) id, relation, kind, state, pages_done, pages_total
                   FROM pagevault.rekey_jobs ORDER BY relation, id DESC) last
              WHERE state <> 'done' ORDER BY id",
            None,
            &[],
        )?;
        rows.map(|row| {
            Ok(Unsettled {
                id: row.get::<i64>(1)?.unwrap_or_default(),
                relation: row.get::<Oid>(2)?.unwrap_or(Oid::INVALID),
                kind: row.get::<String>(3)?.unwrap_or_default(),
                state: row.get::<String>(4)?.unwrap_or_default(),
                pages_done: row.get::<i64>(5)?.unwrap_or_default(),
                pages_total: row.get::<i64>(6)?.unwrap_or_default(),
            })
        })
        .collect()
    })
}

/// What a stopped job has left was done at once: it is forgotten.
pub(crate) fn forget_stopped(relation: Oid) -> Result<()> {
    if !exist()? {
        return Ok(());
    }
    change(
        "DELETE FROM pagevault.rekey_jobs
          WHERE relation = $1 AND state IN ('paused', 'cancelled', 'failed')",
        &[relation.into()],
    )
    .map(|_| ())
}

/// True if the current transaction wrote the job's row, so that no worker can see it yet.
pub(crate) fn is_uncommitted(id: i64) -> Result<bool> {
    let writer = value_of::<String>(
        "SELECT xmin::text FROM pagevault.rekey_jobs WHERE id = $1",
        &[id.into()],
    )?;
    let writer = writer.and_then(|xid| xid.parse::<u32>().ok());
    Ok(writer.is_some_and(process::is_own_transaction))
}
