//! SQL functions for the directories of tablespaces: which ones are known to be the right ones.

use std::collections::BTreeMap;

use pgrx::prelude::*;

use super::audited;
use crate::keys::store::places::{self, Places};
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::{relation_files, tablespaces};
use crate::{preload, roles, shmem};

/// Confirms that the directories of all tablespaces are their own: everything is mounted. Returns
/// the number of tablespaces.
#[pg_extern]
fn confirm_tablespaces() -> i64 {
    audited("confirm_tablespaces", || {
        preload::require_active()?;
        roles::require_admin("confirm the directories of tablespaces")?;
        let all = tablespaces::outside();
        if let Some(missing) =
            all.iter().find(|tablespace| !tablespaces::has_directory(**tablespace))
        {
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("the directory of tablespace {missing} does not exist"),
            )
            .hint("Mount it, or drop the tablespace."));
        }
        places::confirm(all.iter().copied())?;
        Ok(all.len() as i64)
    })
    .or_raise()
}

/// Rows of the view `pagevault.tablespaces`. Looks for each file with a key there.
#[pg_extern]
fn tablespace_rows() -> TableIterator<
    'static,
    (
        name!(tablespace, pg_sys::Oid),
        name!(confirmed, bool),
        name!(files, i64),
        name!(missing_files, i64),
    ),
> {
    preload::require_active().or_raise();
    let rows = counts().or_raise().into_iter().map(|(tablespace, (confirmed, files, missing))| {
        (pg_sys::Oid::from(tablespace), confirmed, files, missing)
    });
    TableIterator::new(rows)
}

/// By tablespace: whether it is confirmed, files with keys, and how many of these do not exist.
fn counts() -> Result<BTreeMap<u32, (bool, i64, i64)>> {
    let places = Places::now()?;
    let all = tablespaces::outside().into_iter();
    let mut counts: BTreeMap<_, _> =
        all.map(|tablespace| (tablespace, (places.is_confirmed(tablespace), 0, 0))).collect();
    for info in shmem::required()?.directory.files()? {
        let file = info?.file;
        if let Some((_, files, missing)) = counts.get_mut(&file.tablespace) {
            *files += 1;
            *missing += i64::from(!relation_files::may_have_any_fork(file));
        }
    }
    Ok(counts)
}
