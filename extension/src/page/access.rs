//! Refusing access to pages before they are read or added. On the page path, like [`super::io`].

use pagevault_cipher::{Fork, Page, page};

use super::io::{PageFault, fork_of, seal_target};
use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::{cache, interim};
use crate::pg::compat::SmgrFile;
use crate::pg::process::{in_recovery, serves_users};
use crate::shmem;

/// Refuses a sealed file whose key is not available: its pages could not be opened, nor sealed when
/// they are written. If its keys were destroyed, only users are refused.
#[inline]
pub(crate) fn check_usable(file: SmgrFile) -> Result<(), PageFault> {
    match seal_target(file) {
        None => Ok(()),
        Some(target) => match cache::with_page_key(file, target.version, |_| ()) {
            Err(KeyError::Destroyed) if !serves_users() => Ok(()),
            Err(KeyError::Locked { scope })
                if !serves_users() && scope.key_group().is_some_and(interim::is_possible) =>
            {
                Ok(())
            }
            checked => checked.map_err(|error| PageFault::of_key(file, error)),
        },
    }
}

/// Whether pages of a file may be sealed under a locked key, perhaps not that of [`check_usable`]:
/// the file may be in plaintext or under another key by now, and have older pages.
#[inline]
pub(crate) fn may_be_locked(file: SmgrFile) -> bool {
    shmem::any_key_locked() && !file.is_temporary() && directory::is_known(file.file)
}

/// Refuses a page on disk that is sealed under a locked key, if [`super::io::open`] does, or redo
/// needs more of it than that gives.
pub(crate) fn check_not_locked(
    file: SmgrFile,
    fork: i32,
    block: u32,
    on_disk: &Page,
) -> Result<(), PageFault> {
    let Some(version) = page::version_of(on_disk) else { return Ok(()) };
    if fork_of(fork) == Fork::FreeSpaceMap && in_recovery() {
        return Ok(());
    }
    match cache::with_page_key(file, version, |_| ()) {
        Err(KeyError::Locked { scope })
            if fork_of(fork) == Fork::Main && interim::may_be_read(scope, file.file, block) =>
        {
            Ok(())
        }
        Err(error @ KeyError::Locked { .. }) => Err(PageFault::of_key(file, error)),
        _ => Ok(()),
    }
}

/// Refuses users access to a file whose data keys were destroyed.
#[inline]
fn check_not_destroyed(file: SmgrFile) -> Result<(), PageFault> {
    let refused = shmem::anything_destroyed()
        && !file.is_temporary()
        && serves_users()
        && directory::is_destroyed(file.file);
    if refused { Err(PageFault::of_key(file, KeyError::Destroyed)) } else { Ok(()) }
}

/// Refuses users access to a file whose database key is refused, whose key group is locked, or
/// whose data keys were destroyed. Called before reading, and before adding pages, which would then
/// be in shared buffers; costs three flag tests if nothing is refused, locked or destroyed.
#[inline]
pub(crate) fn check_access(file: SmgrFile) -> Result<(), PageFault> {
    if shmem::any_key_refused() || shmem::anything_destroyed() || shmem::any_key_locked() {
        check_not_refused(file)
    } else {
        Ok(())
    }
}

/// Whether pages of a locked group may be in shared buffers, where redo has put them, or be under
/// interim keys. Otherwise they cannot be opened.
#[inline]
pub(crate) fn shows_locked() -> bool {
    shmem::any_key_locked() && (interim::any() || in_recovery())
}

/// Not for recovery, the checkpointer and similar processes: they do not show what they read to
/// users. A process in single-user mode does.
#[cold]
fn check_not_refused(file: SmgrFile) -> Result<(), PageFault> {
    if file.is_temporary() || !serves_users() {
        return Ok(());
    }
    check_not_destroyed(file)?;
    if let Some(scope) = directory::refused_scope(file.file) {
        return Err(PageFault::of_key(file, KeyError::Refused { scope }));
    }
    // Also where no page could be opened: a table may be empty, and be extended. Pages under other
    // keys of the file are refused one by one then.
    let locked = match (shmem::any_key_locked(), shows_locked()) {
        (false, _) => None,
        (true, true) => directory::locked_group(file.file),
        (true, false) => directory::current_locked_group(file.file),
    };
    match locked {
        Some(scope) => Err(PageFault::of_key(file, KeyError::Locked { scope })),
        None => Ok(()),
    }
}
