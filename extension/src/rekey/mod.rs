//! Rekeying online: encrypting, decrypting and changing the data keys of relations that are in use.
//!
//! A job concerns one relation and those that follow it. It is a record of the keystore ([`jobs`]),
//! written by the requesting command: it counts once that transaction has committed, survives
//! restarts, and exists on standbys. Background workers run the jobs ([`crate::workers`]), one
//! relation file at a time ([`engine`]):
//!
//! 1. The file is switched: new writes are under a new version, or plaintext.
//! 2. Each page on disk that is in another state is rewritten through shared buffers, with a
//!    full-page image in WAL. The file stays readable, because each page contains its key version.
//! 3. Everything is flushed and synced, and the headers of all pages on disk are read. Only if all
//!    are in the target state is the rewriting finished.
//!
//! Each step reads from disk what is left to do, so a job can be stopped at any point and started
//! again.

pub(crate) mod at_once;
mod consent;
mod engine;
pub(crate) mod file;
pub(crate) mod jobs;
pub(crate) mod launcher;
mod pace;
pub(crate) mod pending;
pub(crate) mod scheduled;
mod traffic;

use pagevault_cipher::CipherId;
pub(crate) use pagevault_keystore::job::JobKind;
use pgrx::pg_sys::Oid;

use crate::fault;
use crate::pg::report::OrRaise;
use crate::pg::{catalog, worker};

/// The part of a job that workers need.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: i64,
    pub(crate) relation: Oid,
    pub(crate) kind: JobKind,
    /// For [`JobKind::Encrypt`], if one was named.
    pub(crate) cipher: Option<CipherId>,
    /// Why the server itself has requested it.
    pub(crate) reason: Option<scheduled::Reason>,
}

/// Claims a job in a worker; `None` if there is none.
pub(crate) fn claim() -> Option<Job> {
    worker::transaction(|| {
        if catalog::has_extension() {
            return jobs::claim().or_raise();
        }
        jobs::cancel_all("extension pagevault is not installed in the database any more")
            .or_raise();
        None
    })
}

/// Runs a claimed job; true if it is complete. May raise ERROR.
pub(crate) fn run(job: &Job) -> bool {
    engine::run(job)
}

/// Records the end of a claimed job, if it ended, and releases it.
pub(crate) fn finish(job: &Job, end: Option<jobs::End>) {
    fault::point("rekey.ended");
    if let Some(end) = end {
        worker::transaction(|| jobs::finish(job, &end).or_raise());
    }
    jobs::release();
}
