//! Asking from time to time whether the providers would still unwrap what is unwrapped.
//!
//! An outage changes nothing: it is logged, and `pagevault.status` shows it. A revocation (the
//! provider answers and says no; see `refusal::is_revocation`) is logged as a warning and, if
//! `pagevault.revoked_key_action` says so, ends after `pagevault.revoked_key_grace` with refusing
//! users what the key protects. Only a good answer ends a revocation, and only a fresh refusal
//! makes it a lock: an outage meanwhile neither shortens nor ends it. When an answer is good again,
//! all is as before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;
use pagevault_keystore::protocol::ErrorClass;
use pagevault_keystore::state::DatabaseKey;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::gone::is_gone;
use super::operations::{self, Answer, Question};
use super::refusal::{self, Subject};
use super::revoked::{self, Change};
use super::unlock;
use crate::keys::store::persist;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process};
use crate::shmem;
use crate::shmem::secrets::{Revocation, State as KeyState};

/// The `by` of the audit trail.
const BY: &str = "revalidate_worker";

/// Who cannot be asked where no provider can be.
const HELPER: &str = "the key provider helper";

/// What has not changed is logged again after this long.
const SAY_AGAIN: Duration = Duration::from_secs(3600);

/// What the worker has logged, so as not to repeat itself.
#[derive(Default)]
pub(crate) struct Logged {
    /// By provider (outages) or scope (revocations): the state that was told, and when.
    states: BTreeMap<String, (Told, Instant)>,
}

/// A state that the log tells of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Outage,
    Revoked,
    Locked,
}

impl Logged {
    /// True if `state` is news about `subject`, or was last logged long ago.
    fn is_due(&mut self, subject: &str, state: Told) -> bool {
        let told = self.states.get(subject);
        let due = told.is_none_or(|(logged, at)| *logged != state || at.elapsed() >= SAY_AGAIN);
        if due {
            self.states.insert(subject.to_owned(), (state, Instant::now()));
        }
        due
    }

    /// True if something was logged about `subject` that is over now.
    fn is_over(&mut self, subject: &str) -> bool {
        self.states.remove(subject).is_some()
    }
}

/// What was asked about.
struct Asked<'a> {
    scope: Scope,
    version: KeyVersion,
    record: &'a DatabaseKey,
}

/// What an answer says about a database key.
enum Verdict {
    Good,
    /// Why nothing was learnt.
    Outage(Report),
    Revoked {
        cause: ErrorClass,
        text: String,
    },
}

/// Asks once for the newest version of each scope's database key.
///
/// # Errors
/// When the keystore cannot be read.
pub(crate) fn revalidate(logged: &mut Logged) -> Result<()> {
    let shared = shmem::required()?;
    if !unlock::locked_keys().is_empty() {
        // On a standby a new key may have come, locked, long after the unlock worker had ended.
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
        questions.push(Question::unwrap(&state, scope, version, record)?);
        asked.push(Asked { scope, version, record });
    }
    match operations::ask(BY, questions) {
        Ok(answers) => {
            tell_end_of_outage(HELPER, logged);
            for (asked, answer) in asked.iter().zip(answers) {
                act(asked, &answer.subject, judge(asked, &answer), logged)?;
            }
        }
        Err(_) if process::is_told_to_stop() => return Ok(()),
        Err(report) => tell_outage(HELPER, &report, logged),
    }
    shared.health.set_last_revalidation(&KeystoreLock::acquire(), process::now_us());
    Ok(())
}

fn judge(asked: &Asked<'_>, answer: &Answer) -> Verdict {
    let Asked { scope, version, .. } = *asked;
    let what = format!("revalidate the key of {}", scope.name());
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

fn act(asked: &Asked<'_>, subject: &Subject, verdict: Verdict, logged: &mut Logged) -> Result<()> {
    let provider = format!("key provider \"{}\"", subject.provider);
    let whose = asked.scope.name();
    match verdict {
        Verdict::Outage(report) => tell_outage(&provider, &report, logged),
        Verdict::Good => {
            tell_end_of_outage(&provider, logged);
            logged.is_over(&whose);
            if revoked::restore(asked.scope)? {
                unlock::remember(None)?;
            }
        }
        Verdict::Revoked { cause, text } => {
            tell_end_of_outage(&provider, logged);
            let Some((revocation, is_refused)) = revoke(asked, cause)? else { return Ok(()) };
            let warning = revoked::warning(asked.scope, subject, revocation, &text);
            if is_refused {
                unlock::remember(Some(&warning))?;
            }
            if logged.is_due(&whose, if is_refused { Told::Locked } else { Told::Revoked }) {
                warning.send(PgLogLevel::WARNING);
            }
        }
    }
    Ok(())
}

/// Marks a scope's key as revoked, since the first time that this was seen; and as refused, once it
/// is time. Returns since when, and whether it is refused; nothing if the key was moved or rotated
/// meanwhile, for then the answer was about another master key.
fn revoke(asked: &Asked<'_>, cause: ErrorClass) -> Result<Option<(Revocation, bool)>> {
    let secrets = &shmem::required()?.secrets;
    let lock = KeystoreLock::acquire();
    let state = persist::cluster_state(&lock)?;
    if state.current_database_key(asked.scope) != Some((asked.version, asked.record)) {
        return Ok(None);
    }
    let now = process::now_us();
    let since = secrets.revocation(asked.scope).map_or(now, |earlier| earlier.since);
    let grace = guc::revoked_key_grace().as_micros() as u64;
    let refuse = guc::locks_revoked_keys() && now.saturating_sub(since) >= grace;
    let revocation = Revocation { since, cause };
    let before = (secrets.revocation(asked.scope).is_some(), secrets.is_refused(asked.scope));
    secrets.revoke(asked.scope, revocation, refuse);
    drop(lock);
    if before != (true, refuse) {
        let change = if refuse { Change::Locked } else { Change::Revoked };
        revoked::audit(change, asked.scope, Some(cause));
    }
    Ok(Some((revocation, refuse)))
}

fn tell_outage(subject: &str, report: &Report, logged: &mut Logged) {
    if logged.is_due(subject, Told::Outage) {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("pagevault: {}", report.message()),
        )
        .detail(report.detail_text())
        .hint("Nothing changes while the server runs: keys that are unlocked stay usable.")
        .send(PgLogLevel::LOG);
    }
}

fn tell_end_of_outage(subject: &str, logged: &mut Logged) {
    if logged.is_over(subject) {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("pagevault: {subject} answers again"),
        )
        .send(PgLogLevel::LOG);
    }
}
