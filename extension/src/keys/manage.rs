//! Providers and master keys: what SQL asks for.
//!
//! Rotation is always the same: make the new thing, wrap, prove by unwrapping, write it down, switch.
//! Killed at any step it ends wholly old or wholly new.

use std::time::Duration;

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::{Action, Base64, Operation, Outcome, ProviderSpec, SecretBytes};
use pagevault_keystore::state::{DatabaseKey, State};
use pagevault_keystore::{Record, master_context};
use pgrx::PgSqlErrorCode as Code;
use serde_json::Value;

use super::{data_keys, helper, persist};
use crate::pg::guc;
use crate::pg::locks::KeystoreLock;
use crate::pg::relation;
use crate::pg::report::{Report, Result};
use crate::pg::wal;

/// Longest name of a provider, as of any PostgreSQL object (`NAMEDATALEN - 1`).
const NAME_MAX: usize = 63;

fn timeout() -> Duration {
    Duration::from_secs(guc::keyring_timeout())
}

/// The cluster's log, read under the lock.
pub(crate) fn state() -> Result<State> {
    persist::cluster_state(&KeystoreLock::acquire())
}

/// Makes a provider known after the helper has checked its options.
pub(crate) fn add_provider(name: &str, kind: &str, options: &Value) -> Result<()> {
    check_name("provider", name)?;
    if state()?.provider(name).is_some() {
        return Err(Report::new(
            Code::ERRCODE_DUPLICATE_OBJECT,
            format!("key provider \"{name}\" already exists"),
        )
        .hint("Use pagevault.alter_provider() to change its options."));
    }
    let spec = checked_options(name, kind, options)?;
    write_cluster(&[provider_record(&spec)])
}

/// Changes a provider's options after proving that it still opens everything it wrapped.
pub(crate) fn alter_provider(name: &str, options: &Value) -> Result<()> {
    let state = state()?;
    let kind = state.provider(name).ok_or_else(|| no_such_provider(name, &state))?.kind.clone();
    let spec = checked_options(name, &kind, options)?;
    for (scope, version, key) in state.database_keys().filter(|(_, _, k)| k.provider == name) {
        let proven = unwrap(&spec, scope, key)?;
        let known = persist::shared_memory()?.secrets.get(scope, version);
        if known.is_some_and(|known| known.expose() != proven.expose()) {
            return Err(unproven(name));
        }
    }
    write_cluster(&[provider_record(&spec)])
}

/// Forgets a provider that wraps no database key.
pub(crate) fn drop_provider(name: &str) -> Result<()> {
    let state = state()?;
    if state.provider(name).is_none() {
        return Err(no_such_provider(name, &state));
    }
    if state.uses_provider(name) {
        let mut scopes: Vec<String> = state
            .database_keys()
            .filter(|(_, _, key)| key.provider == name)
            .map(|(scope, _, _)| scope_name(scope))
            .collect();
        scopes.dedup();
        return Err(Report::new(
            Code::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("cannot drop key provider \"{name}\" because it holds master keys in use"),
        )
        .detail(format!("It wraps the key of {}.", scopes.join(", ")))
        .hint("Move them to another provider with pagevault.set_master_key() or pagevault.set_cluster_master_key() first."));
    }
    write_cluster(&[Record::DropProvider { name: name.to_owned() }])
}

/// Puts a scope's database key under a master key, making the database key if there is none.
pub(crate) fn set_master_key(scope: u32, provider: &str, key: &str) -> Result<()> {
    check_name("master key", key)?;
    let state = state()?;
    let spec = spec_of(&state, provider)?;
    if state.current_database_key(scope).is_none() {
        return first_master_key(scope, &spec, key);
    }
    wrap_versions(&state, scope, &spec, key).map(|_| ())
}

fn first_master_key(scope: u32, spec: &ProviderSpec, key: &str) -> Result<()> {
    let secret = Secret32::random()?;
    let record = wrapped_record(scope, 1, spec, key, &secret)?;
    write_database_key(record, &secret)?;
    if scope != 0 {
        // What the cluster's key wrapped for this database so far moves under its own.
        data_keys::rewrap_data_keys(scope, |by, _| by != scope, (scope, 1, &secret))?;
    }
    Ok(())
}

