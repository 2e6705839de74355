//! What sessions and rekey workers do to the server, for `pagevault.rekey_rate = auto`
//! ([`crate::rekey::traffic`]). Written without a lock; only differences of the sums matter.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::pg::mapping::shared_struct;

shared_struct! {
    /// Sums since the server was started.
    pub(crate) struct Traffic {
        is_measured: AtomicBool,
        commits: AtomicU64,
        commit_ns: AtomicU64,
        wal_of_jobs: AtomicU64,
    }
}

impl Traffic {
    /// Whether a worker wants to know how long commits take.
    #[inline]
    pub(crate) fn is_measured(&self) -> bool {
        self.is_measured.load(Relaxed)
    }

    /// A worker wants to know it, or has ended. If another one still does, it says so again.
    pub(crate) fn measure(&self, on: bool) {
        self.is_measured.store(on, Relaxed);
    }

    /// Counts a commit that wrote WAL.
    pub(crate) fn add_commit(&self, took: Duration) {
        self.commits.fetch_add(1, Relaxed);
        self.commit_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Number of these commits, and how long they have taken together.
    pub(crate) fn commits(&self) -> (u64, Duration) {
        (self.commits.load(Relaxed), Duration::from_nanos(self.commit_ns.load(Relaxed)))
    }

    /// Counts bytes that a rekey worker has written to WAL.
    pub(crate) fn add_wal_of_job(&self, bytes: u64) {
        self.wal_of_jobs.fetch_add(bytes, Relaxed);
    }

    /// The bytes that all rekey workers have written to WAL.
    pub(crate) fn wal_of_jobs(&self) -> u64 {
        self.wal_of_jobs.load(Relaxed)
    }
}
