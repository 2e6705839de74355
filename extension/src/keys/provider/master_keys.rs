//! Setting, moving and rotating master keys and database keys.
//!
//! Every rotation has the same steps: make the new key, wrap it, prove by unwrapping, record,
//! switch. After a crash at any step, either the old key or the new one is in force. All versions
//! of a database key are sent to the provider together.

use std::borrow::Borrow;
use std::collections::HashSet;

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::protocol::{Action, Base64, ProviderSpec, SecretBytes};
use pagevault_keystore::record::MAX_MASTER_KEYS;
use pagevault_keystore::state::State;
use pagevault_keystore::{CheckValue, DatabaseKey, Record, Scope, Wrapping};
use pgrx::PgSqlErrorCode as Code;
use pgrx::pg_sys::Oid;
use pgrx::prelude::PgLogLevel;

use super::creation;
use super::operations::{self, Answer, Question};
use super::proof::{self, Expects};
use super::revoked;
use crate::keys::names::check_key_name;
use crate::keys::store::{compact, database_keys, failures, key_groups, persist};
use crate::keys::usage::{data_keys, interim, refused};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{catalog, process, wal};
use crate::shmem;
use crate::shmem::secrets::State as KeyState;

/// A master key that is to wrap a scope's database key.
struct Target {
    spec: ProviderSpec,
    key: String,
    /// It wraps, although it may have wrapped before: with its newest version then.
    wraps: bool,
}

/// The master keys that wrap a database key, in their order.
fn targets(state: &State, key: &DatabaseKey, wraps: bool) -> Result<Vec<Target>> {
    let target = |by: &Wrapping| {
        let spec = operations::spec_of(state, &by.provider)?;
        Ok(Target { spec, key: by.master_key.clone(), wraps })
    };
    key.wrappings().map(target).collect()
}

/// Wraps a scope's database key with a master key, which is asked first from now on, instead of
/// the one that was; creates the database key if there is none. `by` is the SQL function that asks.
pub(crate) fn set(by: &str, scope: Scope, provider: &str, key: &str) -> Result<()> {
    check_key_name(key)?;
    let state = persist::current_cluster_state()?;
    let spec = operations::spec_of(&state, provider)?;
    refused::require_usable(scope)?;
    let explain = |report| creation::explain(report, &state, &spec, key);
    let Some((_, current)) = state.current_database_key(scope) else {
        return set_first(by, scope, spec.clone(), key).map_err(explain);
    };
    let mut all = targets(&state, current, false)?;
    match current.wrappings().position(|known| known.is_by(provider, key)) {
        // One of several: the others stay.
        Some(known) => drop(all.remove(known)),
        None => drop(all.remove(0)),
    }
    all.insert(0, Target { spec: spec.clone(), key: key.to_owned(), wraps: true });
    wrap_with(by, &state, scope, &all).map(|_| ()).map_err(explain)
}

fn set_first(by: &str, scope: Scope, spec: ProviderSpec, key: &str) -> Result<()> {
    if scope.is_database() {
        refused::require_usable(Scope::CLUSTER)?;
        // The cluster's key is needed to unwrap the data keys that are to be rewrapped.
        require_unlocked(&persist::current_cluster_state()?, Scope::CLUSTER)?;
    }
    if let Some(group) = scope.key_group() {
        interim::make_root(group)?;
    }
    let secret = Secret32::random()?;
    let first = KeyVersion::FIRST;
    let target = Target { spec, key: key.to_owned(), wraps: true };
    let record = wrap_new(by, (scope, first), &[target], &secret, None)?;
    write_database_key(record, secret)?;
    if scope.is_cluster() {
        interim::make_roots()?;
    }
    if scope.is_database() {
        // Data keys of this database that the cluster's key wraps are rewrapped with its own key.
        data_keys::rewrap_data_keys(scope, |by, _| by.is_cluster(), (scope, first))?;
    }
    Ok(())
}

