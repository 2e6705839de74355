//! Asks providers at intervals whether they would still unwrap the unwrapped keys.
//!
//! An outage changes nothing: it is logged, and shown in `pagevault.status`. A revocation (the
//! provider answers with a refusal; see `refusal::is_revocation`) is logged as a warning. After
//! `pagevault.revoked_key_grace`, users are refused access to the data if
//! `pagevault.revoked_key_action` says so. Only a successful answer ends a revocation, and only a
//! new refusal leads to the lock: an outage meanwhile neither shortens nor ends the revocation.
//! After a successful answer access is restored.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::protocol::ErrorClass;
use pagevault_keystore::{DatabaseKey, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::gone::is_gone;
use super::operations::{self, Answer, Question};
use super::refusal;
use super::revoked::{self, Change};
use super::unlock;
use crate::keys::store::{key_groups, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{clock, guc, process, processes};
use crate::shmem;
use crate::shmem::secrets::{Revocation, State as KeyState};

/// The `by` field of the audit trail.
const BY: &str = "revalidate_worker";

/// Name used in the log when no provider can be asked.
const HELPER: &str = "the key provider helper";

/// An unchanged state is logged again after this time.
const LOG_AGAIN: Duration = Duration::from_secs(3600);

/// States that the worker has logged, to avoid repetition.
#[derive(Default)]
pub(crate) struct Logged {
    /// By provider (outages) or scope (revocations): the state that was logged, and when.
    states: BTreeMap<String, (LoggedState, Instant)>,
}

/// A state that is logged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoggedState {
    Outage,
    Revoked,
    Locked,
}

impl Logged {
    /// True if `state` is new for `subject`, or was last logged long ago.
    fn is_due(&mut self, subject: &str, state: LoggedState) -> bool {
        let last = self.states.get(subject);
        let due = last.is_none_or(|(logged, at)| *logged != state || at.elapsed() >= LOG_AGAIN);
        if due {
            self.states.insert(subject.to_owned(), (state, Instant::now()));
        }
        due
    }

    /// True if a state of `subject` was logged, which has now ended.
    fn is_over(&mut self, subject: &str) -> bool {
        self.states.remove(subject).is_some()
    }
}

/// A database key about which a provider is asked.
struct KeyInQuestion<'a> {
    scope: Scope,
    version: KeyVersion,
    record: &'a DatabaseKey,
}

/// Meaning of an answer about a database key.
enum Verdict {
    Good,
    /// Why there was no usable answer.
    Outage(Report),
    Revoked {
        cause: ErrorClass,
        text: String,
    },
}

/// Asks once about the newest version of each scope's database key.
///
/// # Errors
/// If the keystore cannot be read.
pub(crate) fn revalidate(logged: &mut Logged) -> Result<()> {
    let shared = shmem::required()?;
    if !unlock::locked_keys().is_empty() {
        // On a primary, the unlock worker has ended when a crash interrupts the making of a key.
        unlock::unlock_quietly(BY);
    }
    let state = persist::current_cluster_state()?;
    let mut scopes = BTreeMap::new();
    for (scope, version, key_state) in shared.secrets.list() {
        if key_state != KeyState::Locked && !is_gone(scope) {
            let newest = scopes.entry(scope).or_insert(version);
            *newest = version.max(*newest);
        }
    }
    let mut questions = Vec::new();
    let mut asked = Vec::new();
    for (scope, version) in scopes {
        let Some(record) = state.database_key(scope, version) else { continue };
        for wrapping in record.wrappings() {
            let question = Question::unwrap(&state, (scope, version), record, wrapping)?;
            questions.push(if record.others.is_empty() { question } else { question.once() });
        }
        asked.push(KeyInQuestion { scope, version, record });
    }
    match operations::ask(BY, questions) {
        Ok(answers) => {
            log_end_of_outage(HELPER, logged);
            let mut answers = answers.into_iter();
            for asked in &asked {
                let of_it = answers.by_ref().take(asked.record.wrappings().count());
                act(asked, of_it.collect(), logged)?;
            }
        }
        Err(_) if process::is_told_to_stop() => return Ok(()),
        Err(report) => log_outage(HELPER, &report, logged),
    }
    shared.health.set_last_revalidation(&KeystoreLock::acquire(), process::now_us());
    Ok(())
}

