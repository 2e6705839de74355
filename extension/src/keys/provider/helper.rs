//! Runs `pagevault-keyring`, the program that sends requests to key providers.
//!
//! One request on its standard input, one reply on its standard output, one deadline. The server
//! itself opens no connection and has no credentials. A cancel or the end of the session ends the
//! helper. If this process ends or is killed, the kernel tells the helper, which also ends when its
//! reply is not read. One that cannot be killed is left behind. It inherits no descriptor of the
//! server, so that it keeps no connection, file or port open.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagevault_keystore::installed::{self, NotFound};
use pagevault_keystore::object_end::ObjectEnd;
use pagevault_keystore::protocol::{ErrorClass, Operation, Reply, Request, SIZE_LIMIT};
use pgrx::PgSqlErrorCode;
use zeroize::Zeroizing;

use super::refusal;
use crate::pg::report::Report;
use crate::pg::{child, guc, image, process, shutdown};

/// Time after the deadline until the helper is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Time in which a helper ends after its pipes were closed, or it was killed.
const PATIENCE: Duration = Duration::from_millis(200);
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
    /// The statement, the session or the start of the server was cancelled, or the postmaster has
    /// died.
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

    /// The error for the user. A cancel is raised here, as the server's own error, and a start that
    /// is to end does so.
    pub(crate) fn into_report(self) -> Report {
        match self {
            HelperError::Broken(report) => report,
            HelperError::TooLate(timeout) => too_late(timeout),
            HelperError::Cancelled => {
                if shutdown::is_requested() {
                    shutdown::end_start();
                }
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
    let reply = exchange(&request, timeout);
    // The helper has ended, or has been told to.
    if shutdown::has_lost_postmaster() {
        shutdown::end_without_postmaster();
    }
    let reply = reply?;
    Reply::from_json(&reply, count)
        .map_err(|e| broken(format!("Its reply could not be read: {e}.")))
}

/// A helper process that is ended when it goes out of scope, also while unwinding. Its pipes are
/// closed before.
struct Helper(Option<Child>);

impl Drop for Helper {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // It has replied, or ends because nobody reads its reply.
        if ended(&mut child, PATIENCE).is_some() {
            return;
        }
        // Fails only if the child has already ended.
        let _ = child.kill();
        // One that waits for a file system that does not answer cannot be killed. The postmaster
        // reaps any child, and takes status 1, which such a helper has ended with, for no crash.
        if ended(&mut child, PATIENCE).is_none() && !process::is_postmaster() {
            left_behind().push(child);
        }
    }
}

/// Helpers of this process that could not be killed.
static LEFT_BEHIND: Mutex<Vec<Child>> = Mutex::new(Vec::new());

fn left_behind() -> MutexGuard<'static, Vec<Child>> {
    LEFT_BEHIND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the end of a child, not longer than `limit`, and returns its exit status as text.
fn ended(child: &mut Child, limit: Duration) -> Option<String> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.to_string()),
            Ok(None) if started.elapsed() < limit => {}
            Ok(None) => return None,
            // Somebody else has waited for it.
            Err(error) => return Some(error.to_string()),
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(TICK / 4);
    }
}

fn spawn() -> Result<(Helper, ChildStdin, ChildStdout), HelperError> {
    left_behind().retain_mut(|child| matches!(child.try_wait(), Ok(None)));
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
    let helper = Helper(Some(child));
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
    let mut end = ObjectEnd::default();
    let mut is_complete = false;
    while !is_complete {
        if started.elapsed() > timeout + GRACE {
            return Err(HelperError::TooLate(timeout));
        }
        // A request may be larger than the pipe's buffer.
        if let Some(pipe) = &mut stdin {
            match pipe.write(left) {
                Ok(n) => left = &left[n..],
                Err(e) if is_passing(&e) => {}
                // As below.
                Err(_) if is_to_end() => return Err(HelperError::Cancelled),
                Err(e) => return Err(broken(format!("It took no request: {e}."))),
            }
            if left.is_empty() {
                stdin = None;
            }
        }
        let to = stdin.as_ref().map(AsFd::as_fd);
        if !shutdown::may_end_in(|| child::wait_for_pipes(stdout.as_fd(), to, TICK)) {
            if is_to_end() {
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
            // A helper may be unable to end after its reply.
            Ok(n) => {
                is_complete = chunk[..n].iter().any(|byte| end.is_at(*byte));
                reply.extend_from_slice(&chunk[..n]);
            }
            Err(e) if is_passing(&e) => {}
            Err(e) => return Err(broken(format!("Its reply could not be read: {e}."))),
        }
    }
    if !reply.is_empty() {
        return Ok(reply);
    }
    // A cancel is sent to our whole process group, and may have ended the helper before we noticed
    // it.
    if is_to_end() {
        return Err(HelperError::Cancelled);
    }
    let status = helper.0.as_mut().and_then(|child| ended(child, GRACE));
    Err(broken(match status {
        Some(status) => format!("It ended without a reply ({status})."),
        None => "It closed its output without a reply.".into(),
    }))
}

/// Whether nobody waits for the reply any more.
fn is_to_end() -> bool {
    process::is_told_to_stop() || shutdown::is_requested() || shutdown::has_lost_postmaster()
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
