//! Programs that a server process starts.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Isolates a program that is about to be started from the server: it inherits only the standard
/// descriptors, and gets SIGTERM when this process ends. It can end with a status then: what comes
/// to a postmaster that is process 1 of a container should not have been ended by a signal
/// (`CleanupBackend`, postmaster.c).
pub(crate) fn isolate_from_server(command: &mut Command) {
    let server = std::process::id();
    // SAFETY: runs in the child between fork and exec, where only async-signal-safe calls are
    // allowed: isolate() makes only system calls and does not allocate.
    unsafe { command.pre_exec(move || isolate(server)) };
}

/// In the child. `server` is the process that started it.
fn isolate(server: u32) -> io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: system calls on numbers; the only memory they write is `limit`.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() as u32 != server {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let flags = libc::CLOSE_RANGE_CLOEXEC;
        if libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, flags) == 0 {
            return Ok(());
        }
        // Linux before 5.11 has no CLOSE_RANGE_CLOEXEC.
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return Err(io::Error::last_os_error());
        }
        for fd in FIRST as i32..limit.rlim_cur.min(i32::MAX as u64) as i32 {
            libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
    Ok(())
}

/// Makes writes to a child return at once when its pipe is full.
pub(crate) fn do_not_block(pipe: BorrowedFd<'_>) -> io::Result<()> {
    let fd = pipe.as_raw_fd();
    // SAFETY: system calls on numbers; they write no memory of this process, and the borrowed
    // descriptor is open.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until a child has written to `from`, or can read from `to`, at most `tick`; a signal ends
/// the wait early. Whether there is something to read.
pub(crate) fn wait_for_pipes(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    tick: Duration,
) -> bool {
    let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
    // The kernel leaves out negative numbers.
    let to = to.map_or(-1, |pipe| pipe.as_raw_fd());
    let mut polled = [entry(from.as_raw_fd(), libc::POLLIN), entry(to, libc::POLLOUT)];
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the kernel reads and writes these structures, which exist.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), count, tick.as_millis() as i32) };
    ready > 0 && polled[0].revents != 0
}
