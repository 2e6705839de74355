//! Dropped databases. Their keys stay in the keystore, because old backups and WAL need them. The
//! server does not need them, and must not depend on a provider that may no longer exist.

use std::path::Path;

use pagevault_keystore::{RelFile, Scope};
use pgrx::pg_sys::ForkNumber;

use crate::pg::{compat, process, relation_files};

/// Whether no tablespace has a directory of the scope's database. Recovery may create it later;
/// pg_upgrade will, because keys are transferred before databases.
pub(crate) fn is_gone(scope: Scope) -> bool {
    let is_in_none = |tablespaces: Vec<u32>| {
        tablespaces.into_iter().all(|tablespace| !has_directory(scope.number(), tablespace))
    };
    // If they cannot be listed, the directory may exist.
    scope.is_database()
        && !process::is_binary_upgrade()
        && relation_files::tablespaces().is_ok_and(is_in_none)
}

fn has_directory(database: u32, tablespace: u32) -> bool {
    let any = RelFile { tablespace, database, relation: 1 };
    let path = compat::relation_path(any, ForkNumber::MAIN_FORKNUM);
    // If this cannot be determined, the directory may exist.
    Path::new(&path).parent().is_some_and(|path| path.try_exists().unwrap_or(true))
}