/// Has the provider make a new version of the scope's master key and wraps with it.
pub(crate) fn rotate_master_key(scope: u32) -> Result<i64> {
    let state = state()?;
    let (_, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    let (provider, key) = (current.provider.clone(), current.master_key.clone());
    let spec = spec_of(&state, &provider)?;
    let what = format!("rotate master key \"{key}\"");
    let wrapped = Base64(current.wrapped.clone());
    match ask_one(&spec, scope, &key, Action::Rotate { wrapped }, &what)? {
        Outcome::Rotated { .. } => {}
        other => return Err(unexpected(&what, &other)),
    }
    let version = wrap_versions(&state, scope, &spec, &key)?;
    i64::try_from(version).map_err(|_| persist::internal("master key version out of range".into()))
}

/// Wraps every live version of a scope's database key with the newest version of a master key, and
/// writes all of them down at once. Returns the master key's version.
fn wrap_versions(state: &State, scope: u32, spec: &ProviderSpec, key: &str) -> Result<u64> {
    let secrets = &persist::shared_memory()?.secrets;
    let mut records = Vec::new();
    let mut newest = 0;
    for (_, version, _) in state.database_keys().filter(|(s, _, _)| *s == scope) {
        let secret = secrets.get(scope, version).ok_or_else(|| data_keys::locked(scope))?;
        let record = wrapped_record(scope, version, spec, key, &secret)?;
        if let Record::DatabaseKey { master_version, .. } = &record {
            newest = *master_version;
        }
        records.push(record);
    }
    write_cluster(&records)?;
    Ok(newest)
}

/// Makes a new database key and wraps all data keys with it: those of this database if it has a key
/// of its own, else all that the cluster's key wraps.
pub(crate) fn rotate_database_key(database: u32) -> Result<i64> {
    let state = state()?;
    let scope = if state.current_database_key(database).is_some() { database } else { 0 };
    let (version, current) =
        state.current_database_key(scope).ok_or_else(|| no_master_key(database))?;
    let spec = spec_of(&state, &current.provider)?;
    let new_version = version + 1;
    let secret = Secret32::random()?;
    let record = wrapped_record(scope, new_version, &spec, &current.master_key, &secret)?;
    write_database_key(record, &secret)?;
    let homes = data_keys::homes_of_scope(scope)?;
    for home in homes {
        data_keys::rewrap_data_keys(
            home,
            |by, v| by == scope && v != new_version,
            (scope, new_version, &secret),
        )?;
    }
    Ok(i64::from(new_version))
}

/// Wraps a database key and proves that the provider gives it back.
fn wrapped_record(
    scope: u32,
    version: u32,
    spec: &ProviderSpec,
    key: &str,
    secret: &Secret32,
) -> Result<Record> {
    let what = format!("wrap a database key with master key \"{key}\"");
    let plaintext = SecretBytes::from_slice(secret.expose());
    let (wrapped, master_version) =
        match ask_one(spec, scope, key, Action::Wrap { plaintext }, &what)? {
            Outcome::Wrapped { wrapped, key_version } => (wrapped.0, key_version),
            other => return Err(unexpected(&what, &other)),
        };
    let record = DatabaseKey {
        provider: spec.name.clone(),
        master_key: key.to_owned(),
        master_version,
        wrapped,
        created: persist::now(),
    };
    if unwrap(spec, scope, &record)?.expose() != secret.expose() {
        return Err(unproven(&spec.name));
    }
    Ok(Record::DatabaseKey {
        scope,
        version,
        provider: record.provider,
        master_key: record.master_key,
        master_version,
        wrapped: record.wrapped,
        created: record.created,
    })
}

fn unwrap(spec: &ProviderSpec, scope: u32, key: &DatabaseKey) -> Result<Secret32> {
    let what = format!("unwrap the key of {}", scope_name(scope));
    let wrapped = Base64(key.wrapped.clone());
    match ask_one(spec, scope, &key.master_key, Action::Unwrap { wrapped }, &what)? {
        Outcome::Unwrapped { plaintext, .. } => secret_of(&plaintext, &spec.name),
        other => Err(unexpected(&what, &other)),
    }
}

/// Takes an unwrapped database key over, if it is one.
pub(super) fn secret_of(plaintext: &SecretBytes, provider: &str) -> Result<Secret32> {
    plaintext.expose().try_into().map(Secret32::from_bytes).map_err(|_| unproven(provider))
}

/// One operation on one master key; failures become errors that start with "could not `what`".
fn ask_one(
    spec: &ProviderSpec,
    scope: u32,
    key: &str,
    action: Action,
    what: &str,
) -> Result<Outcome> {
    let operation =
        Operation { provider: spec.clone(), key: key.to_owned(), context: context(scope)?, action };
    match helper::ask(vec![operation], timeout())?.pop() {
        Some(Outcome::Failed(failure)) => Err(helper::refusal(what, &failure)),
        Some(outcome) => Ok(outcome),
        None => Err(persist::internal("the keyring helper gave no outcome".into())),
    }
}

/// What a scope's wrapped key is bound to.
pub(super) fn context(scope: u32) -> Result<String> {
    let id = persist::shared_memory()?.control.keystore_id();
    id.map(|id| master_context(&id, scope))
        .ok_or_else(|| persist::internal("the keystore has no identity yet".into()))
}

fn checked_options(name: &str, kind: &str, options: &Value) -> Result<ProviderSpec> {
    let Value::Object(map) = options else {
        return Err(Report::new(
            Code::ERRCODE_INVALID_PARAMETER_VALUE,
            "provider options must be a JSON object",
        )
        .hint("For a key file: '{\"path\": \"/etc/pagevault/keys\"}'."));
    };
    let provider =
        ProviderSpec { name: name.to_owned(), kind: kind.to_owned(), options: map.clone() };
    let operation = Operation {
        provider: provider.clone(),
        key: String::new(),
        context: String::new(),
        action: Action::CheckOptions,
    };
    let what = format!("use key provider \"{name}\"");
    match helper::ask(vec![operation], timeout())?.pop() {
        Some(Outcome::OptionsOk) => Ok(provider),
        Some(Outcome::Failed(failure)) => Err(helper::refusal(&what, &failure)),
        Some(other) => Err(unexpected(&what, &other)),
        None => Err(persist::internal("the keyring helper gave no outcome".into())),
    }
}

/// A provider as the helper wants it.
pub(super) fn spec_of(state: &State, name: &str) -> Result<ProviderSpec> {
    let provider = state.provider(name).ok_or_else(|| no_such_provider(name, state))?;
    let options = serde_json::from_str(&provider.options).map_err(|e| {
        Report::new(
            Code::ERRCODE_DATA_CORRUPTED,
            format!("options of key provider \"{name}\" in the keystore are not JSON: {e}"),
        )
    })?;
    Ok(ProviderSpec { name: name.to_owned(), kind: provider.kind.clone(), options })
}

fn provider_record(spec: &ProviderSpec) -> Record {
    Record::Provider {
        name: spec.name.clone(),
        kind: spec.kind.clone(),
        options: Value::Object(spec.options.clone()).to_string(),
    }
}

fn write_cluster(records: &[Record]) -> Result<()> {
    let end = persist::append(&KeystoreLock::acquire(), 0, records)?;
    wal::flush(end);
    Ok(())
}

/// Writes a new database key down and makes it usable in one step, so that nobody meets it locked.
fn write_database_key(record: Record, secret: &Secret32) -> Result<()> {
    let Record::DatabaseKey { scope, version, .. } = record else {
        return Err(persist::internal("not a database key".into()));
    };
    let lock = KeystoreLock::acquire();
    let end = persist::append(&lock, 0, &[record])?;
    let secrets = &persist::shared_memory()?.secrets;
    secrets.unlock(scope, version, secret).map_err(|_| persist::too_many_database_keys())?;
    drop(lock);
    wal::flush(end);
    Ok(())
}

/// As [`persist::scope_name`] with the database's name; only where catalogs can be read.
fn scope_name(scope: u32) -> String {
    match relation::database_name(scope) {
        Some(name) => format!("database \"{name}\""),
        None => persist::scope_name(scope),
    }
}

fn check_name(what: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(Report::new(Code::ERRCODE_INVALID_NAME, format!("invalid name of a {what}"))
            .detail(format!("A name has 1 to {NAME_MAX} bytes and no control characters.")));
    }
    Ok(())
}

