//! The SQL function behind the view `pagevault.key_ages`.

use pagevault_keystore::Scope;
use pgrx::datum::datetime_support::to_timestamp;
use pgrx::prelude::*;

use crate::pg::process;
use crate::pg::report::OrRaise;
use crate::preload;
use crate::rotation::ages;

/// Rows of the view `pagevault.key_ages`: keys in use, data keys of this database only.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn key_age_rows() -> TableIterator<
    'static,
    (
        name!(kind, &'static str),
        name!(scope, pg_sys::Oid),
        name!(tablespace, Option<pg_sys::Oid>),
        name!(filenode, Option<pg_sys::Oid>),
        name!(version, i64),
        name!(since, TimestampWithTimeZone),
        name!(due_at, Option<TimestampWithTimeZone>),
    ),
> {
    preload::require_active().or_raise();
    let mut ages = ages::of_cluster().or_raise();
    for home in [Scope::database(process::my_database()), Scope::CLUSTER] {
        ages.extend(ages::of_files(home).or_raise());
    }
    let rows: Vec<_> = ages
        .into_iter()
        .map(|age| {
            let due_at = age.due_at().map(|at| to_timestamp(at as f64));
            (
                age.kind.name(),
                age.scope.number().into(),
                age.file.map(|file| file.tablespace.into()),
                age.file.map(|file| file.relation.into()),
                age.version,
                to_timestamp(age.since as f64),
                due_at,
            )
        })
        .collect();
    TableIterator::new(rows)
}
