//! The process that loads the module: `pagevault-keyring pkcs11`, hidden from users.
//!
//! A module is somebody else's code. It may print to standard output, which carries the answers; it
//! may wait for ever, and no call of PKCS#11 can be cancelled; it may crash. So it is loaded by a
//! process of its own, which the provider starts and ends (`process`). This process
//!
//! - takes the pipe for its answers away from standard output, and collects in memory what the
//!   module prints;
//! - logs out when its input ends.
//!
//! Its supervisor (`program`) kills it, and all processes that the module has started,
//! when nobody reads its answers any more.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{dup2_stderr, dup2_stdout};
use pagevault_keystore::protocol::{Base64, ErrorClass, SecretBytes};

use super::calls::{Answer, Call, LIMIT, from_json, to_json};
use super::operations::{LOGIN, Opened, environment};
use super::settings::Settings;
use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::printable;
use crate::provider::Environment;
use crate::wire;

/// Time in which the next call must come; the provider ends earlier.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// Bytes that are read of the end of what the module has printed.
const TAIL: u64 = 2048;

/// Answers calls until the input ends.
pub fn serve() -> ExitCode {
    // Not visible for anybody: the provider reports how this process ended.
    if try_serve().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn try_serve() -> io::Result<()> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let printed = File::from(memfd_create("printed", MFdFlags::MFD_CLOEXEC)?);
    dup2_stdout(&printed)?;
    dup2_stderr(&printed)?;

    let mut worker = Worker { request: None, opened: None, printed };
    loop {
        let text = wire::read_object(&input, LIMIT, Instant::now() + PATIENCE)?;
        if text.is_empty() {
            break;
        }
        let answer = worker.answer(from_json(&text)?);
        drop(text);
        wire::write_all(&output, &to_json(&answer)?, Instant::now() + PATIENCE)?;
    }
    if let Some(opened) = worker.opened {
        opened.close();
    }
    Ok(())
}

struct Worker {
    /// From the first call.
    request: Option<(Settings, Environment)>,
    opened: Option<Opened>,
    /// What the module has printed.
    printed: File,
}

impl Worker {
    fn answer(&mut self, call: Call) -> Answer {
        self.perform(call).unwrap_or_else(|failure| Answer::Failed { failure })
    }

    fn perform(&mut self, call: Call) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Open { settings, data_directory, time_ms } => {
                let deadline = Instant::now() + Duration::from_millis(time_ms);
                let environment = environment(data_directory.as_deref(), deadline);
                self.request = Some((settings, environment));
                Answer::Opened {}
            }
            Call::Examine {} => {
                let mut findings = Findings::default();
                self.opened = self.open(&mut findings);
                Answer::Examined { findings: findings.into_vec() }
            }
            Call::Wrap { key, context, plaintext } => {
                let done = self.opened()?.wrap(&key, &context, plaintext.expose())?;
                Answer::Wrapped { wrapped: Base64(done.wrapped), key_version: done.key_version }
            }
            Call::Unwrap { key, context, wrapped } => {
                let done = self.opened()?.unwrap(&key, &context, &wrapped.0)?;
                let plaintext = SecretBytes::from_vec(done.plaintext);
                Answer::Unwrapped { plaintext, key_version: done.key_version }
            }
            Call::Rotate { key, wrapped } => {
                Answer::Rotated { key_version: self.opened()?.rotate(&key, &wrapped.0)? }
            }
            Call::Describe { key } => self.opened()?.describe(&key)?.into(),
        })
    }

    /// The token, which the first call that needs it opens.
    fn opened(&mut self) -> Result<&Opened, Failure> {
        if self.opened.is_none() {
            let mut findings = Findings::default();
            self.opened = self.open(&mut findings);
            if let Some(failure) = findings.into_vec().pop().and_then(|last| last.failure) {
                return Err(failure);
            }
        }
        self.opened.as_ref().ok_or_else(unopened)
    }

    fn open(&mut self, findings: &mut Findings) -> Option<Opened> {
        let (settings, environment) = self.request.as_ref()?;
        let mut steps = Findings::default();
        let opened = Opened::open(settings, environment, &mut steps);
        let mut steps = steps.into_vec();
        // Not after the module has got the PIN, which it could have printed.
        let before_login = steps.last_mut().filter(|last| last.what != LOGIN);
        if let Some(failure) = before_login.and_then(|last| last.failure.as_mut())
            && failure.class == ErrorClass::Unreachable
            && let Some(said) = self.last_line()
        {
            let detail = format!("{} The module printed: \"{said}\".", failure.detail());
            failure.detail = Some(detail.trim().to_owned());
        }
        findings.append(steps);
        opened
    }

    /// The last line that the module has printed.
    fn last_line(&mut self) -> Option<String> {
        let length = self.printed.seek(SeekFrom::End(0)).ok()?;
        self.printed.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
        let mut tail = Vec::new();
        let read = (&self.printed).take(TAIL).read_to_end(&mut tail);
        self.printed.seek(SeekFrom::End(0)).ok()?;
        read.ok()?;
        let text = String::from_utf8_lossy(&tail);
        let line = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
        Some(printable(line))
    }
}

fn unopened() -> Failure {
    Failure::new(ErrorClass::Internal, "the module's process was used in the wrong order")
}
