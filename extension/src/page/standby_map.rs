//! Pages that redo has itself added to a free space map.
//!
//! Changes of free space maps are not in WAL. Redo keeps a map of its own
//! (`XLogRecordPageWithFreeSpace`, freespace.c), which may be longer than the primary's, or exist
//! on this server only. So the images that a rekey job gives WAL do not reach all of its pages.
//! When the end of the job is replayed, the rest is written again here, under the present key. A
//! server that crashes after that replays the end once more, unless the pages have been written.

use pagevault_cipher::page;
use pagevault_keystore::{Record, RelFile};
use pgrx::pg_sys::ForkNumber;

use crate::keys::store::directory;
use crate::keys::usage::cache;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::{buffers, relation_files};

/// Redo has applied these records.
pub(crate) fn replayed(records: &[Record]) {
    for record in records {
        if let Record::Rewriting { file, done: true, .. } = *record {
            rewrite_rest(file);
        }
    }
}

/// A map that cannot be read stays as it is. Nobody relies on it.
fn rewrite_rest(file: RelFile) {
    let current = directory::current_version(file);
    let (mut block, mut stale) = (0, Vec::new());
    let _ = relation_files::each_page(file, ForkNumber::FSM_FORKNUM, |page| {
        let version = page::version_of(page);
        if version != current && page.iter().any(|&byte| byte != 0) {
            stale.push((block, version));
        }
        block += 1;
    });
    let file_of_all = SmgrFile { file, backend: SHARED_BACKEND };
    for (block, version) in stale {
        // The relation may have left a key group that is locked.
        let has_key = version
            .is_none_or(|version| cache::with_page_key(file_of_all, version, |_| ()).is_ok());
        buffers::rewrite_map_in_redo(file, ForkNumber::FSM_FORKNUM, block, has_key);
    }
}
