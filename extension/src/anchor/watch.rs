//! Writing notes, and comparing with those of others, while a primary runs. Nothing that is found
//! out here stops the server or refuses anything: it is reported, until somebody acts.

use std::time::{Duration, Instant};

use pagevault_keystore::anchor::{Note, Position, Verdict};
use pagevault_keystore::audit::utc;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::store::{self, Outage, Stored};
use super::{Here, accepted, go_on_from, hint, log, lost_note, noted, rolled_back, unchecked};
use crate::pg::report::{Report, Result};
use crate::pg::{control_file, guc, process};
use crate::shmem;
use crate::shmem::anchor::Anchor;

/// The worker in the audit trail.
const BY: &str = "anchor";

/// What the worker of a primary remembers.
#[derive(Default)]
pub(crate) struct Watch {
    last: Option<Instant>,
    /// The file that describes the store, and the place in the last note there.
    noted: Option<(String, Position)>,
    /// The message of the last problem.
    problem: String,
}

/// Why there is no new note.
enum Problem {
    /// The store cannot be used: an outage.
    Outage(Report),
    /// Somebody has to act.
    Finding(Box<Finding>),
    /// This process is to end.
    Stopped,
}

/// A note that this server must not write over, or the lack of one that it must not replace.
struct Finding {
    report: Report,
    /// In the audit trail.
    outcome: &'static str,
    note: Option<Note>,
    here: Position,
}

impl From<Outage> for Problem {
    fn from(outage: Outage) -> Problem {
        match outage {
            Outage::Because(report) => Problem::Outage(report),
            Outage::Stopped => Problem::Stopped,
        }
    }
}

impl Watch {
    /// When the next round is due, if there is an anchor.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        guc::anchor()?;
        let elapsed = self.last.map(|last| last.elapsed());
        Some(
            elapsed
                .map_or(Duration::ZERO, |elapsed| guc::anchor_interval().saturating_sub(elapsed)),
        )
    }

    /// Notes the last checkpoint, if it is due and not noted yet.
    pub(crate) fn note_if_due(&mut self) {
        if self.due_in().is_none_or(|pause| !pause.is_zero()) {
            return;
        }
        self.last = Some(Instant::now());
        let Some(file) = guc::anchor() else { return };
        match self.note(&file) {
            Ok(()) => self.problem.clear(),
            Err(Problem::Stopped) => {}
            Err(Problem::Outage(report)) => {
                if self.is_news(&report) {
                    log(BY, "outage", None, None);
                    report.send(PgLogLevel::WARNING);
                }
            }
            Err(Problem::Finding(finding)) => {
                let Finding { report, outcome, note, here } = *finding;
                // In the log it is repeated until somebody has acted.
                if self.is_news(&report) {
                    log(BY, outcome, note.as_ref(), Some(here));
                }
                report.send(PgLogLevel::WARNING);
            }
        }
    }

    fn is_news(&mut self, report: &Report) -> bool {
        let is_news = self.problem != report.message();
        report.message().clone_into(&mut self.problem);
        is_news
    }

    fn note(&mut self, file: &str) -> std::result::Result<(), Problem> {
        // Without a keystore there is nothing to protect, and until the first checkpoint after a
        // promotion nothing to note.
        let Some(here) = Here::read() else { return Ok(()) };
        let (Some(keystore), Some(checkpoint)) = (here.identity.keystore, here.checkpoint) else {
            return Ok(());
        };
        if self.noted.as_ref().is_some_and(|(of, place)| of == file && *place == checkpoint) {
            return Ok(());
        }
        control_file::sync().map_err(|error| Problem::Outage(unsynced(&error)))?;
        let known = anchor().map_err(Problem::Outage)?;
        // Somebody may write between our two requests, but hardly twice.
        for _ in 0..2 {
            let stored = store::read(file)?;
            match &stored {
                Some(stored) => require_ours(known, &here, stored, file)?,
                None => require_first(known, &here, file)?,
            }
            // Without a note there is nothing to compare with. Before one is written: a start must
            // not compare what there was before with this server's own.
            unchecked::forget();
            if let Some(stored) = &stored {
                go_on_from(known, &stored.note);
            }
            let former = stored.as_ref().map(|stored| &stored.note);
            if former.is_none_or(|note| note.reached != checkpoint) {
                let now = process::now_us();
                known.set_attempt_us(now);
                let note = Note {
                    keystore,
                    system: here.identity.system,
                    reached: checkpoint,
                    generation: known.generation().saturating_add(1),
                    time: utc(now),
                    accepted: None,
                    directory: None,
                };
                if !store::write(file, &note, stored.as_ref().map(|stored| stored.version))? {
                    continue;
                }
                go_on_from(known, &note);
            }
            self.noted = Some((file.to_owned(), checkpoint));
            return Ok(());
        }
        Ok(())
    }
}

fn anchor() -> Result<&'static Anchor> {
    shmem::required().map(|shared| shared.anchor)
}

/// Refuses to write a note where there is none but must have been one. A new one would hide the
/// former: when the store has it again, an older data directory may have overtaken it.
fn require_first(known: &Anchor, here: &Here, file: &str) -> std::result::Result<(), Problem> {
    if known.generation() == 0 && !noted::is_known() {
        return Ok(());
    }
    Err(finding(lost_note(file), "lost_note", None, here.position))
}

/// Refuses to write over a note of another server, or one of what this server does not contain.
fn require_ours(
    known: &Anchor,
    here: &Here,
    stored: &Stored,
    file: &str,
) -> std::result::Result<(), Problem> {
    let note = &stored.note;
    // A store that was put back begins again to count, and so does who accepts there: the number of
    // such a note does not tell which server it is for.
    let is_ours = note.accepted.is_none()
        && (note.generation == known.generation()
            // The answer to our last request may have been lost.
            || (known.attempt_us() > 0 && note.time == utc(known.attempt_us())));
    let is_accepted_here = accepted::is_here(note);
    let is_expected = is_ours || is_accepted_here || known.generation() == 0;
    // If the start could not compare, what the data directory contained then counts, not what has
    // been added since. A person who has accepted it knows both.
    let position = match known.unchecked() {
        Some(at_start) if !is_ours && !is_accepted_here => at_start,
        _ => here.position,
    };
    let verdict = here.compare(note, position);
    let finding = |report, outcome| Err(finding(report, outcome, Some(note.clone()), position));
    if !verdict.contains_the_note() {
        return finding(next_start_refused(verdict, note, position, file), verdict.name());
    }
    if !is_expected {
        return finding(another_server(note, file), "another_server");
    }
    Ok(())
}

fn finding(report: Report, outcome: &'static str, note: Option<Note>, here: Position) -> Problem {
    Problem::Finding(Box::new(Finding { report, outcome, note, here }))
}

/// As at a start, which will be refused.
fn next_start_refused(verdict: Verdict, note: &Note, here: Position, file: &str) -> Report {
    let report = rolled_back(verdict, note, here, file);
    let detail = format!("{} The next start will be refused.", report.detail_text());
    report.detail(detail)
}

fn another_server(note: &Note, file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        "another server writes notes to the anchor of this one",
    )
    .detail(format!(
        "The anchor says {}, in {}, which is not of this server. Two servers believe to be the primary, or share one anchor.",
        note.reached,
        note.origin()
    ))
    .hint(format!("Stop the server that must not be the primary. {}", hint(file)))
}

fn unsynced(error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not sync pg_control before it is noted in the anchor: {error}"),
    )
}
