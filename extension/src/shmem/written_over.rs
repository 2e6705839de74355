//! Notes of sealed pages that recovery would have overwritten; see [`crate::page::written_over`].
//! No lock, no allocation.

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;

use crate::pg::mapping::{Region, shared_struct};
use crate::sync::{AtomicBool, AtomicU32, Ordering::*};

/// Maximum number of notes: a power of two. Memory is allocated only for entries in use.
pub(crate) const PLACES: usize = 1 << 16;

shared_struct! {
    /// See the functions of [`WrittenOver`].
    pub(crate) struct Memory {
        has_overflowed: AtomicBool,
        is_settled: AtomicBool,
    }
}

shared_struct! {
    /// An entry of the hash table of notes.
    pub(crate) struct Place {
        /// [`FREE`], [`TAKEN`] or the version of the key; written last.
        version: AtomicU32,
        tablespace: AtomicU32,
        database: AtomicU32,
        relation: AtomicU32,
        block: AtomicU32,
    }
}

const FREE: u32 = 0;
/// A process is writing a note here. No version has more than 13 bits.
const TAKEN: u32 = u32::MAX;

/// An unknown key, and a page sealed under it that was to be overwritten.
#[derive(Clone, Copy)]
pub(crate) struct Note {
    pub(crate) file: RelFile,
    pub(crate) version: DataKeyVersion,
    /// The first such page.
    pub(crate) block: u32,
}

/// The notes.
#[derive(Clone, Copy)]
pub(crate) struct WrittenOver {
    memory: Region<Memory, Place>,
}

impl WrittenOver {
    /// Notes in this memory, which has [`PLACES`] entries and is zero at first.
    pub(crate) fn new(memory: Region<Memory, Place>) -> WrittenOver {
        WrittenOver { memory }
    }

    /// Removes all notes, before WAL is replayed again.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    /// Adds a note.
    pub(crate) fn note(&self, file: RelFile, version: DataKeyVersion, block: u32) {
        let mixed =
            u64::from(file.relation) << 13 ^ u64::from(file.database) ^ u64::from(version.get());
        let hash = (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize;
        let places = self.memory.entries;
        for step in 0..places.len() {
            let place = &places[(hash + step) % places.len()];
            match place.version.compare_exchange(FREE, TAKEN, AcqRel, Acquire) {
                Ok(_) => {
                    place.tablespace.store(file.tablespace, Relaxed);
                    place.database.store(file.database, Relaxed);
                    place.relation.store(file.relation, Relaxed);
                    place.block.store(block, Relaxed);
                    place.version.store(version.get().into(), SeqCst);
                    return;
                }
                // The entry in progress may be the same note, which is then stored twice.
                Err(there) => {
                    let is_same = |note: Note| (note.file, note.version) == (file, version);
                    if there == u32::from(version.get()) && read(place).is_some_and(is_same) {
                        return;
                    }
                }
            }
        }
        self.memory.head.has_overflowed.store(true, SeqCst);
    }

    /// Notes that no more WAL can bring a missing key.
    pub(crate) fn settle(&self) {
        self.memory.head.is_settled.store(true, SeqCst);
    }

    /// All notes.
    pub(crate) fn notes(&self) -> impl Iterator<Item = Note> + use<> {
        let places = self.memory.entries.iter();
        places.filter(|place| !matches!(place.version.load(SeqCst), FREE | TAKEN)).filter_map(read)
    }

    /// Whether there was no room for a note.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.memory.head.has_overflowed.load(SeqCst)
    }

    /// Whether no more WAL can bring a missing key.
    pub(crate) fn is_settled(&self) -> bool {
        self.memory.head.is_settled.load(SeqCst)
    }
}

fn read(place: &Place) -> Option<Note> {
    Some(Note {
        version: DataKeyVersion::new(place.version.load(Acquire) as u16)?,
        file: RelFile {
            tablespace: place.tablespace.load(Relaxed),
            database: place.database.load(Relaxed),
            relation: place.relation.load(Relaxed),
        },
        block: place.block.load(Relaxed),
    })
}
