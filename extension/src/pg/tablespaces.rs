//! Directories of tablespaces in the file system.

use std::path::PathBuf;

use super::compat::database_path;

/// The directory of this major version in a tablespace. PostgreSQL makes it with the tablespace,
/// and again in recovery if it is missing (`TablespaceCreateDbspace`, tablespace.c).
pub(super) fn directory(tablespace: u32) -> PathBuf {
    // The database is any.
    let of_database = PathBuf::from(database_path(1, tablespace));
    of_database.parent().map(PathBuf::from).unwrap_or_default()
}