fn no_such_provider(name: &str, state: &State) -> Report {
    let known: Vec<&str> = state.providers().map(|(name, _)| name).collect();
    let report = Report::new(
        Code::ERRCODE_UNDEFINED_OBJECT,
        format!("key provider \"{name}\" does not exist"),
    );
    if known.is_empty() {
        report.hint("Add one with pagevault.add_provider().")
    } else {
        report.hint(format!("Known providers: {}.", known.join(", ")))
    }
}

fn no_master_key(scope: u32) -> Report {
    let report = Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} has no master key of its own", scope_name(scope)),
    );
    if scope == 0 {
        report.hint("Set one with pagevault.set_cluster_master_key().")
    } else {
        report.hint("Set one with pagevault.set_master_key(), or rotate the cluster's with pagevault.rotate_cluster_master_key().")
    }
}

fn unproven(provider: &str) -> Report {
    Report::new(
        Code::ERRCODE_DATA_EXCEPTION,
        format!("key provider \"{provider}\" did not give back the key it had wrapped"),
    )
    .detail("Nothing was changed.")
}

fn unexpected(what: &str, _outcome: &Outcome) -> Report {
    Report::new(
        Code::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
        format!("could not {what}: the keyring helper answered something else"),
    )
    .hint("Install the pagevault-keyring of the same version as the extension.")
}
