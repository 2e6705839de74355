//! Serves one request: one reply, within the deadline even if a provider hangs.
//!
//! ```text
//! main      read request ──► start workers, collect outcomes until the deadline ──► reply, exit
//! worker    one per provider of the request: operations in order, one outcome each
//! guard     ends the process on SIGTERM, SIGINT, SIGHUP, or when nobody reads the reply any more
//! ```
//!
//! A request may have a thousand providers: `workers` says how many are asked at a time, and
//! `batch` what a worker does.
//!
//! A request ends with its closing brace. The caller may keep its end of the pipe open or close it.
//! It cancels by a signal, or by closing the pipe from which it reads the reply.
//!
//! Workers are not asked to stop: the process ends, and the system releases its memory and locks.
//! So providers are written in such a way that being killed at any step is harmless.

mod batch;
mod workers;

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use pagevault_keystore::protocol::{
    ErrorClass, Outcome, ProtocolError, Reply, Request, SIZE_LIMIT,
};
use zeroize::Zeroizing;

use batch::{Batch, Done, Update};
use workers::{Bounds, State, Task, Times};

use crate::failure::Failure;
use crate::module;
use crate::provider::Environment;
use crate::wire;

/// Time limit for reading the request, which the caller has ready.
const READ_TIME: Duration = Duration::from_secs(10);

/// Maximum deadline.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// The reply is sent this long before the deadline, or a tenth of it before, whichever is shorter.
const REPLY_TIME: Duration = Duration::from_millis(200);

/// Time that the caller may take to read the reply after the deadline.
const WRITE_GRACE: Duration = Duration::from_secs(5);

/// No provider is asked in this time before that, or a quarter of the deadline: those that run
/// programs end them before the deadline.
const LAST_START: Duration = Duration::from_millis(300);

/// Providers that are asked at a time, without those that are slow to answer.
const PLACES: usize = 64;

/// A provider that does not finish in this time is slow: others are asked meanwhile. Most answer
/// sooner. If a thousand providers do not respond, the last one is asked after three seconds.
const SLOW_AFTER: Duration = Duration::from_millis(200);

/// Maximum number of providers that are asked at a time, as each has a thread. Fewer if the limit
/// of open files is low.
const THREADS: usize = 1024;

/// The same for providers that may run programs, each in two processes.
const PROGRAMS: usize = 128;

/// Files that a provider may have open at a time: five with one connection.
const FILES_EACH: u64 = 16;

/// Files that this process has open itself.
const OWN_FILES: u64 = 64;

