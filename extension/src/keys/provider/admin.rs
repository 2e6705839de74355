//! Adding, altering, checking and dropping key providers by SQL.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::protocol::{Action, Failure, ProviderSpec};
use pagevault_keystore::state::State;
use pagevault_keystore::{DatabaseKey, Record, Scope, Wrapping};
use pgrx::PgSqlErrorCode as Code;
use serde_json::Value;

use super::gone::is_gone;
use super::operations::{self, Answer, Question};
use super::{master_keys, refusal};
use crate::keys::names;
use crate::keys::store::{database_keys, persist};
use crate::pg::catalog;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::{roles, shmem};

/// Maximum length of a provider's name, as of any PostgreSQL object (`NAMEDATALEN - 1`).
const NAME_MAX: usize = 63;

/// Adds a provider after the helper has checked its options.
pub(crate) fn add(name: &str, kind: &str, options: &Value) -> Result<()> {
    const BY: &str = "add_provider";
    names::check_name("provider", name, NAME_MAX)?;
    if persist::current_cluster_state()?.provider(name).is_some() {
        return Err(Report::new(
            Code::ERRCODE_DUPLICATE_OBJECT,
            format!("key provider \"{name}\" already exists"),
        )
        .hint("Use pagevault.alter_provider() to change its options."));
    }
    let spec = checked_options(BY, name, kind, options)?;
    write(&provider_record(&spec))
}

/// Changes a provider's options after proving that it still unwraps everything that it has wrapped,
/// except for dropped databases.
pub(crate) fn alter(name: &str, options: &Value) -> Result<()> {
    const BY: &str = "alter_provider";
    let state = persist::current_cluster_state()?;
    let provider =
        state.provider(name).ok_or_else(|| operations::no_such_provider(name, &state))?;
    let spec = checked_options(BY, name, &provider.kind, options)?;
    let mut wrapped: Vec<_> = wrapped_by(&state, name).collect();
    wrapped.retain(|(scope, ..)| is_needed(*scope));
    let mut questions = Vec::new();
    for (scope, version, record, wrapping) in &wrapped {
        let place = (*scope, *version);
        questions.push(Question::unwrap_by(spec.clone(), place, record.check, wrapping));
    }
    let answers = operations::ask_unrecorded(BY, questions)?;
    for ((scope, version, ..), answer) in wrapped.iter().zip(answers) {
        let proven =
            answer.unwrapped(&format!("unwrap the key of {}", master_keys::scope_name(*scope)))?;
        if shmem::required()?.secrets.is(*scope, *version, &proven) == Some(false) {
            return Err(operations::unproven(name));
        }
    }
    write(&provider_record(&spec))
}

/// Removes a provider that wraps no database key.
pub(crate) fn drop(name: &str) -> Result<()> {
    let state = persist::current_cluster_state()?;
    if state.provider(name).is_none() {
        return Err(operations::no_such_provider(name, &state));
    }
    if state.uses_provider(name) {
        let scopes: BTreeSet<Scope> = wrapped_by(&state, name).map(|(scope, ..)| scope).collect();
        let has_others = |(_, _, key, _): (_, _, &DatabaseKey, _)| !key.others.is_empty();
        let hint = if scopes.iter().all(|scope| is_gone(*scope)) {
            "These databases are gone. Nobody asks the provider for their keys any more; its name is kept for backups of their time."
        } else if wrapped_by(&state, name).all(has_others) {
            "Other master keys wrap the same keys. Take those of this provider away with pagevault.drop_cluster_master_key(), pagevault.drop_database_master_key() or pagevault.drop_key_group_master_key() first."
        } else {
            "Move them to another provider with pagevault.set_database_master_key() or pagevault.set_cluster_master_key() first."
        };
        let scopes: Vec<String> = scopes.into_iter().map(master_keys::scope_name).collect();
        return Err(Report::new(
            Code::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("cannot drop key provider \"{name}\" because it holds master keys in use"),
        )
        .detail(format!("It wraps the key of {}.", scopes.join(", ")))
        .hint(hint));
    }
    write(&Record::DropProvider { name: name.to_owned() })?;
    shmem::required()?.health.forget(&KeystoreLock::acquire(), name);
    Ok(())
}

/// One line of the result of [`check`].
pub(crate) struct Checked {
    pub(crate) master_key: Option<String>,
    pub(crate) what: String,
    pub(crate) ok: bool,
    pub(crate) result: String,
    pub(crate) hint: Option<String>,
}

/// Checks a provider, with each of its master keys in use, or with `key`, and whether it unwraps
/// the database keys in use.
pub(crate) fn check(name: &str, key: Option<&str>) -> Result<Vec<Checked>> {
    let state = persist::current_cluster_state()?;
    let spec = operations::spec_of(&state, name)?;
    let keys: Vec<String> = match key {
        Some(key) => {
            names::check_key_name(key)?;
            vec![key.to_owned()]
        }
        None => {
            let keys: Vec<String> = master_keys_in_use(&state, name).into_keys().collect();
            // Without a key only the provider is checked.
            if keys.is_empty() { vec![String::new()] } else { keys }
        }
    };
    let question = |key| Question::new(spec.clone(), key, None, Action::Check);
    let answers = operations::ask("check_provider", keys.into_iter().map(question).collect())?;
    let mut checks = Vec::new();
    for answer in answers {
        let master_key = answer.subject.key.clone();
        let mut lines = Vec::new();
        for finding in answer.findings(&format!("check key provider \"{name}\""))? {
            let line = Checked::new(&master_key, finding.what);
            lines.push(match finding.failure {
                None => Checked { result: finding.seen, ..line },
                Some(failure) => line.failed(failure),
            });
        }
        checks.push((master_key, lines));
    }
    // One that fails anyway is not asked again.
    let usable = checks.iter().filter(|(_, lines)| lines.iter().all(|line| line.ok));
    let usable = usable.map(|(key, _)| key.as_str()).collect();
    let mut unwrapped = check_in_use(&state, &spec, &usable)?;
    let all = checks.into_iter().flat_map(|(key, mut lines)| {
        lines.extend(unwrapped.remove(&key));
        lines
    });
    Ok(all.collect())
}

