//! Writing the dirty pages of whole files in redo. Not of files whose key is locked or refused:
//! there nothing can be written, and recovery need not stop for this.

use pagevault_keystore::RelFile;

use super::access;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::{buffers, relation_files};

/// Each of these files is opened.
const AT_ONCE: usize = 100;

/// Whether pages of the file can be written.
pub(super) fn is_usable(file: RelFile) -> bool {
    access::check_usable(SmgrFile { file, backend: SHARED_BACKEND }).is_ok()
}

/// Calls `write` for all files that can be written, some at a time.
pub(super) fn of(mut files: Vec<RelFile>, write: impl Fn(&[RelFile])) {
    files.retain(|file| is_usable(*file));
    files.chunks(AT_ONCE).for_each(write);
}

/// Writes the dirty pages of all files.
pub(crate) fn everything() {
    let dirty = (0..buffers::count()).filter_map(buffers::dirty);
    of(existing(dirty.map(|(file, ..)| file).collect()), buffers::flush_files);
}

/// Each of these files once that is not known to be gone.
pub(super) fn existing(mut files: Vec<RelFile>) -> Vec<RelFile> {
    files.sort_unstable();
    files.dedup();
    files.retain(|file| relation_files::may_exist(*file));
    files
}
