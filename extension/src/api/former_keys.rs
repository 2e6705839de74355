//! The SQL function behind the view `pagevault.former_keys`.

use std::collections::BTreeMap;

use pagevault_keystore::Scope;
use pgrx::prelude::*;

use crate::keys::usage::unneeded::{self, Need, Replaced};
use crate::pg::control_file;
use crate::pg::guc::forgetting::Keep;
use crate::pg::report::{OrRaise, Result, internal};
use crate::preload;

/// Kind and scope of keys, and why they are needed.
type Group = (&'static str, Scope, Option<Need>);

/// First and last version, and number of keys.
type Versions = (u32, u32, i64);

/// Rows of the view `pagevault.former_keys`: keys that were replaced, and why this server still has
/// them.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn former_key_rows() -> TableIterator<
    'static,
    (
        name!(kind, &'static str),
        name!(scope, pg_sys::Oid),
        name!(first_version, i64),
        name!(last_version, i64),
        name!(keys, i64),
        name!(needed_for, Option<String>),
    ),
> {
    preload::require_active().or_raise();
    let rows = groups().or_raise().into_iter().map(|((kind, scope, need), versions)| {
        let (first, last, keys) = versions;
        let needed_for = need.map(|need| match need {
            Need::DataKeys => "data keys that it wraps".to_owned(),
            Need::Wal(from) => format!("WAL from {from} on, in pg_wal or for the next start"),
            Need::WalElsewhere => {
                "WAL outside of this server: pagevault.keep_former_wal_keys is -1".to_owned()
            }
            Need::Pages => "pages that may be under it".to_owned(),
        });
        (kind, scope.number().into(), first.into(), last.into(), keys, needed_for)
    });
    TableIterator::new(rows.collect::<Vec<_>>())
}

fn groups() -> Result<BTreeMap<Group, Versions>> {
    let control = control_file::read_again();
    let control = control.ok_or_else(|| internal("pg_control cannot be read".to_owned()))?;
    let mut groups = BTreeMap::new();
    unneeded::each(control.redo, Keep::now(), |key, need| {
        let (kind, scope, version) = match key {
            Replaced::Database(scope, version) => ("database", scope, version.get()),
            Replaced::Wal(version) => ("wal", Scope::CLUSTER, version.get()),
            Replaced::Data(file, version) => ("data", file.scope(), version.get().into()),
        };
        let (first, last, keys) =
            groups.entry((kind, scope, need)).or_insert((version, version, 0));
        *first = version.min(*first);
        *last = version.max(*last);
        *keys += 1;
    })?;
    Ok(groups)
}
