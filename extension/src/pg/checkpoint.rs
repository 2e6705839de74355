//! Sync requests to the checkpointer, syncs without it, and delaying checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::{fs, io};

use pagevault_keystore::Scope;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::compat;
use super::process::level_of_failed_sync;
use super::report::Report;

/// Makes the next checkpoint sync the key log of `scope`. Call before the WAL record is inserted,
/// so that a checkpoint whose redo pointer is after that record has the request.
pub(crate) fn request_sync(scope: Scope) {
    let tag = compat::keystore_tag(scope);
    // SAFETY: the tag is copied. With `retryOnError` the call waits for room in the checkpointer's
    // queue instead of failing; without a checkpointer, this process keeps the request.
    unsafe {
        pg_sys::RegisterSyncRequest(&raw const tag, pg_sys::SyncRequestType::SYNC_REQUEST, true)
    };
}

/// Syncs all relation files. If one cannot be synced, that is a PANIC, unless `data_sync_retry` is
/// on, as in a checkpoint: the kernel reports it once, and the pages may be lost.
///
/// `SyncDataDirectory` (fd.c) only logs it.
pub(crate) fn sync_relation_files() {
    for directory in ["global", "base", "pg_tblspc"] {
        if let Err((path, error)) = sync_below(Path::new(directory)) {
            let message = format!("could not fsync file \"{}\": {error}", path.display());
            Report::new(PgSqlErrorCode::ERRCODE_IO_ERROR, message).send(level_of_failed_sync());
        }
    }
}

/// Syncs the files and directories below a directory, and itself. What disappears meanwhile needs
/// no sync.
fn sync_below(directory: &Path) -> Result<(), (PathBuf, io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        |error| (path, error)
    };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(at(directory))?,
    };
    for entry in entries {
        let path = entry.map_err(at(directory))?.path();
        // Follows the links to tablespaces.
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err((path, error)),
            Ok(found) if found.is_dir() => sync_below(&path)?,
            Ok(_) => sync(&path).map_err(at(&path))?,
        }
    }
    sync(directory).map_err(at(directory))
}

fn sync(path: &Path) -> io::Result<()> {
    match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        file => file?.sync_all(),
    }
}

/// While this lives, no checkpoint writes its record: none that begins meanwhile, and none that
/// has begun, unless it has passed its last look at these flags (`CreateCheckPoint`, xlog.c). In a
/// transaction. No shared buffer may be changed meanwhile, because `MarkBufferDirtyHint` (bufmgr.c)
/// sets and clears the same flag.
pub(crate) struct CheckpointDelay(());

const DELAY: i32 = (pg_sys::DELAY_CHKPT_START | pg_sys::DELAY_CHKPT_COMPLETE) as i32;

impl CheckpointDelay {
    pub(crate) fn begin() -> Self {
        // SAFETY: MyProc is set in every process that runs transactions; only this process changes
        // its flags.
        unsafe { (*pg_sys::MyProc).delayChkptFlags |= DELAY };
        fence(Ordering::SeqCst);
        Self(())
    }
}

impl Drop for CheckpointDelay {
    fn drop(&mut self) {
        fence(Ordering::SeqCst);
        // SAFETY: as in `begin`. The end of a transaction clears the flags itself.
        unsafe { (*pg_sys::MyProc).delayChkptFlags &= !DELAY };
    }
}