fn judge(asked: &KeyInQuestion<'_>, answer: &Answer) -> Verdict {
    let KeyInQuestion { scope, version, .. } = *asked;
    let what = format!("revalidate the key of {}", key_groups::describe(scope));
    match (answer.unwrapped(&what), answer.failure()) {
        (Ok(secret), _) => {
            let is_known = crate::shmem::secrets().and_then(|s| s.is(scope, version, &secret));
            if is_known == Some(true) {
                Verdict::Good
            } else {
                let text = "it unwraps to another database key".to_owned();
                Verdict::Revoked { cause: ErrorClass::WrongKey, text }
            }
        }
        (Err(_), Some(failure)) if refusal::is_revocation(failure.class) => {
            Verdict::Revoked { cause: failure.class, text: failure.message.clone() }
        }
        (Err(report), _) => Verdict::Outage(report),
    }
}

/// Acts on the answers of all master keys that wrap a database key. It is revoked if all of them
/// refuse: one that answers is enough, and one that cannot be reached may be.
fn act(asked: &KeyInQuestion<'_>, answers: Vec<Answer>, logged: &mut Logged) -> Result<()> {
    let whose = key_groups::describe(asked.scope);
    let (mut is_good, mut refusals, mut others) = (false, Vec::new(), false);
    for answer in answers {
        let provider = format!("key provider \"{}\"", answer.subject.provider);
        match judge(asked, &answer) {
            Verdict::Outage(report) => {
                log_outage(&provider, &report, logged);
                others = true;
            }
            Verdict::Good => {
                log_end_of_outage(&provider, logged);
                is_good = true;
            }
            Verdict::Revoked { cause, text } => {
                log_end_of_outage(&provider, logged);
                refusals.push((answer.subject, cause, text));
            }
        }
    }
    if is_good {
        logged.is_over(&whose);
        if revoked::restore(asked.scope)? {
            unlock::remember(None)?;
        }
    }
    if is_good || others {
        for (subject, cause, text) in &refusals {
            let one = format!("{whose} by {}/{}", subject.provider, subject.key);
            if logged.is_due(&one, LoggedState::Revoked) {
                revoked::one_of_several(asked.scope, subject, *cause, text, is_good)
                    .send(PgLogLevel::WARNING);
            }
        }
        return Ok(());
    }
    let Some((subject, cause, text)) = refusals.into_iter().next() else { return Ok(()) };
    let Some((revocation, is_refused)) = revoke(asked, cause)? else { return Ok(()) };
    let warning = revoked::warning(asked.scope, &subject, revocation, &text);
    if is_refused {
        unlock::remember(Some(&warning))?;
    }
    let state = if is_refused { LoggedState::Locked } else { LoggedState::Revoked };
    if logged.is_due(&whose, state) {
        warning.send(PgLogLevel::WARNING);
    }
    Ok(())
}

/// Marks a scope's key as revoked since the first refusal and, after the grace time, as refused.
/// Returns the revocation, and whether the key is refused; `None` if the key was moved or rotated
/// meanwhile, because then the answer concerns another master key.
fn revoke(asked: &KeyInQuestion<'_>, cause: ErrorClass) -> Result<Option<(Revocation, bool)>> {
    let secrets = &shmem::required()?.secrets;
    let lock = KeystoreLock::acquire();
    let state = persist::cluster_state(&lock)?;
    if state.current_database_key(asked.scope) != Some((asked.version, asked.record)) {
        return Ok(None);
    }
    let now = clock::since_boot();
    let (since, begun) = secrets
        .revocation(asked.scope)
        .map_or_else(|| (process::now_us(), now), |earlier| (earlier.since, earlier.begun));
    let refuse = guc::locks_revoked_keys() && now.saturating_sub(begun) >= guc::revoked_key_grace();
    let revocation = Revocation { since, begun, cause };
    let before = (secrets.revocation(asked.scope).is_some(), secrets.is_refused(asked.scope));
    secrets.revoke(asked.scope, revocation, refuse);
    drop(lock);
    if refuse && !before.1 {
        // They may hold rows of transactions that have not ended yet.
        let database = asked.scope.is_database().then(|| asked.scope.number());
        processes::end_logical_decoding(database);
    }
    if before != (true, refuse) {
        let change = if refuse { Change::Locked } else { Change::Revoked };
        revoked::audit(change, asked.scope, Some(cause));
    }
    Ok(Some((revocation, refuse)))
}

fn log_outage(subject: &str, report: &Report, logged: &mut Logged) {
    if logged.is_due(subject, LoggedState::Outage) {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("pagevault: {}", report.message()),
        )
        .detail(report.detail_text())
        .hint("Nothing changes while the server runs: keys that are unlocked stay usable.")
        .send(PgLogLevel::LOG);
    }
}

fn log_end_of_outage(subject: &str, logged: &mut Logged) {
    if logged.is_over(subject) {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("pagevault: {subject} answers again"),
        )
        .send(PgLogLevel::LOG);
    }
}
