//! Requests to the store, through `pagevault-keyring`.

use std::time::Duration;

use pagevault_keystore::anchor::{self, Note};
use pagevault_keystore::protocol::{Action, ErrorClass, Failure, Operation, Outcome, ProviderSpec};
use pgrx::PgSqlErrorCode;

use crate::keys::provider::helper::{self, HelperError};
use crate::keys::provider::refusal;
use crate::pg::guc;
use crate::pg::report::Report;

/// Why the note is not known, or was not written.
pub(super) enum Outage {
    /// The store gave no usable answer.
    Because(Report),
    /// This process is to end.
    Stopped,
}

/// A note with its version in the store.
pub(super) struct Stored {
    pub(super) note: Note,
    pub(super) version: u64,
}

/// The newest note, if there is one.
pub(super) fn read(file: &str) -> Result<Option<Stored>, Outage> {
    match ask(file, Action::ReadNote)? {
        Outcome::Note { stored: None } => Ok(None),
        Outcome::Note { stored: Some(stored) } => match Note::decode(stored.note.as_bytes()) {
            Ok(note) => Ok(Some(Stored { note, version: stored.version })),
            Err(error) => Err(Outage::Because(unreadable(&error.to_string(), file))),
        },
        other => Err(unexpected(file, other)),
    }
}

/// Writes a note over the one of this version. Returns whether that was the newest.
pub(super) fn write(file: &str, note: &Note, replaces: Option<u64>) -> Result<bool, Outage> {
    match ask(file, Action::WriteNote { note: note.encode(), replaces })? {
        Outcome::Noted { .. } => Ok(true),
        Outcome::Overtaken => Ok(false),
        other => Err(unexpected(file, other)),
    }
}

fn ask(file: &str, action: Action) -> Result<Outcome, Outage> {
    let (key, context) = (String::new(), String::new());
    let operation =
        Operation { provider: ProviderSpec::store(file), key, context, action, once: false };
    match helper::run(vec![operation], Duration::from_secs(guc::keyring_timeout())) {
        // The reply has one outcome: see `Reply::from_json`.
        Ok(mut reply) => Ok(reply.results.pop().unwrap_or(Outcome::OptionsOk)),
        Err(HelperError::Cancelled) => Err(Outage::Stopped),
        Err(error) => Err(Outage::Because(error.into_report())),
    }
}

/// The report of a failure, or of an answer to another question.
fn unexpected(file: &str, outcome: Outcome) -> Outage {
    let failure = match outcome {
        Outcome::Failed(failure) => failure,
        _ => Failure::new(ErrorClass::BadRequest, "unexpected reply of the key provider helper"),
    };
    let detail = format!("{} {}", failure.detail(), described(file));
    let hint = failure.hint.clone().unwrap_or_else(|| refusal::hint(failure.class).to_owned());
    let code = refusal::sqlstate(failure.class);
    // The helper names what an operation concerns.
    let prefix = format!("{}: ", anchor::KIND);
    let message = failure.message.strip_prefix(&prefix).unwrap_or(&failure.message);
    Outage::Because(
        Report::new(code, format!("anchor cannot be used: {message}"))
            .detail(detail.trim_start().to_owned())
            .hint(hint),
    )
}

fn unreadable(cause: &str, file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
        "anchor cannot be used: its note cannot be read",
    )
    .detail(format!("The store answers, but {cause}. {}", described(file)))
    .hint("Find out who has written it. \"pagevault-keyring accept-restore\" replaces it.")
}

fn described(file: &str) -> String {
    format!("The file \"{file}\" describes the store.")
}
