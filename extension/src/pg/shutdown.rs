//! The end of the server, for a process that waits for something else than its latch.
//!
//! While the postmaster starts it handles no shutdown request: it does so in `ServerLoop` only,
//! whether its handlers act there (15: `PostmasterMain` blocks all signals, `ServerLoop` unblocks
//! them, `pmdie` is the handler) or make a note for it (since 16 `PostmasterMain` unblocks them at
//! once, `handle_pm_shutdown_request_signal`; postmaster.c). In single-user mode signals are
//! blocked until `PostgresMain` (`InitStandaloneProcess`, miscinit.c).

use std::mem::MaybeUninit;
use std::thread;
use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;
use pgrx::prelude::PgLogLevel;

use super::process::ProcessLocal;
use super::report::Report;
use super::{externs, process};

/// Signals that shut the server down: smart, fast, immediate.
const REQUESTS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGQUIT];

/// Interval at which a pause looks for a request.
const TICK: Duration = Duration::from_millis(100);

/// Signals that were blocked before [`hold`].
static BEFORE: ProcessLocal<Option<libc::sigset_t>> = ProcessLocal::new(None);

/// Lets shutdown requests wait until [`release`], so that [`is_requested`] sees them; in the
/// postmaster, while it starts, or starts again after a crash.
pub(crate) fn hold() {
    if BEFORE.get().is_some() {
        return;
    }
    let (mut requests, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the functions fill in the sets, and fail only for arguments other than these.
    unsafe {
        libc::sigemptyset(requests.as_mut_ptr());
        for signal in REQUESTS {
            libc::sigaddset(requests.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, requests.as_ptr(), before.as_mut_ptr());
        BEFORE.set(Some(before.assume_init()));
    }
}

/// From now on the server handles shutdown requests, also those that have come since [`hold`].
pub(crate) fn release() {
    if let Some(before) = BEFORE.get() {
        BEFORE.set(None);
        // SAFETY: the mask that this thread had before; a handler that runs now is the server's.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
        };
    }
}

/// Whether the server was told to shut down while it starts; in the process that starts it.
pub(crate) fn is_requested() -> bool {
    // SAFETY: a plain global of this process.
    if unsafe { pg_sys::IsUnderPostmaster } {
        return false;
    }
    let mut pending = MaybeUninit::uninit();
    // SAFETY: the function fills in the set, and fails only for an invalid address.
    unsafe {
        libc::sigpending(pending.as_mut_ptr());
        REQUESTS.iter().any(|signal| libc::sigismember(pending.as_ptr(), *signal) == 1)
    }
}

/// Ends the server, which is starting, as requested. It is where it may refuse to start as well:
/// none of its processes runs yet, and the next start begins again.
pub(crate) fn end_start() -> ! {
    Report::new(
        PgSqlErrorCode::ERRCODE_ADMIN_SHUTDOWN,
        "pagevault: server start ends because of a shutdown request",
    )
    .send(PgLogLevel::LOG);
    // SAFETY: nothing on the stack of this process has to be released: the callbacks release
    // shared memory and the lock file, as at the end of each postmaster (`ExitPostmaster`).
    unsafe { externs::proc_exit(0) }
}

/// While the server starts: waits, and ends the start when that is requested.
pub(crate) fn pause(time: Duration) {
    let end = Instant::now() + time;
    loop {
        if is_requested() {
            end_start();
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(TICK));
    }
}

/// Whether the postmaster of this process has died. Until all of its processes have ended, no other
/// can start in the data directory.
pub(crate) fn has_lost_postmaster() -> bool {
    !process::is_postmaster() && !process::has_postmaster()
}

/// Ends this process, whose postmaster has died, as a wait for its latch would
/// (`WL_EXIT_ON_PM_DEATH`, `WaitEventSetWait`: latch.c, waiteventset.c since 18).
pub(crate) fn end_without_postmaster() -> ! {
    // SAFETY: as at the end of a session by a FATAL error, which does not return either: callbacks
    // abort the transaction and release locks.
    unsafe { externs::proc_exit(1) }
}

/// Waits by `wait`, a system call. In the startup process, a fast shutdown ends it there, as while
/// a `restore_command` runs (`StartupProcShutdownHandler`, startup.c). Otherwise that is a note,
/// which is read between WAL records.
pub(crate) fn may_end_in<T>(wait: impl FnOnce() -> T) -> T {
    // SAFETY: a plain global of this process.
    if unsafe { pg_sys::MyBackendType } != pg_sys::BackendType::B_STARTUP {
        return wait();
    }
    // SAFETY: sets a flag; if the shutdown was requested before, the process ends here, as it may:
    // redo ends between two records in the same way, and its callers hold no lock.
    unsafe { pg_sys::PreRestoreCommand() };
    let done = wait();
    // SAFETY: resets that flag of this process; reached only where it was set above.
    unsafe { pg_sys::PostRestoreCommand() };
    done
}
