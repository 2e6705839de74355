//! The provider's side of the process that loads the module ([`worker`](super::worker)).

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pagevault_keystore::protocol::ErrorClass;

use super::calls::{Answer, Call, LIMIT, from_json, to_json};
use super::settings::Settings;
use crate::failure::Failure;
use crate::program::{Supervisor, supervised};
use crate::provider::Environment;
use crate::wire;

/// The process is given up this long before the deadline, so that the reply can still report it.
const MARGIN: Duration = Duration::from_millis(200);

/// Maximum time for a call without a deadline.
const LONGEST: Duration = Duration::from_secs(60 * 60);

/// Time in which the process must have logged out and ended.
const GOODBYE: Duration = Duration::from_secs(1);

/// A process that has loaded a module, or is about to. On drop it may log out; then it is killed,
/// together with all processes that the module has started.
pub(super) struct Process {
    input: Option<File>,
    output: Option<File>,
    /// Dropped after the pipes.
    supervisor: Supervisor,
    deadline: Instant,
}

impl Process {
    /// Starts the process.
    pub(super) fn start(
        settings: &Settings,
        environment: &Environment,
    ) -> Result<Process, Failure> {
        let now = Instant::now();
        let deadline = environment
            .deadline
            .map_or(now + LONGEST, |deadline| deadline.checked_sub(MARGIN).unwrap_or(now));
        let mut command = supervised(OsStr::new("/proc/self/exe"));
        command.arg("pkcs11").envs(&settings.environment).stderr(Stdio::null());
        let mut supervisor =
            Supervisor::start(&mut command).map_err(|error| not_started(&error))?;
        let child = &mut supervisor.child;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = pipes else {
            return Err(not_started(&io::ErrorKind::BrokenPipe.into()));
        };
        let (input, output) = (OwnedFd::from(input), OwnedFd::from(output));
        let mut process = Process {
            input: Some(input.into()),
            output: Some(output.into()),
            supervisor,
            deadline,
        };
        let data_directory =
            environment.data_directory.as_ref().map(|path| path.display().to_string());
        let time = deadline.saturating_duration_since(now).as_millis();
        let time_ms = u64::try_from(time).unwrap_or(u64::MAX);
        process.ask(&Call::Open { settings: settings.clone(), data_directory, time_ms })?;
        Ok(process)
    }

    /// Makes a call and waits for the answer, until the deadline.
    pub(super) fn ask(&mut self, call: &Call) -> Result<Answer, Failure> {
        match self.exchange(call) {
            Ok(Answer::Failed { failure }) => Err(failure),
            Ok(answer) => Ok(answer),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(late()),
            Err(error) => Err(self.ended(&error)),
        }
    }

    fn exchange(&mut self, call: &Call) -> io::Result<Answer> {
        let (Some(input), Some(output)) = (&self.input, &self.output) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        wire::write_all(input, &to_json(call)?, self.deadline)?;
        let text = wire::read_object(output, LIMIT, self.deadline)?;
        if text.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        from_json(&text)
    }

    /// The failure of a process that gave no answer.
    fn ended(&mut self, error: &io::Error) -> Failure {
        self.input = None;
        let has_ended = self.supervisor.ends(Instant::now() + GOODBYE);
        self.output = None;
        let code = self.supervisor.reap().ok().filter(|_| has_ended).and_then(|it| it.code());
        let how = match code {
            // As in a shell.
            Some(code) => match Signal::try_from(code - 128) {
                Ok(signal) => format!("It was ended by {signal}."),
                Err(_) => format!("Its exit status was {code}."),
            },
            None => format!("It was killed: {error}."),
        };
        Failure::new(ErrorClass::Unreachable, "the module's process ended without an answer")
            .with_detail(how)
            .with_hint("The module is probably defective, or made for another system. Test it with: pkcs11-tool --module MODULE --login --test")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It logs out at the end of its input. When nobody reads its output any more, it is killed.
        self.input = None;
        self.supervisor.ends((Instant::now() + GOODBYE).min(self.deadline));
    }
}

fn late() -> Failure {
    Failure::new(ErrorClass::Deadline, "the token did not answer in time")
        .with_detail("The module's process was killed.")
        .with_hint("The token, or the service behind it, is slow or does not respond. Try again, or raise pagevault.keyring_timeout.")
        .transient()
}

fn not_started(error: &io::Error) -> Failure {
    Failure::new(ErrorClass::Unreachable, "could not start a process for the module")
        .with_detail(format!("{error}."))
        .with_hint("Check the limits of processes and memory for the server's user.")
        .transient()
}
