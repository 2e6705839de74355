//! SQL functions for master keys and database keys.

use pagevault_keystore::Scope;
use pgrx::prelude::*;

use super::{KEY, PROVIDER, audited, audited_with, require_key_admin};
use crate::keys::provider::{master_keys, unlock as unlocking};
use crate::keys::usage::{authenticated, data_keys, wal_switch};
use crate::pg::report::{OrRaise, Result};
use crate::pg::{process, text};
use crate::{preload, roles};

/// Sets or changes the master key of this database.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.set_database_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn set_database_master_key(provider: &[u8], key: &[u8]) {
    let scope = Scope::database(process::my_database());
    audited_with("set_database_master_key", provider, key, || {
        require_key_admin("set the master key of a database")?;
        let (provider, key) = texts(provider, key)?;
        set("set_database_master_key", scope, provider, key)
    })
    .or_raise();
}

/// Sets or changes the master key of the cluster, which is used for all databases without their
/// own.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.set_cluster_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn set_cluster_master_key(provider: &[u8], key: &[u8]) {
    audited_with("set_cluster_master_key", provider, key, || {
        require_key_admin("set the master key of the cluster")?;
        let (provider, key) = texts(provider, key)?;
        set("set_cluster_master_key", Scope::CLUSTER, provider, key)
    })
    .or_raise();
}

/// Wraps the key of this database with another master key, too.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.add_database_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn add_database_master_key(provider: &[u8], key: &[u8]) {
    let scope = Scope::database(process::my_database());
    change("add_database_master_key", scope, (provider, key), master_keys::add).or_raise();
}

/// Wraps the key of the cluster with another master key, too.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.add_cluster_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn add_cluster_master_key(provider: &[u8], key: &[u8]) {
    change("add_cluster_master_key", Scope::CLUSTER, (provider, key), master_keys::add).or_raise();
}

/// Takes one of several master keys of this database away.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drop_database_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn drop_database_master_key(provider: &[u8], key: &[u8]) {
    let scope = Scope::database(process::my_database());
    change("drop_database_master_key", scope, (provider, key), master_keys::remove).or_raise();
}

/// Takes one of several master keys of the cluster away.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drop_cluster_master_key(provider text, master_key text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn drop_cluster_master_key(provider: &[u8], key: &[u8]) {
    let change_it = master_keys::remove;
    change("drop_cluster_master_key", Scope::CLUSTER, (provider, key), change_it).or_raise();
}

/// A change of the set of master keys.
fn change(
    function: &'static str,
    scope: Scope,
    (provider, key): (&[u8], &[u8]),
    change: fn(&str, Scope, &str, &str) -> Result<()>,
) -> Result<()> {
    audited_with(function, provider, key, || {
        require_key_admin("change the master keys of a database or of the cluster")?;
        let (provider, key) = texts(provider, key)?;
        change(function, scope, provider, key)
    })
}

/// The names of a provider and of a master key.
pub(super) fn texts<'a>(provider: &'a [u8], key: &'a [u8]) -> Result<(&'a str, &'a str)> {
    Ok((text::require_utf8(PROVIDER, provider)?, text::require_utf8(KEY, key)?))
}

pub(super) fn set(function: &str, scope: Scope, provider: &str, key: &str) -> Result<()> {
    let is_first = !authenticated::has_master_key();
    master_keys::set(function, scope, provider, key)?;
    if is_first {
        authenticated::log_auto();
    }
    Ok(())
}

/// Creates a new version of this database's master key, and wraps the database key with it.
#[pg_extern]
fn rotate_database_master_key() -> i64 {
    audited("rotate_database_master_key", || {
        require_key_admin("rotate the master key of a database")?;
        let scope = Scope::database(process::my_database());
        master_keys::rotate("rotate_database_master_key", scope)
    })
    .or_raise()
}

/// Creates a new version of the cluster's master key, and wraps the cluster's database key with it.
#[pg_extern]
fn rotate_cluster_master_key() -> i64 {
    audited("rotate_cluster_master_key", || {
        require_key_admin("rotate the master key of the cluster")?;
        master_keys::rotate("rotate_cluster_master_key", Scope::CLUSTER)
    })
    .or_raise()
}

/// Creates a new database key, and rewraps all data keys of this database. No page is touched.
#[pg_extern]
fn rotate_database_key() -> i64 {
    audited("rotate_database_key", || {
        require_key_admin("rotate a database key")?;
        let scope = data_keys::wrapping_scope(process::my_database())?;
        master_keys::rotate_database_key("rotate_database_key", scope)
            .map(|version| version.get().into())
    })
    .or_raise()
}

/// Creates a new WAL key, which is used from now on. Returns its version.
#[pg_extern]
fn rotate_wal_key() -> i64 {
    audited("rotate_wal_key", || {
        require_key_admin("rotate the WAL key")?;
        wal_switch::rotate().map(|version| version.get().into())
    })
    .or_raise()
}

/// Requests all locked and revoked keys from the providers again; raises an error if any of them
/// stays so.
#[pg_extern]
fn unlock() {
    audited("unlock", || {
        preload::require_active()?;
        roles::require_admin("unlock keys")?;
        unlocking::unlock_now()
    })
    .or_raise()
}
