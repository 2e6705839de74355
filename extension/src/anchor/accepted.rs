//! Whether a note that a person has written is about this data directory. A former primary may
//! contain what it says as well; and the directory may have been put back since.

use pagevault_keystore::anchor::{ACCEPTED, Note, decode_accepted};
use pagevault_keystore::storage::{FileStorage, Storage};

use crate::keystore_dir;

const LIMIT: u64 = 4096;

/// Whether `pagevault-keyring accept-restore` has written this note for this data directory, in
/// this state or an earlier one. Copies that were made later have the number, too.
pub(super) fn is_here(note: &Note) -> bool {
    let number = || {
        let storage = FileStorage::new(&keystore_dir::path()).ok()?;
        decode_accepted(&storage.read(ACCEPTED, 0, LIMIT).ok()??)
    };
    note.directory.is_some_and(|directory| number() == Some(directory))
}
