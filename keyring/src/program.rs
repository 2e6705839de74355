//! Runs a program of the operator, and ends all processes that it started.
//!
//! ```text
//! pagevault-keyring serve          pipes, deadline; closes the pipes at the end
//!  └─ pagevault-keyring run        kills all of its descendants when nobody reads their output
//!      └─ program                  with its descendants, in whatever process group or session
//! ```
//!
//! The middle process ([`supervisor`]) is needed for cases in which `serve` has no time to clean
//! up: the server kills its helper when a session is cancelled. It also gives the program an empty
//! signal mask, which threads of `serve` do not have. If it is killed itself, `serve` inherits what
//! it has left, and kills that.

mod children;
mod supervisor;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::PIPE_BUF;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use zeroize::Zeroizing;

pub(crate) use self::supervisor::supervise;

/// Maximum size of a program's output in bytes.
pub(crate) const OUTPUT_LIMIT: usize = 64 * 1024;

/// Bytes that are kept of the end of its standard error.
const TAIL: usize = 2048;

/// Interval in which the end of the program is checked while its pipes are open.
const TICK: Duration = Duration::from_millis(5);

/// Time in which a middle process whose pipes are closed has ended. It waits for less.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// Runs `path` with `input` as standard input. When this returns, the program and all of its
/// descendants have ended.
pub(crate) fn run(
    path: &Path,
    arguments: &[String],
    input: &[u8],
    deadline: Instant,
) -> Result<Ended, Stopped> {
    let mut command = supervised(path.as_os_str());
    let mut supervisor = Supervisor::start(command.args(arguments).stderr(Stdio::piped()))?;
    let child = &mut supervisor.child;
    let pipe = |end: Option<OwnedFd>| end.map(File::from);
    let pipes = Pipes {
        input: pipe(child.stdin.take().map(Into::into)),
        output: pipe(child.stdout.take().map(Into::into)),
        errors: pipe(child.stderr.take().map(Into::into)),
    };
    let mut running = Running { pipes, supervisor };
    let pipes = &mut running.pipes;
    let mut printed = Printed::new();
    let mut input = input;
    let mut ended = false;
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Err(Stopped::Late);
        }
        // Processes that could not be killed may keep the pipes open.
        ended = ended || running.supervisor.has_ended()?;
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
            let code = code_of(running.supervisor.reap()?);
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

/// A middle process that runs `program`; arguments and environment may be added.
pub(crate) fn supervised(program: &OsStr) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("pagevault-keyring")
        .args(["run", "--"])
        .arg(program)
        .env_clear()
        .envs(inherited())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// A program, and the pipes to it, which are closed first.
struct Running {
    pipes: Pipes,
    supervisor: Supervisor,
}

/// Supervisors of this process that are not reaped. Whoever adds or removes one holds the lock, so
/// that none is taken for a process that was inherited.
static SUPERVISORS: Mutex<BTreeSet<Pid>> = Mutex::new(BTreeSet::new());

/// A middle process. When this is dropped, it ends, and all descendants of it with it. The pipe
/// that its output goes to must be closed before: by that it knows that it is time.
pub(crate) struct Supervisor {
    pub(crate) child: Child,
    reaped: bool,
}

impl Supervisor {
    /// Starts a command of [`supervised`].
    pub(crate) fn start(command: &mut Command) -> io::Result<Supervisor> {
        let mut supervisors = SUPERVISORS.lock().unwrap_or_else(PoisonError::into_inner);
        let supervisor = Supervisor { child: command.spawn()?, reaped: false };
        supervisors.insert(supervisor.number());
        Ok(supervisor)
    }

    fn number(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Whether it has ended, by itself because the program has.
    pub(crate) fn has_ended(&self) -> nix::Result<bool> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        Ok(waitid(Id::Pid(self.number()), flags)? != WaitStatus::StillAlive)
    }

    /// Waits for its end, not after `until`, and returns whether it has ended.
    pub(crate) fn ends(&self, until: Instant) -> bool {
        loop {
            match self.has_ended() {
                Ok(false) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                ended => return ended.unwrap_or(true),
            }
        }
    }

    /// Its exit status, which is the program's: if that was killed by a signal, 128 plus its
    /// number. One that does not end is killed.
    pub(crate) fn reap(&mut self) -> io::Result<ExitStatus> {
        if !self.ends(Instant::now() + PATIENCE) {
            let _ = self.child.kill();
        }
        self.reaped = true;
        let _ = waitid(Id::Pid(self.number()), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        let mut supervisors = SUPERVISORS.lock().unwrap_or_else(PoisonError::into_inner);
        let status = self.child.wait()?;
        supervisors.remove(&self.number());
        // It ends by itself with a status. Killed, it has left its descendants to this process.
        if status.signal().is_some() {
            children::end_inherited(&supervisors);
        }
        Ok(status)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if !self.reaped {
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
