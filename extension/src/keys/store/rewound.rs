//! What `pg_rewind` with `pagevault-keyring exec` leaves in a data directory if it is killed
//! (`pagevault_keystore::briefing`).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pagevault_keystore::briefing::{KEPT, KEPT_CONTROL, NOT_KEPT, WAITING};
use pgrx::PgSqlErrorCode;

use crate::keystore_dir;
use crate::pg::process;
use crate::pg::report::{Report, Result, code_of};

/// At server start, before key files are read: removes what belongs to a run that has come to its
/// end, with keys that may be destroyed later.
///
/// # Errors
/// If the keystore was replaced, and the control file was not: the keys of the WAL that is there
/// are not all in it.
pub(crate) fn settle() -> Result<()> {
    let root = process::data_directory();
    let unfinished = is_unfinished(&root).map_err(|error| failed(&error))?;
    if unfinished {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "pg_rewind was killed after it had replaced the keystore",
        )
        .detail(format!(
            "It has not written the control file yet. What it had replaced is in \"{KEPT}\"."
        ))
        .hint("Run it again with pagevault-keyring exec, or make a new copy of the source."));
    }
    remove(&root).map_err(|error| failed(&error))
}

fn is_unfinished(root: &Path) -> io::Result<bool> {
    match fs::read(root.join(KEPT).join(KEPT_CONTROL)) {
        Ok(control) => Ok(fs::read(root.join("global/pg_control"))? == control),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn remove(root: &Path) -> io::Result<()> {
    // Under the other name nobody takes a part of it for the whole.
    match fs::symlink_metadata(root.join(KEPT)) {
        Ok(_) => {
            remove_all(&root.join(NOT_KEPT))?;
            fs::rename(root.join(KEPT), root.join(NOT_KEPT))?;
        }
        Err(error) if is_absent(&error) => {}
        Err(error) => return Err(error),
    }
    remove_all(&root.join(NOT_KEPT))?;
    let directory = keystore_dir::path();
    let waits = |name: &OsStr| name.as_bytes().ends_with(WAITING.as_bytes());
    let entries = match fs::read_dir(&directory) {
        Err(error) if is_absent(&error) => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if waits(&entry.file_name()) {
            fs::remove_file(entry.path())?;
        }
    }
    File::open(directory)?.sync_all()?;
    File::open(root)?.sync_all()
}

/// A link is removed itself.
fn remove_all(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if !is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn failed(error: &io::Error) -> Report {
    Report::new(code_of(error), format!("could not remove what pg_rewind has left: {error}"))
}
