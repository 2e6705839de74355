//! Files that had pages in plaintext, or under a former key, and of which a primary has proven that
//! none is left.
//!
//! On a server that replays this, the last of them are still on disk, while shared buffers have
//! them as WAL has restored them. These are written before the record counts, so that nobody who
//! looks at the disk (`pagevault.verify()`) takes the former pages for somebody else's. Readers do
//! not need that: they find the pages in shared buffers.
//!
//! When a file is switched to another key, or to plaintext, its dirty pages are written under the
//! state before, and synced, as on the primary (`data_keys::Pages::before_switch`).

use pagevault_keystore::{Record, RelFile};

use super::io;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::{buffers, relation_files};

/// Each of these files is opened.
pub(super) const AT_ONCE: usize = 100;

/// Files whose pages are to be written when the data directory is consistent. Until then nobody
/// looks.
static NOT_WRITTEN: ProcessLocal<Vec<RelFile>> = ProcessLocal::new(Vec::new());

/// Redo is about to apply these records.
pub(crate) fn replaying(records: &[Record]) {
    let is_new = |of: RelFile| {
        records.iter().any(|record| matches!(record, Record::DataKey { file, .. } if *file == of))
    };
    let proven = records.iter().filter_map(|record| match record {
        Record::SealedOnly { file, phase } if !phase.plaintext => Some(*file),
        _ => None,
    });
    let proven = proven.filter(|file| !is_new(*file));
    NOT_WRITTEN.with(|files| files.extend(proven));
    if !process::is_not_consistent_yet() {
        write();
    }
    let switched = records.iter().filter_map(|record| match record {
        Record::Rewriting { file, done: false, .. } => Some(*file),
        _ => None,
    });
    let switched = usable(switched.collect());
    switched.chunks(AT_ONCE).for_each(buffers::flush_and_sync_files);
}

/// Writes the dirty pages of files that were proven until now. Not where the key is locked or
/// refused: then nothing can be written, and recovery need not stop for this.
pub(crate) fn write() {
    flush(NOT_WRITTEN.with(std::mem::take));
}

/// Writes the dirty pages of all files.
pub(crate) fn write_all() {
    let dirty = (0..buffers::count()).filter_map(buffers::dirty);
    let mut files: Vec<_> = dirty.map(|(file, _, _)| file).collect();
    files.sort_unstable();
    files.dedup();
    files.retain(|file| relation_files::may_exist(*file));
    flush(files);
}

fn flush(files: Vec<RelFile>) {
    usable(files).chunks(AT_ONCE).for_each(buffers::flush_files);
}

fn usable(mut files: Vec<RelFile>) -> Vec<RelFile> {
    files.retain(|&file| io::check_usable(SmgrFile { file, backend: SHARED_BACKEND }).is_ok());
    files
}