impl Checked {
    fn new(master_key: &str, what: impl Into<String>) -> Checked {
        let master_key = Some(master_key.to_owned()).filter(|key| !key.is_empty());
        Checked { master_key, what: what.into(), ok: true, result: String::new(), hint: None }
    }

    fn failed(self, failure: Failure) -> Checked {
        let detail = failure.detail.map(|detail| format!(". {detail}")).unwrap_or_default();
        let fallback = || refusal::hint(failure.class).to_owned();
        let hint = Some(failure.hint.unwrap_or_else(fallback));
        Checked { ok: false, result: format!("{}{detail}", failure.message), hint, ..self }
    }
}

/// Whether a provider unwraps the database keys in use that these master keys wrap, as it has to
/// when the server starts: a test key, which the newest version wraps, does not prove that. Keys of
/// dropped databases are not needed.
fn check_in_use(
    state: &State,
    spec: &ProviderSpec,
    master_keys: &BTreeSet<&str>,
) -> Result<BTreeMap<String, Checked>> {
    let in_use = database_keys::in_use()?;
    let mut wrapped: Vec<_> = wrapped_by(state, &spec.name).collect();
    wrapped.retain(|(scope, version, _, by)| {
        in_use.contains(&(*scope, *version))
            && master_keys.contains(by.master_key.as_str())
            && is_needed(*scope)
    });
    let questions = wrapped.iter().map(|(scope, version, record, by)| {
        Question::unwrap_by(spec.clone(), (*scope, *version), record.check, by)
    });
    let answers = operations::ask("check_provider", questions.collect())?;
    let mut results: BTreeMap<String, (usize, Option<Failure>)> = BTreeMap::new();
    for ((scope, version, _, by), answer) in wrapped.into_iter().zip(answers) {
        let (count, failure) = results.entry(by.master_key.clone()).or_default();
        *count += 1;
        if failure.is_none()
            && let Some(refused) = answer.failure()
        {
            let whose = master_keys::scope_name(scope);
            let message = format!("version {version} of the key of {whose}: {}", refused.message);
            *failure = Some(Failure { message, ..refused.clone() });
        }
    }
    let lines = results.into_iter().map(|(key, (count, failure))| {
        let line = Checked::new(&key, "the keys in use can be unwrapped");
        let line = match failure {
            None => {
                Checked { result: format!("database keys that were unwrapped: {count}"), ..line }
            }
            Some(failure) => line.failed(failure),
        };
        (key, line)
    });
    Ok(lines.collect())
}

/// Whether the key of a scope is needed. If a tablespace is not mounted, its databases seem to be
/// dropped.
fn is_needed(scope: Scope) -> bool {
    !is_gone(scope) || catalog::database_name(scope.number()).is_some()
}

/// The master keys of a provider that wrap a database key, each with its newest version in use.
pub(crate) fn master_keys_in_use(state: &State, provider: &str) -> BTreeMap<String, u64> {
    let mut keys = BTreeMap::new();
    for (.., key) in wrapped_by(state, provider) {
        let version = keys.entry(key.master_key.clone()).or_insert(key.master_version);
        *version = key.master_version.max(*version);
    }
    keys
}

/// The database keys that master keys of a provider wrap.
fn wrapped_by<'a>(
    state: &'a State,
    provider: &str,
) -> impl Iterator<Item = (Scope, KeyVersion, &'a DatabaseKey, &'a Wrapping)> {
    state.database_keys().flat_map(move |(scope, version, key)| {
        let by_it = key.wrappings().filter(move |by| by.provider == provider);
        by_it.map(move |by| (scope, version, key, by))
    })
}

fn checked_options(by: &str, name: &str, kind: &str, options: &Value) -> Result<ProviderSpec> {
    let Value::Object(map) = options else {
        return Err(Report::new(
            Code::ERRCODE_INVALID_PARAMETER_VALUE,
            "provider options must be a JSON object",
        )
        .hint("For a key file: '{\"path\": \"/etc/pagevault/keys\"}'."));
    };
    // Recorded, because the permission covers all programs that the provider may run, also those
    // named in a file.
    let programs = roles::may_run_programs();
    if matches!(kind, "command" | "pkcs11") {
        // A user who can choose a program and its arguments, or a library that the helper loads,
        // can act as the server's operating system user.
        roles::require_program_runner("set the programs of a key provider")?;
    }
    let provider = ProviderSpec {
        name: name.to_owned(),
        kind: kind.to_owned(),
        options: map.clone(),
        programs,
    };
    let question = Question::new(provider.clone(), String::new(), None, Action::CheckOptions);
    let what = format!("use key provider \"{name}\"");
    let answers = operations::ask_unrecorded(by, vec![question])?;
    answers.into_iter().try_for_each(|answer: Answer| answer.options_ok(&what))?;
    Ok(provider)
}

fn provider_record(spec: &ProviderSpec) -> Record {
    Record::Provider {
        name: spec.name.clone(),
        kind: spec.kind.clone(),
        options: Value::Object(spec.options.clone()).to_string(),
        programs: spec.programs,
    }
}

/// Records a change of a provider.
fn write(record: &Record) -> Result<()> {
    persist::write_cluster(std::slice::from_ref(record))
}
