//! The speed of a worker when `pagevault.rekey_rate` is `auto`: what is seen of the rest of the
//! server, for [`pagevault_core::rekey::pace`].

use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use pagevault_cipher::Lsn;
use pagevault_core::rekey::pace::{Busy, Pace, Seen};
use pgrx::Spi;

use crate::pg::wal;
use crate::shmem;
use crate::shmem::traffic::Traffic;

/// Interval between looks at the rest of the server.
const INTERVAL: Duration = Duration::from_millis(500);

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(2);

/// Sessions and parallel workers that execute statements, without those that wait for something
/// else than the disk or a buffer; and by how much WAL the standby that is the furthest behind
/// lags.
const LOOK: &str = "SELECT
      (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_get_activity(NULL)
        WHERE state = 'active' AND backend_type IN ('client backend', 'parallel worker')
          AND coalesce(wait_event_type, 'IO') IN ('IO', 'LWLock', 'BufferPin', 'Buffer')),
      (SELECT pg_catalog.max(pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_flush_lsn(), flush_lsn))::int8
         FROM pg_catalog.pg_stat_get_wal_senders() WHERE state IN ('streaming', 'catchup'))";

/// The sums at one moment.
#[derive(Clone, Copy)]
struct Sums {
    at: Instant,
    wal: Lsn,
    commits: (u64, Duration),
    wal_of_jobs: u64,
}

impl Sums {
    fn now(traffic: &Traffic) -> Sums {
        Sums {
            at: Instant::now(),
            wal: wal::end(),
            commits: traffic.commits(),
            wal_of_jobs: traffic.wal_of_jobs(),
        }
    }
}

/// The speed of this worker.
pub(super) struct Auto {
    traffic: &'static Traffic,
    pace: Pace,
    last: Sums,
    /// WAL of this process that was counted.
    own_wal: u64,
    /// The end of the last pause.
    resumed: Instant,
    has_looked: bool,
}

impl Auto {
    /// `None` without shared memory.
    pub(super) fn begin() -> Option<Auto> {
        let traffic = shmem::get()?.traffic;
        traffic.measure(true);
        Some(Auto {
            traffic,
            pace: Pace::default(),
            last: Sums::now(traffic),
            own_wal: wal::written_by_this_process(),
            resumed: Instant::now(),
            has_looked: false,
        })
    }

    /// Why the worker goes slower.
    pub(super) fn busy(&self) -> Option<Busy> {
        self.pace.busy()
    }

    /// The share of its time in which the worker works, and what else to say.
    pub(super) fn describe(&self) -> String {
        let percent = 100.0 * self.pace.share();
        match self.pace.busy() {
            None => format!("works {percent:.0} % of the time"),
            Some(busy) => format!("works {percent:.0} % of the time: {}", busy.as_text()),
        }
    }

    /// How long to sleep now, after the work since the last pause.
    pub(super) fn pause(&self) -> Duration {
        self.pace.pause_after(self.resumed.elapsed()).min(LONGEST)
    }

    /// The pause has ended, or a step that does not count.
    pub(super) fn resume(&mut self) {
        self.resumed = Instant::now();
    }

    /// Whether to look at the rest of the server again.
    pub(super) fn is_due(&self) -> bool {
        !self.has_looked || self.last.at.elapsed() >= INTERVAL
    }

    /// Looks at the rest of the server; in a transaction.
    pub(super) fn look(&mut self) {
        let written = wal::written_by_this_process();
        self.traffic.add_wal_of_job(written.saturating_sub(self.own_wal));
        self.own_wal = written;
        self.traffic.measure(true);
        let (active, lag) = Spi::get_two::<i64, i64>(LOOK).unwrap_or_default();
        let (last, now) = (self.last, Sums::now(self.traffic));
        let wal_of_jobs = now.wal_of_jobs.saturating_sub(last.wal_of_jobs);
        self.pace.observe(&Seen {
            interval: now.at - last.at,
            active: active.and_then(|count| u32::try_from(count).ok()).unwrap_or(0),
            processors: available_parallelism().map_or(1, |count| count.get() as u32),
            commits: now.commits.0.saturating_sub(last.commits.0),
            commit_time: now.commits.1.saturating_sub(last.commits.1),
            wal: now.wal.0.saturating_sub(last.wal.0).saturating_sub(wal_of_jobs),
            wal_of_jobs,
            lag: lag.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
        });
        self.last = now;
        self.has_looked = true;
    }
}

impl Drop for Auto {
    fn drop(&mut self) {
        self.traffic.measure(false);
    }
}
