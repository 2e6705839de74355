//! Unwrapping database keys: at server start, by the background worker, and on request.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::Scope;
use pagevault_keystore::protocol::{ErrorClass, Failure};
use pagevault_keystore::record::MAX_MASTER_KEYS;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::gone::is_gone;
use super::operations::{self, Question};
use super::revoked;
use crate::keys::store::{database_keys, directory, failures, key_groups, persist};
use crate::keys::usage::interim;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process, shutdown};
use crate::shmem::secrets::State as KeyState;
use crate::{audit, shmem};

/// The outcome of one attempt.
enum Attempt {
    /// No key is locked any more.
    Unlocked,
    /// Keys are locked, for this reason; another attempt may succeed after this time.
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

/// After a failure that may end by itself: network, sealed Vault, file system not mounted.
const OUTAGE: Duration = Duration::from_secs(5);

/// After a failure that requires a change by an administrator.
const REFUSAL: Duration = Duration::from_secs(60);

/// After wrong credentials: tokens and accounts may be locked after a few failures.
const CREDENTIALS: Duration = Duration::from_secs(300);

/// While recovery waits, the warning is repeated after this time.
const WARN_AGAIN: Duration = Duration::from_secs(300);

/// How long one attempt may take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// As long as a provider may take.
    Full,
    /// This time, and [`EACH_MASTER_KEY`] for each that is asked: the server goes on without these
    /// keys.
    Limited(Duration),
}

/// How long the start of the server waits for the keys of key groups, and how much longer for each
/// of their master keys. Providers answer within a second; a worker goes on asking the others.
const GROUPS_AT_START: Duration = Duration::from_secs(3);
const EACH_MASTER_KEY: Duration = Duration::from_millis(2);

/// The same if WAL is to be replayed without interim keys: a page of a locked group ends the start.
const GROUPS_BEFORE_REDO: Duration = Duration::from_secs(10);

/// Asks once for every database key in a `wanted` state, except those of dropped databases.
fn attempt(by: &str, wanted: impl Fn(Scope, KeyState) -> bool) -> Result<Attempt> {
    let keys = shmem::required()?.secrets.list();
    let keys =
        keys.into_iter().filter(|&(scope, _, state)| wanted(scope, state) && !is_gone(scope));
    ask_for(by, keys.map(|(scope, version, _)| (scope, version)).collect(), Patience::Full)
}

