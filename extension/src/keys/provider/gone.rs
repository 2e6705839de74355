//! Databases that are gone. Their keys stay in the keystore, because backups and WAL of their time
//! need them; the server itself does not, and must not depend on a provider that may be gone as
//! well.

use std::fs;
use std::path::Path;

use pagevault_keystore::{RelFile, Scope};
use pgrx::pg_sys::ForkNumber;

use crate::pg::{compat, process};

/// `DEFAULTTABLESPACE_OID` (pg_tablespace_d.h)
const DEFAULT_TABLESPACE: u32 = 1663;

/// Whether no tablespace has a directory of the database whose scope this is. During recovery that
/// may change; in a binary upgrade it will, for the keys are there before the databases.
pub(crate) fn is_gone(scope: Scope) -> bool {
    !scope.is_cluster()
        && !process::is_binary_upgrade()
        && !is_in(scope.number(), DEFAULT_TABLESPACE)
        && !tablespaces().any(|tablespace| is_in(scope.number(), tablespace))
}

fn is_in(database: u32, tablespace: u32) -> bool {
    let any = RelFile { tablespace, database, relation: 1 };
    let path = compat::relation_path(any, ForkNumber::MAIN_FORKNUM);
    // What cannot be looked for may be there.
    Path::new(&path).parent().is_some_and(|path| path.try_exists().unwrap_or(true))
}

/// Those that are not built in.
fn tablespaces() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("pg_tblspc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
