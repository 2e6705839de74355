//! Pages whose keys were destroyed: what redo, and readers of files that are still in use, get.

use pagevault_cipher::{DataKeyVersion, Fork, Lsn, Page, page};
use pagevault_keystore::RelFile;

use super::io::fork_of;
use crate::keys::store::directory;
use crate::pg::compat::SmgrFile;
use crate::pg::process::data_checksums;

/// Recovery begins at the redo pointer of the last checkpoint. Keys may have been destroyed after
/// that, so redo repeats changes of pages that can no longer be opened. It gets empty pages with an
/// LSN after these changes, and skips the changes. (Users are refused: [`super::access`].)
#[cold]
pub(super) fn blank_for_redo(
    file: RelFile,
    fork: i32,
    version: DataKeyVersion,
    block: u32,
    page: &mut Page,
) {
    let lsn = match fork_of(fork) {
        // Redo changes this map without comparing LSNs (`XLogRecordPageWithFreeSpace`, freespace.c)
        // and writes it; WAL may end before that LSN.
        Fork::FreeSpaceMap => Lsn::INVALID,
        // Redo sets and clears its bits as WAL says (`heap_xlog_visible`, heapam.c), so an empty
        // map has some of the right ones. It also changes the map without comparing LSNs
        // (`visibilitymap_prepare_truncate`, visibilitymap.c): then it is written, and must not
        // have an address that WAL does not reach.
        Fork::VisibilityMap if directory::is_lost_key(file, version) => Lsn::INVALID,
        _ => directory::destroyed_at(file, version).unwrap_or(Lsn::INVALID),
    };
    blank(file, fork, lsn, block, page);
}

/// A page that redo had added to a file, whose keys were destroyed before it was written: zeros on
/// disk ([`crate::pg::buffers`] drops pages of such a file). A restart point after that may be at
/// an earlier checkpoint, so redo repeats changes of it. PostgreSQL would take the page for one
/// that is missing, and end recovery (`XLogReadBufferExtended`, xlogutils.c).
#[cold]
pub(super) fn blank_if_lost(file: SmgrFile, fork: i32, block: u32, page: &mut Page) {
    if !file.is_temporary()
        && fork_of(fork) != Fork::FreeSpaceMap
        && page.iter().all(|byte| *byte == 0)
        && let Some(lsn) = directory::whole_destroyed_at(file.file)
    {
        blank(file.file, fork, lsn, block, page);
    }
}

/// Replaces a page whose key was destroyed. If the file is still in use, its indexes still point to
/// rows of the page: these become dead rows. Redo gets the same.
#[cold]
pub(super) fn blank(file: RelFile, fork: i32, lsn: Lsn, block: u32, page: &mut Page) {
    if is_in_use_after_destruction(file) && fork_of(fork) == Fork::Main {
        page::blank_heap(page, lsn, block, data_checksums());
    } else {
        page::blank(page, lsn, block, data_checksums());
    }
}

/// Whether the file is still in use although earlier keys of it were destroyed. No page under those
/// keys is left, unless the data directory is older than its keystore. This happens to statistics
/// only ([`crate::remnants`]): in such a data directory they are lost, and ANALYZE restores them,
/// whereas an error would make every query fail.
#[cold]
pub(super) fn is_in_use_after_destruction(file: RelFile) -> bool {
    !directory::is_destroyed(file)
}