/// Asks once for these database keys, (scope, version): all master keys that come first in one
/// batch, then those that come second for the keys that are left, and so on. If patience is
/// limited, all of them in one batch: a provider that does not answer would use up the time.
fn ask_for(by: &str, keys: Vec<(Scope, KeyVersion)>, patience: Patience) -> Result<Attempt> {
    if keys.is_empty() {
        return Ok(Attempt::Unlocked);
    }
    let state = persist::current_cluster_state()?;
    let record = |key: (Scope, KeyVersion)| Some((key, state.database_key(key.0, key.1)?));
    let asked: Vec<_> = keys.into_iter().filter_map(record).collect();
    let secrets = &shmem::required()?.secrets;
    let locked = || {
        let states = asked.iter().map(|((scope, version), _)| secrets.state(*scope, *version));
        states.filter(|state| *state == Some(KeyState::Locked)).count()
    };
    let before = locked();
    let mut failure: Option<(Report, Duration)> = None;
    let mut left = asked.clone();
    let preferences = match patience {
        Patience::Full => 1,
        Patience::Limited(_) => MAX_MASTER_KEYS,
    };
    for first in (0..MAX_MASTER_KEYS).step_by(preferences) {
        let mut questions = Vec::new();
        let mut of_these = Vec::new();
        for preference in first..first + preferences {
            for &(place, record) in &left {
                let Some(wrapping) = record.wrappings().nth(preference) else { continue };
                let question = match Question::unwrap(&state, place, record, wrapping) {
                    Ok(question) => question,
                    // Its provider was dropped where nothing needed it any more. The others count.
                    Err(report) => {
                        failure = failure.or(Some((report, REFUSAL)));
                        continue;
                    }
                };
                let is_patient = record.others.is_empty() && patience == Patience::Full;
                questions.push(if is_patient { question } else { question.once() });
                of_these.push(place);
            }
        }
        if questions.is_empty() {
            continue;
        }
        let answers = match patience {
            Patience::Full => operations::ask(by, questions),
            Patience::Limited(limit) => {
                let each = u32::try_from(questions.len()).unwrap_or_default();
                operations::ask_within(by, questions, limit + EACH_MASTER_KEY * each)
            }
        };
        let answers = match answers {
            Ok(answers) => answers,
            Err(report) => return Ok(Attempt::Locked { report, again: OUTAGE }),
        };
        for (place, answer) in of_these.into_iter().zip(&answers) {
            let what = format!("unwrap the key of {}", key_groups::describe(place.0));
            match answer.unwrapped(&what).and_then(|key| accept(place.0, place.1, &key)) {
                Ok(()) => left.retain(|(other, _)| *other != place),
                Err(report) => {
                    let again = answer.failure().map_or(REFUSAL, pause_after);
                    // If several failed, the one that may recover soonest determines the pause.
                    if failure.as_ref().is_none_or(|(_, earlier)| again <= *earlier) {
                        failure = Some((report, again));
                    }
                }
            }
        }
    }
    // What nothing needs may stay locked: its master key may be gone.
    let in_use = database_keys::in_use()?;
    left.retain(|(place, _)| in_use.contains(place));
    let withheld: BTreeSet<Scope> = left.iter().map(|((scope, _), _)| *scope).collect();
    let scopes: BTreeSet<Scope> = asked.iter().map(|((scope, _), _)| *scope).collect();
    for scope in scopes.difference(&withheld) {
        revoked::restore(*scope)?;
    }
    let still_locked = locked();
    if still_locked < before {
        audit::unlocked(by, before - still_locked, still_locked);
    }
    let failure = failure.filter(|_| !left.is_empty());
    Ok(failure.map_or(Attempt::Unlocked, |(report, again)| Attempt::Locked { report, again }))
}

/// Publishes an unwrapped key. If it is already known, the two must be equal.
fn accept(scope: Scope, version: KeyVersion, key: &Secret32) -> Result<()> {
    let secrets = &shmem::required()?.secrets;
    let _lock = KeystoreLock::acquire();
    secrets
        .unlock(scope, version, key)
        .map_err(|_| failures::recovery_needs_room("database key"))?;
    match secrets.is(scope, version, key) {
        Some(true) => Ok(()),
        _ => Err(revoked::another_key(scope)),
    }
}

/// (scope, version) of every locked database key that is in use, except those of dropped databases.
pub(crate) fn locked_keys() -> Vec<(Scope, KeyVersion)> {
    all_locked_keys().into_iter().filter(|(scope, _)| !is_gone(*scope)).collect()
}

/// Like [`locked_keys`], including those of dropped databases.
pub(crate) fn all_locked_keys() -> Vec<(Scope, KeyVersion)> {
    in_states(|state| state == KeyState::Locked)
}

/// What the server has to ask for before it replays WAL: also for versions that wrap nothing yet.
/// Data keys may have been wrapped by them since the last checkpoint, and will be again on the way.
fn locked_before_redo() -> Vec<(Scope, KeyVersion)> {
    if !process::replays_wal() {
        return all_locked_keys();
    }
    listed(|state| state == KeyState::Locked)
}

/// Whether all of these are keys of databases that were dropped, or whose directories are away.
pub(crate) fn are_gone(keys: &[(Scope, KeyVersion)]) -> bool {
    keys.iter().all(|(scope, _)| is_gone(*scope))
}

/// (scope, version) of every database key in use that is locked or refused.
pub(crate) fn withheld_keys() -> Vec<(Scope, KeyVersion)> {
    in_states(|state| matches!(state, KeyState::Locked | KeyState::Refused))
}

