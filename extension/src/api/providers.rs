//! SQL functions for key providers.

use pgrx::prelude::*;
use pgrx::{AnyElement, PgSqlErrorCode};

use super::{KEY, PROVIDER, require_key_admin};
use crate::audit::{self, Operation};
use crate::keys::provider::admin;
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::text;
use crate::{preload, roles};

/// Adds a key provider. Its options are checked; no request is sent to it yet.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.add_provider(provider text, kind text, options jsonb) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn add_provider(name: &[u8], kind: &[u8], options: AnyElement) {
    let add = || {
        require_key_admin("add a key provider")?;
        let (name, kind) = (text::require_utf8(PROVIDER, name)?, text::require_utf8("kind", kind)?);
        admin::add(name, kind, &text::json("options", options)?)
    };
    audited("add_provider", name, add).or_raise();
}

/// Changes the options of a provider, after checking that every key it wrapped can still be
/// unwrapped.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.alter_provider(provider text, options jsonb) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn alter_provider(name: &[u8], options: AnyElement) {
    let alter = || {
        require_key_admin("alter a key provider")?;
        admin::alter(text::require_utf8(PROVIDER, name)?, &text::json("options", options)?)
    };
    audited("alter_provider", name, alter).or_raise();
}

/// Removes a provider that wraps no key.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drop_provider(provider text) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn drop_provider(name: &[u8]) {
    audited("drop_provider", name, || {
        require_key_admin("drop a key provider")?;
        admin::drop(text::require_utf8(PROVIDER, name)?)
    })
    .or_raise();
}

fn audited<T>(
    function: &'static str,
    provider: &[u8],
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let provider = text::excerpt(provider);
    audit::audited(Operation { provider: Some(provider), ..Operation::function(function) }, work)
}

/// Checks a provider from its options to a round trip with each of its master keys in use, or with
/// `key`. A failed check is a row, not an error.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.check_provider(provider text, master_key text DEFAULT NULL)
    RETURNS TABLE (master_key text, item text, ok boolean, result text, hint text)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn check_provider(
    name: Option<&[u8]>,
    key: Option<&[u8]>,
) -> TableIterator<
    'static,
    (
        name!(master_key, Option<String>),
        name!(item, String),
        name!(ok, bool),
        name!(result, String),
        name!(hint, Option<String>),
    ),
> {
    let lines = preload::require_active()
        .and_then(|()| roles::require_admin("check a key provider"))
        .and_then(|()| name.ok_or_else(no_name))
        .and_then(|name| {
            let key = key.map(|key| text::require_utf8(KEY, key)).transpose()?;
            admin::check(text::require_utf8(PROVIDER, name)?, key)
        })
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
