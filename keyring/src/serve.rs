//! Serves one request: one reply, within the deadline even if a provider hangs.
//!
//! ```text
//! main      read request ──► start workers ──► collect outcomes until the deadline ──► reply, exit
//! worker    one per provider of the request: operations in order, one outcome each
//! guard     ends the process on SIGTERM, SIGINT, SIGHUP, or when nobody reads the reply any more
//! ```
//!
//! A request ends with its closing brace. The caller may keep its end of the pipe open or close it.
//! It cancels by a signal, or by closing the pipe from which it reads the reply.
//!
//! Workers are not asked to stop: the process ends, and the system releases its memory and locks.
//! So providers are written in such a way that being killed at any step is harmless.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use pagevault_keystore::anchor;
use pagevault_keystore::protocol::{
    Action, Base64, ErrorClass, Operation, Outcome, ProtocolError, ProviderSpec, Reply, Request,
    SIZE_LIMIT, SecretBytes,
};

use crate::check::check;
use crate::failure::Failure;
use crate::provider::{Environment, Provider};
use crate::providers;
use crate::retry::{Backoff, retry};
use crate::store::{Store, Written};
use crate::{stores, wire};

/// Time limit for reading the request, which the caller has ready.
const READ_TIME: Duration = Duration::from_secs(10);

/// Maximum deadline.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// The reply is sent this long before the deadline, or a tenth of it before, whichever is shorter.
const REPLY_TIME: Duration = Duration::from_millis(200);

/// Time that the caller may take to read the reply after the deadline.
const WRITE_GRACE: Duration = Duration::from_secs(5);

/// Maximum number of providers in a request: each has a thread.
const PROVIDER_LIMIT: usize = 64;

/// Reads a request from standard input and writes the reply to standard output. Returns success
/// also if the reply reports failures; failure means that there is no reply.
pub fn serve() -> ExitCode {
    match guard().and_then(|()| serve_request()) {
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
        Ok(request) => {
            let limit = Duration::from_millis(request.deadline_ms).min(LONGEST_DEADLINE);
            (answer(request, start, limit), limit)
        }
        Err(error) => (refuse(unreadable(&error)), Duration::ZERO),
    };
    drop(text);
    let reply = reply.to_json().or_else(|_| {
        let error = bad_request("reply would be too large")
            .with_hint("Ask for fewer operations in one request.");
        refuse(error).to_json()
    });
    let reply = reply.map_err(io::Error::other)?;
    REPLYING.store(true, Ordering::SeqCst);
    wire::write_all(output, &reply, start + limit + WRITE_GRACE)
        .map_err(|error| io::Error::other(format!("could not write the reply: {error}")))
}

/// A worker's report on an operation.
enum Update {
    /// An attempt failed; another follows.
    Retrying(Failure),
    Done(Done),
}

/// Result and duration of an operation.
struct Done {
    result: Result<Outcome, Failure>,
    elapsed: Duration,
}

/// Performs all operations and returns their outcomes in order, within the deadline.
pub(crate) fn answer(request: Request, start: Instant, limit: Duration) -> Reply {
    let deadline = start + limit.saturating_sub(REPLY_TIME.min(limit / 10));
    let environment = Environment {
        data_directory: Some(PathBuf::from(request.data_directory)),
        deadline: Some(deadline),
        programs: false,
    };
    let titles: Vec<String> = request.operations.iter().map(title).collect();
    let batches = match divide(request.operations) {
        Ok(batches) => batches,
        Err(error) => return refuse(error),
    };

    let (sender, receiver) = mpsc::channel();
    for batch in batches {
        let (environment, sender) = (environment.clone(), sender.clone());
        let started = thread::Builder::new().spawn(move || batch.run(&environment, &sender));
        if let Err(error) = started {
            eprintln!("pagevault-keyring: could not start a thread: {error}");
        }
    }
    drop(sender);

    let mut all: Vec<Option<Update>> = Vec::new();
    all.resize_with(titles.len(), || None);
    let ended = loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((index, update)) => all[index] = Some(update),
            Err(ended) => break ended,
        }
    };
    let cause = || match ended {
        RecvTimeoutError::Timeout => Failure::new(
            ErrorClass::Deadline,
            format!("no answer within {} ms", limit.as_millis()),
        )
        .with_detail("The provider did not finish before the time limit.")
        .with_hint("It is slow or does not respond. Try again, or raise pagevault.keyring_timeout.")
        .transient(),
        RecvTimeoutError::Disconnected => {
            Failure::new(ErrorClass::Internal, "the helper failed during this operation")
                .with_detail("Its messages are in the server's log.")
        }
    };
    let unfinished = |error| Done { result: Err(error), elapsed: start.elapsed() };
    let (results, elapsed_us) = all
        .into_iter()
        .zip(titles)
        .map(|(update, title)| {
            let Done { result, elapsed } = match update {
                Some(Update::Done(done)) => done,
                Some(Update::Retrying(error)) if ended == RecvTimeoutError::Timeout => {
                    unfinished(error)
                }
                _ => unfinished(cause()),
            };
            let outcome = result.unwrap_or_else(|error| {
                let message = format!("{title}: {}", error.message);
                Outcome::Failed(Failure { message, ..error })
            });
            (outcome, u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
        })
        .unzip();
    Reply::new(results, elapsed_us)
}

