//! Notes of pages that recovery would have written over; see [`crate::page::written_over`]. No
//! lock, no allocation.

use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_keystore::RelFile;

use crate::pg::mapping;

/// A power of two. The memory is used only where there are that many.
pub(crate) const PLACES: usize = 1 << 16;
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

    /// Adds a note.
    pub(crate) fn note(&self, file: RelFile, epoch: u16, block: u32) {
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

    /// All notes.
    pub(crate) fn notes(&self) -> impl Iterator<Item = Note> + use<> {
        let places = self.words[NOTES..].chunks_exact(STRIDE);
        places.filter(|place| !matches!(place[0].load(SeqCst), FREE | TAKEN)).map(read)
    }

    /// Whether there were more of them than there is room for.
    pub(crate) fn has_overflown(&self) -> bool {
        self.words[OVERFLOW].load(SeqCst) != 0
    }

    /// Whether WAL brings no key any more that is missing.
    pub(crate) fn is_settled(&self) -> bool {
        self.words[SETTLED].load(SeqCst) != 0
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
