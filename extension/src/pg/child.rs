//! Programs that a process of the server runs.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Has a program that is to be started cut off from the server: it inherits no descriptor but the
/// standard ones, and does not outlive this process.
pub(crate) fn keep_apart(command: &mut Command) {
    let server = std::process::id();
    // SAFETY: runs in the child between fork and exec, where only async-signal-safe calls are
    // allowed: leave_server makes system calls and nothing else, not even an allocation.
    unsafe { command.pre_exec(move || leave_server(server)) };
}

/// In the child. `server` has started it.
fn leave_server(server: u32) -> io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: system calls on numbers; they touch no memory of ours but `limit`.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() as u32 != server {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let flags = libc::CLOSE_RANGE_CLOEXEC;
        if libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, flags) == 0 {
            return Ok(());
        }
        // Linux before 5.11: one by one.
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

/// Waits for data of a child, `tick` at most; a signal ends the wait early.
pub(crate) fn wait_readable(pipe: BorrowedFd<'_>, tick: Duration) -> bool {
    let mut poll = libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: there is the one structure that is read and written.
    let ready = unsafe { libc::poll(&raw mut poll, 1, tick.as_millis() as i32) };
    ready > 0
}