/// The subject of an operation in error messages.
fn title(operation: &Operation) -> String {
    use crate::options::printable;
    if operation.provider.kind == anchor::KIND {
        return "anchor".to_owned();
    }
    let provider = printable(&operation.provider.name);
    let about_key = !operation.key.is_empty() && !matches!(operation.action, Action::CheckOptions);
    if about_key {
        format!("master key \"{}\" of provider \"{provider}\"", printable(&operation.key))
    } else {
        format!("provider \"{provider}\"")
    }
}

/// The operations of one provider, with their indexes in the request.
struct Batch {
    provider: ProviderSpec,
    operations: Vec<(usize, Operation)>,
}

/// Divides operations into one [`Batch`] per provider, so that a provider that hangs does not delay
/// others.
fn divide(operations: Vec<Operation>) -> Result<Vec<Batch>, Failure> {
    let mut batches: Vec<Batch> = Vec::new();
    for (index, operation) in operations.into_iter().enumerate() {
        let provider = &operation.provider;
        let same = |batch: &Batch| {
            let other = &batch.provider;
            (&other.name, &other.kind, &other.options, other.programs)
                == (&provider.name, &provider.kind, &provider.options, provider.programs)
        };
        match batches.iter().position(same) {
            Some(at) => batches[at].operations.push((index, operation)),
            None if batches.len() == PROVIDER_LIMIT => {
                return Err(bad_request(format!("more than {PROVIDER_LIMIT} providers")));
            }
            None => batches
                .push(Batch { provider: provider.clone(), operations: vec![(index, operation)] }),
        }
    }
    Ok(batches)
}

impl Batch {
    fn run(self, environment: &Environment, sender: &Sender<(usize, Update)>) {
        let environment = &Environment { programs: self.provider.programs, ..environment.clone() };
        let target = Target::of(&self.provider, environment);
        let mut out_of_order = None;
        for (index, operation) in self.operations {
            let start = Instant::now();
            let result = match (&target, &out_of_order) {
                (Err(error), _) => Err(error.clone()),
                (_, Some(error)) if operation.once => Err(Failure::clone(error)),
                (Ok(target), _) if operation.once => target.perform(&operation),
                (Ok(target), _) => retry(
                    Backoff::default(),
                    environment.deadline,
                    // Sending fails if the deadline has passed, which `retry` notices as well.
                    |error| drop(sender.send((index, Update::Retrying(error)))),
                    || target.perform(&operation),
                ),
            };
            if let Err(error) = &result
                && error.retry
            {
                out_of_order = Some(error.clone());
            }
            let done = Done { result, elapsed: start.elapsed() };
            if sender.send((index, Update::Done(done))).is_err() {
                return; // the deadline has passed
            }
        }
    }
}

/// What a batch of operations concerns.
enum Target {
    Provider(Box<dyn Provider>),
    Store(Box<dyn Store>),
}

impl Target {
    fn of(spec: &ProviderSpec, environment: &Environment) -> Result<Target, Failure> {
        if spec.kind == anchor::KIND {
            return stores::of_request(&spec.options, environment).map(Target::Store);
        }
        providers::build(&spec.kind, &spec.options, environment).map(Target::Provider)
    }

    fn perform(&self, operation: &Operation) -> Result<Outcome, Failure> {
        match self {
            Target::Provider(provider) => perform(provider.as_ref(), operation),
            Target::Store(store) => perform_on_store(store.as_ref(), &operation.action),
        }
    }
}

fn perform_on_store(store: &dyn Store, action: &Action) -> Result<Outcome, Failure> {
    match action {
        Action::ReadNote => Ok(Outcome::Note { stored: store.read()? }),
        Action::WriteNote { note, replaces } => Ok(match store.write(note, *replaces)? {
            Written::Done(version) => Outcome::Noted { version },
            Written::Overtaken => Outcome::Overtaken,
        }),
        _ => Err(bad_request("operation does not concern an anchor")),
    }
}

fn perform(provider: &dyn Provider, operation: &Operation) -> Result<Outcome, Failure> {
    let (key, context) = (&operation.key, &operation.context);
    Ok(match &operation.action {
        Action::Wrap { plaintext } => {
            let done = provider.wrap(key, context, plaintext.expose())?;
            Outcome::Wrapped { wrapped: Base64(done.wrapped), key_version: done.key_version }
        }
        Action::Unwrap { wrapped } => {
            let done = provider.unwrap(key, context, &wrapped.0)?;
            let plaintext = SecretBytes::from_vec(done.plaintext);
            Outcome::Unwrapped { plaintext, key_version: done.key_version }
        }
        Action::Rewrap { from_key, wrapped } => {
            let done = provider.rewrap(from_key, key, context, &wrapped.0)?;
            Outcome::Wrapped { wrapped: Base64(done.wrapped), key_version: done.key_version }
        }
        Action::Rotate { wrapped } => {
            Outcome::Rotated { key_version: provider.rotate(key, &wrapped.0)? }
        }
        Action::Check => {
            let key = Some(key.as_str()).filter(|key| !key.is_empty());
            Outcome::Checked { findings: check(provider, key) }
        }
        Action::CheckOptions => provider.check_options().map(|()| Outcome::OptionsOk)?,
        Action::ReadNote | Action::WriteNote { .. } => {
            return Err(bad_request("operation does not concern a key provider"));
        }
    })
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

/// Exit status of a process ended by SIGTERM, as in a shell.
const ENDED: i32 = 143;

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
