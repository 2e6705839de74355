//! Runs `pagevault-keyring`, the program that sends requests to key providers.
//!
//! One request on its standard input, one reply on its standard output, one deadline. The server
//! itself opens no connection and has no credentials. A cancel or the end of the session kills the
//! helper. If this process is killed, the kernel kills the helper, which also ends when its reply
//! is not read. It inherits no descriptor of the server, so that it keeps no connection, file or
//! port open.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use pagevault_keystore::installed::{self, NotFound};
use pagevault_keystore::protocol::{ErrorClass, Operation, Reply, Request, SIZE_LIMIT};
use pgrx::PgSqlErrorCode;
use zeroize::Zeroizing;

use super::refusal;
use crate::pg::report::Report;
use crate::pg::{child, guc, image, process};

/// Time after the deadline until the helper is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Interval at which a waiting process checks for interrupts that did not wake it.
const TICK: Duration = Duration::from_millis(200);

/// The helper's path: the setting, or the program that was installed with this library or the
/// server, or is in `PATH`. A program that others could have put there is none.
pub(crate) fn program() -> Result<PathBuf, NotFound> {
    let configured = guc::keyring_command();
    if !configured.is_empty() {
        return Ok(PathBuf::from(configured));
    }
    let library = image::own_library();
    let path = std::env::var_os("PATH");
    let (server, user) = (image::server_binary(), image::user());
    installed::find_helper(library.as_deref(), Some(&server), path.as_deref(), user)
}

/// [`program`], for messages.
fn shown() -> String {
    program().map_or_else(|_| installed::HELPER.into(), |path| path.display().to_string())
}

/// Why there is no reply.
pub(crate) enum HelperError {
    /// The helper failed, or could not be started.
    Broken(Report),
    /// The deadline has passed.
    TooLate(Duration),
    /// The statement or the session was cancelled.
    Cancelled,
}

impl HelperError {
    /// The outcome in the audit trail.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            HelperError::Broken(_) => "no_reply",
            HelperError::TooLate(_) => ErrorClass::Deadline.name(),
            HelperError::Cancelled => "cancelled",
        }
    }

    pub(crate) fn is_cancel(&self) -> bool {
        matches!(self, HelperError::Cancelled)
    }

    /// The error for the user. A cancel is raised here, as the server's own error.
    pub(crate) fn into_report(self) -> Report {
        match self {
            HelperError::Broken(report) => report,
            HelperError::TooLate(timeout) => too_late(timeout),
            HelperError::Cancelled => {
                process::check_for_interrupts();
                Report::new(
                    PgSqlErrorCode::ERRCODE_QUERY_CANCELED,
                    "canceling the request to a key provider",
                )
            }
        }
    }

    /// What happened, in one sentence.
    pub(crate) fn text(&self) -> String {
        match self {
            HelperError::Broken(report) => {
                format!("{}. {}", report.message(), report.detail_text())
            }
            HelperError::TooLate(timeout) => too_late(*timeout).message().to_owned(),
            HelperError::Cancelled => String::new(),
        }
    }
}

/// Sends operations to the providers and returns one outcome for each.
///
/// # Errors
/// If the helper cannot be run or does not answer; failures of single operations are outcomes.
pub(crate) fn run(operations: Vec<Operation>, timeout: Duration) -> Result<Reply, HelperError> {
    let count = operations.len();
    let data_directory = process::data_directory().to_string_lossy().into_owned();
    let deadline_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let mut request = Request::new(deadline_ms, data_directory, operations);
    request.require_fips = guc::require_fips();
    let request =
        request.to_json().map_err(|e| broken(format!("The request could not be written: {e}.")))?;
    let reply = exchange(&request, timeout)?;
    Reply::from_json(&reply, count)
        .map_err(|e| broken(format!("Its reply could not be read: {e}.")))
}

