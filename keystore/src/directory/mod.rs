//! The directory: the keys of each relation file, in shared memory, for all processes of a server.
//!
//! ```text
//! header   16 words     files, keys, spare body, floors (how often one was raised),
//!                       reuses, free file, free files, free key, free keys
//! buckets  2^n words    newest file of each hash chain
//! files    15 words     tablespace, database, relation,
//!                       phase (version | cipher << 16 | plaintext << 24 | mixed << 25 |
//!                       sealed only << 26), next,
//!                       newest key, destroyed (last version | cipher << 16 | count << 24),
//!                       its LSN (low, high), rewriting (done | plaintext << 1 | version << 2),
//!                       its LSN in every other count, sealed only (plaintext | version << 1),
//!                       generation (odd: free), earliest (plaintext | version << 1)
//! keys     4 words      meta (version | cipher << 16 | length << 24), next, sequence, body
//! bodies   25 words     scope, key version, wrapped key; one more than there are keys
//! ```
//!
//! References are indexes plus one, so that zeroed memory is an empty directory. Readers need no
//! lock: an entry is written first and linked last (release); a reader follows links (acquire) and
//! sees complete entries.
//!
//! Entries of files that are gone are used again ([`Directory::forget`]). Such an entry is
//! unlinked, and its own link stays, so that a reader on it goes on. Before it is written again,
//! the *reuses* are counted: a reader whose search may have met it sees that, and searches again. A
//! [`FileSlot`] has the generation of its entry, which changes when the entry becomes free, and
//! whatever is read through an older slot is [`DirectoryError::Gone`].
//!
//! Changes in place are one word each (`phase`, `rewriting`, `sealed only`, `earliest`,
//! `destroyed`), except for a wrapping, which has 25. A new wrapping is written to the *spare*
//! body; then the key is pointed to it, and its old body becomes the spare. So a writer that sleeps
//! or dies in between blocks no reader. If the body that a reader copies is overwritten meanwhile,
//! the reader detects that the key's body or sequence has changed, and reads again. It gives up
//! with [`DirectoryError::Busy`] after [`RETRIES`] attempts. That takes as many rewraps of this one
//! key, each during the copy of 100 bytes, so it happens only if a writer misbehaves. Then an error
//! is right, and plaintext would be wrong.
//!
//! The entry of a key that was destroyed, or forgotten while its file is in use, stays, with a
//! length of 0. Its body is overwritten with zeros in place, after its sequence was changed, so
//! that a reader that is copying it detects the change.
//!
//! There is one writer at a time: callers of `init`, `apply`, `insert`, `enter`, `destroy`,
//! `forget`, `forget_versions` and `replace_wrapping` hold an exclusive lock. If a writer is killed
//! between two stores, PostgreSQL restarts all processes with new shared memory, and the directory
//! is initialised and loaded again; nothing in it survives.

mod check;
mod layout;
mod read;
mod reuse;
mod write;

use pagevault_cipher::{DataKeyVersion, KeyVersion};

use self::layout::*;
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::sync::{AtomicU32, Ordering};

/// Attempts of a reader before it reports [`DirectoryError::Busy`].
pub const RETRIES: usize = 64;
/// Searches of a reader during each of which an entry was used again, before it reports that.
/// Callers take an error for a file without a key, so it must not happen: each use takes a record
/// in WAL.
const SEARCHES: usize = 1 << 20;
/// Highest capacity of a directory, in keys.
pub const MAX_CAPACITY: u32 = 1 << 24;

