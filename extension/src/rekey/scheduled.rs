//! Jobs that the server itself requests: because a data key has reached the age that
//! `pagevault.rotate_data_key_after` names, while `pagevault.rotation_window` is open; or because
//! pages are under interim keys, at any time. They run one at a time, and give way to what users
//! request.

use pagevault_core::rekey::life::{self, is_unfinished};
use pagevault_keystore::job::JobState;
use pagevault_keystore::job_table::{Head, JobTable, Known};
use pgrx::pg_sys::Oid;

use super::JobKind;
use super::jobs::{now, request, table, try_submit};
use crate::keys::store::persist::append;
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::Result;

/// Why the server requests a job: in the place of the role that has requested it. No role has such
/// a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Age = 0,
    InterimPages = 1,
}

impl Reason {
    /// `None` if somebody else has requested the job.
    pub(super) fn of(known: &Known) -> Option<Reason> {
        let all = [Reason::Age, Reason::InterimPages];
        all.into_iter().find(|reason| known.request.requested_by == *reason as u32)
    }

    /// Whether such jobs may run now.
    pub(super) fn may_run(self) -> bool {
        self == Reason::InterimPages || guc::is_rotation_window_open()
    }
}

/// Adds a job that gives a relation new data keys, unless it has another unfinished one, even of a
/// transaction in progress: waiting for that would hold up everything else. Returns its number.
pub(crate) fn submit(relation: Oid, reason: Reason) -> Result<Option<i64>> {
    let requested_by = Oid::from(reason as u32);
    loop {
        match try_submit(request(requested_by, relation, JobKind::Rotate, None))? {
            Ok(job) => return Ok(Some(job)),
            Err(other) if waits_for_window(&other) && reason == Reason::InterimPages => {
                give_way(&other)?;
            }
            Err(_) => return Ok(None),
        }
    }
}

/// Whether nobody is running it, and nobody will before the window opens.
pub(crate) fn waits_for_window(known: &Known) -> bool {
    gives_way(known) && Reason::of(known).is_some_and(|reason| !reason.may_run())
}

/// Whether it is such a job.
pub(super) fn is_scheduled(known: &Known) -> bool {
    Reason::of(known).is_some()
}

/// Whether it is such a job that nobody is running.
pub(super) fn gives_way(known: &Known) -> bool {
    is_scheduled(known) && known.step > 0 && known.state == JobState::Waiting && known.process == 0
}

/// Whether there is such a job that is running, or will be without anybody else doing anything: in
/// this database; `None`: anywhere; for this reason; `None`: for any.
pub(crate) fn any_in(database: Option<u32>, reason: Option<Reason>) -> Result<bool> {
    let _lock = KeystoreLock::acquire();
    let wanted = |head: &Head| {
        database.is_none_or(|database| head.job.database == database)
            && head.state == JobState::Waiting
            && (head.process != 0 || head.given_up == 0)
    };
    let found = table()?.select(wanted);
    let mut reasons = found.iter().filter_map(Reason::of);
    Ok(reasons.any(|found| reason.is_none_or(|reason| reason == found)))
}

/// A job that gives way is not visible any more.
pub(super) fn give_way(known: &Known) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let Some(known) = table()?.find(known.job).filter(gives_way) else { return Ok(()) };
    let step = life::step(&known, JobState::Void, "", now());
    append(&lock, known.job.scope(), &[step]).map(|_| ())
}

/// Which jobs are not to be begun now.
pub(super) fn held(table: &JobTable<'_>) -> impl Fn(&Known) -> bool + use<> {
    let running = table.select(|head| head.process != 0 && is_unfinished(head.state));
    let is_busy = running.iter().any(is_scheduled);
    move |known| Reason::of(known).is_some_and(|reason| is_busy || !reason.may_run())
}
