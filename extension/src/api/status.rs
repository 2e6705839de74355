//! SQL functions behind the views. None of them handles key material.

use std::collections::BTreeMap;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::wal::is_key_place;
use pagevault_keystore::{Scope, Wrapping};
use pgrx::prelude::*;

use crate::keys::provider::gone::is_gone;
use crate::keys::provider::{admin, helper, unlock};
use crate::keys::store::{directory, escrow, key_groups, persist};
use crate::keys::usage::wal_switch;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::survey::Survey;
use crate::pg::{catalog, relation_files};
use crate::shmem::health::Moment;
use crate::shmem::secrets::State;
use crate::{preload, roles, shmem, verify};

/// The version of this library. That of the extension in a database is older until ALTER EXTENSION.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Row of the view `pagevault.status`.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn status_rows() -> TableIterator<
    'static,
    (
        name!(loaded, bool),
        name!(state, &'static str),
        name!(locked_database_keys, i64),
        name!(unlock_error, Option<String>),
        name!(relation_files, i64),
        name!(data_keys, i64),
        name!(max_data_keys, i64),
        name!(keyring_command, Option<String>),
        name!(unreachable_providers, Option<Vec<String>>),
        name!(last_revalidation_at, Option<TimestampWithTimeZone>),
        name!(wal_encrypted, Option<bool>),
        name!(wal_key_version, Option<i64>),
        name!(wal_error, Option<String>),
        name!(last_escrow_at, Option<TimestampWithTimeZone>),
        name!(database_keys_not_in_escrow, Option<i64>),
        name!(audit_error, Option<String>),
        name!(one_master_key_left, Option<Vec<String>>),
        name!(cryptographic_module, Option<&'static str>),
        name!(fips_certificate, Option<i64>),
        name!(fips_mode, Option<bool>),
        name!(version, &'static str),
    ),
> {
    if preload::require_active().is_err() {
        return TableIterator::once((
            false,
            "not_loaded",
            0,
            None,
            0,
            0,
            0,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            VERSION,
        ));
    }
    // Paths and providers are shown to privileged roles only.
    let privileged = roles::may_see_providers();
    let shared = shmem::required().or_raise();
    let counts = shared.directory.counts().map_err(Report::from).or_raise();
    let mut keys = shared.secrets.list();
    keys.retain(|(scope, _, _)| !is_gone(*scope));
    let withheld = unlock::withheld_keys().into_iter();
    let locked = withheld.filter(|(scope, _)| !is_gone(*scope)).count() as i64;
    let (failure, last_revalidation) = {
        let lock = KeystoreLock::acquire();
        let revalidation = shared.health.last_revalidation(&lock);
        (shared.control.unlock_failure(), revalidation)
    };
    let wal_key = shared.wal.written().sealed();
    let wal_error = wal_switch::problem().or_raise();
    let state = match (keys.is_empty(), locked) {
        (true, _) => "no_master_key",
        (false, 0) => "unlocked",
        (false, _) => "locked",
    };
    let escrow = escrow::mark();
    let recorded = escrow.as_ref().and_then(|_| persist::state_at_hand(Scope::CLUSTER).ok());
    let in_escrow = |scope, version| {
        let key = recorded.as_ref().and_then(|state| state.database_key(scope, version));
        escrow.as_ref().zip(key).is_some_and(|(mark, key)| mark.contains(scope, version, key.check))
    };
    // Keys of key groups are not in bundles.
    let of_ours = keys.iter().filter(|(scope, ..)| scope.key_group().is_none());
    let missing = of_ours.filter(|(scope, version, _)| !in_escrow(*scope, *version)).count();
    let module = pagevault_cipher::module();
    TableIterator::once((
        true,
        state,
        locked,
        Some(failure).filter(|text| privileged && !text.is_empty()),
        i64::from(counts.files),
        i64::from(counts.keys),
        i64::from(persist::most_data_keys(shared, counts.capacity)),
        privileged
            .then(helper::program)
            .and_then(|found| found.ok())
            .map(|path| path.display().to_string()),
        privileged.then(|| unreachable_providers().or_raise()),
        timestamp(last_revalidation),
        Some(wal_key.is_some()),
        wal_key.map(|version| version.get().into()),
        wal_error.filter(|_| privileged),
        escrow.as_ref().map(|mark| pgrx::datum::datetime_support::to_timestamp(mark.made as f64)),
        Some(missing as i64),
        Some(shared.trail.problem()).filter(|text| privileged && !text.is_empty()),
        privileged.then(|| one_master_key_left().or_raise()),
        module.map(|module| module.name),
        module.map(|module| module.certificate.into()),
        module.map(|module| module.is_in_fips_mode),
        VERSION,
    ))
}

/// Names of the providers that did not answer the last request.
fn unreachable_providers() -> Result<Vec<String>> {
    let state = persist::current_cluster_state()?;
    let (health, lock) = (&shmem::required()?.health, KeystoreLock::acquire());
    let is_unreachable =
        |name: &&str| health.entry(&lock, name).is_some_and(|known| !known.reachable);
    Ok(state.providers().map(|(name, _)| name).filter(is_unreachable).map(str::to_owned).collect())
}

/// Scopes with several master keys of which no more than one would unlock them now: the providers
/// of the others have failed at the last request.
fn one_master_key_left() -> Result<Vec<String>> {
    let state = persist::current_cluster_state()?;
    let health = &shmem::required()?.health;
    let mut scopes: Vec<_> = state.database_keys().map(|(scope, ..)| scope).collect();
    scopes.dedup();
    scopes.retain(|scope| !is_gone(*scope));
    let lock = KeystoreLock::acquire();
    let answers =
        |by: &&Wrapping| health.entry(&lock, &by.provider).is_none_or(|known| known.failures == 0);
    scopes.retain(|scope| {
        let newest = state.current_database_key(*scope);
        newest.is_some_and(|(_, key)| {
            !key.others.is_empty() && key.wrappings().filter(answers).count() < 2
        })
    });
    drop(lock);
    let name = |scope: Scope| match scope.is_cluster() {
        true => "cluster".to_owned(),
        false => match catalog::database_name(scope.number()) {
            Some(name) if scope.is_database() => name.to_string(),
            _ => key_groups::describe(scope),
        },
    };
    Ok(scopes.into_iter().map(name).collect())
}

fn timestamp(moment: Moment) -> Option<TimestampWithTimeZone> {
    let seconds = moment as f64 / 1e6;
    (moment != 0).then(|| pgrx::datum::datetime_support::to_timestamp(seconds))
}

/// Rows of the view `pagevault.providers`, from the last requests. No request is sent.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn provider_rows() -> TableIterator<
    'static,
    (
        name!(provider, String),
        name!(kind, String),
        name!(options, pgrx::JsonB),
        name!(in_use, bool),
        name!(reachable, Option<bool>),
        name!(last_success_at, Option<TimestampWithTimeZone>),
        name!(last_error_at, Option<TimestampWithTimeZone>),
        name!(last_error_class, Option<String>),
        name!(last_error, Option<String>),
        name!(consecutive_failures, i64),
        name!(latency_ms, Option<f64>),
        name!(master_key_versions, pgrx::JsonB),
    ),
> {
    preload::require_active().or_raise();
    let state = persist::current_cluster_state().or_raise();
    let health = &shmem::required().or_raise().health;
    let rows: Vec<_> = state
        .providers()
        .map(|(name, provider)| {
            let known = health.entry(&KeystoreLock::acquire(), name);
            let known = known.as_ref();
            let failed = known.filter(|known| known.last_error_at != 0);
            let keys = admin::master_keys_in_use(&state, name);
            let latency = known.map(|known| known.latency_us).filter(|us| *us != 0);
            (
                name.to_owned(),
                provider.kind.clone(),
                pgrx::JsonB(serde_json::from_str(&provider.options).unwrap_or_default()),
                state.uses_provider(name),
                known.map(|known| known.reachable),
                known.and_then(|known| timestamp(known.last_success)),
                failed.and_then(|known| timestamp(known.last_error_at)),
                failed.map(|known| known.last_error_class.clone()),
                failed.map(|known| known.last_error.clone()),
                known.map_or(0, |known| i64::from(known.failures)),
                latency.map(|us| us as f64 / 1000.0),
                pgrx::JsonB(serde_json::json!(keys)),
            )
        })
        .collect();
    TableIterator::new(rows)
}

/// Rows of the view `pagevault.database_keys`.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn database_key_rows() -> TableIterator<
    'static,
    (
        name!(scope, pg_sys::Oid),
        name!(version, i64),
        name!(provider, String),
        name!(master_key, String),
        name!(master_key_version, i64),
        name!(state, &'static str),
        name!(wrapped_at, TimestampWithTimeZone),
        name!(preference, i32),
    ),
> {
    preload::require_active().or_raise();
    let state = persist::current_cluster_state().or_raise();
    let shared = shmem::required().or_raise();
    let wrappings = state.database_keys().flat_map(|(scope, version, key)| {
        (1..).zip(key.wrappings()).map(move |(preference, by)| (scope, version, preference, by))
    });
    let rows: Vec<_> = wrappings
        .map(|(scope, version, preference, key)| {
            let usable = match shared.secrets.state(scope, version) {
                Some(State::Ready) => "unlocked",
                Some(State::Revoked) => "revoked",
                Some(State::Refused | State::Locked) | None => "locked",
            };
            (
                pg_sys::Oid::from(scope.number()),
                version.get().into(),
                key.provider.clone(),
                key.master_key.clone(),
                key.master_version as i64,
                usable,
                pgrx::datum::datetime_support::to_timestamp(key.at as f64),
                preference,
            )
        })
        .collect();
    TableIterator::new(rows)
}

/// Rows of the view `pagevault.data_keys`: the keys of this database.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn data_key_rows() -> TableIterator<
    'static,
    (
        name!(tablespace, pg_sys::Oid),
        name!(filenode, pg_sys::Oid),
        name!(version, i32),
        name!(cipher, String),
        name!(is_current, bool),
        name!(scope, pg_sys::Oid),
        name!(database_key_version, i64),
    ),
> {
    preload::require_active().or_raise();
    let shared = shmem::required().or_raise();
    TableIterator::new(key_rows(&shared.directory).or_raise())
}

type KeyRow = (pg_sys::Oid, pg_sys::Oid, i32, String, bool, pg_sys::Oid, i64);

fn key_rows(directory: &Directory<'_>) -> Result<Vec<KeyRow>> {
    let database = crate::pg::process::my_database();
    let mut rows = Vec::new();
    for file in directory.files()? {
        let file = file?;
        let is_ours = file.file.database == database || file.file.database == 0;
        if !is_ours || is_key_place(file.file) {
            continue;
        }
        for key in directory.keys(file.slot)? {
            let key = key?;
            let cipher = pagevault_cipher::CipherId::try_from(key.cipher);
            rows.push((
                file.file.tablespace.into(),
                file.file.relation.into(),
                key.version.get().into(),
                cipher.map_or_else(|_| format!("unknown ({})", key.cipher), |c| c.to_string()),
                file.current.is_some_and(|(version, _)| version == key.version),
                key.scope.number().into(),
                key.key_version.get().into(),
            ));
        }
    }
    Ok(rows)
}

/// Rows of the view `pagevault.encrypted_databases`: encrypted files of all databases; 0 has those
/// of shared catalogs.
#[pg_extern]
fn encrypted_database_rows()
-> TableIterator<'static, (name!(database, pg_sys::Oid), name!(encrypted_files, i64))> {
    preload::require_active().or_raise();
    let files = encrypted_files(&shmem::required().or_raise().directory).or_raise();
    TableIterator::new(files.into_iter().map(|(database, files)| (database.into(), files)))
}

fn encrypted_files(directory: &Directory<'_>) -> Result<BTreeMap<u32, i64>> {
    let mut files = BTreeMap::new();
    for file in directory.files()? {
        let file = file?;
        let is_encrypted = file.current.is_some() && !is_key_place(file.file);
        // Keys of dropped relations are kept for a while.
        if is_encrypted && relation_files::may_exist(file.file) {
            *files.entry(file.file.database).or_default() += 1;
        }
    }
    Ok(files)
}

/// Rows of the view `pagevault.relations`: all relations with storage, the key of new pages, and
/// the size of the main fork. Waits for no lock.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn relation_rows() -> TableIterator<
    'static,
    (
        name!(relation, pg_sys::Oid),
        name!(data_key_version, Option<i32>),
        name!(cipher, Option<String>),
        name!(sealed_only, bool),
        name!(authenticated, bool),
        name!(bytes, i64),
        name!(key_group, Option<String>),
    ),
> {
    preload::require_active().or_raise();
    let survey = Survey::make();
    let rows: Result<Vec<_>> = survey
        .relations()
        .filter(|facts| facts.is_stored())
        .map(|facts| {
            let version =
                directory::current_version(facts.file).map(|version| i32::from(version.get()));
            let cipher = directory::current_cipher(facts.file).map(|cipher| cipher.to_string());
            let sealed_only = directory::is_sealed_only(facts.file);
            let authenticated = directory::is_authenticated(facts.file);
            let bytes = verify::main_fork_bytes(facts.file)?;
            let group = directory::current_key_group(facts.file).and_then(key_groups::name_of);
            Ok((facts.oid, version, cipher, sealed_only, authenticated, bytes, group))
        })
        .collect();
    TableIterator::new(rows.or_raise())
}
