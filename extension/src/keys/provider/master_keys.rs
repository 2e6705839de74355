//! Setting, moving and rotating master keys and database keys.
//!
//! Every rotation has the same steps: make the new key, wrap it, prove by unwrapping, record,
//! switch. After a crash at any step, either the old key or the new one is in force. All versions
//! of a database key are sent to the provider together.

use std::borrow::Borrow;

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::protocol::{Action, Base64, ProviderSpec, SecretBytes};
use pagevault_keystore::state::{DatabaseKey, State};
use pagevault_keystore::{CheckValue, KeyTimes, Record, Scope};
use pgrx::PgSqlErrorCode as Code;

use super::operations::{self, Answer, Question};
use super::proof::{self, Expects};
use super::revoked;
use crate::keys::names::check_key_name;
use crate::keys::store::persist;
use crate::keys::usage::{data_keys, refused};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{catalog, process, wal};
use crate::shmem;
use crate::shmem::secrets::State as KeyState;

/// Wraps a scope's database key with a master key; creates the database key if there is none. `by`
/// is the SQL function that asks.
pub(crate) fn set(by: &str, scope: Scope, provider: &str, key: &str) -> Result<()> {
    check_key_name(key)?;
    let state = persist::current_cluster_state()?;
    let spec = operations::spec_of(&state, provider)?;
    refused::require_usable(scope)?;
    if state.current_database_key(scope).is_none() {
        return set_first(by, scope, &spec, key);
    }
    move_to(by, &state, scope, &spec, key).map(|_| ())
}

fn set_first(by: &str, scope: Scope, spec: &ProviderSpec, key: &str) -> Result<()> {
    if !scope.is_cluster() {
        refused::require_usable(Scope::CLUSTER)?;
        // The cluster's key is needed to unwrap the data keys that are to be rewrapped.
        require_unlocked(&persist::current_cluster_state()?, Scope::CLUSTER)?;
    }
    let secret = Secret32::random()?;
    let first = KeyVersion::FIRST;
    let record = wrap_new(by, (scope, first), spec, key, &secret, None)?;
    write_database_key(record, secret)?;
    if !scope.is_cluster() {
        // Data keys of this database that the cluster's key wraps are rewrapped with its own key.
        data_keys::rewrap_data_keys(scope, |by, _| by != scope, (scope, first))?;
    }
    Ok(())
}

