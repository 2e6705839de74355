//! Unwrapping database keys: at server start, by the background worker, and on request.

use std::time::{Duration, Instant};

use pagevault_keystore::protocol::{Action, Base64, ErrorClass, Operation, Outcome};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::secrets::State as KeyState;
use super::{helper, manage, persist};
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

/// Asks once for every locked database key, in one batch.
fn attempt() -> Result<Attempt> {
    let shared = persist::shared_memory()?;
    let locked: Vec<(u32, u32)> = locked_keys();
    if locked.is_empty() {
        return Ok(Attempt::Unlocked);
    }
    let state = manage::state()?;
    let mut operations = Vec::new();
    let mut asked = Vec::new();
    for (scope, version) in locked {
        let Some(key) = state.database_key(scope, version) else { continue };
        operations.push(Operation {
            provider: manage::spec_of(&state, &key.provider)?,
            key: key.master_key.clone(),
            context: manage::context(scope)?,
            action: Action::Unwrap { wrapped: Base64(key.wrapped.clone()) },
        });
        asked.push((scope, version, key.provider.clone()));
    }
    let timeout = Duration::from_secs(guc::keyring_timeout());
    let outcomes = match helper::ask(operations, timeout) {
        Ok(outcomes) => outcomes,
        Err(report) => return Ok(Attempt::Locked { report, retry: true }),
    };
    let mut failure = None;
    for ((scope, version, provider), outcome) in asked.into_iter().zip(outcomes) {
        match outcome {
            Outcome::Unwrapped { plaintext, .. } => {
                let secret = manage::secret_of(&plaintext, &provider)?;
                let _lock = KeystoreLock::acquire();
                let published = shared.secrets.unlock(scope, version, &secret);
                published.map_err(|_| persist::too_many_database_keys())?;
            }
            Outcome::Failed(refused) => {
                let what = format!("unwrap the key of {}", persist::scope_name(scope));
                let report = helper::refusal(&what, &refused);
                // A key file that is missing may be on a file system not mounted yet.
                let retry = refused.retry || refused.class == ErrorClass::Unreachable;
                failure = Some(Attempt::Locked { report, retry });
            }
            _ => {
                let report = persist::internal("the keyring helper answered something else".into());
                failure = Some(Attempt::Locked { report, retry: false });
            }
        }
    }
    Ok(failure.unwrap_or(Attempt::Unlocked))
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
fn remember(failure: Option<&Report>) -> Result<()> {
    let text = failure.map_or(String::new(), |report| match report.detail_text() {
        "" => report.message().to_owned(),
        detail => format!("{}. {detail}", report.message()),
    });
    let _lock = KeystoreLock::acquire();
    persist::shared_memory()?.control.set_unlock_failure(&text);
    Ok(())
}

/// `pagevault.unlock()`: one attempt; an ERROR says why keys stay locked.
pub(crate) fn unlock_now() -> Result<bool> {
    match attempt()? {
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

/// The background worker's attempt: true when nothing is locked any more.
pub(crate) fn unlock_quietly() -> bool {
    unlock_now().is_ok()
}

/// At server start, in the postmaster: asks until `pagevault.unlock_timeout` has passed.
///
/// # Errors
/// When keys stay locked and crash recovery needs them.
pub(crate) fn at_start(recovery_needs_keys: bool) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(guc::unlock_timeout());
    let mut pause = Duration::from_millis(200);
    loop {
        let (report, retry) = match attempt()? {
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