/// A helper process that is killed and reaped when it goes out of scope, also while unwinding.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        // Both fail only if the child has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn() -> Result<(Helper, ChildStdin, ChildStdout), HelperError> {
    let program = program().map_err(|not_found| HelperError::Broken(missing(&not_found)))?;
    let mut command = Command::new(&program);
    command.arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped());
    child::isolate_from_server(&mut command);
    let mut child = command.spawn().map_err(|e| {
        HelperError::Broken(
            Report::new(
                PgSqlErrorCode::ERRCODE_SYSTEM_ERROR,
                format!("could not run \"{}\": {e}", program.display()),
            )
            .detail("Key providers are reached through this program.")
            .hint("Install pagevault-keyring there, or set pagevault.keyring_command."),
        )
    })?;
    let pipes = (child.stdin.take(), child.stdout.take());
    let helper = Helper(child);
    match pipes {
        (Some(stdin), Some(stdout)) => Ok((helper, stdin, stdout)),
        _ => Err(broken("Its pipes could not be opened.".into())),
    }
}

fn missing(places: &NotFound) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SYSTEM_ERROR,
        format!("could not find the program \"{}\"", installed::HELPER),
    )
    .detail(format!("Key providers are reached through this program. {places}"))
    .hint("Install it, owned by root and writable by its owner only, or set pagevault.keyring_command.")
}

fn exchange(request: &[u8], timeout: Duration) -> Result<Zeroizing<Vec<u8>>, HelperError> {
    let started = Instant::now();
    let (mut helper, stdin, mut stdout) = spawn()?;
    child::do_not_block(stdin.as_fd())
        .map_err(|e| broken(format!("Its pipe could not be used: {e}.")))?;
    let mut stdin = Some(stdin);
    let mut left = request;
    let mut reply = Zeroizing::new(Vec::with_capacity(64 * 1024));
    let mut chunk = Zeroizing::new([0u8; 4096]);
    loop {
        if started.elapsed() > timeout + GRACE {
            return Err(HelperError::TooLate(timeout));
        }
        // A request may be larger than the pipe's buffer.
        if let Some(pipe) = &mut stdin {
            match pipe.write(left) {
                Ok(n) => left = &left[n..],
                Err(e) if is_passing(&e) => {}
                // As below.
                Err(_) if process::is_told_to_stop() => return Err(HelperError::Cancelled),
                Err(e) => return Err(broken(format!("It took no request: {e}."))),
            }
            if left.is_empty() {
                stdin = None;
            }
        }
        if !child::wait_for_pipes(stdout.as_fd(), stdin.as_ref().map(AsFd::as_fd), TICK) {
            if process::is_told_to_stop() {
                return Err(HelperError::Cancelled);
            }
            process::check_for_interrupts();
            continue;
        }
        match stdout.read(chunk.as_mut_slice()) {
            Ok(0) => break,
            Ok(n) if reply.len() + n > SIZE_LIMIT => {
                return Err(broken("Its reply is too long.".into()));
            }
            Ok(n) => reply.extend_from_slice(&chunk[..n]),
            Err(e) if is_passing(&e) => {}
            Err(e) => return Err(broken(format!("Its reply could not be read: {e}."))),
        }
    }
    if !reply.is_empty() {
        return Ok(reply);
    }
    // A cancel is sent to our whole process group, and may have ended the helper before we noticed
    // it.
    if process::is_told_to_stop() {
        return Err(HelperError::Cancelled);
    }
    let status = helper.0.wait().map(|s| s.to_string()).unwrap_or_default();
    Err(broken(format!("It ended without a reply ({status}).")))
}

/// Whether a read or a write can be repeated.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn broken(detail: String) -> HelperError {
    HelperError::Broken(
        Report::new(
            PgSqlErrorCode::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
            "key provider helper failed",
        )
        .detail(format!("{detail} The server ran \"{} serve\".", shown()))
        .hint("Run \"pagevault-keyring check\" as the server's operating system user."),
    )
}

fn too_late(timeout: Duration) -> Report {
    Report::new(
        refusal::DEADLINE,
        format!("key provider helper did not answer within {} s", timeout.as_secs()),
    )
    .detail(format!("The server ran \"{} serve\" and ended it.", shown()))
    .hint("Check the provider, or raise pagevault.keyring_timeout.")
}
