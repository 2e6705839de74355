//! The provider's side of the process that loads the module ([`worker`](super::worker)).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pagevault_keystore::protocol::ErrorClass;

use super::calls::{Answer, Call, LIMIT, from_json, to_json};
use super::settings::Settings;
use crate::failure::Failure;
use crate::program::{Group, inherited};
use crate::provider::Environment;
use crate::wire;

/// The process is given up this long before the deadline, so that the reply can still report it.
const MARGIN: Duration = Duration::from_millis(200);

/// Maximum time for a call without a deadline.
const LONGEST: Duration = Duration::from_secs(60 * 60);

/// Time in which the process must have logged out and ended.
const GOODBYE: Duration = Duration::from_secs(1);

/// A process that has loaded a module, or is about to. On drop it may log out; then it is killed,
/// together with the processes that the module has started, except in a session of their own.
pub(super) struct Process {
    group: Group,
    input: Option<File>,
    output: File,
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
        let mut child = Command::new("/proc/self/exe")
            .arg0("pagevault-keyring")
            .arg("pkcs11")
            .env_clear()
            .envs(inherited())
            .envs(&settings.environment)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| not_started(&error))?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = pipes else {
            return Err(not_started(&io::ErrorKind::BrokenPipe.into()));
        };
        let (input, output) = (OwnedFd::from(input), OwnedFd::from(output));
        let mut process = Process {
            group: Group::new(child),
            input: Some(input.into()),
            output: output.into(),
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
        let input = self.input.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        wire::write_all(input, &to_json(call)?, self.deadline)?;
        let text = wire::read_object(&self.output, LIMIT, self.deadline)?;
        if text.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        from_json(&text)
    }

    /// The failure of a process that gave no answer.
    fn ended(&mut self, error: &io::Error) -> Failure {
        self.input = None;
        let has_ended = self.has_ended(Instant::now() + GOODBYE);
        self.group.kill();
        let how = match self.group.reap() {
            Ok(status) if has_ended => match status.signal().map(Signal::try_from) {
                Some(Ok(signal)) => format!("It was ended by {signal}."),
                _ => format!("Its exit status was {}.", status.code().unwrap_or_default()),
            },
            _ => format!("It was killed: {error}."),
        };
        Failure::new(ErrorClass::Unreachable, "the module's process ended without an answer")
            .with_detail(how)
            .with_hint("The module is probably defective, or made for another system. Test it with: pkcs11-tool --module MODULE --login --test")
    }

    /// Waits for the end of the process.
    fn has_ended(&self, until: Instant) -> bool {
        loop {
            match self.group.has_ended() {
                Ok(false) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                ended => return ended.unwrap_or(true),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It logs out at the end of its input. Then the group is killed, when it is dropped.
        self.input = None;
        self.has_ended((Instant::now() + GOODBYE).min(self.deadline));
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
