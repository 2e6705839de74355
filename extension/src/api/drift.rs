//! What differs from the policy.

use pgrx::pg_sys::Oid;
use pgrx::prelude::*;

use crate::pg::report::OrRaise;
use crate::policy::drift;
use crate::preload;

/// Behind the view `pagevault.drift`; with `check_files` also what is on disk, which is read from
/// end to end.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.drift(check_files boolean)
    RETURNS TABLE (relation regclass, wanted text, why text, actual text, heal text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn drift(
    check_files: bool,
) -> TableIterator<
    'static,
    (
        name!(relation, Oid),
        name!(wanted, String),
        name!(why, Vec<u8>),
        name!(actual, String),
        name!(heal, Vec<u8>),
    ),
> {
    preload::require_active().or_raise();
    let found = drift::find(check_files).or_raise();
    TableIterator::new(
        found
            .into_iter()
            .map(|d| (d.relation, d.wanted, d.why.into_column(), d.actual, d.heal.into_column())),
    )
}
