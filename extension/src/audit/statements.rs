//! Statements that change what is protected: SECURITY LABEL, settings, CREATE and DROP EXTENSION.
//!
//! They can be rolled back. So one line is written when the statement begins, and one with the
//! outcome when its transaction or subtransaction has ended: `ok`, `rolled_back`, `prepared`, or
//! why the statement failed. Statements that the server refuses before pagevault's hooks are
//! recognised by their error.

use pgrx::pg_sys::SubTransactionId;

use super::operation::{ATTEMPTED, Operation};
use crate::pg::process::ProcessLocal;
use crate::pg::session::{self, Identity};
use crate::shmem;

/// A statement whose transaction is in progress.
struct Pending {
    number: u64,
    operation: Operation,
    who: Identity,
    subtransaction: SubTransactionId,
    is_done: bool,
    /// The SQLSTATE with which it was refused.
    refused: Option<i32>,
}

/// Number of the last statement; numbers are not used again.
static NUMBER: ProcessLocal<u64> = ProcessLocal::new(0);
static PENDING: ProcessLocal<Vec<Pending>> = ProcessLocal::new(Vec::new());
/// The SQLSTATE of the last error of this process.
static LAST_ERROR: ProcessLocal<Option<i32>> = ProcessLocal::new(None);
/// Statements of this transaction that the server itself has refused.
static DENIED: ProcessLocal<Vec<(Operation, Identity)>> = ProcessLocal::new(Vec::new());
/// More of them than [`MOST`], with their number; one for each object.
static MORE_DENIED: ProcessLocal<Vec<(Operation, Identity, u64)>> = ProcessLocal::new(Vec::new());
/// Settings that this session has changed in this transaction.
static CHANGED: ProcessLocal<Vec<(Operation, Identity)>> = ProcessLocal::new(Vec::new());

/// Limit of each list. Outcomes of statements beyond it are logged at once; changes of a setting
/// and refusals beyond it are merged with others of the same object.
const MOST: usize = 10_000;

/// Called when a statement begins. Returns its number, for [`done`].
pub(crate) fn begin(operation: Operation) -> u64 {
    let who = session::identity();
    operation.log(&who, ATTEMPTED, None);
    let subtransaction = session::subtransaction();
    LAST_ERROR.set(None);
    let number = NUMBER.with(|last| {
        *last += 1;
        *last
    });
    let (is_done, refused) = (false, None);
    let pending = Pending { number, operation, who, subtransaction, is_done, refused };
    PENDING.with(|all| all.push(pending));
    number
}

/// Called when the statement of this number has ended.
pub(crate) fn done(number: u64) {
    let too_many: Vec<Pending> = PENDING.with(|all| {
        if let Some(pending) = all.iter_mut().rfind(|pending| pending.number == number) {
            pending.is_done = true;
        }
        let is_full = all.len() >= MOST;
        all.extract_if(.., |pending| is_full && pending.is_done).collect()
    });
    too_many.iter().for_each(|pending| pending.end("not committed yet"));
}

/// Sets the object of the newest statement, and the value that it replaces.
pub(crate) fn is_about(object: String, from: Option<String>) {
    PENDING.with(|all| {
        if let Some(pending) = all.last_mut().filter(|pending| !pending.is_done) {
            pending.operation.object = Some(object);
            pending.operation.from = from;
        }
    });
}

/// Called when pagevault refuses the newest statement.
pub(crate) fn refuse(code: i32) {
    PENDING.with(|all| {
        if let Some(pending) = all.last_mut().filter(|pending| !pending.is_done) {
            pending.refused = Some(code);
        }
    });
}

/// The identity, without raising an error: an error during error handling would stop the server. So
/// catalogs are read only while all their keys are available.
fn who() -> Identity {
    let withheld = shmem::any_key_unusable() || shmem::anything_destroyed();
    if withheld { session::identity_at_hand() } else { session::identity() }
}

/// Called when this session changes a setting.
pub(crate) fn setting_changed(name: &'static str, from: bool, to: bool) {
    let text = |on| Some(if on { "on" } else { "off" }.to_owned());
    let operation = Operation { action: "set", by: "session", ..Operation::default() };
    let operation = Operation { from: text(from), to: text(to), ..operation.on(name) };
    let who = who();
    CHANGED.with(|all| {
        if all.len() < MOST {
            return all.push((operation, who));
        }
        match all.iter_mut().rfind(|(change, _)| change.object == operation.object) {
            // The last value is what matters.
            Some((change, last)) => (change.to, *last) = (operation.to, who),
            None => all.push((operation, who)),
        }
    });
}

/// Called when an error is logged. Lines about it are written when the transaction has ended.
pub(crate) fn note_error(code: i32, denied: impl FnOnce() -> Option<Operation>) {
    LAST_ERROR.set(Some(code));
    if let Some(operation) = denied() {
        let who = who();
        if DENIED.with(|all| all.len() < MOST) {
            return DENIED.with(|all| all.push((operation, who)));
        }
        MORE_DENIED.with(|more| {
            match more.iter_mut().find(|(same, ..)| same.object == operation.object) {
                Some((.., times)) => *times += 1,
                None => more.push((operation, who, 1)),
            }
        });
    }
}

impl Pending {
    fn end(&self, outcome: &str) {
        // A command in progress commits what it has done: ALTER DATABASE ... SET TABLESPACE
        // (`movedb`, dbcommands.c). One that fails would be rolled back.
        let commits = outcome == "ok" && self.refused.is_none();
        if self.is_done || commits {
            return self.operation.log(&self.who, outcome, None);
        }
        let code = self.refused.or(LAST_ERROR.get());
        self.operation.log_failure(&self.who, code);
    }
}

/// Called when the transaction has ended. Raises no error and reads no catalog.
pub(crate) fn transaction_ended(outcome: &'static str) {
    let denied = !DENIED.is_empty() || !MORE_DENIED.is_empty();
    if denied || !PENDING.is_empty() || !CHANGED.is_empty() {
        write_all(outcome);
    }
}

#[cold]
fn write_all(outcome: &'static str) {
    // In reverse order, as statements are undone.
    for pending in PENDING.take().iter().rev() {
        pending.end(outcome);
    }
    settings_changed();
    for (denied, who) in DENIED.take() {
        denied.log(&who, "denied", Some("42501"));
    }
    for (mut denied, who, times) in MORE_DENIED.take() {
        denied.to = Some(format!("{times} more times"));
        denied.log(&who, "denied", Some("42501"));
    }
}

/// Writes the lines of settings that the session has changed.
fn settings_changed() {
    for (operation, who) in CHANGED.take() {
        operation.log(&who, "ok", None);
    }
}

/// Called when a subtransaction was rolled back.
pub(crate) fn subtransaction_aborted(subtransaction: SubTransactionId) {
    let aborted = |pending: &mut Pending| pending.subtransaction == subtransaction;
    let gone: Vec<Pending> = PENDING.with(|all| all.extract_if(.., aborted).collect());
    gone.iter().for_each(|pending| pending.end("rolled_back"));
}

/// Called when a subtransaction was merged into its parent.
pub(crate) fn subtransaction_ended(subtransaction: SubTransactionId, parent: SubTransactionId) {
    PENDING.with(|all| {
        for pending in all.iter_mut().filter(|pending| pending.subtransaction == subtransaction) {
            pending.subtransaction = parent;
        }
    });
}
