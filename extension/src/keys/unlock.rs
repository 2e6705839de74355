//! Unwrapping database keys: at server start, by the background worker, and on request.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::{ErrorClass, Failure};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::providers::{self, Question};
use super::secrets::State as KeyState;
use super::{persist, revoked, shared};
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};

/// How one attempt ended.
enum Attempt {
    /// Nothing is locked any more.
    Unlocked,
    /// Something is, for this reason, and it may be worth asking again after this time.
    Locked { report: Report, again: Duration },
}

/// How long to wait before asking again for a locked key.
fn pause_after(failure: &Failure) -> Duration {
    match failure.class {
        _ if failure.retry => OUTAGE,
        ErrorClass::Unreachable | ErrorClass::Sealed | ErrorClass::Throttled => OUTAGE,
        ErrorClass::Unauthenticated => CREDENTIALS,
        _ => REFUSAL,
    }
}

/// After what may pass by itself: a network, a Vault to be unsealed, a file system to be mounted.
const OUTAGE: Duration = Duration::from_secs(5);

/// After what somebody has to change.
const REFUSAL: Duration = Duration::from_secs(60);

/// After wrong credentials: tokens and accounts lock themselves after a few of those.
const CREDENTIALS: Duration = Duration::from_secs(300);

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
        Err(report) => return Ok(Attempt::Locked { report, again: OUTAGE }),
    };
    let mut failure: Option<(Report, Duration)> = None;
    let mut withheld = BTreeSet::new();
    for ((scope, version), answer) in asked.iter().zip(&answers) {
        let what = format!("unwrap the key of {}", persist::scope_name(*scope));
        let accepted = answer.unwrapped(&what).and_then(|key| accept(*scope, *version, &key));
        if let Err(report) = accepted {
            withheld.insert(*scope);
            let again = answer.failure().map_or(REFUSAL, pause_after);
            // Of several providers, the one that may be back soonest decides.
            if failure.as_ref().is_none_or(|(_, earlier)| again <= *earlier) {
                failure = Some((report, again));
            }
        }
    }
    let scopes: BTreeSet<u32> = asked.iter().map(|(scope, _)| *scope).collect();
    for scope in scopes.difference(&withheld) {
        revoked::restore(*scope)?;
    }
    Ok(failure.map_or(Attempt::Unlocked, |(report, again)| Attempt::Locked { report, again }))
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
    let keys = shared::secrets().map(|s| s.list()).unwrap_or_default();
    keys.into_iter()
        .filter(|(_, _, state)| *state == KeyState::Locked)
        .map(|(scope, version, _)| (scope, version))
        .collect()
}

/// True while nobody can log in: shared catalogs are sealed, and the cluster's key is locked or refused.
pub(crate) fn keeps_everyone_out() -> bool {
    const CLUSTER: u32 = 0;
    let keys = shared::secrets().map(|s| s.list()).unwrap_or_default();
    let locked = |state| matches!(state, KeyState::Locked | KeyState::Refused);
    keys.iter().any(|(scope, _, state)| *scope == CLUSTER && locked(*state))
        && shared::anything_sealed_in(CLUSTER)
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

/// One attempt, of which the status tells.
fn attempt_and_remember(by: &str, wanted: impl Fn(KeyState) -> bool) -> Result<Attempt> {
    let attempt = attempt(by, wanted)?;
    remember(match &attempt {
        Attempt::Unlocked => None,
        Attempt::Locked { report, .. } => Some(report),
    })?;
    Ok(attempt)
}

/// `pagevault.unlock()`: asks for keys that are locked, and for those that were revoked meanwhile. An
/// ERROR says why keys stay locked.
pub(crate) fn unlock_now() -> Result<bool> {
    match attempt_and_remember("unlock", |state| state != KeyState::Ready)? {
        Attempt::Unlocked => Ok(true),
        Attempt::Locked { report, .. } => Err(report),
    }
}

/// The background worker's attempt, and recovery's when it meets a new database key. Returns when to
/// try again, if something is still locked.
pub(crate) fn unlock_quietly(by: &str) -> Duration {
    match attempt_and_remember(by, |state| state == KeyState::Locked) {
        Ok(Attempt::Locked { again, .. }) => again,
        Ok(Attempt::Unlocked) | Err(_) => OUTAGE,
    }
}

/// At server start, in the postmaster: asks until `pagevault.unlock_timeout` has passed.
///
/// # Errors
/// When keys stay locked and the start needs them: crash recovery does, and any read of sealed WAL.
pub(crate) fn at_start(recovery_needs_keys: bool) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(guc::unlock_timeout());
    let mut pause = Duration::from_millis(200);
    loop {
        let (report, again) = match attempt_and_remember("start", |s| s == KeyState::Locked)? {
            Attempt::Unlocked => return Ok(()),
            Attempt::Locked { report, again } => (report, again),
        };
        if again == OUTAGE && Instant::now() + pause < give_up {
            std::thread::sleep(pause);
            pause = (pause * 2).min(OUTAGE);
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
        "WAL is encrypted, or the server was not shut down cleanly and replaying WAL may need encrypted relations. {}",
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
    .hint(if keeps_everyone_out() {
        "Shared catalogs are encrypted: nobody can log in until then. The server keeps trying and unlocks without a restart."
    } else {
        "Plaintext relations are usable. The server keeps trying and unlocks without a restart."
    })
}
