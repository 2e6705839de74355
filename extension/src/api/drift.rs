//! The SQL function behind the view `pagevault.drift`.

use pgrx::pg_sys::Oid;
use pgrx::prelude::*;

use crate::commands::drift;
use crate::pg::report::OrRaise;
use crate::preload;

/// Relations that differ from the policy. With `check_files` also pages on disk; this reads all
/// files completely.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drift(check_files boolean)
    RETURNS TABLE (relation regclass, expected text, actual text, reason text, fix text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn drift(
    check_files: bool,
) -> TableIterator<
    'static,
    (
        name!(relation, Oid),
        name!(expected, String),
        name!(actual, String),
        name!(reason, Vec<u8>),
        name!(fix, Vec<u8>),
    ),
> {
    preload::require_active().or_raise();
    let found = drift::find(check_files).or_raise();
    TableIterator::new(found.into_iter().map(|d| {
        let (expected, actual) = (d.expected.to_string(), d.actual.to_string());
        (d.relation, expected, actual, d.reason.into_column(), d.fix.into_column())
    }))
}
