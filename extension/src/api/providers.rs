//! Key providers in SQL.

use pgrx::prelude::*;
use pgrx::{JsonB, PgSqlErrorCode};

use super::require_key_admin;
use crate::keys::provider_admin;
use crate::pg::report::{OrRaise, Report};
use crate::{preload, roles};

/// Makes a key provider known. Options are checked, the provider is not asked for anything yet.
#[pg_extern]
fn add_provider(name: &str, kind: &str, options: JsonB) {
    require_key_admin("add a key provider")
        .and_then(|()| provider_admin::add(name, kind, &options.0))
        .or_raise();
}

/// Gives a provider other options, after proving that every key it wrapped still unwraps.
#[pg_extern]
fn alter_provider(name: &str, options: JsonB) {
    require_key_admin("alter a key provider")
        .and_then(|()| provider_admin::alter(name, &options.0))
        .or_raise();
}

/// Forgets a provider that wraps nothing.
#[pg_extern]
fn drop_provider(name: &str) {
    require_key_admin("drop a key provider").and_then(|()| provider_admin::drop(name)).or_raise();
}

/// Has a provider looked at from its options to a round trip with each of its master keys in use, or
/// with `key`. What is not as it should be is a row, not an error.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.check_provider(name text, key text DEFAULT NULL)
    RETURNS TABLE (master_key text, what text, ok boolean, result text, hint text)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn check_provider(
    name: Option<&str>,
    key: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(master_key, Option<String>),
        name!(what, String),
        name!(ok, bool),
        name!(result, String),
        name!(hint, Option<String>),
    ),
> {
    let lines = preload::require_active()
        .and_then(|()| roles::require_admin("check a key provider"))
        .and_then(|()| name.ok_or_else(no_name))
        .and_then(|name| provider_admin::check(name, key))
        .or_raise();
    let rows: Vec<_> = lines
        .into_iter()
        .map(|line| (line.master_key, line.what, line.ok, line.result, line.hint))
        .collect();
    TableIterator::new(rows)
}

fn no_name() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
        "name of a key provider must not be null",
    )
}
