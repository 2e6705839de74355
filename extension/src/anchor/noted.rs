//! Whether the cluster of this data directory has ever had a note. If so, a store that says that
//! there is none has lost it, or is another one: an empty mount point, a Vault that was set up
//! again. For all that is known, the data directory may be an older one.
//!
//! A mark in the data directory says so, whatever is in it. Copies have the mark, too: older ones
//! that are put back, base backups, standbys. It is made after the first note. A crash in between
//! leaves a note without a mark, and whoever reads the note next makes up for it; the other way
//! round, a cluster would be without an anchor until somebody runs a command.

use pagevault_keystore::anchor::{ACCEPTED, NOTED, NOTED_TEXT};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::replace_file;
use crate::keystore_dir;
use crate::pg::report::Report;

/// Whether there was a note, of a server or of `pagevault-keyring accept-restore`.
pub(super) fn is_known() -> bool {
    is_there(NOTED) || is_there(ACCEPTED)
}

/// There is a note. That the mark cannot be written is no reason to stop.
pub(super) fn keep() {
    if is_there(NOTED) {
        return;
    }
    if let Err(error) = replace_file(NOTED, NOTED_TEXT) {
        Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not write the file pagevault/{NOTED}: {error}"),
        )
        .detail("It says that this cluster has a note in its anchor: without the file, a lost note is taken for one that was never there.")
        .send(PgLogLevel::WARNING);
    }
}

/// A file that cannot be looked up counts: an error must not make a cluster a new one.
fn is_there(name: &str) -> bool {
    keystore_dir::path().join(name).try_exists().unwrap_or(true)
}
