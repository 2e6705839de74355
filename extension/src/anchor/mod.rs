//! The anchor: after checkpoints a primary notes outside what it has reached, and a start from a
//! data directory that does not contain what the note says is refused (docs/design/0042-anchor.md).
//!
//! The store is asked by `pagevault-keyring`. The comparison itself is
//! [`pagevault_keystore::anchor`].

mod accepted;
mod noted;
mod start;
mod store;
mod unchecked;
mod watch;

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use pagevault_keystore::anchor::{self, Identity, Note, Position, Verdict, position_of_control};
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::wal_timelines::history_name;
use pgrx::PgSqlErrorCode;

pub(crate) use self::start::at_start;
pub(crate) use self::watch::Watch;
use crate::audit::{self, Operation};
use crate::keystore_dir;
use crate::pg::report::Report;
use crate::pg::{control_file, process};
use crate::shmem;
use crate::shmem::anchor::Anchor;

/// What this data directory is and contains.
struct Here {
    identity: Identity,
    position: Position,
    /// The last checkpoint, if nothing later counts.
    checkpoint: Option<Position>,
}

impl Here {
    /// `None` if pg_control, or the label of a backup, cannot be read. PostgreSQL itself reports
    /// that.
    fn read() -> Option<Here> {
        let control = control_file::read()?;
        let keystore = shmem::get().and_then(|shared| shared.control.keystore_id());
        let identity = Identity { keystore, system: control.system };
        let position = match read_text(LABEL) {
            Some(label) => anchor::position_of_label(&label)?,
            None => position_of_control(control.checkpoint, control.minimum),
        };
        let checkpoint = (position == control.checkpoint).then_some(position);
        Some(Here { identity, position, checkpoint })
    }

    /// Compares a place in the history of this data directory with a note.
    fn compare(&self, note: &Note, position: Position) -> Verdict {
        let name = history_name(position.timeline);
        let history = read_text(format!("pg_wal/{}", String::from_utf8_lossy(&name)));
        let history = history.unwrap_or_default();
        anchor::compare(note, &self.identity, position, history.as_bytes())
    }
}

/// The file that says which part of WAL a base backup contains.
const LABEL: &str = "backup_label";

/// A small file of the data directory, if it exists.
fn read_text(name: impl Into<PathBuf>) -> Option<String> {
    const LIMIT: u64 = 1 << 20;
    let file = fs::File::open(process::data_directory().join(name.into())).ok()?;
    let mut bytes = Vec::new();
    file.take(LIMIT).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes a small file of the keystore's directory, in one step.
fn replace_file(name: &str, text: &str) -> io::Result<()> {
    let storage = FileStorage::new(&keystore_dir::path())?;
    let new = format!("{name}.new");
    storage.create(&new, text.as_bytes())?;
    Ok(storage.rename(&new, name)?)
}

/// This server goes on from a note, and its cluster has one from now on.
fn go_on_from(known: &Anchor, note: &Note) {
    noted::keep();
    known.go_on_from(note);
}

/// Writes a line of the audit trail: a comparison, its result, the note, and this data directory.
fn log(by: &'static str, outcome: &str, note: Option<&Note>, here: Option<Position>) {
    let operation = Operation {
        action: "anchor_check",
        by,
        from: note.map(|note| format!("{}, {}", note.reached, note.origin())),
        to: here.map(|position| position.to_string()),
        ..Operation::default()
    };
    audit::log_operation(&operation, outcome);
}

/// The report that this data directory does not contain what a note says.
fn rolled_back(verdict: Verdict, note: &Note, here: Position, file: &str) -> Report {
    let what = match verdict {
        Verdict::OtherCluster => "anchor is that of another cluster",
        Verdict::OtherTimeline => "data directory is not on the timeline of its anchor",
        _ => "data directory is older than its anchor",
    };
    let ours = match verdict {
        Verdict::OtherCluster => {
            "The keystore or the system identifier of this data directory is another.".to_owned()
        }
        _ => format!("The data directory contains WAL up to {here}."),
    };
    Report::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, what)
        .detail(format!("{ours} The anchor says {}, in {}.", note.reached, note.origin()))
        .hint(hint(file))
}

/// The report that there is no note, although this cluster has had one.
fn lost_note(file: &str) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_WARNING, "anchor has lost its note")
        .detail(format!("The store has no note, but this cluster has had one. No new note is written. The file \"{file}\" describes the store."))
        .hint(format!(
            "Check that it is the same store, and that its file system is mounted. If the note was removed, or the store is a new one, run: {}. Otherwise find out who has removed the note.",
            accept_restore(file)
        ))
}

/// What to do if a data directory and its anchor differ.
fn hint(file: &str) -> String {
    format!(
        "After a restore, a recovery to a point in time, a failover or pg_upgrade, run: {}. Otherwise find out who has replaced the data directory.",
        accept_restore(file)
    )
}

fn accept_restore(file: &str) -> String {
    let directory = process::data_directory();
    format!(
        "pagevault-keyring accept-restore \"{}\" --anchor \"{file}\" --reason \"...\"",
        directory.display()
    )
}
