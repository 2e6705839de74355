//! Rekeying online: encrypting, decrypting and giving new data keys to relations that are in use.
//!
//! A job concerns one relation and what follows it. It is a record of the keystore ([`jobs`]),
//! written by the command that asks for it: it counts once that transaction has committed, outlives
//! the server, and goes along to standbys. Background workers do the jobs ([`crate::workers`]), a
//! relation file at a time ([`engine`]):
//!
//! 1. From now on pages of the file are written under a new version (or in plaintext).
//! 2. Every page that on disk is not so yet is written again through shared buffers, with a
//!    full-page image in WAL. The file is readable throughout, since each page says how it is
//!    written.
//! 3. All is flushed and synced, and the header of every page on disk is read: only if each is as
//!    wanted is the rewriting finished.
//!
//! Each step looks at the disk for what is left to do, so a job may be stopped anywhere and begun
//! again.

pub(crate) mod at_once;
mod consent;
mod engine;
pub(crate) mod file;
pub(crate) mod jobs;
pub(crate) mod launcher;

use pagevault_cipher::CipherId;
pub(crate) use pagevault_keystore::job::JobKind;
use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys::Oid;

use crate::fault;
use crate::pg::catalog;
use crate::pg::report::OrRaise;

/// What workers need of a job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: i64,
    pub(crate) relation: Oid,
    pub(crate) kind: JobKind,
    /// For [`JobKind::Encrypt`], where one was named.
    pub(crate) cipher: Option<CipherId>,
}

/// Takes a job that nobody does, in a worker; `None` if there is none.
pub(crate) fn claim() -> Option<Job> {
    BackgroundWorker::transaction(|| {
        if catalog::has_extension() {
            return jobs::claim().or_raise();
        }
        jobs::cancel_all("extension pagevault is not installed in the database any more")
            .or_raise();
        None
    })
}

/// Does a claimed job; true if it is complete. Raises ERROR.
pub(crate) fn run(job: &Job) -> bool {
    engine::run(job)
}

/// Writes down how a claimed job ended, if it did, and gives it back.
pub(crate) fn finish(job: &Job, end: Option<jobs::End>) {
    fault::point("rekey.ended");
    if let Some(end) = end {
        BackgroundWorker::transaction(|| jobs::finish(job, &end).or_raise());
    }
    jobs::release();
}