/// Makes the provider create a new version of the scope's master key, and wraps with it. Returns
/// the version in use.
pub(crate) fn rotate(by: &str, scope: Scope) -> Result<i64> {
    let state = persist::current_cluster_state()?;
    let (_, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    refused::require_usable(scope)?;
    require_unlocked(&state, scope)?;
    let key = current.master_key.clone();
    let spec = operations::spec_of(&state, &current.provider)?;
    let action = Action::Rotate { wrapped: Base64(current.wrapped.clone()) };
    let question = Question::new(spec.clone(), key.clone(), Some(scope), action);
    operations::ask_one(by, question)?.rotated(&format!("rotate master key \"{key}\""))?;
    let version = move_to(by, &state, scope, &spec, &key)?;
    i64::try_from(version).map_err(|_| internal("master key version out of range".into()))
}

/// Wraps every live version of a scope's database key with the newest version of a master key,
/// proves all of them, and records them together. Returns the master key's version.
///
/// Keys wrapped by this provider are rewrapped by it. Keys wrapped by another provider are wrapped
/// from memory, so the old provider need not be reachable.
fn move_to(by: &str, state: &State, scope: Scope, spec: &ProviderSpec, key: &str) -> Result<u64> {
    let secrets = &shmem::required()?.secrets;
    let mut questions = Vec::new();
    let mut versions = Vec::new();
    for (_, version, record) in state.database_keys().filter(|(s, _, _)| *s == scope) {
        if secrets.state(scope, version).is_none() {
            continue; // forgotten since the state was read
        }
        let secret = secrets.get(scope, version).ok_or_else(|| data_keys::locked(scope))?;
        proof::require_right(Expects { scope, version, check: record.check }, &secret)?;
        let action = if record.provider == spec.name {
            let wrapped = Base64(record.wrapped.clone());
            Action::Rewrap { from_key: record.master_key.clone(), wrapped }
        } else {
            Action::Wrap { plaintext: SecretBytes::from_slice(secret.expose()) }
        };
        questions.push(Question::new(spec.clone(), key.to_owned(), Some(scope), action));
        versions.push((version, secret, record));
    }
    let mut moved = Vec::new();
    for ((version, secret, before), answer) in
        versions.into_iter().zip(operations::ask(by, questions)?)
    {
        let record = record_of(spec, key, before.check, answer, Some(before))?;
        let times = KeyTimes { made: before.times.made, ..record.times };
        moved.push((version, secret, DatabaseKey { times, ..record }));
    }
    prove(by, scope, spec, &moved)?;
    let newest = moved.last().map_or(0, |(_, _, record)| record.master_version);
    let end = {
        let lock = KeystoreLock::acquire();
        let known = moved.into_iter().filter(|(v, _, _)| secrets.state(scope, *v).is_some());
        let records = known.map(|(version, _, key)| database_key_record(scope, version, key));
        persist::append(&lock, Scope::CLUSTER, &records.collect::<Vec<_>>())?
    };
    wal::flush(end);
    // The scope no longer uses the revoked master key.
    revoked::restore(scope)?;
    Ok(newest)
}

/// Creates a new database key and wraps data keys with it: those of this database if it has its own
/// key, otherwise all that the cluster's key wraps.
pub(crate) fn rotate_database_key(by: &str, database: u32) -> Result<KeyVersion> {
    let state = persist::current_cluster_state()?;
    let own = Scope::database(database);
    let has_own = state.current_database_key(own).is_some();
    let scope = if has_own { own } else { Scope::CLUSTER };
    let (version, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(own))?;
    refused::require_usable(scope)?;
    require_unlocked(&state, scope)?;
    let spec = operations::spec_of(&state, &current.provider)?;
    let new_version = KeyVersion::after(Some(version))
        .ok_or_else(|| internal("database key versions are used up".into()))?;
    let secret = Secret32::random()?;
    let place = (scope, new_version);
    let record = wrap_new(by, place, &spec, &current.master_key, &secret, Some(current))?;
    write_database_key(record, secret)?;
    let homes = data_keys::logs_wrapped_by(scope)?;
    for home in homes {
        data_keys::rewrap_data_keys(
            home,
            |by, v| by == scope && v != new_version,
            (scope, new_version),
        )?;
    }
    Ok(new_version)
}

/// Refuses the operation if a version of the key is locked: data keys under it could not be
/// rewrapped.
fn require_unlocked(state: &State, scope: Scope) -> Result<()> {
    let secrets = &shmem::required()?.secrets;
    let mut versions = state.database_keys().filter(|(s, _, _)| *s == scope);
    // One without a state was forgotten since this one was read.
    match versions.any(|(_, version, _)| secrets.state(scope, version) == Some(KeyState::Locked)) {
        true => Err(data_keys::locked(scope)),
        false => Ok(()),
    }
}

/// Wraps a new database key and proves that the provider unwraps it. `before`: the scope's key
/// until now.
fn wrap_new(
    by: &str,
    (scope, version): (Scope, KeyVersion),
    spec: &ProviderSpec,
    key: &str,
    secret: &Secret32,
    before: Option<&DatabaseKey>,
) -> Result<Record> {
    let plaintext = SecretBytes::from_slice(secret.expose());
    let action = Action::Wrap { plaintext };
    let question = Question::new(spec.clone(), key.to_owned(), Some(scope), action);
    let check = proof::check_value(scope, version, secret)?;
    let record = record_of(spec, key, check, operations::ask_one(by, question)?, before)?;
    let wrapped = [(version, secret, record)];
    prove(by, scope, spec, &wrapped)?;
    let [(_, _, record)] = wrapped;
    Ok(database_key_record(scope, version, record))
}

/// Proves that the provider unwraps each wrapped key of the given version to its secret. New
/// wrappings are recorded only after that; until then the keystore has the old ones.
fn prove<S: Borrow<Secret32>>(
    by: &str,
    scope: Scope,
    spec: &ProviderSpec,
    keys: &[(KeyVersion, S, DatabaseKey)],
) -> Result<()> {
    let question = |(version, _, record): &(KeyVersion, S, DatabaseKey)| {
        Question::unwrap_by(spec.clone(), scope, *version, record)
    };
    let answers = operations::ask(by, keys.iter().map(question).collect())?;
    let what = format!("unwrap the key of {}", scope_name(scope));
    for ((_, secret, _), answer) in keys.iter().zip(answers) {
        if !secret.borrow().matches(answer.unwrapped(&what)?.expose()) {
            return Err(operations::unproven(&spec.name));
        }
    }
    Ok(())
}

/// The record of a database key that is new and has just been wrapped. `before`: what the scope's
/// master key has wrapped until now.
fn record_of(
    spec: &ProviderSpec,
    key: &str,
    check: CheckValue,
    answer: Answer,
    before: Option<&DatabaseKey>,
) -> Result<DatabaseKey> {
    let what = format!("wrap a database key with master key \"{key}\"");
    let (wrapped, master_version) = answer.wrapped(&what)?;
    let is_same = |before: &&DatabaseKey| {
        before.provider == spec.name
            && before.master_key == key
            && before.master_version == master_version
    };
    let times = KeyTimes::at(process::now());
    let since = before.filter(is_same).map(|before| before.times.master_key);
    let times = KeyTimes { master_key: since.unwrap_or(times.master_key), ..times };
    Ok(DatabaseKey {
        provider: spec.name.clone(),
        master_key: key.to_owned(),
        master_version,
        wrapped,
        check,
        times,
    })
}

fn database_key_record(scope: Scope, version: KeyVersion, key: DatabaseKey) -> Record {
    let DatabaseKey { provider, master_key, master_version, wrapped, check, times } = key;
    Record::DatabaseKey {
        scope,
        version,
        provider,
        master_key,
        master_version,
        wrapped,
        check,
        times,
    }
}

/// Records a new database key and makes it usable under one lock, so that no process finds it
/// locked. Afterwards the key is only in memory that is excluded from core dumps.
fn write_database_key(record: Record, secret: Secret32) -> Result<()> {
    let Record::DatabaseKey { scope, version, .. } = record else {
        return Err(internal("not a database key".into()));
    };
    let lock = KeystoreLock::acquire();
    let end = persist::append(&lock, Scope::CLUSTER, &[record])?;
    let secrets = &shmem::required()?.secrets;
    secrets
        .unlock(scope, version, &secret)
        .map_err(|_| persist::recovery_needs_room("database key"))?;
    drop(secret);
    drop(lock);
    wal::flush(end);
    Ok(())
}

/// [`Scope::name`] with the database's name; only where catalogs can be read.
pub(crate) fn scope_name(scope: Scope) -> String {
    match catalog::database_name(scope.number()) {
        Some(name) => format!("database \"{name}\""),
        None => scope.name(),
    }
}

fn no_master_key(scope: Scope) -> Report {
    let report = Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} has no master key of its own", scope_name(scope)),
    );
    if scope.is_cluster() {
        report.hint("Set one with pagevault.set_cluster_master_key().")
    } else {
        report.hint("Set one with pagevault.set_database_master_key(), or rotate the cluster's with pagevault.rotate_cluster_master_key().")
    }
}
