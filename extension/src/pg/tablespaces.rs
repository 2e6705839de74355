//! Directories of tablespaces in the file system.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use pgrx::pg_sys;

use super::compat::database_path;

/// What tells a directory from another one at the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Number of the inode.
    pub(crate) inode: u64,
    /// When it was made, in nanoseconds since 1970.
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

/// The directory of a tablespace that is there. `None` if it is not, if that cannot be determined,
/// or if the file system does not tell when directories are made.
pub(crate) fn identity(tablespace: u32) -> Option<Identity> {
    let found = fs::metadata(directory(tablespace)).ok().filter(fs::Metadata::is_dir)?;
    let made = found.created().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    (made != 0).then(|| Identity { inode: found.ino(), made })
}

/// Whether a tablespace has a directory.
pub(crate) fn has_directory(tablespace: u32) -> bool {
    directory(tablespace).is_dir()
}

/// Tablespaces outside of `base` and `global`.
pub(crate) fn outside() -> Vec<u32> {
    let links = fs::read_dir("pg_tblspc").into_iter().flatten().flatten();
    links.filter_map(|link| link.file_name().to_str()?.parse().ok()).collect()
}

/// In a tablespace of the data directory: whether the directory of a database is its own, or there
/// is none at all. It may be a link to a file system that is not mounted. `initdb` and CREATE
/// DATABASE write `PG_VERSION` into it; recovery, which makes a missing directory, does not
/// (`recovery_create_dbdir`, dbcommands.c; `TablespaceCreateDbspace`, tablespace.c).
pub(crate) fn has_directory_if_any(database: u32, tablespace: u32) -> bool {
    if tablespace == pg_sys::GLOBALTABLESPACE_OID.to_u32() {
        return true; // with pg_control
    }
    let has_version = |database| {
        let directory = PathBuf::from(database_path(database, tablespace));
        directory.join("PG_VERSION").is_file()
    };
    let is_absent = || {
        fs::symlink_metadata(Path::new(&database_path(database, tablespace)))
            .is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    // That of template1 stands for the directory `base`.
    has_version(pg_sys::Template1DbOid) && (has_version(database) || is_absent())
}
