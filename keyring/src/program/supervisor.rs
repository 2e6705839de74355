//! The middle process: runs a program, and kills it with all of its descendants when it ends, when
//! nobody reads the output any more, or when this process is told to end.
//!
//! Descendants may have changed their process group or session (`timeout`, `setsid`). But whoever
//! loses its parent becomes a child of this process (`PR_SET_CHILD_SUBREAPER`, prctl(2)): so it
//! kills its children until none is left.
//!
//! In a container the postmaster may be process 1, and inherits processes whose parents are gone.
//! It takes any exit status but 0 and 1 for the crash of a session, and then ends all sessions
//! (`CleanupBackend` in 15 to 17, `process_pm_child_exit` since 18, postmaster.c). So killed
//! processes must not come to it: this process inherits them, waits for them, and ends with 1.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{Pid, getpgrp, getpid};

use super::children::{PATIENCE, children, kill_child};

/// Exit status if nobody reads the output, or this process was told to end.
const GIVEN_UP: i32 = 1;

/// Runs the program and ends with its exit status; if a signal has ended it, 128 plus its number,
/// as in a shell.
pub(crate) fn supervise(program: &OsStr, arguments: &[OsString]) -> ! {
    match start(program, arguments) {
        Ok(program) => end(program, wait(program)),
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
    exit(if is_read { status } else { GIVEN_UP })
}

/// Starts the program.
fn start(program: &OsStr, arguments: &[OsString]) -> io::Result<Pid> {
    // A signal to the server's process group must not end this process before the program.
    if getpgrp() != getpid() {
        return Err(io::Error::other("not the leader of a process group"));
    }
    SigSet::empty().thread_set_mask()?;
    prctl::set_child_subreaper(true)?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let child = Command::new(program).args(arguments).process_group(0).spawn()?;
    let program = Pid::from_raw(child.id().cast_signed());
    match watch(program, output) {
        Ok(()) => Ok(program),
        Err(error) => {
            say(&format!("could not be watched: {error}"));
            end(program, 126)
        }
    }
}

/// Starts the thread that ends everything when nobody reads `output` any more, or when a signal
/// says so. The program was started before: it inherits no blocked signals.
fn watch(program: Pid, output: OwnedFd) -> io::Result<()> {
    let signals: SigSet =
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT].into_iter().collect();
    signals.thread_block()?; // inherited by the thread
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;
    let watch = move || loop {
        let mut watched = [
            // Without requested events, poll still reports errors and hang-up.
            PollFd::new(output.as_fd(), PollFlags::empty()),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        if !matches!(poll(&mut watched, PollTimeout::NONE), Ok(0) | Err(nix::Error::EINTR)) {
            end(program, GIVEN_UP);
        }
    };
    thread::Builder::new().spawn(watch).map(drop)
}

/// Waits for the program's end. It is not reaped yet: until then, no other process group can get
/// its number.
fn wait(program: Pid) -> i32 {
    loop {
        match waitid(Id::Pid(program), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(_, code)) => return code,
            Ok(WaitStatus::Signaled(_, signal, _)) => return 128 + signal as i32,
            Ok(_) | Err(nix::Error::EINTR) => {}
            // The other thread has reaped it, and is about to end this process.
            Err(_) => return GIVEN_UP,
        }
    }
}

/// Kills and reaps all descendants, and ends this process. Who comes second waits for that.
fn end(program: Pid, status: i32) -> ! {
    static ENDING: Mutex<()> = Mutex::new(());
    let _first = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    let until = Instant::now() + PATIENCE;
    // Kernels without CONFIG_PROC_CHILDREN do not list children.
    kill_child(program);
    loop {
        // The other thread reaps nobody: these are still the processes with these numbers. Their
        // own children come to this process, and are killed next.
        children().into_iter().for_each(kill_child);
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            _ if Instant::now() >= until => break,
            Ok(WaitStatus::StillAlive) => thread::sleep(Duration::from_millis(1)),
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(_) => break,
        }
    }
    leave(status)
}

/// Whether the pipe behind `output` has no reader, after at most `time`.
fn has_hung_up(output: BorrowedFd<'_>, time: PollTimeout) -> bool {
    // Without requested events, poll still reports errors and hang-up.
    let mut watched = [PollFd::new(output, PollFlags::empty())];
    !matches!(poll(&mut watched, time), Ok(0) | Err(nix::Error::EINTR))
}