/// Reads a request from standard input and writes the reply to standard output. Returns success
/// also if the reply reports failures; failure means that there is no reply.
pub fn serve() -> ExitCode {
    match guard().and_then(|()| inherit()).and_then(|()| serve_request()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagevault-keyring: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve_request() -> io::Result<()> {
    if io::stdin().is_terminal() || io::stdout().is_terminal() {
        return Err(io::Error::other(
            "serve communicates with the server through pipes; to test a provider, use: \
             pagevault-keyring check --help",
        ));
    }
    // Duplicated descriptors, because std's handles have buffers, which would hold secrets.
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);

    let start = Instant::now();
    let text = wire::read_object(input, SIZE_LIMIT, start + READ_TIME)
        .map_err(|error| io::Error::other(format!("could not read the request: {error}")))?;
    if text.is_empty() {
        return Err(io::Error::other("standard input was closed without a request"));
    }
    let start = Instant::now();
    let (reply, limit) = match Request::from_json(&text) {
        Ok(request) => match accept(&request) {
            Ok(()) => {
                let limit = Duration::from_millis(request.deadline_ms).min(LONGEST_DEADLINE);
                (answer(request, start, limit), limit)
            }
            Err(error) => (refuse(error), Duration::ZERO),
        },
        Err(error) => (refuse(unreadable(&error)), Duration::ZERO),
    };
    drop(text);
    let reply = written(reply).map_err(io::Error::other)?;
    REPLYING.store(true, Ordering::SeqCst);
    wire::write_all(output, &reply, start + limit + WRITE_GRACE)
        .map_err(|error| io::Error::other(format!("could not write the reply: {error}")))
}

/// Whether this build may do what the server asks for.
fn accept(request: &Request) -> Result<(), Failure> {
    if request.require_fips { module::require_module() } else { Ok(()) }
}

/// The reply as text. If it would be too large, failures have no details and hints: those of some
/// providers must not hide the answers of others.
fn written(mut reply: Reply) -> Result<Zeroizing<Vec<u8>>, ProtocolError> {
    if let Ok(text) = reply.to_json() {
        return Ok(text);
    }
    for outcome in &mut reply.results {
        if let Outcome::Failed(failure) = outcome {
            (failure.detail, failure.hint) = (None, None);
        }
    }
    reply.to_json().or_else(|_| {
        let error = bad_request("reply would be too large")
            .with_hint("Ask for fewer operations in one request.");
        refuse(error).to_json()
    })
}

/// Performs all operations and returns their outcomes in order, within the deadline.
pub(crate) fn answer(request: Request, start: Instant, limit: Duration) -> Reply {
    let deadline = start + limit.saturating_sub(REPLY_TIME.min(limit / 10));
    let environment = Environment {
        data_directory: Some(PathBuf::from(request.data_directory)),
        deadline: Some(deadline),
        programs: false,
        repeats_programs: false,
    };
    let titles: Vec<String> = request.operations.iter().map(batch::title).collect();
    let batches = batch::divide(request.operations);
    let mut task_of = vec![0; titles.len()];
    for (task, batch) in batches.iter().enumerate() {
        batch.indexes().for_each(|index| task_of[index] = task);
    }
    let tasks = batches
        .into_iter()
        .map(|batch| Task { runs_programs: batch.runs_programs(), work: batch })
        .collect();
    let mut updates: Vec<Option<Update>> = titles.iter().map(|_| None).collect();
    let last_start = deadline.checked_sub(LAST_START.min(limit / 4)).unwrap_or(start);
    let states = workers::run_all(
        tasks,
        bounds(),
        Times { last_start, deadline },
        move |batch: Batch, reports| batch.run(&environment, reports),
        |(index, update)| updates[index] = Some(update),
    );

    let (results, elapsed_us) = titles
        .into_iter()
        .zip(updates)
        .zip(task_of)
        .map(|((title, update), task)| {
            let Done { result, elapsed } = done(update, states[task], start, limit);
            let outcome = result.unwrap_or_else(|error| {
                let message = format!("{title}: {}", error.message);
                Outcome::Failed(Failure { message, ..error })
            });
            (outcome, u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
        })
        .unzip();
    Reply::new(results, elapsed_us)
}

/// The result of an operation, from the last report on it and the state of its worker.
fn done(update: Option<Update>, state: State, start: Instant, limit: Duration) -> Done {
    let late = || {
        Failure::new(ErrorClass::Deadline, format!("no answer within {} ms", limit.as_millis()))
            .transient()
    };
    let error = match (update, state) {
        (Some(Update::Done(done)), _) => return done,
        (Some(Update::Retrying(error)), State::Running) => error,
        (_, State::Running) => {
            late().with_detail("The provider did not finish before the time limit.").with_hint(
                "It is slow or does not respond. Try again, or raise pagevault.keyring_timeout.",
            )
        }
        (_, State::Waiting) => late()
            .with_detail("It was not asked, because too many others did not finish.")
            .with_hint("Check the other providers. Try again, or raise pagevault.keyring_timeout."),
        (_, State::Ended) => {
            Failure::new(ErrorClass::Internal, "the helper failed during this operation")
                .with_detail("Its messages are in the server's log.")
        }
    };
    Done { result: Err(error), elapsed: start.elapsed() }
}

/// How many providers are asked at a time.
fn bounds() -> Bounds {
    let wanted = OWN_FILES + FILES_EACH * THREADS as u64;
    let limit = open_files(wanted).unwrap_or_default();
    let threads = limit.saturating_sub(OWN_FILES) / FILES_EACH;
    Bounds {
        places: PLACES,
        slow_after: SLOW_AFTER,
        threads: usize::try_from(threads).unwrap_or(THREADS).clamp(1, THREADS),
        programs: PROGRAMS,
    }
}

/// Lets this process have `count` open files, or as many as it may, and returns the limit. Programs
/// get another one, because the process between limits itself again.
fn open_files(count: u64) -> nix::Result<u64> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = count.min(most);
    setrlimit(Resource::RLIMIT_NOFILE, limit, most)?;
    Ok(limit)
}

/// The reply to a request that is refused as a whole.
fn refuse(error: Failure) -> Reply {
    Reply::new(vec![Outcome::Failed(error)], vec![0])
}

fn unreadable(error: &ProtocolError) -> Failure {
    let hint = match error {
        ProtocolError::Version { .. } => {
            "Extension and pagevault-keyring must be of the same release. Check the setting \
             pagevault.keyring_command."
        }
        _ => "",
    };
    bad_request(error.to_string()).with_hint(hint)
}

fn bad_request(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::BadRequest, message)
}

