//! The middle process: runs a program, and kills its process group when nobody reads the output
//! any more.
//!
//! In a container the postmaster may be process 1, and inherits processes whose parents are gone.
//! It takes any exit status but 0 and 1 for the crash of a session, and then ends all sessions
//! (`CleanupBackend` in 15 to 17, `process_pm_child_exit` since 18, postmaster.c). So killed
//! processes must not come to it: this process inherits them, waits for them, and ends with 1.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{Pid, getpgrp, getpid};

/// Time in which killed processes have ended. Those that wait for a file system that does not
/// answer are left.
const PATIENCE: Duration = Duration::from_secs(1);

/// Exit status if nobody reads the output.
const NOT_READ: i32 = 1;

/// Runs the program and ends with its exit status; if a signal has ended it, 128 plus its number,
/// as in a shell.
pub(crate) fn supervise(program: &OsStr, arguments: &[OsString]) -> ! {
    match start(program, arguments) {
        Ok(group) => end(group, wait(group)),
        Err(error) => {
            say(&format!("could not be run: {error}"));
            // The exit status of a shell.
            leave(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
        }
    }
}

/// Nobody may read it any more.
fn say(what: &str) {
    let _ = writeln!(io::stderr(), "{what}");
}

/// Ends this process.
fn leave(status: i32) -> ! {
    let is_read = !has_hung_up(io::stdout().as_fd(), PollTimeout::ZERO);
    exit(if is_read { status } else { NOT_READ })
}

/// Starts the program, and returns its process group.
fn start(program: &OsStr, arguments: &[OsString]) -> io::Result<Pid> {
    // A signal to the server's process group must not end this process before the program.
    if getpgrp() != getpid() {
        return Err(io::Error::other("not the leader of a process group"));
    }
    SigSet::empty().thread_set_mask()?;
    prctl::set_child_subreaper(true)?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let child = Command::new(program).args(arguments).process_group(0).spawn()?;
    let group = Pid::from_raw(child.id().cast_signed());
    let watch = move || {
        wait_for_hangup(output.as_fd());
        end(group, NOT_READ)
    };
    match thread::Builder::new().spawn(watch) {
        Ok(_) => Ok(group),
        Err(error) => {
            say(&format!("could not be watched: {error}"));
            end(group, 126)
        }
    }
}

/// Waits for the program's end. The program is not reaped yet: until then, no other group can get
/// its number.
fn wait(program: Pid) -> i32 {
    loop {
        match waitid(Id::Pid(program), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(_, code)) => return code,
            Ok(WaitStatus::Signaled(_, signal, _)) => return 128 + signal as i32,
            Ok(_) | Err(nix::Error::EINTR) => {}
            // The other thread has reaped it, and is about to end this process.
            Err(_) => return NOT_READ,
        }
    }
}

/// Kills and reaps the process group, and ends this process. Who comes second waits for that.
fn end(group: Pid, status: i32) -> ! {
    static ENDING: Mutex<()> = Mutex::new(());
    let _first = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    // Fails only if all of its processes have been reaped.
    let _ = killpg(group, Signal::SIGKILL);
    let until = Instant::now() + PATIENCE;
    let members = Pid::from_raw(-group.as_raw());
    loop {
        match waitpid(members, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) if Instant::now() < until => {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(WaitStatus::StillAlive) => break,
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(_) => break,
        }
    }
    leave(status)
}

/// Returns when the pipe behind `output` has no reader.
fn wait_for_hangup(output: BorrowedFd<'_>) {
    while !has_hung_up(output, PollTimeout::NONE) {}
}

/// Whether the pipe behind `output` has no reader, after at most `time`.
fn has_hung_up(output: BorrowedFd<'_>, time: PollTimeout) -> bool {
    // Without requested events, poll still reports errors and hang-up.
    let mut watched = [PollFd::new(output, PollFlags::empty())];
    !matches!(poll(&mut watched, time), Ok(0) | Err(nix::Error::EINTR))
}
