//! A clock that is cheap enough to be read twice for each page.
//!
//! If the processor's counter has a constant rate on all cores, it is read by one instruction;
//! otherwise the system's monotonic clock is read. The length of a tick is measured once, when the
//! server starts. With a new measurement for each query, reported times could decrease.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use pgrx::pg_sys;

/// Whether the counter may be used. Set in the postmaster, inherited by all other processes.
static HAS_COUNTER: AtomicBool = AtomicBool::new(false);

/// The current time in ticks. Only differences are meaningful: between two readings of one process,
/// or between processes if the difference is long.
///
/// Not serialized with the surrounding instructions: off by a few dozen nanoseconds either way.
#[inline]
pub(crate) fn ticks() -> u64 {
    if HAS_COUNTER.load(Relaxed) { counter::read() } else { monotonic() }
}

/// `CLOCK_MONOTONIC`, nanoseconds.
fn monotonic() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Reads one of the system's clocks that cannot fail; nanoseconds.
fn read(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one structure, which exists.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Time since the system was started, also while it was suspended. Unlike the time of day it cannot
/// be set; all processes have the same.
pub(crate) fn since_boot() -> Duration {
    Duration::from_nanos(read(libc::CLOCK_BOOTTIME))
}

/// The weekday (0: Sunday) and the minute after midnight, now, in the time zone `log_timezone`.
pub(crate) fn local_minute() -> (u8, u16) {
    let now = read(libc::CLOCK_REALTIME) / 1_000_000_000;
    let now = i64::try_from(now).unwrap_or_default();
    // SAFETY: the zone is set since the server was configured; the result is a variable of the
    // server, null if the time cannot be represented, and is read at once.
    unsafe {
        let local = pg_sys::pg_localtime(&now, pg_sys::log_timezone);
        local.as_ref().map_or((0, 0), |local| {
            (local.tm_wday as u8, (local.tm_hour * 60 + local.tm_min) as u16)
        })
    }
}

/// CPU time of this process, nanoseconds.
#[cfg(any(test, feature = "pg_test"))]
pub(crate) fn cpu_time() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Chooses the clock; returns milliseconds per tick. In the postmaster, before [`ticks`] is used.
/// Takes ten milliseconds, which makes the result accurate to a few millionths.
pub(crate) fn choose() -> f64 {
    if !counter::is_steady() {
        return 1e-6;
    }
    HAS_COUNTER.store(true, Relaxed);
    let (ticks, nanoseconds) = (counter::read(), monotonic());
    std::thread::sleep(Duration::from_millis(10));
    let (ticks, nanoseconds) = (counter::read() - ticks, monotonic() - nanoseconds);
    nanoseconds as f64 / 1e6 / ticks.max(1) as f64
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc};

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: part of the architecture; PostgreSQL runs where the kernel permits it.
        unsafe { _rdtsc() }
    }

    /// "TSC invariant": Intel SDM volume 2, CPUID leaf 80000007H, EDX bit 8; AMD the same.
    pub(super) fn is_steady() -> bool {
        const LAST: u32 = 0x8000_0000;
        const POWER: u32 = 0x8000_0007;
        __cpuid(LAST).eax >= POWER && __cpuid(POWER).edx & 1 << 8 != 0
    }
}

#[cfg(target_arch = "aarch64")]
mod counter {
    #[inline]
    pub(super) fn read() -> u64 {
        let ticks: u64;
        // SAFETY: reads the virtual counter (Arm ARM, CNTVCT_EL0), which Linux permits programs to
        // read.
        unsafe {
            std::arch::asm!(
                "mrs {}, cntvct_el0",
                out(reg) ticks,
                options(nomem, nostack, preserves_flags)
            );
        }
        ticks
    }

    /// Guaranteed by the architecture.
    pub(super) fn is_steady() -> bool {
        true
    }
}
