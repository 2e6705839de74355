//! Directories of tablespaces in the file system.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use pgrx::pg_sys;

use super::compat::database_path;

/// What tells a directory from another one at the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Number of the inode.
    pub(crate) inode: u64,
    /// When it was made, in nanoseconds since 1970; 0 if the file system does not tell.
    pub(crate) made: u128,
}

/// Whether a tablespace is part of the data directory: `pg_default` or `pg_global`.
pub(crate) fn is_built_in(tablespace: u32) -> bool {
    matches!(tablespace.into(), pg_sys::DEFAULTTABLESPACE_OID | pg_sys::GLOBALTABLESPACE_OID)
}

/// The directory of this major version in a tablespace. PostgreSQL makes it with the tablespace,
/// and again in recovery if it is missing (`TablespaceCreateDbspace`, tablespace.c).
pub(super) fn directory(tablespace: u32) -> PathBuf {
    // The database is any.
    let of_database = PathBuf::from(database_path(1, tablespace));
    of_database.parent().map(PathBuf::from).unwrap_or_default()
}

/// The directory of a tablespace that is there. `None` if it is not, or that cannot be determined.
pub(crate) fn identity(tablespace: u32) -> Option<Identity> {
    let found = fs::metadata(directory(tablespace)).ok().filter(fs::Metadata::is_dir)?;
    let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Some(Identity { inode: found.ino(), made: made.map_or(0, |at| at.as_nanos()) })
}

/// Tablespaces that have a link, and no directory: their file systems are not mounted.
pub(crate) fn without_directory() -> Vec<u32> {
    let links = fs::read_dir("pg_tblspc").into_iter().flatten().flatten();
    let numbers = links.filter_map(|link| link.file_name().to_str()?.parse().ok());
    let is_missing = |tablespace: &u32| {
        fs::metadata(directory(*tablespace)).is_err_and(|e| e.kind() == ErrorKind::NotFound)
    };
    numbers.filter(is_missing).collect()
}
