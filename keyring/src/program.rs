//! Runs a program of the operator, and ends all processes that it started.
//!
//! ```text
//! pagevault-keyring serve          pipes, deadline; kills the group at the end
//!  └─ pagevault-keyring run        leads a process group; kills it when nobody reads its output
//!      └─ program                  in that group, with its child processes
//! ```
//!
//! The middle process is needed for cases in which `serve` has no time to clean up: the server
//! kills its helper when a session is cancelled. It also gives the program an empty signal mask,
//! which threads of `serve` do not have.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::PIPE_BUF;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpgrp, getpid};
use zeroize::Zeroizing;

/// Maximum size of a program's output in bytes.
pub(crate) const OUTPUT_LIMIT: usize = 64 * 1024;

/// Bytes that are kept of the end of its standard error.
const TAIL: usize = 2048;

/// Interval in which the end of the program is checked while its pipes are open.
const TICK: Duration = Duration::from_millis(5);

/// Environment variables that a program gets, besides those that begin with `LC_`. Others may be
/// credentials for other purposes, or change the program's behaviour.
const ENVIRONMENT: &[&str] = &["PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR"];

/// A program that has ended.
pub(crate) struct Ended {
    /// Exit status; if it was killed by a signal, 128 plus its number, as in a shell.
    pub(crate) code: i32,
    /// Its standard output, which may contain a secret.
    pub(crate) output: Zeroizing<Vec<u8>>,
    /// The last line of its standard error, unescaped.
    pub(crate) last_error: String,
}

/// Why a program did not run to its end.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The deadline was reached.
    Late,
    /// It printed more than [`OUTPUT_LIMIT`].
    TooMuch,
    /// A system call failed.
    System(io::Error),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Stopped {
        Stopped::System(error)
    }
}

impl From<nix::Error> for Stopped {
    fn from(error: nix::Error) -> Stopped {
        Stopped::System(error.into())
    }
}

/// Runs `path` with `input` as standard input. When this returns, the program and all processes in
/// its process group have ended.
pub(crate) fn run(
    path: &Path,
    arguments: &[String],
    input: &[u8],
    deadline: Instant,
) -> Result<Ended, Stopped> {
    let mut child = Command::new("/proc/self/exe")
        .arg0("pagevault-keyring")
        .args(["run", "--"])
        .arg(path)
        .args(arguments)
        .env_clear()
        .envs(inherited())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pipe = |end: Option<OwnedFd>| end.map(File::from);
    let mut pipes = Pipes {
        input: pipe(child.stdin.take().map(Into::into)),
        output: pipe(child.stdout.take().map(Into::into)),
        errors: pipe(child.stderr.take().map(Into::into)),
    };
    let mut group = Group::new(child);
    let mut printed = Printed::new();
    let mut input = input;
    let mut ended = false;
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Err(Stopped::Late);
        }
        if !ended && group.has_ended()? {
            // Its child processes must not keep the pipes open.
            group.kill();
            ended = true;
        }
        let time = if ended { Duration::ZERO } else { TICK.min(deadline - now) };
        let ready = pipes.wait(time)?;
        if ready.input {
            input = pipes.feed(input);
        }
        if ready.output {
            printed.read_output(&mut pipes.output)?;
        }
        if ready.errors {
            printed.read_errors(&mut pipes.errors)?;
        }
        if ended && !ready.output && !ready.errors {
            let status = group.reap()?;
            let code = code_of(status);
            let last_error = last_line(&printed.errors);
            return Ok(Ended { code, output: printed.output, last_error });
        }
    }
}

/// The environment variables that a program, or a module, gets.
pub(crate) fn inherited() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        ENVIRONMENT.contains(&&*name) || name.starts_with("LC_")
    })
}

/// The exit status as in a shell.
fn code_of(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// A process group; killed and reaped on drop.
pub(crate) struct Group {
    leader: Child,
    reaped: bool,
}

impl Group {
    /// The group that `leader` was started in as its leader.
    pub(crate) fn new(leader: Child) -> Group {
        Group { leader, reaped: false }
    }

    fn number(&self) -> Pid {
        Pid::from_raw(self.leader.id().cast_signed())
    }

    /// Whether its leader has ended. The leader is not reaped yet: until then, no other group can
    /// get its number.
    pub(crate) fn has_ended(&self) -> nix::Result<bool> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        Ok(waitid(Id::Pid(self.number()), flags)? != WaitStatus::StillAlive)
    }

    pub(crate) fn kill(&self) {
        // Fails only if all its processes have ended.
        let _ = killpg(self.number(), Signal::SIGKILL);
    }

    pub(crate) fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        self.leader.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            let _ = self.reap();
        }
    }
}

