//! The chain of audit lines (`pagevault_keystore::audit`): their order, the key of their MACs, and
//! the state that survives the server.
//!
//! A line is saved in `audit.state`, then written to its destinations, then marked as written; all
//! under one lock, so that the order is the same everywhere. If the server is killed in between, it
//! writes the saved line at the next start. So a missing line was removed by someone. If saving
//! fails, the line is written nevertheless, and the audited operation continues.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use pagevault_cipher::secret::fill_random;
use pagevault_keystore::audit::{
    self, AuditKey, MARK, MAX_LINE, Noted, Place, STATE, STATE_SIZE, WRITTEN,
};
use pagevault_keystore::storage::Storage;
use pagevault_keystore::{KeyVersion, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{settings, sink};
use crate::pg::guc;
use crate::pg::locks::AuditLock;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{self, Report, Result};
use crate::shmem::secrets::State;
use crate::shmem::trail::Trail;
use crate::shmem::{self, Shared};
use crate::{fault, keystore_dir};

/// The cluster's database key, from which the key of the MACs is derived.
const SCOPE: Scope = Scope::CLUSTER;

/// Begins a new run, which is linked to the one before. Called at server start, before anything
/// else is audited.
pub(crate) fn begin(shared: &Shared, is_first: bool) -> Result<()> {
    let mut run = [0; 16];
    fill_random(&mut run)?;
    let lock = AuditLock::acquire();
    let trail = &shared.trail;
    // After a crash restart the logging collector is already running.
    trail.set_repeated(!is_first);
    EARLY.with(Vec::clear);
    trail.set_problem("");
    let (noted, state) = match read_state() {
        Ok(Some(noted)) => (Some(noted), None),
        Ok(None) => (None, Some("missing")),
        Err(error) => {
            unreadable(&error).send(PgLogLevel::WARNING);
            (None, Some("damaged"))
        }
    };
    trail.set_count(noted.as_ref().map_or(0, |noted| noted.count));
    if let Some(noted) = noted.as_ref().filter(|noted| !noted.written) {
        // On failure, the first line of this run shows it.
        let _ = send(&noted.text, true);
    }
    let previous = noted.and_then(|noted| Place::of(&noted.text));
    let by = if is_first { "start" } else { "restart after a crash" };
    let state = state.map_or(String::new(), |state| format!(",\"state\":\"{state}\""));
    let settings = serde_json::to_string(&settings::at_start()).unwrap_or_default();
    let facts = format!(
        "\"action\":\"start\",\"by\":\"{by}\"{state},\"settings\":{settings},\"outcome\":\"ok\""
    );
    let facts = on_one_line(&facts);
    let mut place = Place::before(run);
    let key = key_of(shared);
    let text =
        audit::next_line(&mut place, previous.as_ref(), process::now_us(), &facts, key.as_ref());
    put(&lock, trail, &place, &text, true);
    Ok(())
}

fn unreadable(error: &io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("pagevault: could not read \"{STATE}\", the position of the audit trail: {error}"),
    )
    .detail("The trail continues without a link to its earlier lines.")
}

/// Appends a line to the trail. `facts` are members of a JSON object, without braces.
pub(super) fn write(facts: &str, sync: bool) {
    let facts = on_one_line(facts);
    let Some(shared) = shmem::get() else {
        return report::log_line(&format!("{MARK}{{{facts}}}"));
    };
    let lock = AuditLock::acquire();
    let trail = &shared.trail;
    let key = key_of(shared);
    let line = |facts: &str| {
        let mut place = trail.place();
        let text = audit::next_line(&mut place, None, process::now_us(), facts, key.as_ref());
        (place, text)
    };
    let (mut place, mut text) = line(&facts);
    if text.len() > MAX_LINE {
        (place, text) = line(&format!("\"action\":\"too_long\",\"bytes\":{}", facts.len()));
    }
    put(&lock, trail, &place, &text, sync);
}

/// The audit key from the newest unlocked version of the cluster's database key.
fn key_of(shared: &Shared) -> Option<AuditKey> {
    let id = shared.control.keystore_id()?;
    let is_unlocked = |(scope, _, state): &&(Scope, KeyVersion, State)| {
        *scope == SCOPE && *state != State::Locked
    };
    let mut versions: Vec<_> =
        shared.secrets.list().iter().filter(is_unlocked).map(|key| key.1).collect();
    versions.sort_unstable();
    versions.into_iter().rev().find_map(|version| {
        shared.secrets.with(SCOPE, version, |key| AuditKey::derive(key, &id, version))
    })
}

