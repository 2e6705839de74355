//! SQL functions for key groups.

use pagevault_keystore::Scope;
use pagevault_keystore::record::is_key_group_name;
use pgrx::prelude::*;

use super::keys::{set, texts};
use super::require_key_admin;
use crate::audit::{self, Operation};
use crate::keys::provider::master_keys;
use crate::keys::store::persist;
use crate::keys::usage::key_groups as groups;
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::text;
use crate::policy::label::KEY_GROUP_NAMES;
use crate::preload;
use crate::shmem;
use crate::shmem::secrets::State;
use crate::shred;

const NAME: &str = "name of a key group";

/// Creates a key group, which has no master key yet.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.create_key_group(key_group text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn create_key_group(name: &[u8]) {
    let create = |name: &str| {
        require_key_admin("create a key group")?;
        if !is_key_group_name(name) {
            let message = format!("\"{name}\" cannot be the name of a key group");
            return Err(
                Report::new(PgSqlErrorCode::ERRCODE_INVALID_NAME, message).hint(KEY_GROUP_NAMES)
            );
        }
        groups::create(name)
    };
    audited("create_key_group", name, create).or_raise();
}

/// Drops a key group that nothing is encrypted in, with its key.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drop_key_group(key_group text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn drop_key_group(name: &[u8]) {
    let drop = |name: &str| {
        require_key_admin("drop a key group")?;
        shred::key_group::drop_empty(name)
    };
    audited("drop_key_group", name, drop).or_raise();
}

/// Sets or changes the master key of a key group.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.set_key_group_master_key(key_group text, provider text, master_key text)
    RETURNS void STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn set_key_group_master_key(name: &[u8], provider: &[u8], key: &[u8]) {
    change("set_key_group_master_key", name, (provider, key), set).or_raise();
}

/// Wraps the key of a key group with another master key, too.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.add_key_group_master_key(key_group text, provider text, master_key text)
    RETURNS void STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn add_key_group_master_key(name: &[u8], provider: &[u8], key: &[u8]) {
    change("add_key_group_master_key", name, (provider, key), master_keys::add).or_raise();
}

/// Takes one of several master keys of a key group away.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drop_key_group_master_key(key_group text, provider text, master_key text)
    RETURNS void STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn drop_key_group_master_key(name: &[u8], provider: &[u8], key: &[u8]) {
    change("drop_key_group_master_key", name, (provider, key), master_keys::remove).or_raise();
}

/// Creates a new version of a key group's master key, and wraps the group's key with it.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.rotate_key_group_master_key(key_group text) RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn rotate_key_group_master_key(name: &[u8]) -> i64 {
    const BY: &str = "rotate_key_group_master_key";
    let rotate = |name: &str| {
        require_key_admin("rotate the master key of a key group")?;
        master_keys::rotate(BY, groups::require(name)?.scope())
    };
    audited(BY, name, rotate).or_raise()
}

/// Creates a new key of a key group, and rewraps all data keys under it. No page is touched.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.rotate_key_group_key(key_group text) RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn rotate_key_group_key(name: &[u8]) -> i64 {
    const BY: &str = "rotate_key_group_key";
    let rotate = |name: &str| {
        require_key_admin("rotate the key of a key group")?;
        let version = master_keys::rotate_database_key(BY, groups::require(name)?.scope())?;
        Ok(version.get().into())
    };
    audited(BY, name, rotate).or_raise()
}

/// Runs work about a key group between two lines of the audit trail.
fn audited<T>(
    function: &'static str,
    name: &[u8],
    work: impl FnOnce(&str) -> Result<T>,
) -> Result<T> {
    let name = text::require_utf8(NAME, name)?;
    audit::audited(Operation::function(function).on(text::excerpt(name.as_bytes())), || work(name))
}

/// A change of the master keys of a key group.
fn change(
    function: &'static str,
    name: &[u8],
    (provider, key): (&[u8], &[u8]),
    change: fn(&str, Scope, &str, &str) -> Result<()>,
) -> Result<()> {
    let name = text::require_utf8(NAME, name)?;
    let shown = |name: &[u8]| Some(text::excerpt(name));
    let operation = Operation::function(function).on(text::excerpt(name.as_bytes()));
    let operation = Operation { provider: shown(provider), master_key: shown(key), ..operation };
    audit::audited(operation, || {
        require_key_admin("change the master keys of a key group")?;
        let scope = groups::require(name)?.scope();
        let (provider, key) = texts(provider, key)?;
        change(function, scope, provider, key)
    })
}

/// Rows of the view `pagevault.key_groups`.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn key_group_rows() -> TableIterator<
    'static,
    (
        name!(number, i32),
        name!(key_group, String),
        name!(created_at, TimestampWithTimeZone),
        name!(state, &'static str),
        name!(key_version, Option<i64>),
        name!(databases, Vec<pg_sys::Oid>),
        name!(relation_files, i64),
        name!(data_keys, i64),
    ),
> {
    preload::require_active().or_raise();
    let state = persist::current_cluster_state().or_raise();
    let secrets = &shmem::required().or_raise().secrets;
    let mut contents = groups::contents().or_raise();
    let rows: Vec<_> = state
        .key_groups()
        .map(|(group, known)| {
            let scope = group.scope();
            let newest = state.current_database_key(scope).map(|(version, _)| version);
            let usable = newest.and_then(|version| secrets.state(scope, version));
            let usable = match usable {
                _ if newest.is_none() => "no_master_key",
                Some(State::Ready) => "unlocked",
                Some(State::Revoked) => "revoked",
                Some(State::Refused | State::Locked) | None => "locked",
            };
            let contents = contents.remove(&group).unwrap_or_default();
            let databases: std::collections::BTreeSet<u32> =
                contents.files.iter().map(|file| file.database).collect();
            (
                i32::try_from(group.number()).unwrap_or_default(),
                known.name.clone(),
                pgrx::datum::datetime_support::to_timestamp(known.at as f64),
                usable,
                newest.map(|version| version.get().into()),
                databases.into_iter().map(pg_sys::Oid::from).collect(),
                contents.files.len() as i64,
                contents.keys as i64,
            )
        })
        .collect();
    TableIterator::new(rows)
}

/// Numbers and names of key groups, for other views.
#[pg_extern]
fn key_group_names()
-> TableIterator<'static, (name!(number, pg_sys::Oid), name!(key_group, String))> {
    preload::require_active().or_raise();
    let state = persist::current_cluster_state().or_raise();
    let groups =
        state.key_groups().map(|(group, known)| (group.number().into(), known.name.clone()));
    TableIterator::new(groups.collect::<Vec<_>>())
}