/// (scope, version) of every database key in memory in such a state, in use or not.
fn listed(wanted: impl Fn(KeyState) -> bool) -> Vec<(Scope, KeyVersion)> {
    let keys = shmem::secrets().map(|s| s.list()).unwrap_or_default();
    let found = keys.into_iter().filter(|(.., state)| wanted(*state));
    found.map(|(scope, version, _)| (scope, version)).collect()
}

fn in_states(wanted: impl Fn(KeyState) -> bool) -> Vec<(Scope, KeyVersion)> {
    let mut found = listed(wanted);
    // Which are in use takes longer to find out.
    if !found.is_empty()
        && let Ok(in_use) = database_keys::in_use()
    {
        found.retain(|key| in_use.contains(key));
    }
    found
}

/// Whether keys of a database, or the cluster's, are locked or refused.
pub(crate) fn withholds_keys_of(database: u32) -> bool {
    let own = Scope::database(database);
    withheld_keys().iter().any(|(scope, _)| scope.is_cluster() || *scope == own)
}

/// True while sessions cannot log in: shared catalogs are encrypted, and the cluster's key is
/// locked or refused.
pub(crate) fn prevents_connections() -> bool {
    withheld_keys().iter().any(|(scope, _)| scope.is_cluster())
        && directory::anything_sealed_in(Scope::CLUSTER)
}

/// Stores for `pagevault.status` why keys are locked, or that none is.
pub(crate) fn remember(failure: Option<&Report>) -> Result<()> {
    let text = failure.map_or(String::new(), |report| match report.detail_text() {
        "" => report.message().to_owned(),
        detail => format!("{}. {detail}", report.message()),
    });
    let _lock = KeystoreLock::acquire();
    shmem::required()?.control.set_unlock_failure(&text);
    Ok(())
}

/// One attempt, whose outcome is stored for the status.
fn attempt_and_remember(by: &str, wanted: impl Fn(Scope, KeyState) -> bool) -> Result<Attempt> {
    let attempt = attempt(by, wanted)?;
    remember(match &attempt {
        Attempt::Unlocked => None,
        Attempt::Locked { report, .. } => Some(report),
    })?;
    Ok(attempt)
}

/// `pagevault.unlock()`: asks for locked keys, and for keys that were revoked meanwhile. Returns an
/// error if keys stay locked.
pub(crate) fn unlock_now() -> Result<()> {
    match attempt_and_remember("unlock", |_, state| state != KeyState::Ready)? {
        Attempt::Unlocked => Ok(()),
        Attempt::Locked { report, .. } => Err(report),
    }
}

/// Called in recovery after new database keys, (scope, version), are replayed: later records may
/// need them. A standby, or a restore from an archive, waits for the keys here, where nothing is
/// half done and queries continue; but not where it can do without ([`can_do_without`]). Crash
/// recovery asks once and continues to the place where the key is needed; so do the others if
/// `pagevault.recovery_waits_for_keys` is off, because nothing
/// may need the key any more. A promotion waits, too: records about relations of a new key group
/// follow its key, as a rule. Without the key redo would end there, and the server with it; a
/// standby that waits serves queries.
pub(crate) fn unlock_in_recovery(new: &[(Scope, KeyVersion)]) {
    let waits =
        || guc::recovery_waits_for_keys() && new.iter().any(|(scope, _)| !can_do_without(*scope));
    let group = new.iter().map(|(scope, _)| *scope).find(|of| of.key_group().is_some());
    ask_in_recovery(new, waits, |cause| waiting(cause, group));
}

/// Called in recovery before a new WAL key, or a switch to it, is replayed, with the database key
/// that wraps it, (scope, version). All that follows needs it: without it a WAL receiver could not
/// store what it receives, and recovery not read what is archived; both end the server. So a
/// standby waits here, whatever `pagevault.recovery_waits_for_keys` says. Its receiver goes on
/// meanwhile, as before the switch.
pub(crate) fn unlock_for_wal(key: (Scope, KeyVersion)) {
    ask_in_recovery(&[key], || true, waiting_for_wal);
}

