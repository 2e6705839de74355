//! The comparison at the start of the server.

use std::time::{Duration, Instant};

use pagevault_keystore::anchor::Note;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::store::{self, Outage};
use super::{
    Here, LABEL, accepted, go_on_from, log, lost_note, noted, read_text, rolled_back, unchecked,
};
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process, shutdown};
use crate::shmem::Shared;

/// Pause between two requests while the store cannot be reached.
const PAUSE: Duration = Duration::from_secs(5);

/// The worker or stage in the audit trail.
const BY: &str = "start";

/// Compares the data directory with the note; in the postmaster, before keys are unlocked. Not
/// after a crash of a process: the data directory is the one with which the server has started.
///
/// A standby is behind its primary, whose notes these are. It is compared when it is promoted.
///
/// # Errors
/// If the data directory does not contain what the note says. If the note cannot be read, the
/// server starts, and the comparison is made up for ([`super::watch`]).
pub(crate) fn at_start(shared: &Shared) -> Result<()> {
    if process::is_binary_upgrade() {
        return Ok(());
    }
    let Some(file) = guc::anchor().filter(|_| !process::starts_as_standby()) else {
        unchecked::forget();
        return Ok(());
    };
    let Some(here) = Here::read() else {
        // PostgreSQL may understand a label that we do not.
        return if read_text(LABEL).is_some() { Err(unreadable_label(&file)) } else { Ok(()) };
    };
    // A person who has accepted this directory since knows what it contains now.
    let unchecked = unchecked::read();
    let position = |note: &Note| match unchecked {
        Some(earlier) if !accepted::is_here(note) => earlier,
        _ => here.position,
    };
    let deadline = Instant::now() + guc::anchor_wait();
    let mut logged = String::new();
    loop {
        let (report, outcome) = match store::read(&file) {
            Ok(Some(stored)) => {
                let position = position(&stored.note);
                let verdict = here.compare(&stored.note, position);
                if !verdict.contains_the_note() {
                    log(BY, verdict.name(), Some(&stored.note), Some(position));
                    return Err(rolled_back(verdict, &stored.note, position, &file));
                }
                log(BY, "ok", Some(&stored.note), Some(position));
                unchecked::forget();
                go_on_from(shared.anchor, &stored.note);
                return Ok(());
            }
            // The note may be back in a moment: a file system may not be mounted yet.
            Ok(None) if noted::is_known() => (lost_note(&file), "lost_note"),
            Ok(None) => {
                log(BY, "no_note", None, Some(here.position));
                no_note(&file).send(PgLogLevel::LOG);
                unchecked::forget();
                return Ok(());
            }
            Err(Outage::Because(report)) => (report, "outage"),
            Err(Outage::Stopped) => shutdown::end_start(),
        };
        if Instant::now() + PAUSE < deadline {
            if logged != report.message() {
                report.message().clone_into(&mut logged);
                waits(&report).send(PgLogLevel::WARNING);
            }
            shutdown::pause(PAUSE);
            continue;
        }
        log(BY, outcome, None, Some(here.position));
        let earliest = unchecked.unwrap_or(here.position);
        unchecked::keep(earliest);
        shared.anchor.set_unchecked(earliest);
        goes_on(&report).send(PgLogLevel::WARNING);
        return Ok(());
    }
}

fn unreadable_label(file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        "data directory cannot be compared with its anchor: the file backup_label is not as a server writes it",
    )
    .detail(format!("So it is not known whether it is older than what the anchor says. The file \"{file}\" describes the anchor's store."))
    .hint("Put the label back as the backup had it, or restore the base backup again. To start without the comparison, turn pagevault.anchor off.")
}

fn no_note(file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        "pagevault: the anchor has no note of this cluster yet",
    )
    .detail(format!("The file \"{file}\" describes the store. The first checkpoint is noted."))
}

fn waits(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("server start waits for its anchor: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint("The server starts without it after pagevault.anchor_wait.")
}

const UNCOMPARED: &str = "server starts without comparing its data directory with its anchor";

fn goes_on(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("{UNCOMPARED}: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint("The comparison is made up for when the anchor can be read; watch the log. To have a start wait for it, set pagevault.anchor_wait.")
}