/// Set before the first byte of the reply: from then on the reader may close, because it may have
/// everything.
static REPLYING: AtomicBool = AtomicBool::new(false);

/// Exit status after a signal, or when nobody reads the reply. The server may have given this
/// process up, and not wait for it; the postmaster takes any status of a child but 0 and 1 for a
/// crash of a session, and as process 1 of a container it gets what others leave.
const ENDED: i32 = 1;

/// Lets this process inherit what a killed supervisor leaves (`program`).
fn inherit() -> io::Result<()> {
    Ok(prctl::set_child_subreaper(true)?)
}

/// Starts the thread that ends the process on a signal, or when nobody reads its output any more.
/// Signals are read from a descriptor, which works even if the parent ignored or blocked them.
fn guard() -> io::Result<()> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block()?; // inherited by threads that are started later
    // Child processes must not inherit it.
    let signal_fd = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let watch = move || {
        loop {
            let mut watched = [
                PollFd::new(signal_fd.as_fd(), PollFlags::POLLIN),
                // Without requested events, poll still reports errors and hang-up.
                PollFd::new(output.as_fd(), PollFlags::empty()),
            ];
            match poll(&mut watched, PollTimeout::NONE) {
                Err(nix::Error::EINTR) => continue,
                Err(_) => process::exit(ENDED),
                Ok(_) => {}
            }
            let is_signalled = watched[0].any() != Some(false);
            if is_signalled || !REPLYING.load(Ordering::SeqCst) {
                process::exit(ENDED);
            }
            // The main thread is about to exit with its own status; only a signal ends the process
            // earlier.
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::Builder::new().name("guard".into()).spawn(watch)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_without_a_result_say_why() {
        let failed = |update, state| {
            let done = done(update, state, Instant::now(), Duration::from_secs(1));
            let error = done.result.unwrap_err();
            (error.class, error.retry, error.detail.unwrap_or_default())
        };
        let retrying = || Failure::new(ErrorClass::Throttled, "too many requests").transient();
        let (class, retry, detail) = failed(None, State::Running);
        assert_eq!((class, retry), (ErrorClass::Deadline, true));
        assert!(detail.starts_with("The provider did not finish"), "{detail}");
        let (class, retry, detail) = failed(None, State::Waiting);
        assert_eq!((class, retry), (ErrorClass::Deadline, true));
        assert!(detail.starts_with("It was not asked"), "{detail}");
        let update = Some(Update::Retrying(retrying()));
        assert_eq!(failed(update, State::Running).0, ErrorClass::Throttled);
        // A panic, during the first attempt or a later one.
        for update in [None, Some(Update::Retrying(retrying()))] {
            let (class, retry, _) = failed(update, State::Ended);
            assert_eq!((class, retry), (ErrorClass::Internal, false));
        }
        let done = Done { result: Ok(Outcome::OptionsOk), elapsed: Duration::ZERO };
        let done = super::done(Some(Update::Done(done)), State::Ended, Instant::now(), READ_TIME);
        assert!(matches!(done.result, Ok(Outcome::OptionsOk)));
    }
}