/// Asks for these keys until none is locked, or recovery is not to wait for them.
fn ask_in_recovery(
    new: &[(Scope, KeyVersion)],
    is_to_wait: impl Fn() -> bool,
    warning: impl Fn(&Report) -> Report,
) {
    // The database may be created by later records, so it does not count as dropped yet.
    let locked = || -> Vec<(Scope, KeyVersion)> {
        let locked = all_locked_keys();
        new.iter().copied().filter(|key| locked.contains(key)).collect()
    };
    let waits = || process::replays_foreign_wal() && is_to_wait();
    let mut logged: Option<(String, Instant)> = None;
    loop {
        let (report, again) = match ask_for("recovery", locked(), Patience::Full) {
            Ok(Attempt::Locked { report, again }) => (report, again),
            Ok(Attempt::Unlocked) => break,
            Err(report) => return report.send(PgLogLevel::WARNING),
        };
        if let Err(report) = remember(Some(&report)) {
            return report.send(PgLogLevel::WARNING);
        }
        if !waits() {
            return report.send(PgLogLevel::WARNING);
        }
        let is_news = logged
            .as_ref()
            .is_none_or(|(text, at)| text != report.message() || at.elapsed() >= WARN_AGAIN);
        if is_news {
            logged = Some((report.message().to_owned(), Instant::now()));
            warning(&report).send(PgLogLevel::WARNING);
        }
        // pagevault.unlock() also ends the wait.
        process::wait_in_recovery(again, || !waits() || locked().is_empty());
    }
    if locked_keys().is_empty()
        && let Err(report) = remember(None)
    {
        report.send(PgLogLevel::WARNING);
    }
    if logged.is_some() {
        recovery_continues().send(PgLogLevel::LOG);
    }
}

/// Whether recovery goes on without a new key of this scope: it writes pages under interim keys.
/// Not if it has an earlier key of the group: then it has written pages under data keys that are
/// about to be wrapped by the new one, and may have to read them.
fn can_do_without(scope: Scope) -> bool {
    let has_another = || {
        let keys = shmem::secrets().map(|secrets| secrets.list()).unwrap_or_default();
        keys.into_iter().any(|(of, _, state)| of == scope && state != KeyState::Locked)
    };
    scope.key_group().is_some_and(interim::is_possible) && !has_another()
}

/// `group`: the scope of a key group, if it is about the key of one.
fn waiting(cause: &Report, group: Option<Scope>) -> Report {
    let last_resort = group.map_or("", |_| key_groups::LAST_RESORT);
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("recovery waits for a new key: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint(format!("Make the key provider reachable from this server; recovery goes on by itself, sooner with pagevault.unlock(). Queries go on meanwhile, and a restart would not find the key either. If nothing needs it any more, turn off pagevault.recovery_waits_for_keys.{last_resort}"))
}

fn waiting_for_wal(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("recovery waits for the key of WAL: {}", cause.message()),
    )
    .detail(format!(
        "WAL that follows is encrypted under a key that is locked here. {}",
        cause.detail_text()
    ))
    .hint("Make the key provider reachable from this server; recovery goes on by itself, sooner with pagevault.unlock(). Queries go on meanwhile, and WAL is received as before.")
}

fn recovery_continues() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        "pagevault: recovery has the new key, and goes on",
    )
}

/// An attempt by a background worker. Returns the pause before the next attempt, if keys are still
/// locked.
pub(crate) fn unlock_quietly(by: &str) -> Duration {
    match attempt_and_remember(by, |_, state| state == KeyState::Locked) {
        Ok(Attempt::Locked { again, .. }) => again,
        Ok(Attempt::Unlocked) | Err(_) => OUTAGE,
    }
}

