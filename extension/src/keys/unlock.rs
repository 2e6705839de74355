//! Unwrapping database keys: at server start, by the background worker, and on request.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::ErrorClass;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::providers::{self, Question};
use super::secrets::State as KeyState;
use super::{persist, revoked};
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};

/// How one attempt ended.
enum Attempt {
    /// Nothing is locked any more.
    Unlocked,
    /// Something is, for this reason; `retry` tells whether time alone may mend it.
    Locked { report: Report, retry: bool },
}

/// Asks once, in one batch, for every database key whose state is `wanted`.
fn attempt(by: &str, wanted: impl Fn(KeyState) -> bool) -> Result<Attempt> {
    let secrets = &persist::shared_memory()?.secrets;
    let keys: Vec<(u32, u32, KeyState)> =
        secrets.list().into_iter().filter(|(_, _, state)| wanted(*state)).collect();
    if keys.is_empty() {
        return Ok(Attempt::Unlocked);
    }
    let state = persist::current_cluster_state()?;
    let mut questions = Vec::new();
    let mut asked = Vec::new();
    for (scope, version, _) in keys {
        let Some(record) = state.database_key(scope, version) else { continue };
        questions.push(Question::unwrap(&state, scope, record)?);
        asked.push((scope, version));
    }
    let answers = match providers::ask(by, questions) {
        Ok(answers) => answers,
        Err(report) => return Ok(Attempt::Locked { report, retry: true }),
    };
    let mut failure = None;
    let mut withheld = BTreeSet::new();
    for ((scope, version), answer) in asked.iter().zip(&answers) {
        let what = format!("unwrap the key of {}", persist::scope_name(*scope));
        let accepted = answer.unwrapped(&what).and_then(|key| accept(*scope, *version, &key));
        if let Err(report) = accepted {
            withheld.insert(*scope);
            // A key file that is missing may be on a file system not mounted yet.
            let retry = answer
                .failure()
                .is_some_and(|refused| refused.retry || refused.class == ErrorClass::Unreachable);
            failure = Some(Attempt::Locked { report, retry });
        }
    }
    let scopes: BTreeSet<u32> = asked.iter().map(|(scope, _)| *scope).collect();
    for scope in scopes.difference(&withheld) {
        revoked::restore(*scope)?;
    }
    Ok(failure.unwrap_or(Attempt::Unlocked))
}

/// Takes an unwrapped key over; one that is known already must be the same.
fn accept(scope: u32, version: u32, key: &Secret32) -> Result<()> {
    let secrets = &persist::shared_memory()?.secrets;
    let _lock = KeystoreLock::acquire();
    secrets.unlock(scope, version, key).map_err(|_| persist::too_many_database_keys())?;
    match secrets.get(scope, version) {
        Some(known) if known.expose() == key.expose() => Ok(()),
        _ => Err(revoked::another_key(scope)),
    }
}

/// (scope, version) of every database key that is known but not unwrapped.
pub(crate) fn locked_keys() -> Vec<(u32, u32)> {
    let keys = super::shared::secrets().map(|s| s.list()).unwrap_or_default();
    keys.into_iter()
        .filter(|(_, _, state)| *state == KeyState::Locked)
        .map(|(scope, version, _)| (scope, version))
        .collect()
}

/// Remembers for `pagevault.status` why keys are locked, or that none is.
pub(super) fn remember(failure: Option<&Report>) -> Result<()> {
    let text = failure.map_or(String::new(), |report| match report.detail_text() {
        "" => report.message().to_owned(),
        detail => format!("{}. {detail}", report.message()),
    });
    let _lock = KeystoreLock::acquire();
    persist::shared_memory()?.control.set_unlock_failure(&text);
    Ok(())
}

/// One attempt; an ERROR says why keys stay locked.
fn unlock_and_remember(by: &str, wanted: impl Fn(KeyState) -> bool) -> Result<bool> {
    match attempt(by, wanted)? {
        Attempt::Unlocked => {
            remember(None)?;
            Ok(true)
        }
        Attempt::Locked { report, .. } => {
            remember(Some(&report))?;
            Err(report)
        }
    }
}

/// `pagevault.unlock()`: asks for keys that are locked, and for those that were revoked meanwhile.
pub(crate) fn unlock_now() -> Result<bool> {
    unlock_and_remember("unlock", |state| state != KeyState::Ready)
}

/// The background worker's attempt, and recovery's when it meets a new database key: the status says
/// what came of it.
pub(crate) fn unlock_quietly(by: &str) {
    let _ = unlock_and_remember(by, |state| state == KeyState::Locked);
}

/// At server start, in the postmaster: asks until `pagevault.unlock_timeout` has passed.
///
/// # Errors
/// When keys stay locked and crash recovery needs them.
pub(crate) fn at_start(recovery_needs_keys: bool) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(guc::unlock_timeout());
    let mut pause = Duration::from_millis(200);
    loop {
        let (report, retry) = match attempt("start", |state| state == KeyState::Locked)? {
            Attempt::Unlocked => return remember(None),
            Attempt::Locked { report, retry } => (report, retry),
        };
        remember(Some(&report))?;
        if retry && Instant::now() + pause < give_up {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(5));
            continue;
        }
        if recovery_needs_keys {
            return Err(cannot_recover(&report));
        }
        starts_locked(&report).send(PgLogLevel::WARNING);
        return Ok(());
    }
}

fn cannot_recover(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
        format!("cannot start without keys: {}", cause.message()),
    )
    .detail(format!(
        "The server was not shut down cleanly, and replaying WAL may need encrypted relations. {}",
        cause.detail_text()
    ))
    .hint("Make the key provider reachable and start the server again. Nothing was changed.")
}

fn starts_locked(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("server starts with encrypted relations locked: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint("Everything else works. The server keeps trying and unlocks without a restart.")
}
