//! Files with keys that were dropped: no catalog has them, and they do not exist. Found by a worker
//! in each database, for the one that forgets keys. Used under the keystore lock.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::directory::FileSlot;

use crate::pg::mapping::Region;

/// A word for each entry of the directory.
pub(crate) struct Dropped(Region<(), AtomicU64>);

impl Dropped {
    /// In zeroed memory with a word for each entry.
    pub(crate) fn new(words: Region<(), AtomicU64>) -> Dropped {
        Dropped(words)
    }

    /// Nothing is known any more.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.0.clear()
    }

    /// Notes that the file in an entry was dropped, with this last version. A file that uses the
    /// entry or the number again has another generation or version. For the next round only, and
    /// until a key of the file is recorded.
    pub(crate) fn note(&self, slot: FileSlot, last: DataKeyVersion) {
        if let Some(word) = self.0.entries.get(slot.index()) {
            word.store(mark(slot, last), Relaxed);
        }
    }

    /// The file in an entry may exist again with the same key: databases move and come back.
    pub(crate) fn clear(&self, slot: FileSlot) {
        if let Some(word) = self.0.entries.get(slot.index())
            && word.load(Relaxed) != 0
        {
            word.store(0, Relaxed);
        }
    }

    /// Whether that was noted.
    pub(crate) fn is_noted(&self, slot: FileSlot, last: DataKeyVersion) -> bool {
        let word = self.0.entries.get(slot.index());
        word.is_some_and(|word| word.load(Relaxed) == mark(slot, last))
    }
}

/// Never 0, because versions are not.
fn mark(slot: FileSlot, last: DataKeyVersion) -> u64 {
    u64::from(slot.generation()) << 16 | u64::from(last.get())
}
