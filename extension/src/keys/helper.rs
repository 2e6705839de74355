//! Runs `pagevault-keyring`, the program that talks to key providers.
//!
//! One request on its standard input, one reply on its standard output, a deadline. The server itself
//! opens no connection and holds no credentials. A cancel or a terminated session kills the helper.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::{
    ErrorClass, Failure, Operation, Outcome, Reply, Request, SIZE_LIMIT,
};
use pgrx::PgSqlErrorCode;
use zeroize::Zeroizing;

use crate::pg::report::{Report, Result};
use crate::pg::{guc, process};

/// What the helper is given on top of its deadline before it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// How often a waiting process looks for interrupts that did not wake it.
const TICK: Duration = Duration::from_millis(200);

/// The helper's path: the setting, or the program beside the server's binary.
pub(crate) fn program() -> PathBuf {
    let configured = guc::keyring_command();
    if configured.is_empty() {
        process::server_binary_directory().join("pagevault-keyring")
    } else {
        PathBuf::from(configured)
    }
}

/// Asks the providers and returns one outcome for each operation.
///
/// # Errors
/// When the helper cannot be run or does not answer; failures of single operations are outcomes.
pub(crate) fn ask(operations: Vec<Operation>, timeout: Duration) -> Result<Vec<Outcome>> {
    let count = operations.len();
    let data_directory = process::data_directory().to_string_lossy().into_owned();
    let deadline_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let request = Request::new(deadline_ms, data_directory, operations)
        .to_json()
        .map_err(|e| broken(format!("The request could not be written: {e}.")))?;
    let reply = converse(&request, timeout)?;
    let reply = Reply::from_json(&reply, count)
        .map_err(|e| broken(format!("Its reply could not be read: {e}.")))?;
    Ok(reply.results)
}

/// A helper that is killed and reaped when it goes out of scope, also while unwinding.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        // Either may fail only because the child has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn converse(request: &[u8], timeout: Duration) -> Result<Zeroizing<Vec<u8>>> {
    let program = program();
    let started = Instant::now();
    let child = Command::new(&program)
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| {
            Report::new(
                PgSqlErrorCode::ERRCODE_SYSTEM_ERROR,
                format!("could not run \"{}\": {e}", program.display()),
            )
            .detail("Key providers are reached through this program.")
            .hint("Install pagevault-keyring there, or set pagevault.keyring_command.")
        })?;
    let mut helper = Helper(child);
    let (Some(mut stdin), Some(mut stdout)) = (helper.0.stdin.take(), helper.0.stdout.take())
    else {
        return Err(broken("Its pipes could not be opened.".into()));
    };
    // A request is far smaller than a pipe holds, so this does not block on a helper that hangs.
    stdin.write_all(request).map_err(|e| broken(format!("It took no request: {e}.")))?;
    drop(stdin);

    let mut reply = Zeroizing::new(Vec::with_capacity(64 * 1024));
    let mut chunk = Zeroizing::new([0u8; 4096]);
    loop {
        if started.elapsed() > timeout + GRACE {
            return Err(too_late(timeout));
        }
        if !wait_readable(stdout.as_raw_fd(), TICK) {
            process::check_for_interrupts();
            continue;
        }
        match stdout.read(chunk.as_mut_slice()) {
            Ok(0) => break,
            Ok(n) if reply.len() + n > SIZE_LIMIT => {
                return Err(broken("Its reply is too long.".into()));
            }
            Ok(n) => reply.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(broken(format!("Its reply could not be read: {e}."))),
        }
    }
    if reply.is_empty() {
        // A cancel is sent to our whole process group: it ended the helper before we saw it.
        process::check_for_interrupts();
        let status = helper.0.wait().map(|s| s.to_string()).unwrap_or_default();
        return Err(broken(format!("It ended without a reply ({status}).")));
    }
    Ok(reply)
}

/// Waits for data, `tick` at most; a signal ends the wait early.
fn wait_readable(fd: i32, tick: Duration) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd on our stack.
    let ready = unsafe { libc::poll(&raw mut poll, 1, tick.as_millis() as i32) };
    ready > 0
}

fn broken(detail: String) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
        "the keyring helper did not do its work",
    )
    .detail(format!("{detail} The server ran \"{} serve\".", program().display()))
    .hint("Run \"pagevault-keyring check\" as the server's operating system user.")
}

fn too_late(timeout: Duration) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
        format!("the keyring helper did not answer within {} s", timeout.as_secs()),
    )
    .detail(format!("The server ran \"{} serve\" and ended it.", program().display()))
    .hint("Check the provider, or raise pagevault.keyring_timeout.")
}

/// A provider's refusal as an error report. `what` completes "could not ...".
pub(crate) fn refusal(what: &str, failure: &Failure) -> Report {
    let mut report =
        Report::new(sqlstate(failure.class), format!("could not {what}: {}", failure.message));
    if let Some(detail) = &failure.detail {
        report = report.detail(detail.clone());
    }
    if let Some(hint) = &failure.hint {
        report = report.hint(hint.clone());
    }
    report
}

/// The SQLSTATE of each class of provider failure.
fn sqlstate(class: ErrorClass) -> PgSqlErrorCode {
    use PgSqlErrorCode as E;
    match class {
        ErrorClass::Unreachable | ErrorClass::Tls => E::ERRCODE_CONNECTION_FAILURE,
        ErrorClass::Unauthenticated => E::ERRCODE_INVALID_AUTHORIZATION_SPECIFICATION,
        ErrorClass::Denied | ErrorClass::Insecure => E::ERRCODE_INSUFFICIENT_PRIVILEGE,
        ErrorClass::KeyMissing => E::ERRCODE_UNDEFINED_OBJECT,
        ErrorClass::KeyDisabled | ErrorClass::Sealed => E::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        ErrorClass::Throttled => E::ERRCODE_INSUFFICIENT_RESOURCES,
        ErrorClass::Deadline => E::ERRCODE_QUERY_CANCELED,
        ErrorClass::WrongCiphertext => E::ERRCODE_DATA_EXCEPTION,
        ErrorClass::BadOptions => E::ERRCODE_INVALID_PARAMETER_VALUE,
        ErrorClass::BadRequest | ErrorClass::Internal => E::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
    }
}