/// This process's ends of a program's pipes; `None` once closed.
struct Pipes {
    input: Option<File>,
    output: Option<File>,
    errors: Option<File>,
}

struct Ready {
    input: bool,
    output: bool,
    errors: bool,
}

impl Pipes {
    fn wait(&self, time: Duration) -> io::Result<Ready> {
        let ends = [
            (&self.input, PollFlags::POLLOUT),
            (&self.output, PollFlags::POLLIN),
            (&self.errors, PollFlags::POLLIN),
        ];
        let mut watched: Vec<PollFd<'_>> = ends
            .iter()
            .filter_map(|(end, events)| Some(PollFd::new(end.as_ref()?.as_fd(), *events)))
            .collect();
        let timeout = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        match poll(&mut watched, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut watched = watched.iter();
        let mut ready = |end: &Option<File>| {
            end.is_some() && watched.next().is_some_and(|seen| seen.any() != Some(false))
        };
        Ok(Ready {
            input: ready(&self.input),
            output: ready(&self.output),
            errors: ready(&self.errors),
        })
    }

    /// Writes as much as the pipe accepts without blocking and returns the rest. A program need not
    /// read all of its input.
    fn feed<'a>(&mut self, input: &'a [u8]) -> &'a [u8] {
        let piece = &input[..input.len().min(PIPE_BUF)];
        let written = self.input.as_mut().map_or(Ok(0), |end| end.write(piece));
        match written {
            Ok(count) if count < input.len() => &input[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => input,
            _ => {
                self.input = None;
                &[]
            }
        }
    }
}

/// Output of a program.
struct Printed {
    output: Zeroizing<Vec<u8>>,
    errors: Zeroizing<Vec<u8>>,
}

impl Printed {
    /// With full capacity: a vector that grows leaves copies behind.
    fn new() -> Printed {
        Printed {
            output: Zeroizing::new(Vec::with_capacity(OUTPUT_LIMIT + 1)),
            errors: Zeroizing::new(Vec::with_capacity(2 * TAIL)),
        }
    }

    fn read_output(&mut self, from: &mut Option<File>) -> Result<(), Stopped> {
        let mut piece = Zeroizing::new([0; PIPE_BUF]);
        let count = read(from, &mut *piece)?;
        if self.output.len() + count > OUTPUT_LIMIT {
            return Err(Stopped::TooMuch);
        }
        self.output.extend_from_slice(&piece[..count]);
        Ok(())
    }

    fn read_errors(&mut self, from: &mut Option<File>) -> io::Result<()> {
        let mut piece = Zeroizing::new([0; TAIL]);
        let count = read(from, &mut *piece)?;
        let held = self.errors.len();
        self.errors.drain(..(held + count).saturating_sub(TAIL).min(held));
        self.errors.extend_from_slice(&piece[..count]);
        Ok(())
    }
}

/// Reads what is available; at the end of the pipe, closes it.
fn read(from: &mut Option<File>, piece: &mut [u8]) -> io::Result<usize> {
    let Some(pipe) = from else { return Ok(0) };
    match pipe.read(piece) {
        Ok(0) => *from = None,
        Ok(count) => return Ok(count),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
        Err(error) => return Err(error),
    }
    Ok(0)
}

/// The last line that is not blank.
fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

/// The middle process: runs the program, ends with its exit status, and kills the whole process
/// group when nobody reads its output any more.
pub(crate) fn supervise(program: &OsStr, arguments: &[OsString]) -> ExitCode {
    match try_supervise(program, arguments) {
        Ok(status) => ExitCode::from(u8::try_from(code_of(status)).unwrap_or(u8::MAX)),
        Err(error) => {
            eprintln!("could not be run: {error}");
            // The exit status of a shell.
            let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
            ExitCode::from(code)
        }
    }
}

fn try_supervise(program: &OsStr, arguments: &[OsString]) -> io::Result<ExitStatus> {
    if getpgrp() != getpid() {
        return Err(io::Error::other("not the leader of a process group"));
    }
    SigSet::empty().thread_set_mask()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    thread::Builder::new().spawn(move || {
        wait_for_hangup(output.as_fd());
        killpg(getpgrp(), Signal::SIGKILL)
    })?;
    Command::new(program).args(arguments).status()
}

/// Returns when the pipe behind `output` has no reader.
pub(crate) fn wait_for_hangup(output: BorrowedFd<'_>) {
    // Without requested events, poll still reports errors and hang-up.
    let mut watched = [PollFd::new(output, PollFlags::empty())];
    while poll(&mut watched, PollTimeout::NONE) == Err(nix::Error::EINTR) {}
}
