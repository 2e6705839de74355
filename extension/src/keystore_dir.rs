//! The location of the keystore.

use std::path::PathBuf;

use pagevault_keystore::storage::FileStorage;

use crate::pg::process;
use crate::pg::report::{Report, Result, code_of};

/// Name of the keystore's directory in the data directory.
pub(crate) const NAME: &str = "pagevault";

/// Absolute path of the keystore's directory.
pub(crate) fn path() -> PathBuf {
    process::data_directory().join(NAME)
}

/// The keystore's files.
pub(crate) fn storage() -> Result<FileStorage> {
    FileStorage::new(&path()).map_err(|e| {
        Report::new(code_of(&e), format!("could not open keystore directory \"{NAME}\": {e}"))
            .detail("Nothing was changed.")
    })
}
