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

use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;

use crate::pg::mapping;
use crate::pg::report::{Report, Result};
use crate::shmem;

/// A power of two. The memory is used only where there are that many.
const PLACES: usize = 1 << 16;
/// Epoch, tablespace, database, file, block. The epoch is written last.
const STRIDE: usize = 5;
const OVERFLOW: usize = 0;
const SETTLED: usize = 1;
const NOTES: usize = 2;

/// Words of memory that [`WrittenOver`] needs.
pub(crate) const WORDS: usize = NOTES + PLACES * STRIDE;

const FREE: u32 = 0;
/// Somebody is about to write a note here. No epoch has more than 13 bits.
const TAKEN: u32 = u32::MAX;

/// A key that was not known when a page sealed under it was to be written over.
#[derive(Clone, Copy)]
pub(crate) struct Note {
    pub(crate) file: RelFile,
    pub(crate) epoch: u16,
    /// The first such page.
    pub(crate) block: u32,
}

/// The notes.
#[derive(Clone, Copy)]
pub(crate) struct WrittenOver {
    words: &'static [AtomicU32],
}

impl WrittenOver {
    /// Notes in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> WrittenOver {
        assert!(words.len() >= WORDS);
        WrittenOver { words }
    }

    /// Forgets everything, before WAL is replayed again.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        mapping::zero(self.words)
    }

    fn note(&self, file: RelFile, epoch: u16, block: u32) {
        let mixed = u64::from(file.relation) << 13 ^ u64::from(file.database) ^ u64::from(epoch);
        let hash = (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize;
        for step in 0..PLACES {
            let at = NOTES + (hash + step) % PLACES * STRIDE;
            let place = &self.words[at..at + STRIDE];
            match place[0].compare_exchange(FREE, TAKEN, AcqRel, Acquire) {
                Ok(_) => {
                    let fields = [file.tablespace, file.database, file.relation, block];
                    for (word, field) in place[1..].iter().zip(fields) {
                        word.store(field, Relaxed);
                    }
                    place[0].store(u32::from(epoch), SeqCst);
                    return;
                }
                // What is being written there may be the same; then it is noted twice.
                Err(there) => {
                    if there == u32::from(epoch) && read(place).file == file {
                        return;
                    }
                }
            }
        }
        self.words[OVERFLOW].store(1, SeqCst);
    }

    /// From now on WAL brings no key that is missing.
    pub(crate) fn settle(&self) {
        self.words[SETTLED].store(1, SeqCst);
    }

    pub(crate) fn notes(&self) -> impl Iterator<Item = Note> + use<> {
        let places = self.words[NOTES..].chunks_exact(STRIDE);
        places.filter(|place| !matches!(place[0].load(SeqCst), FREE | TAKEN)).map(read)
    }

    /// Ends recovery where there were more of them than there is room for: whether all keys have
    /// come is not known.
    pub(crate) fn refuse_overflow(&self) {
        if self.words[OVERFLOW].load(SeqCst) != 0 {
            too_many().fatal();
        }
    }
}

fn read(place: &[AtomicU32]) -> Note {
    let field = |at: usize| place[at].load(Relaxed);
    Note {
        file: RelFile { tablespace: field(1), database: field(2), relation: field(3) },
        epoch: place[0].load(Acquire) as u16,
        block: field(4),
    }
}

/// Whether WAL still has to bring this key.
pub(crate) fn is_unknown(file: RelFile, epoch: u16) -> bool {
    !shmem::has_key(file, epoch) && shmem::destroyed_at(file, epoch).is_none()
}

/// In recovery: a page was about to be written over one that is sealed under a key which is not
/// known. False if no WAL will bring the key any more.
pub(crate) fn note(file: RelFile, epoch: u16, block: u32) -> bool {
    let Some(shared) = shmem::get() else { return true };
    // In this order: who settles it looks at the notes afterwards.
    shared.written_over.note(file, epoch, block);
    shared.written_over.words[SETTLED].load(SeqCst) == 0
}

/// For [`crate::keys::load`]: memory for the notes.
pub(crate) fn map(no_memory: impl Fn(usize, &std::io::Error) -> Report) -> Result<WrittenOver> {
    let words = mapping::shared_words(WORDS, mapping::Kind::Sparse);
    Ok(WrittenOver::new(words.map_err(|e| no_memory(WORDS, &e))?))
}

fn too_many() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        "recovery has met sealed pages of too many relation files whose data keys it did not know",
    )
    .detail(format!("Whether WAL has brought the keys is known of {PLACES} of them, and not of the others."))
    .hint("Restore a base backup that was taken while fewer relations were encrypted or given new keys.")
}
