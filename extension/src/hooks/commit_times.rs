//! How long commits take, measured while a rekey worker wants to know it
//! ([`crate::shmem::traffic`]).

use std::time::Instant;

use crate::pg::process::ProcessLocal;
use crate::pg::xact;
use crate::shmem;

/// When the commit in progress began, if it is measured.
static COMMIT_BEGAN: ProcessLocal<Option<Instant>> = ProcessLocal::new(None);

/// A transaction is about to commit. The time until [`committed`] is that of writing WAL, syncing
/// it, and waiting for synchronous standbys (`CommitTransaction`, xact.c).
pub(crate) fn commits() {
    if shmem::get().is_some_and(|shared| shared.traffic.is_measured()) && xact::has_id() {
        COMMIT_BEGAN.set(Some(Instant::now()));
    }
}

/// The transaction has committed.
pub(crate) fn committed() {
    if let Some(began) = COMMIT_BEGAN.with(Option::take)
        && let Some(shared) = shmem::get()
    {
        shared.traffic.add_commit(began.elapsed());
    }
}

/// A commit that began has failed.
pub(crate) fn forget() {
    COMMIT_BEGAN.set(None);
}