/// Wraps a scope's database key with another master key as well, which is asked last.
pub(crate) fn add(by: &str, scope: Scope, provider: &str, key: &str) -> Result<()> {
    check_key_name(key)?;
    let state = persist::current_cluster_state()?;
    let spec = operations::spec_of(&state, provider)?;
    refused::require_usable(scope)?;
    let (_, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    if current.wrappings().any(|known| known.is_by(provider, key)) {
        return Err(Report::new(
            Code::ERRCODE_DUPLICATE_OBJECT,
            format!(
                "master key \"{key}\" of provider \"{provider}\" wraps the key of {} already",
                scope_name(scope)
            ),
        ));
    }
    let mut all = targets(&state, current, false)?;
    if all.len() >= MAX_MASTER_KEYS {
        return Err(Report::new(
            Code::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            format!("the key of {} has {MAX_MASTER_KEYS} master keys", scope_name(scope)),
        )
        .detail("More are not possible."));
    }
    all.push(Target { spec: spec.clone(), key: key.to_owned(), wraps: true });
    let done = wrap_with(by, &state, scope, &all).map(|_| ());
    done.map_err(|report| creation::explain(report, &state, &spec, key))
}

/// Takes one of several master keys away, after proving that another one unlocks.
pub(crate) fn remove(by: &str, scope: Scope, provider: &str, key: &str) -> Result<()> {
    let state = persist::current_cluster_state()?;
    refused::require_usable(scope)?;
    let (_, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    let Some(place) = current.wrappings().position(|known| known.is_by(provider, key)) else {
        let known: Vec<_> =
            current.wrappings().map(|by| in_words(&by.provider, &by.master_key)).collect();
        return Err(Report::new(
            Code::ERRCODE_UNDEFINED_OBJECT,
            format!("{} does not wrap the key of {}", in_words(provider, key), scope_name(scope)),
        )
        .detail(format!("It is wrapped by {}.", known.join(" and "))));
    };
    if current.others.is_empty() {
        return Err(Report::new(
            Code::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("cannot drop the only master key of {}", scope_name(scope)),
        )
        .detail("Nothing else would unlock it.")
        .hint("Replace it with pagevault.set_cluster_master_key(), pagevault.set_database_master_key() or pagevault.set_key_group_master_key(), or add another one first."));
    }
    let mut all = targets(&state, current, false)?;
    drop(all.remove(place));
    require_one_that_unlocks(by, &state, scope, &all)?;
    wrap_with(by, &state, scope, &all)?;
    Ok(())
}

/// Whether one of these master keys unwraps all versions of a scope's database key that are in use.
///
/// # Errors
/// The failure of the last one, if none does.
fn require_one_that_unlocks(by: &str, state: &State, scope: Scope, of: &[Target]) -> Result<()> {
    let what = format!("unwrap the key of {}", scope_name(scope));
    let in_use = database_keys::in_use()?;
    let mut keys: Vec<_> = state.database_keys().filter(|(of, ..)| *of == scope).collect();
    keys.retain(|(_, version, _)| in_use.contains(&(scope, *version)));
    let mut failure = None;
    for target in of {
        let is_it = |by: &&Wrapping| by.is_by(&target.spec.name, &target.key);
        let question = |(_, version, record): &(Scope, KeyVersion, &DatabaseKey)| {
            let wrapping = record.wrappings().find(is_it)?;
            Some(Question::unwrap(state, (scope, *version), record, wrapping).map(Question::once))
        };
        // One that does not wrap all versions does not count.
        let Some(questions) = keys.iter().map(question).collect::<Option<Result<Vec<_>>>>() else {
            continue;
        };
        let answers = operations::ask(by, questions?)?;
        match answers.iter().try_for_each(|answer| answer.unwrapped(&what).map(drop)) {
            Ok(()) => return Ok(()),
            Err(report) => failure = Some(report),
        }
    }
    let report = failure.unwrap_or_else(|| data_keys::locked(scope));
    Err(report.hint("None of the master keys that would be left unlocks. Nothing was changed."))
}

/// Makes the providers create new versions of all master keys of a scope, and wraps with them.
/// Returns the version in use of the one that is asked first.
pub(crate) fn rotate(by: &str, scope: Scope) -> Result<i64> {
    let state = persist::current_cluster_state()?;
    let (_, current) = state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    refused::require_usable(scope)?;
    require_unlocked(&state, scope)?;
    let all = targets(&state, current, true)?;
    require_newest_versions(by, &state, &all, current)?;
    let questions = all.iter().zip(current.wrappings()).map(|(target, wrapping)| {
        let action = Action::Rotate { wrapped: Base64(wrapping.wrapped.clone()) };
        Question::new(target.spec.clone(), target.key.clone(), Some(scope), action)
    });
    let answers = operations::ask(by, questions.collect())?;
    for (answer, target) in answers.into_iter().zip(&all) {
        answer.rotated(&format!("rotate master key \"{}\"", target.key))?;
    }
    let version = wrap_with(by, &state, scope, &all)?;
    i64::try_from(version).map_err(|_| internal("master key version out of range".into()))
}

/// The keys of other scopes may be wrapped by a later version of these master keys than the key
/// that is `current` here. A provider that does not have it, as an old copy of a key file, would
/// give its number to another key.
fn require_newest_versions(
    by: &str,
    state: &State,
    targets: &[Target],
    current: &DatabaseKey,
) -> Result<()> {
    let mut questions = Vec::new();
    // Not by their directories: a tablespace may not be mounted.
    let databases: HashSet<Oid> = catalog::any_databases().into_iter().collect();
    for (target, known) in targets.iter().zip(current.wrappings()) {
        // Those of dropped databases are not needed, and their providers may be gone.
        let needed = state.database_keys().filter(|(scope, ..)| {
            !scope.is_database() || databases.contains(&scope.number().into())
        });
        let all = needed.flat_map(|(scope, version, record)| {
            record.wrappings().map(move |by| ((scope, version), record, by))
        });
        let by_this = all.filter(|(_, _, by)| by.is_by(&target.spec.name, &target.key));
        let newest = by_this.max_by_key(|(_, _, by)| by.master_version);
        if let Some((place, record, newest)) = newest
            && newest.master_version > known.master_version
        {
            let spec = target.spec.clone();
            questions.push(Question::unwrap_by(spec, place, record.check, newest));
        }
    }
    if questions.is_empty() {
        return Ok(());
    }
    for answer in operations::ask(by, questions)? {
        answer.unwrapped("find the newest version of the master key")?;
    }
    Ok(())
}

/// A wrapping that stays, or is to be made.
enum Plan<'a> {
    Stays(&'a Wrapping),
    New { target: &'a Target, before: Option<&'a Wrapping> },
}

/// Lets these master keys, and no others, wrap every live version of a scope's database key, proves
/// what is new, and records everything together. Returns the version of the first master key.
///
/// Keys wrapped by the same provider are rewrapped by it. Others are wrapped from memory, so the
/// provider that has wrapped them until now need not be reachable.
fn wrap_with(by: &str, state: &State, scope: Scope, targets: &[Target]) -> Result<u64> {
    let secrets = &shmem::required()?.secrets;
    let in_use = database_keys::in_use()?;
    let mut plans = Vec::new();
    let mut questions = Vec::new();
    for (_, version, record) in state.database_keys().filter(|(s, _, _)| *s == scope) {
        let secret = match secrets.get(scope, version) {
            Some(secret) => secret,
            None if in_use.contains(&(scope, version)) => return Err(data_keys::locked(scope)),
            // Nothing needs it: forgotten since the state was read, or about to be.
            None => continue,
        };
        proof::require_right(Expects { scope, version, check: record.check }, &secret)?;
        let mut plan = Vec::new();
        for target in targets {
            let name = &target.spec.name;
            let same = record.wrappings().find(|by| by.is_by(name, &target.key));
            if let Some(same) = same.filter(|_| !target.wraps) {
                plan.push(Plan::Stays(same));
                continue;
            }
            let at_provider = same.or(record.wrappings().find(|by| by.provider == *name));
            let action = match at_provider {
                Some(known) => {
                    let wrapped = Base64(known.wrapped.clone());
                    Action::Rewrap { from_key: known.master_key.clone(), wrapped }
                }
                None => Action::Wrap { plaintext: SecretBytes::from_slice(secret.expose()) },
            };
            let (spec, key) = (target.spec.clone(), target.key.clone());
            questions.push(Question::new(spec, key, Some(scope), action));
            plan.push(Plan::New { target, before: same });
        }
        plans.push((version, secret, record, plan));
    }
    let mut answers = operations::ask(by, questions)?.into_iter();
    let mut wrapped = Vec::new();
    let mut to_prove = Vec::new();
    for (version, secret, record, plan) in &plans {
        let mut wrappings = Vec::new();
        for planned in plan {
            wrappings.push(match planned {
                Plan::Stays(wrapping) => Wrapping::clone(wrapping),
                Plan::New { target, before } => {
                    let answer = answers.next().ok_or_else(|| internal("no answer".to_owned()))?;
                    let new = wrapping_of(target, answer, *before)?;
                    to_prove.push((*version, secret, record.check, *target, new.clone()));
                    new
                }
            });
        }
        let mut wrappings = wrappings.into_iter();
        let first = wrappings.next().ok_or_else(|| no_master_key(scope))?;
        let (check, made) = (record.check, record.made);
        wrapped.push((*version, DatabaseKey { check, made, first, others: wrappings.collect() }));
    }
    prove(by, scope, &to_prove)?;
    let newest = wrapped.last().map_or(0, |(_, key)| key.first.master_version);
    let end = {
        let lock = KeystoreLock::acquire();
        let known = wrapped.into_iter().filter(|(v, _)| secrets.state(scope, *v).is_some());
        let records = known.map(|(version, key)| Record::DatabaseKey { scope, version, key });
        persist::append(&lock, Scope::CLUSTER, &records.collect::<Vec<_>>())?
    };
    wal::flush(end);
    remove_former_wrappings();
    // The scope no longer uses the revoked master key.
    revoked::restore(scope)?;
    Ok(newest)
}

/// Removes what later base backups must not contain: older wrappings from the key file and, with a
/// segment of its own for what follows, from the WAL that a backup has. What cannot be removed now
/// the worker removes later.
fn remove_former_wrappings() {
    let removed = compact::remove_former_wrappings(&KeystoreLock::acquire());
    match removed {
        Ok(found) if found.were_there => wal::begin_segment(),
        Ok(_) => {}
        Err(report) => Report::new(
            Code::ERRCODE_WARNING,
            "former wrappings of database keys could not be removed yet",
        )
        .detail(format!(
            "The new ones are stored, and in use: {}. A server that runs tries again to remove the former ones.",
            report.message()
        ))
        .send(PgLogLevel::WARNING),
    }
}

/// Creates a new database key and wraps all data keys with it that the present one of this scope
/// wraps. All master keys of the scope wrap it.
pub(crate) fn rotate_database_key(by: &str, scope: Scope) -> Result<KeyVersion> {
    let state = persist::current_cluster_state()?;
    let (version, current) =
        state.current_database_key(scope).ok_or_else(|| no_master_key(scope))?;
    refused::require_usable(scope)?;
    require_unlocked(&state, scope)?;
    let targets = targets(&state, current, true)?;
    let new_version = KeyVersion::after(Some(version))
        .ok_or_else(|| internal("database key versions are used up".into()))?;
    let secret = Secret32::random()?;
    let place = (scope, new_version);
    let record = wrap_new(by, place, &targets, &secret, Some((version, current)))?;
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
    let in_use = database_keys::in_use()?;
    let is_locked = |version| secrets.state(scope, version) == Some(KeyState::Locked);
    match versions.any(|(_, v, _)| is_locked(v) && in_use.contains(&(scope, v))) {
        true => Err(data_keys::locked(scope)),
        false => Ok(()),
    }
}

/// Wraps a new database key with all of these master keys, and proves that they unwrap it.
/// `before`: the scope's key until now.
fn wrap_new(
    by: &str,
    (scope, version): (Scope, KeyVersion),
    targets: &[Target],
    secret: &Secret32,
    before: Option<(KeyVersion, &DatabaseKey)>,
) -> Result<Record> {
    let known = |target: &Target| {
        let (_, key) = before?;
        key.wrappings().find(|by| by.is_by(&target.spec.name, &target.key))
    };
    // A provider with another key of this name would wrap, and prove, as well. It does not unwrap
    // what the right one has wrapped.
    let mut questions = Vec::new();
    for target in targets {
        if let (Some((version, key)), Some(wrapping)) = (before, known(target)) {
            let place = (scope, version);
            questions.push(Question::unwrap_by(target.spec.clone(), place, key.check, wrapping));
        }
        let action = Action::Wrap { plaintext: SecretBytes::from_slice(secret.expose()) };
        questions.push(Question::new(target.spec.clone(), target.key.clone(), Some(scope), action));
    }
    let what = format!("unwrap the key of {}", scope_name(scope));
    let check = proof::check_value(scope, version, secret)?;
    let mut answers = operations::ask(by, questions)?.into_iter();
    let mut answer = || answers.next().ok_or_else(|| internal("no answer".to_owned()));
    let mut to_prove = Vec::new();
    for target in targets {
        let before = known(target);
        if before.is_some() {
            answer()?.unwrapped(&what)?;
        }
        to_prove.push((version, secret, check, target, wrapping_of(target, answer()?, before)?));
    }
    prove(by, scope, &to_prove)?;
    let mut wrappings = to_prove.into_iter().map(|(.., wrapping)| wrapping);
    let first = wrappings.next().ok_or_else(|| no_master_key(scope))?;
    let key = DatabaseKey { others: wrappings.collect(), ..DatabaseKey::new(check, first) };
    Ok(Record::DatabaseKey { scope, version, key })
}

/// Proves that the providers unwrap each wrapped key of the given version to its secret. New
/// wrappings are recorded only after that; until then the keystore has the old ones.
fn prove<S: Borrow<Secret32>>(
    by: &str,
    scope: Scope,
    keys: &[(KeyVersion, S, CheckValue, &Target, Wrapping)],
) -> Result<()> {
    let questions = keys.iter().map(|(version, _, check, target, wrapping)| {
        Question::unwrap_by(target.spec.clone(), (scope, *version), *check, wrapping)
    });
    let answers = operations::ask(by, questions.collect())?;
    let what = format!("unwrap the key of {}", scope_name(scope));
    for ((_, secret, _, target, _), answer) in keys.iter().zip(answers) {
        if !secret.borrow().matches(answer.unwrapped(&what)?.expose()) {
            return Err(operations::unproven(&target.spec.name));
        }
    }
    Ok(())
}

/// The wrapping in an answer. `before`: what the same master key has wrapped until now.
fn wrapping_of(target: &Target, answer: Answer, before: Option<&Wrapping>) -> Result<Wrapping> {
    let Target { spec, key, .. } = target;
    let what = format!("wrap a database key with master key \"{key}\"");
    let (wrapped, master_version) = answer.wrapped(&what)?;
    let new = Wrapping::new((&spec.name, key), master_version, wrapped, process::now());
    let since = before.filter(|before| before.master_version == master_version);
    Ok(Wrapping { since: since.map_or(new.since, |before| before.since), ..new })
}

fn in_words(provider: &str, key: &str) -> String {
    format!("master key \"{key}\" of provider \"{provider}\"")
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
        .map_err(|_| failures::recovery_needs_room("database key"))?;
    drop(secret);
    drop(lock);
    wal::flush(end);
    Ok(())
}

/// [`Scope::name`] with the database's name; only where catalogs can be read.
pub(crate) fn scope_name(scope: Scope) -> String {
    let database = Some(scope).filter(|scope| scope.is_database());
    match database.and_then(|scope| catalog::database_name(scope.number())) {
        Some(name) => format!("database \"{name}\""),
        None => key_groups::describe(scope),
    }
}

fn no_master_key(scope: Scope) -> Report {
    let report = Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{} has no master key of its own", scope_name(scope)),
    );
    if scope.is_cluster() {
        report.hint("Set one with pagevault.set_cluster_master_key().")
    } else if scope.key_group().is_some() {
        report.hint("Set one with pagevault.set_key_group_master_key().")
    } else {
        report.hint("Set one with pagevault.set_database_master_key(), or rotate the cluster's with pagevault.rotate_cluster_master_key().")
    }
}
