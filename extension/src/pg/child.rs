//! Programs that a server process starts.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Isolates a program that is about to be started from the server: it inherits only the standard
/// descriptors, and is killed when this process ends.
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

/// Waits for data from a child, at most `tick`; a signal ends the wait early.
pub(crate) fn wait_readable(pipe: BorrowedFd<'_>, tick: Duration) -> bool {
    let mut poll = libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel reads and writes one structure, which exists.
    let ready = unsafe { libc::poll(&raw mut poll, 1, tick.as_millis() as i32) };
    ready > 0
}
