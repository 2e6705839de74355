//! How fast a job goes when `pagevault.rekey_rate` is `auto`: at full speed while nobody else uses
//! the server, and out of the way of those who do.
//!
//! What is set is the share of its time in which a worker works; it sleeps for the rest. So the
//! cost for others is bounded whatever the hardware: at [`SLOWEST`] a worker takes 3 % of one
//! processor and of the time of one writer. The share follows what is seen of the rest of the
//! server in intervals of about a second: it grows slowly, and is halved at once.

use std::time::Duration;

/// The smallest share.
pub const SLOWEST: f64 = 1.0 / 32.0;
/// The share with which a job begins.
const FIRST: f64 = 1.0 / 8.0;

/// Growth in an interval in which nobody else did anything, and in one without a sign that the job
/// is in the way.
const WHEN_IDLE: f64 = 2.0;
const WHEN_CALM: f64 = 1.1;
const WHEN_BUSY: f64 = 0.5;

/// Fewer commits in an interval say nothing about their duration.
const ENOUGH_COMMITS: u64 = 5;
/// Commits that take this many times as long as usual, and this much longer, are slow.
const SLOW: f64 = 1.25;
const SLOW_BY: Duration = Duration::from_micros(200);
/// Weight of the last interval in averages.
const WEIGHT: f64 = 0.3;

/// Others that write less WAL than this per second are not busy with writing.
const LITTLE_WAL: f64 = 1e6;
/// A standby may lag by this many bytes.
const LAG: u64 = 64 << 20;

/// What was seen of the rest of the server in one interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// Length of the interval.
    pub interval: Duration,
    /// Processes that execute statements at its end, without rekey workers.
    pub active: u32,
    /// Processors of the machine.
    pub processors: u32,
    /// Commits that wrote WAL.
    pub commits: u64,
    /// How long these have taken together.
    pub commit_time: Duration,
    /// WAL of others than rekey workers, in bytes.
    pub wal: u64,
    /// WAL of all rekey workers, in bytes.
    pub wal_of_jobs: u64,
    /// WAL that the standby which is the furthest behind has not written to disk, in bytes.
    pub lag: u64,
}

/// Why a job goes slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    /// Others keep all processors busy.
    Processors,
    /// Commits take longer than usual.
    Commits,
    /// Jobs write more than half as much WAL as others who write much.
    Wal,
    /// A standby falls behind.
    Standby,
}

impl Busy {
    /// For those who watch a job.
    #[must_use]
    pub fn as_text(self) -> &'static str {
        match self {
            Self::Processors => "processors are busy",
            Self::Commits => "commits take longer",
            Self::Wal => "others write WAL",
            Self::Standby => "a standby falls behind",
        }
    }
}

/// The speed of one worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    share: f64,
    busy: Option<Busy>,
    /// Usual duration of a commit in seconds.
    usual: Option<f64>,
    /// Average number of active processes.
    active: f64,
    /// At the end of the last interval.
    lag: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { share: FIRST, busy: None, usual: None, active: 0.0, lag: 0 }
    }
}

impl Pace {
    /// Share of the time in which the worker works: from [`SLOWEST`] to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Why it was made slower in the last interval.
    #[must_use]
    pub fn busy(&self) -> Option<Busy> {
        self.busy
    }

    /// How long to sleep after work that has taken this long.
    #[must_use]
    pub fn pause_after(&self, work: Duration) -> Duration {
        work.mul_f64(1.0 / self.share - 1.0)
    }

    /// Follows what was seen in an interval.
    pub fn observe(&mut self, seen: &Seen) {
        self.active += WEIGHT * (f64::from(seen.active) - self.active);
        self.busy = self.reason(seen);
        let factor = match self.busy {
            Some(_) => WHEN_BUSY,
            None if self.is_idle(seen) => WHEN_IDLE,
            None => WHEN_CALM,
        };
        self.learn(seen);
        self.lag = seen.lag;
        self.share = (self.share * factor).clamp(SLOWEST, 1.0);
    }

    fn reason(&self, seen: &Seen) -> Option<Busy> {
        if seen.lag > LAG && seen.lag >= self.lag {
            return Some(Busy::Standby);
        }
        let slow = |usual: f64| usual * SLOW + SLOW_BY.as_secs_f64();
        if let (Some(latest), Some(usual)) = (latest(seen), self.usual)
            && latest > slow(usual)
        {
            return Some(Busy::Commits);
        }
        if per_second(seen.wal, seen) > LITTLE_WAL && seen.wal_of_jobs > seen.wal / 2 {
            return Some(Busy::Wal);
        }
        (self.active >= f64::from(seen.processors.max(1)) * 0.9).then_some(Busy::Processors)
    }

    /// The average rounds to nobody: one short statement now and then does not count.
    fn is_idle(&self, seen: &Seen) -> bool {
        self.active < 0.5
            && seen.commits == 0
            && per_second(seen.wal, seen) < LITTLE_WAL
            && seen.lag <= LAG
    }

    /// The usual duration is the shortest that was seen. It grows only at the slowest pace, where
    /// the job is not the reason why commits take longer. Elsewhere it must not, however slowly:
    /// the job would get used to what it does to others.
    fn learn(&mut self, seen: &Seen) {
        let Some(latest) = latest(seen) else { return };
        self.usual = Some(match self.usual {
            None => latest,
            Some(usual) if self.share <= SLOWEST => usual + WEIGHT * (latest - usual),
            Some(usual) => latest.min(usual),
        });
    }
}

/// Duration of a commit in seconds.
fn latest(seen: &Seen) -> Option<f64> {
    let enough = seen.commits >= ENOUGH_COMMITS;
    enough.then(|| seen.commit_time.as_secs_f64() / seen.commits as f64)
}

fn per_second(bytes: u64, seen: &Seen) -> f64 {
    bytes as f64 / seen.interval.as_secs_f64().max(1e-3)
}
