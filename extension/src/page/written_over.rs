//! Sealed pages that recovery would overwrite before it knows their key.
//!
//! Redo restores pages from full-page images without reading them. So it may be about to write a
//! page in plaintext, or under an older key, over a page on disk that is sealed under an unknown
//! key. In a base backup the page on disk is newer than the replayed WAL, and WAL brings the key
//! before the data directory is consistent. If instead the keystore is older than the data
//! directory, the key never comes, and the file would become plaintext, or be written under a
//! retired key. In both cases the page on disk stays, for the same reason as under a placeholder
//! ([`super::placeholders`]): it already contains every change that is replayed before the key; and
//! if the key never comes, everything is replayed again with the right keystore. The key is noted
//! here, and [`super::placeholders::require_none`] checks that all noted keys have arrived. After
//! that, such a page is an error, unless `ignore_invalid_pages` is on.
//!
//! No such page is one that only names an unknown key ([`super::misnamed`]).
//!
//! The notes are in shared memory, because the checkpointer and the background writer write pages
//! too. No lock, no allocation.

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;

use crate::keys::store::directory;
use crate::pg::report::Report;
use crate::shmem;
use crate::shmem::written_over::PLACES;

/// Whether this key is still to come in WAL. Not an interim key of a group that has ended: a file
/// that has left the group may have such pages until redo's are written, and has no tombstone.
pub(crate) fn is_unknown(file: RelFile, version: DataKeyVersion) -> bool {
    !directory::has_key(file, version)
        && directory::destroyed_at(file, version).is_none()
        && !directory::is_interim_of_ended_group(file, version)
}

/// In recovery: notes that a page was to be written over one that is sealed under an unknown key.
/// False if no more WAL can bring the key.
pub(crate) fn note(file: RelFile, version: DataKeyVersion, block: u32) -> bool {
    let Some(shared) = shmem::get() else { return true };
    // In this order: after settling, the other side reads the notes.
    shared.written_over.note(file, version, block);
    !shared.written_over.is_settled()
}

/// Ends recovery if there was no room for all notes, so that it is unknown whether all keys have
/// arrived.
pub(crate) fn refuse_overflow() {
    if shmem::get().is_some_and(|shared| shared.written_over.has_overflowed()) {
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
