//! Sealed pages that recovery would write over while the key that they are sealed under is not
//! known.
//!
//! Redo restores pages from full-page images without reading them, so it may have a page for a file
//! in plaintext, or under an older key, whose page on disk is sealed under a key that is not known.
//! In a base backup that one is newer than what is replayed, and WAL brings the key before the data
//! directory is consistent. With a keystore older than the data directory it never does, and the
//! file would become plaintext, or be written under a key that was given up. In both the page on
//! disk stays, as it does under a stand-in and for the same reason ([`super::stand_ins`]): before
//! the key comes nothing is replayed that it does not hold already, and if the key does not come,
//! all is replayed again with the right keystore. Whoever leaves a page so notes the key here, and
//! [`super::stand_ins::require_none`] asks whether all have come. From then on it is an error.
//!
//! The notes are in shared memory, for the checkpointer and the background writer write as well. No
//! lock, no allocation.

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;

use crate::keys::store::directory;
use crate::pg::report::Report;
use crate::shmem;
use crate::shmem::written_over::PLACES;

/// Whether WAL still has to bring this key.
pub(crate) fn is_unknown(file: RelFile, version: DataKeyVersion) -> bool {
    !directory::has_key(file, version) && directory::destroyed_at(file, version).is_none()
}

/// In recovery: a page was about to be written over one that is sealed under a key which is not
/// known. False if no WAL will bring the key any more.
pub(crate) fn note(file: RelFile, version: DataKeyVersion, block: u32) -> bool {
    let Some(shared) = shmem::get() else { return true };
    // In this order: who settles it looks at the notes afterwards.
    shared.written_over.note(file, version, block);
    !shared.written_over.is_settled()
}

/// Ends recovery where there were more of them than there is room for: whether all keys have come
/// is not known.
pub(crate) fn refuse_overflow() {
    if shmem::get().is_some_and(|shared| shared.written_over.has_overflown()) {
        too_many().fatal();
    }
}

fn too_many() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        "recovery has read encrypted pages of too many relation files whose data keys it did not know",
    )
    .detail(format!("Whether WAL has brought the keys is known of {PLACES} of them, and not of the others."))
    .hint("Restore a base backup that was taken while fewer relations were encrypted or given new keys.")
}
