//! Doing what is due, in a worker.

use std::collections::BTreeSet;

use pagevault_keystore::job::JobState;
use pagevault_keystore::{RelFile, Scope};
use pgrx::PgSqlErrorCode;

use super::{Task, ages, number};
use crate::audit::{self, Operation};
use crate::keys::provider::master_keys;
use crate::keys::store::{directory, key_groups};
use crate::keys::usage::{interim, wal_switch};
use crate::pg::guc::{self, KeyKind};
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, locks, process, relation, survey};
use crate::rekey::jobs;
use crate::rekey::scheduled::{self, Reason};

/// The worker in the audit trail.
const BY: &str = "rotation_worker";

/// Most jobs that are requested at once; the next follow when these are done.
const JOBS_AT_ONCE: usize = 100;

/// Seconds before a relation gets another job after one has failed or was cancelled.
const AFTER_FAILURE: i64 = 86_400;

/// Does a task of a cluster, in a transaction of a worker that is not connected to a database;
/// data keys: of the worker's database. May raise ERROR.
pub(crate) fn perform(task: Task) -> Result<()> {
    match task {
        Task::MasterKey(scope) => {
            let action = match scope.key_group() {
                _ if scope.is_cluster() => "rotate_cluster_master_key",
                Some(_) => "rotate_key_group_master_key",
                None => "rotate_database_master_key",
            };
            audited((KeyKind::Master, scope), action, || master_keys::rotate(BY, scope))
        }
        Task::DatabaseKey(scope) => {
            let action = match scope.key_group() {
                Some(_) => "rotate_key_group_key",
                None => "rotate_database_key",
            };
            audited((KeyKind::Database, scope), action, || {
                master_keys::rotate_database_key(BY, scope).map(number)
            })
        }
        Task::WalKey => {
            let what = (KeyKind::Wal, Scope::CLUSTER);
            audited(what, "rotate_wal_key", || wal_switch::rotate().map(number))
        }
        Task::DataKeys(database) => request_jobs(Scope::database(database), Reason::Age),
        Task::SharedDataKeys(_) => request_jobs(Scope::CLUSTER, Reason::Age),
        Task::FindInterimPages => interim::find_unmarked(),
        Task::InterimPages(database) => {
            request_jobs(Scope::database(database), Reason::InterimPages)
        }
    }
}

fn audited(
    (kind, scope): (KeyKind, Scope),
    action: &'static str,
    work: impl FnOnce() -> Result<i64>,
) -> Result<()> {
    locks::lock_key_management();
    // Somebody else may have rotated it, or changed the settings, while this waited.
    let now = process::now();
    let is_due = ages::of_cluster()?.iter().any(|age| {
        (age.kind, age.scope) == (kind, scope) && age.due_at().is_some_and(|at| at <= now)
    });
    if !is_due || !guc::is_rotation_window_open() {
        return Ok(());
    }
    let operation = Operation { action, by: BY, ..Operation::default() };
    let version = audit::audited(operation.on(key_groups::describe(scope)), work)?;
    let message = format!(
        "pagevault: {action} by age: {} has version {version}",
        key_groups::describe(scope)
    );
    Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message)
        .send(pgrx::prelude::PgLogLevel::LOG);
    Ok(())
}

/// The files that have a data key which is due; `home`: a database, or the cluster for shared
/// relations.
fn due_in(home: Scope) -> Result<BTreeSet<RelFile>> {
    let now = process::now();
    let ages = ages::of_files(home)?;
    let due = ages.iter().filter(|age| age.due_at().is_some_and(|at| at <= now));
    Ok(due.filter_map(|age| age.file).collect())
}

/// The files of a database that have pages under their interim keys. Removes the marks of those
/// that have none any more. Files that a crash has left stay marked, until they are gone or their
/// keys are destroyed: nobody reads them, and no job rewrites them.
fn interim_in(home: Scope) -> Result<BTreeSet<RelFile>> {
    let mut found = BTreeSet::new();
    let in_use = survey::files_in_catalog();
    for file in interim::to_rekey()?.into_iter().filter(|file| file.scope() == home) {
        let has_pages = interim::has_pages(file);
        if process::is_told_to_stop() {
            return Ok(BTreeSet::new());
        }
        if !has_pages {
            interim::unmark(file)?;
        } else if in_use.contains(&file) {
            found.insert(file);
        } else {
            let report = Report::new(
                PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
                format!(
                    "pagevault: relation file {file} has pages under an interim key, and belongs to no relation"
                ),
            );
            let report = report.detail("A crash has left it. While it is there, each page on disk is compared before it is written over.");
            report.send(pgrx::prelude::PgLogLevel::LOG);
        }
    }
    Ok(found)
}

/// Requests jobs for relations of this database whose files are to get new data keys for this
/// reason; `home`: this database, or the cluster for shared relations.
fn request_jobs(home: Scope, reason: Reason) -> Result<()> {
    if !catalog::has_extension() {
        if home.is_cluster() {
            return Ok(()); // another database sees to it
        }
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!(
                "cannot rotate data keys in database {}: pagevault is not installed there",
                process::my_database()
            ),
        )
        .hint("CREATE EXTENSION pagevault in this database."));
    }
    let now = process::now();
    let due = match reason {
        Reason::Age => due_in(home)?,
        Reason::InterimPages => interim_in(home)?,
    };
    if due.is_empty() {
        return Ok(());
    }
    let mut requested = 0;
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        let is_due = || {
            let family = relation::family_unlocked(facts.oid);
            family.iter().any(|member| due.contains(&member.file))
        };
        if requested < JOBS_AT_ONCE
            && facts.is_stored()
            && relation::is_independent(&facts)
            && !directory::is_destroyed(facts.file)
            && is_due()
            && may_be_requested(facts.oid, reason, now)?
        {
            let Some(job) = scheduled::submit(facts.oid, reason)? else { continue };
            let name = relation::quoted_name(&facts);
            let operation = Operation { action: "rotate_data_key", by: BY, ..Operation::default() };
            audit::log_operation(&operation.on(format!("{name}, job {job}")), "ok");
            requested += 1;
        }
    }
    Ok(())
}

/// Not if a job of the relation is unfinished, or somebody has to look at the last one.
fn may_be_requested(relation: pgrx::pg_sys::Oid, reason: Reason, now: i64) -> Result<bool> {
    let Some(last) = jobs::last_known(relation)? else { return Ok(true) };
    Ok(match last.state {
        JobState::Waiting if reason == Reason::InterimPages => scheduled::waits_for_window(&last),
        JobState::Waiting | JobState::Paused => false,
        JobState::Failed | JobState::Cancelled => last.ended / 1_000_000 < now - AFTER_FAILURE,
        JobState::Done | JobState::Void => true,
    })
}
