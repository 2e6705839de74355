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

use super::flushing;
use crate::pg::buffers;
use crate::pg::process::{self, ProcessLocal};

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
    flushing::of(switched.collect(), buffers::flush_and_sync_files);
}

/// Writes the dirty pages of files that were proven until now.
pub(crate) fn write() {
    flushing::of(NOT_WRITTEN.with(std::mem::take), buffers::flush_files);
}
