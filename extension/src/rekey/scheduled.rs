//! Jobs that the server itself requests, because a data key has reached the age that
//! `pagevault.rotate_data_key_after` names. They run while `pagevault.rotation_window` is open, one
//! at a time.

use pagevault_core::rekey::life::is_unfinished;
use pagevault_keystore::job_table::{Head, JobTable, Known};
use pgrx::pg_sys::Oid;

use super::JobKind;
use super::jobs::{submit_by, table};
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::Result;

/// In the place of the role that has requested a job.
const SERVER: Oid = Oid::INVALID;

/// Adds a job that gives a relation new data keys.
pub(crate) fn submit(relation: Oid, name: &str) -> Result<i64> {
    submit_by(SERVER, relation, name, JobKind::Rotate, None)
}

/// Whether it is such a job.
pub(super) fn is_scheduled(known: &Known) -> bool {
    known.request.requested_by == SERVER.to_u32()
}

/// Whether a database has such a job that is unfinished.
pub(crate) fn any_in(database: u32) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let wanted = |head: &Head| head.job.database == database && is_unfinished(head.state);
    Ok(table()?.select(wanted).iter().any(is_scheduled))
}

/// Whether such jobs may run now.
pub(super) fn may_run() -> bool {
    guc::is_rotation_window_open()
}

/// Which jobs are not to be begun now.
pub(super) fn held(table: &JobTable<'_>) -> impl Fn(&Known) -> bool + use<> {
    let running = table.select(|head| head.process != 0 && is_unfinished(head.state));
    let held = running.iter().any(is_scheduled) || !may_run();
    move |known| held && is_scheduled(known)
}