/// Why the directory cannot answer or apply a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// No room for another key or file.
    #[error("key directory is full with {capacity} keys")]
    Full {
        /// Capacity in keys.
        capacity: u32,
    },
    /// Another key for a version that has one.
    #[error("relation file {file} has another data key of version {version}")]
    KeyReplaced {
        /// Which file.
        file: RelFile,
        /// Which version.
        version: DataKeyVersion,
    },
    /// No key for this version.
    #[error("relation file {file} has no data key of version {version}")]
    NoKey {
        /// Which file.
        file: RelFile,
        /// Which version.
        version: DataKeyVersion,
    },
    /// The record is outside its limits.
    #[error("record cannot be stored: {0}: {1}")]
    Record(&'static str, &'static str),
    /// What was to be read changed during each attempt to read it. Try again.
    #[error("key is being rewrapped, try again")]
    Busy,
    /// The file's keys were forgotten since its slot was found.
    #[error("relation file is gone, and its keys are forgotten")]
    Gone,
    /// The memory is too small, or was overwritten.
    #[error("key directory in shared memory is damaged")]
    Damaged,
}

type Result<T> = std::result::Result<T, DirectoryError>;

/// The place of a file in the directory. Valid until the file is forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileSlot {
    index: u32,
    generation: u32,
}

impl FileSlot {
    /// The number of the entry, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// Which use of the entry it is; no other use has the same before it wraps.
    #[must_use]
    pub fn generation(self) -> u32 {
        self.generation
    }
}

/// What [`Directory::key`] returns beside the wrapped bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyInfo {
    /// Version of the key.
    pub version: DataKeyVersion,
    /// Cipher number.
    pub cipher: u8,
    /// Scope of the database key that wraps.
    pub scope: Scope,
    /// Version of the database key that wraps.
    pub key_version: KeyVersion,
    /// Length of the wrapped key in bytes.
    pub length: usize,
}

/// How pages of a file are written, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writing {
    /// Version and cipher, `None` for plaintext.
    pub current: Option<(DataKeyVersion, u8)>,
    /// Pages on disk may be in another state.
    pub mixed: bool,
}

/// What [`Directory::files`] returns for a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// The slot of the file.
    pub slot: FileSlot,
    /// Which file.
    pub file: RelFile,
    /// Version and cipher for writes, `None` for plaintext.
    pub current: Option<(DataKeyVersion, u8)>,
    /// State of the file.
    pub phase: Phase,
    /// The last version whose key was destroyed.
    pub destroyed: Option<DataKeyVersion>,
}

impl FileInfo {
    /// Whether the file is encrypted under a destroyed key, so that nothing in it can be read.
    pub fn is_destroyed(&self) -> bool {
        self.phase.current().is_some_and(|version| Some(version) <= self.destroyed)
    }
}

/// How full the directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Files.
    pub files: u32,
    /// Keys.
    pub keys: u32,
    /// Capacity in files, and in keys.
    pub capacity: u32,
}

/// The directory as one process sees it.
#[derive(Debug, Clone, Copy)]
pub struct Directory<'a> {
    words: &'a [AtomicU32],
    capacity: u32,
    buckets: u32,
}

impl<'a> Directory<'a> {
    /// Words of shared memory for `capacity` keys and as many files; about 170 bytes each. A
    /// capacity above [`MAX_CAPACITY`] counts as that.
    pub const fn words_needed(capacity: u32) -> usize {
        let capacity = if capacity > MAX_CAPACITY { MAX_CAPACITY } else { capacity } as usize;
        HEADER_WORDS
            + buckets(capacity as u32) as usize
            + capacity * (FILE_WORDS + KEY_WORDS)
            + (capacity + 1) * BODY_WORDS
    }

    /// Creates an empty directory. No other process may access the words yet.
    pub fn init(words: &'a [AtomicU32], capacity: u32) -> Result<Self> {
        if capacity > MAX_CAPACITY || words.len() < Self::words_needed(capacity) {
            return Err(DirectoryError::Damaged);
        }
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Self::init_zeroed(words, capacity)
    }

    /// Like [`Directory::init`] in memory that is known to be zero, such as a new mapping: writes
    /// the header only, so that memory is used only for existing keys.
    pub fn init_zeroed(words: &'a [AtomicU32], capacity: u32) -> Result<Self> {
        let this = Self::at(words, capacity)?;
        this.word(head::SPARE)?.store(capacity, Ordering::Release);
        Ok(this)
    }