/// At server start, in the postmaster: asks until `pagevault.unlock_timeout` has passed. Keys of
/// key groups are asked for once, after all others: their providers are many, and none of them is
/// to hold up the rest. Recovery writes pages of locked groups under interim keys ([`interim`]).
/// Without these, or if WAL has no image of a page that it reads, it ends there.
///
/// # Errors
/// If keys stay locked and the start needs them: for crash recovery, or to read sealed WAL.
pub(crate) fn at_start(recovery_needs_keys: bool) -> Result<()> {
    let mut gone = locked_before_redo();
    gone.retain(|(scope, _)| is_gone(*scope));
    if process::replays_wal() && !gone.is_empty() {
        // Replay may create these databases again, and write into those that were dropped later. If
        // not, their keys are not needed.
        if let Attempt::Locked { report, .. } = ask_for("start", gone, Patience::Full)? {
            key_of_dropped_database(&report).send(PgLogLevel::LOG);
        }
    }
    let deadline = Instant::now() + Duration::from_secs(guc::unlock_timeout());
    let mut pause = Duration::from_millis(200);
    loop {
        let wanted = |scope: Scope, state| state == KeyState::Locked && scope.key_group().is_none();
        let (report, again) = match attempt_and_remember("start", wanted)? {
            Attempt::Unlocked => return key_groups_at_start(),
            Attempt::Locked { report, again } => (report, again),
        };
        if again == OUTAGE && Instant::now() + pause < deadline {
            shutdown::pause(pause);
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

fn key_groups_at_start() -> Result<()> {
    let mut keys = locked_before_redo();
    keys.retain(|(scope, _)| scope.key_group().is_some());
    let groups = keys.iter().filter_map(|(scope, _)| scope.key_group());
    let are_needed = process::was_not_shut_down() && !groups.clone().all(interim::is_possible);
    let limit = if are_needed { GROUPS_BEFORE_REDO } else { GROUPS_AT_START };
    if let Attempt::Locked { report, .. } = ask_for("start", keys, Patience::Limited(limit))? {
        remember(Some(&report))?;
        starts_without_groups(&report, are_needed).send(PgLogLevel::WARNING);
    }
    Ok(())
}

fn key_of_dropped_database(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("pagevault: the key of a database that does not exist: {}", cause.message()),
    )
    .detail("It is needed only if the WAL to be replayed creates the database.")
}

fn cannot_recover(cause: &Report) -> Report {
    let need = if process::is_binary_upgrade() {
        "pg_upgrade needs the keys of all encrypted relations."
    } else {
        "WAL is encrypted, or the server was not shut down cleanly and replaying WAL may need encrypted relations."
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
        format!("cannot start without keys: {}", cause.message()),
    )
    .detail(format!("{} {}", need, cause.detail_text()))
    .hint("Make the key provider reachable and start the server again. No data was changed.")
}

fn starts_without_groups(cause: &Report, are_needed: bool) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("server starts with relations of key groups locked: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint(match process::was_not_shut_down() {
        true if !are_needed => "All other relations are usable after recovery, which writes pages of the locked ones under interim keys of the cluster. The server keeps trying and unlocks without a restart. See pagevault.key_groups.".to_owned(),
        true => format!("All other relations are usable after recovery, which ends at the first page that needs such a key. The server keeps trying and unlocks without a restart. See pagevault.key_groups.{}", key_groups::LAST_RESORT),
        false => "All other relations are usable. The server keeps trying and unlocks without a restart. See pagevault.key_groups.".to_owned(),
    })
}

fn starts_locked(cause: &Report) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("server starts with encrypted relations locked: {}", cause.message()),
    )
    .detail(cause.detail_text().to_owned())
    .hint(if prevents_connections() {
        "Shared catalogs are encrypted: nobody can log in until then. The server keeps trying and unlocks without a restart."
    } else {
        "Plaintext relations are usable. The server keeps trying and unlocks without a restart."
    })
}
