//! Jobs that the server itself requests, because a data key has reached the age that
//! `pagevault.rotate_data_key_after` names. They run while `pagevault.rotation_window` is open, one
//! at a time, and give way to what users request.

use pagevault_core::rekey::life::is_unfinished;
use pagevault_keystore::job::JobState;
use pagevault_keystore::job_table::{Head, JobTable, Known};
use pgrx::pg_sys::Oid;

use super::JobKind;
use super::jobs::{request, table, try_submit};
use crate::keys::usage::interim;
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::Result;

/// In the place of the role that has requested a job.
const SERVER: Oid = Oid::INVALID;

/// Adds a job that gives a relation new data keys, unless it has another unfinished one, even of a
/// transaction in progress: waiting for that would hold up everything else. Returns its number.
pub(crate) fn submit(relation: Oid) -> Result<Option<i64>> {
    let job = try_submit(request(SERVER, relation, JobKind::Rotate, None))?;
    Ok(job.ok())
}

/// Whether it is such a job.
pub(super) fn is_scheduled(known: &Known) -> bool {
    known.request.requested_by == SERVER.to_u32()
}

/// Whether it is such a job that nobody is running.
pub(super) fn gives_way(known: &Known) -> bool {
    is_scheduled(known) && known.step > 0 && known.state == JobState::Waiting && known.process == 0
}

/// Whether there is such a job that is running, or will be without anybody else doing anything: in
/// this database; `None`: anywhere.
pub(crate) fn any_in(database: Option<u32>) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let wanted = |head: &Head| {
        database.is_none_or(|database| head.job.database == database)
            && head.state == JobState::Waiting
            && (head.process != 0 || head.given_up == 0)
    };
    Ok(table()?.select(wanted).iter().any(is_scheduled))
}

/// Whether such jobs may run now. Those that replace interim keys wait for no window.
pub(super) fn may_run() -> bool {
    guc::is_rotation_window_open() || interim::any_to_rekey()
}

/// Which jobs are not to be begun now.
pub(super) fn held(table: &JobTable<'_>) -> impl Fn(&Known) -> bool + use<> {
    let running = table.select(|head| head.process != 0 && is_unfinished(head.state));
    let held = running.iter().any(is_scheduled) || !may_run();
    move |known| held && is_scheduled(known)
}