/// Saves a line, writes it, and marks it as written.
fn put(_lock: &AuditLock, trail: &Trail, place: &Place, text: &str, sync: bool) {
    let count = trail.count() + 1;
    let noted = note(count, text, sync && process::fsync());
    trail.set_place(place);
    trail.set_count(count);
    let noted =
        noted.map_err(|error| format!("could not store an audit line in \"{STATE}\": {error}"));
    if let Err(problem) = &noted {
        report::log_line(&format!("pagevault: {problem}"));
    }
    fault::point("audit.noted");
    let sent = send(text, sync);
    if let Ok(file) = &noted {
        // If this is lost, the line is written twice, which readers recognise.
        let _ = file.write_all_at(&[1], audit::offset(count) + WRITTEN);
    }
    let problem = noted.err().or(sent.err());
    trail.set_problem(problem.as_deref().unwrap_or_default());
}

fn note(count: u64, text: &str, sync: bool) -> io::Result<File> {
    let slot = audit::slot(count, text).ok_or(io::ErrorKind::FileTooLarge)?;
    let path = keystore_dir::path().join(STATE);
    let open = || OpenOptions::new().write(true).open(&path);
    let file = match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let storage = keystore_dir::storage()
                .map_err(|report| io::Error::other(report.message().to_owned()))?;
            storage.create(STATE, &[0; STATE_SIZE])?;
            open()?
        }
        file => file?,
    };
    file.write_all_at(&slot, audit::offset(count))?;
    if sync {
        file.sync_data()?;
    }
    Ok(file)
}

fn read_state() -> io::Result<Option<Noted>> {
    let path = keystore_dir::path().join(STATE);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = vec![0; STATE_SIZE];
    let mut read = 0;
    while let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, read as u64)? {
            0 => break,
            count => read += count,
        }
    }
    bytes.truncate(read);
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None); // created, never written
    }
    audit::newest(&bytes).map(Some).ok_or_else(|| io::Error::other("it is damaged"))
}

/// Lines written before the logging collector ran, which it has not received.
static EARLY: ProcessLocal<Vec<String>> = ProcessLocal::new(Vec::new());

/// Writes a line to its destinations. If another destination fails, the line goes to the server
/// log.
fn send(text: &str, sync: bool) -> std::result::Result<(), String> {
    let destination = guc::audit_destination();
    let mut problem = None;
    if destination.file {
        let path = guc::audit_file();
        let done = match path.as_os_str().is_empty() {
            true => Err(io::Error::other("pagevault.audit_file is not set")),
            // Relative names are relative to the data directory.
            false => {
                sink::append(&process::data_directory().join(&path), text, sync && process::fsync())
            }
        };
        problem = done.err().map(|error| {
            format!("could not write an audit line to \"{}\": {error}", path.display())
        });
    }
    if destination.syslog {
        let socket = guc::audit_syslog_socket();
        let (facility, ident) = (guc::shown("syslog_facility"), guc::shown("syslog_ident"));
        if let Err(error) = sink::send(&socket, &facility, &ident, text) {
            let socket = socket.display();
            problem = Some(format!("could not send an audit line to \"{socket}\": {error}"));
        }
    }
    if let Some(problem) = &problem {
        report::log_line(&format!("pagevault: {problem}"));
    }
    if destination.log || problem.is_some() {
        report::log_line(&format!("{MARK}{text}"));
        if process::is_postmaster() {
            EARLY.with(|early| early.push(text.to_owned()));
        }
    }
    problem.map_or(Ok(()), Err)
}

/// Repeats, for the logging collector, the lines written before it ran. Called in a background
/// worker, which has inherited these lines from the postmaster.
pub(crate) fn repeat_early_lines() {
    let Some(shared) = shmem::get() else { return };
    let early = EARLY.take();
    let _lock = AuditLock::acquire();
    if process::has_logging_collector() && shared.trail.is_first_to_repeat() {
        for text in early {
            report::log_line(&format!("{MARK}{text}"));
        }
    }
}

/// JSON escapes control characters below U+0020 only; log readers also end lines at others.
fn on_one_line(json: &str) -> String {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let mut line = String::with_capacity(json.len());
    for c in json.chars() {
        if breaks(c) {
            line.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            line.push(c);
        }
    }
    line
}
