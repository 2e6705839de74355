//! Sync requests to the checkpointer, syncs without it, and delaying checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::{fs, io};

use pagevault_keystore::Scope;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::process::level_of_failed_sync;
use super::report::Report;
use super::{compat, tablespaces};

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
/// `SyncDataDirectory` (fd.c) only logs it. Like that, this does not mind file systems that cannot
/// sync directories, and does not touch what is not the server's: below the link to a tablespace,
/// only directories of databases of this major version.
pub(crate) fn sync_relation_files() {
    if let Err((path, error)) = sync_databases() {
        let message = format!("could not fsync file \"{}\": {error}", path.display());
        Report::new(PgSqlErrorCode::ERRCODE_IO_ERROR, message).send(level_of_failed_sync());
    }
}

type Failed = (PathBuf, io::Error);

fn sync_databases() -> Result<(), Failed> {
    let mut places = vec![PathBuf::from("base")];
    for link in children(Path::new("pg_tblspc"), is_number)? {
        let tablespace = link.file_name().and_then(|name| name.to_str()?.parse().ok());
        places.extend(tablespace.map(tablespaces::directory));
    }
    let mut directories = vec![PathBuf::from("global")];
    for place in places {
        directories.extend(children(&place, is_number)?);
    }
    for directory in directories {
        for file in children(&directory, is_relation_file)? {
            sync(&file).map_err(|error| (file, error))?;
        }
        match sync(&directory) {
            // `fsync_fname_ext`, fd.c
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBADF | libc::EINVAL)) => {}
            synced => synced.map_err(|error| (directory, error))?,
        }
    }
    Ok(())
}

/// What is in a directory under such names; nothing if the directory does not exist.
fn children(directory: &Path, is_one: fn(&str) -> bool) -> Result<Vec<PathBuf>, Failed> {
    let at = |error| (directory.to_owned(), error);
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at)?;
        if entry.file_name().to_str().is_some_and(is_one) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn is_number(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())
}

/// `relpath.c`: a number, for other forks than the main one an underscore and a name, for other
/// segments than the first one a dot and a number.
fn is_relation_file(name: &str) -> bool {
    let (name, segment) = name.split_once('.').unwrap_or((name, "0"));
    let (number, fork) = name.split_once('_').unwrap_or((name, "fsm"));
    is_number(number) && is_number(segment) && matches!(fork, "fsm" | "vm" | "init")
}

/// What disappears meanwhile needs no sync, nor does what is no file.
fn sync(path: &Path) -> io::Result<()> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match fs::metadata(path) {
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !(found.is_file() || found.is_dir()) => return Ok(()),
        Ok(_) => {}
    }
    match fs::File::open(path) {
        Err(error) if is_gone(&error) => Ok(()),
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
