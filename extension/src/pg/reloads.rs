//! Reloads of settings that a background worker misses: `BackgroundWorkerMain` (bgworker.c) begins
//! by ignoring SIGHUP, which discards one that is pending since the fork. Other workers tell when
//! they have reloaded. Settings are not read again at each start, because whoever has changed them
//! may not have reloaded them yet.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use pgrx::pg_sys;

use super::mapping::{MemoryKind, Region, shared_struct};
use super::process::ProcessLocal;

shared_struct! {
    /// What workers tell each other.
    struct Told {
        /// When one has last reloaded because it was told to (a `TimestampTz`).
        at: AtomicU64,
    }
}

/// Mapped in the postmaster.
static TOLD: ProcessLocal<Option<&'static Told>> = ProcessLocal::new(None);

/// What this worker was told last: the clock may be set back.
static HEARD: ProcessLocal<i64> = ProcessLocal::new(0);

/// How long after a worker has started others may hear of a reload that it has missed.
const MAY_BE_MISSED: Duration = Duration::from_secs(1);

/// In the postmaster, when the library is loaded. Without memory, a reload may be missed.
pub(crate) fn prepare() {
    TOLD.set(Region::<Told>::map(0, MemoryKind::Sparse).ok().map(|region| region.head));
}

/// This worker has reloaded, because it was told to.
pub(super) fn tell_others() {
    // SAFETY: a plain global of this process.
    let time = unsafe { pg_sys::PgReloadTime };
    if let Some(told) = TOLD.get() {
        told.at.store(time.cast_unsigned(), Release);
    }
}

/// Whether others have reloaded since this worker was started, or about then, and it has not.
pub(super) fn one_was_missed() -> bool {
    let told = TOLD.get().map_or(0, |told| told.at.load(Acquire).cast_signed());
    // SAFETY: a plain global of this process.
    let own = unsafe { pg_sys::PgReloadTime };
    HEARD.replace(told) != told && told > own && is_within(told, started_at())
}

/// How long a new worker sleeps at most, so that it hears of a reload that it has missed.
pub(super) fn longest_pause() -> Option<Duration> {
    // SAFETY: the server's clock, which any process may read at any time.
    let now = unsafe { pg_sys::GetCurrentTimestamp() };
    is_within(started_at(), now).then_some(MAY_BE_MISSED)
}

/// Whether the second time is less than [`MAY_BE_MISSED`] after the first, or before it.
fn is_within(first: i64, second: i64) -> bool {
    second.saturating_sub(first) < MAY_BE_MISSED.as_micros() as i64
}

/// When this process was forked (a `TimestampTz`).
fn started_at() -> i64 {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::MyStartTimestamp }
}
