//! Replaces the keystore of `pg_rewind`'s target in one step.
//!
//! `pg_rewind` replaces the files of the target's keystore by the source's. That is correct: keys
//! that the target made after the timelines diverged must go, because the source may have made
//! other keys with the same versions. But `pg_rewind` does so file by file, while it still needs
//! the target's WAL. If it were killed in between, the target's WAL could not be read any more, and
//! the target could not be rewound again.
//!
//! So the new files are first written next to the target's, under other names. When `pg_rewind` is
//! about to write the control file, which is its last step, they are checked and renamed. Until it
//! has written that, the old files are kept, in the directory [`KEPT`]: `pagevault-keyring exec`
//! puts them back if `pg_rewind` was killed in between, and is run again.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagevault_keystore::briefing::{KEPT, KEPT_CONTROL, KEPT_FILES, KEPT_MADE, NOT_KEPT, WAITING};
use pagevault_keystore::{Scope, log};

use crate::raw;

struct Changes {
    replaced: BTreeSet<OsString>,
    removed: BTreeSet<OsString>,
    /// The changes have been made.
    done: bool,
}

static CHANGES: Mutex<Changes> =
    Mutex::new(Changes { replaced: BTreeSet::new(), removed: BTreeSet::new(), done: false });

fn changes() -> MutexGuard<'static, Changes> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The path for the new content of a keystore file. `None` if the path has no file name.
pub(crate) fn replace(path: &[u8]) -> Option<CString> {
    let name = Path::new(OsStr::from_bytes(path)).file_name()?.to_owned();
    let mut changes = changes();
    changes.removed.remove(&name);
    changes.replaced.insert(name);
    CString::new([path, WAITING.as_bytes()].concat()).ok()
}

/// Remembers that a file of the keystore is to be removed. `pg_rewind` may already have begun to
/// replace it: it first makes a file, and removes it if the source does not have it any more.
///
/// # Errors
///
/// If the file that was begun cannot be removed.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let mut changes = changes();
    if changes.replaced.remove(name) {
        remove_now(&waiting(directory, name))?;
    }
    changes.removed.insert(name.to_owned());
    Ok(())
}

/// Replaces the old keystore by the new one.
///
/// # Errors
///
/// Text: the new keystore is incomplete, or a system call failed.
pub(crate) fn commit(target: &Path) -> Result<(), String> {
    let mut changes = changes();
    if changes.done {
        return Ok(());
    }
    let directory = target.join("pagevault");
    check(&directory, &changes)?;
    // A file system may have no hard links. Then the old files are not kept.
    if keep(target, &directory, &changes).is_err() {
        let _ = discard(target);
    }
    let done = || -> io::Result<()> {
        for name in &changes.replaced {
            File::open(waiting(&directory, name))?.sync_all()?;
        }
        for name in &changes.replaced {
            fs::rename(waiting(&directory, name), directory.join(name))?;
        }
        for name in &changes.removed {
            remove_now(&directory.join(name))?;
        }
        File::open(&directory)?.sync_all()
    };
    done().map_err(|error| format!("could not replace the keystore of the target: {error}"))?;
    changes.done = true;
    Ok(())
}

/// Called when the control file was written: the target has the new keystore.
pub(crate) fn settle(target: &Path) {
    if changes().done {
        // What is left is of another control file, and is never put back.
        let _ = discard(target);
    }
}

/// Keeps what is about to be replaced, and for which control file.
fn keep(target: &Path, directory: &Path, changes: &Changes) -> io::Result<()> {
    discard(target)?;
    let new = target.join(NOT_KEPT);
    let files = new.join(KEPT_FILES);
    fs::create_dir_all(&files)?;
    let mut made = Vec::new();
    for name in changes.replaced.union(&changes.removed) {
        match fs::hard_link(directory.join(name), files.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                made.extend_from_slice(name.as_bytes());
                made.push(0);
            }
            linked => linked?,
        }
    }
    fs::write(new.join(KEPT_MADE), made)?;
    fs::write(new.join(KEPT_CONTROL), fs::read(target.join("global/pg_control"))?)?;
    for path in [new.join(KEPT_MADE), new.join(KEPT_CONTROL), files, new.clone()] {
        File::open(path)?.sync_all()?;
    }
    fs::rename(&new, target.join(KEPT))?;
    File::open(target)?.sync_all()
}

/// Removes what was kept.
fn discard(target: &Path) -> io::Result<()> {
    for name in [KEPT, NOT_KEPT] {
        match fs::remove_dir_all(target.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Removes a file by the system call, not by this library's `unlink`.
fn remove_now(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    if raw::unlinkat(libc::AT_FDCWD, &path, 0) == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Checks that the new files are a keystore, all with the same identity.
fn check(directory: &Path, changes: &Changes) -> Result<(), String> {
    let cluster = log::file_name(Scope::CLUSTER);
    if !changes.replaced.contains(OsStr::new(&cluster)) {
        return Err("the source has no keystore, or it was not copied".to_owned());
    }
    let id = identity(&directory.join(&cluster), Scope::CLUSTER)?;
    for name in &changes.replaced {
        let Some(scope) = name.to_str().and_then(log::scope_of) else { continue };
        if identity(&waiting(directory, name), scope)? != id {
            return Err(format!(
                "key file \"{}\" of the source is of another keystore than the target's",
                name.display()
            ));
        }
    }
    Ok(())
}

/// The keystore identity in a key log.
fn identity(path: &Path, scope: Scope) -> Result<[u8; 16], String> {
    let unreadable = |error: &dyn std::fmt::Display| {
        format!("key file \"{}\" is not readable: {error}", path.display())
    };
    let bytes = fs::read(path).map_err(|error| unreadable(&error))?;
    let contents = log::replay(&bytes, scope).map_err(|error| unreadable(&error))?;
    Ok(contents.position.keystore_id)
}

fn waiting(directory: &Path, name: &OsStr) -> PathBuf {
    directory.join(OsString::from_vec([name.as_bytes(), WAITING.as_bytes()].concat()))
}