    /// The directory that was made in these words.
    pub fn at(words: &'a [AtomicU32], capacity: u32) -> Result<Self> {
        if capacity > MAX_CAPACITY || words.len() < Self::words_needed(capacity) {
            return Err(DirectoryError::Damaged);
        }
        Ok(Self { words, capacity, buckets: buckets(capacity) })
    }

    fn word(&self, index: usize) -> Result<&'a AtomicU32> {
        self.words.get(index).ok_or(DirectoryError::Damaged)
    }

    fn bucket(&self, file: RelFile) -> usize {
        HEADER_WORDS + (hash(file) & (self.buckets - 1)) as usize
    }

    fn file(&self, index: u32) -> Result<&'a [AtomicU32; FILE_WORDS]> {
        self.entry(HEADER_WORDS + self.buckets as usize, index, self.capacity)
    }

    fn key_entry(&self, index: u32) -> Result<&'a [AtomicU32; KEY_WORDS]> {
        let files = self.capacity as usize * FILE_WORDS;
        self.entry(HEADER_WORDS + self.buckets as usize + files, index, self.capacity)
    }

    fn body(&self, index: u32) -> Result<&'a [AtomicU32; BODY_WORDS]> {
        let entries = self.capacity as usize * (FILE_WORDS + KEY_WORDS);
        self.entry(HEADER_WORDS + self.buckets as usize + entries, index, self.capacity + 1)
    }

    /// Entry `index` of `count`, each `N` words, from word `start` on.
    fn entry<const N: usize>(
        &self,
        start: usize,
        index: u32,
        count: u32,
    ) -> Result<&'a [AtomicU32; N]> {
        let at = start + index as usize * N;
        let words = self.words.get(at..at + N).filter(|_| index < count);
        words.and_then(|words| words.try_into().ok()).ok_or(DirectoryError::Damaged)
    }

    fn full(&self) -> DirectoryError {
        DirectoryError::Full { capacity: self.capacity }
    }
}

#[cfg(test)]
mod tests {
    use super::layout::{file, identity, step};
    use super::{DataKeyVersion, Directory, KeyInfo, KeyVersion};
    use crate::rel_file::RelFile;
    use crate::scope::Scope;
    use crate::sync::{AtomicU32, Ordering};

    /// Uses file numbers as PostgreSQL assigns them: consecutive, in several databases, and in
    /// steps. In a full directory with at least as many buckets as files, a good hash function
    /// leaves about half an entry to pass before the one searched for; a bad one leaves thousands.
    #[test]
    fn chains_stay_short() {
        let count = if cfg!(miri) { 200 } else { 100_000 };
        let info = KeyInfo {
            version: DataKeyVersion::FIRST,
            cipher: 1,
            scope: Scope::CLUSTER,
            key_version: KeyVersion::FIRST,
            length: 92,
        };
        for by in [1, 3, 8, 1024] {
            let words = Directory::words_needed(count);
            let memory: Vec<AtomicU32> = (0..words).map(|_| AtomicU32::new(0)).collect();
            let directory = Directory::init_zeroed(&memory, count).unwrap();
            for n in 0..count {
                let relation = 16384 + n / 3 * by;
                let new = RelFile { tablespace: 1663, database: 5 + n % 3, relation };
                directory.insert(new, &info, &[7; 92]).unwrap();
            }
            let mut passed = 0;
            for info in directory.files().unwrap() {
                let wanted = info.unwrap().file;
                let mut next = directory.word(directory.bucket(wanted)).unwrap();
                let mut left = count;
                loop {
                    let found = step(next.load(Ordering::Acquire), &mut left).unwrap();
                    let entry = directory.file(found.unwrap()).unwrap();
                    if identity(entry) == wanted {
                        break;
                    }
                    passed += 1;
                    next = &entry[file::NEXT];
                }
            }
            assert!(passed < count, "{passed} entries passed for {count} files in steps of {by}");
        }
    }
}
