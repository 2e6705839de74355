//! The directory: the keys of each relation file, in shared memory, for all processes of a server.
//!
//! ```text
//! header   16 words     files, keys, spare body, floors (how often one was raised)
//! buckets  2^n words    newest file of each hash chain
//! files    13 words     tablespace, database, relation,
//!                       phase (version | cipher << 16 | plaintext << 24 | mixed << 25 |
//!                       sealed only << 26), next,
//!                       newest key, destroyed (last version | cipher << 16 | count << 24),
//!                       its LSN (low, high), rewriting (done | plaintext << 1 | version << 2),
//!                       its LSN in every other count, sealed only (plaintext | version << 1)
//! keys     4 words      meta (version | cipher << 16 | length << 24), next, sequence, body
//! bodies   25 words     scope, key version, wrapped key; one more than there are keys
//! ```
//!
//! References are indexes plus one, so that zeroed memory is an empty directory. Entries are only
//! added, and a chain leads to older entries only, so that readers need no lock: an entry is
//! written first and linked last (release); a reader follows links (acquire) and sees complete
//! entries.
//!
//! Changes in place are one word each (`phase`, `rewriting`, `sealed only`, `destroyed`), except
//! for a wrapping, which has 25. A new wrapping is written to the *spare* body; then the key is
//! pointed to it, and its old body becomes the spare. So a writer that sleeps or dies in between
//! blocks no reader. If the body that a reader copies is overwritten meanwhile, the reader detects
//! that the key's body or sequence has changed, and reads again. It gives up with
//! [`DirectoryError::Busy`] after [`RETRIES`] attempts. That takes as many rewraps of this one
//! key, each during the copy of 100 bytes, so it happens only if a writer misbehaves. Then an
//! error is right, and plaintext would be wrong.
//!
//! The entry of a destroyed key stays, with a length of 0. Its body is overwritten with zeros in
//! place, after its sequence was changed, so that a reader that is copying it detects the change.
//!
//! There is one writer at a time: callers of `init`, `apply`, `insert`, `enter`, `destroy` and
//! `replace_wrapping` hold an exclusive lock. If a writer is killed between two stores, PostgreSQL
//! restarts all processes with new shared memory, and the directory is initialised and loaded
//! again; nothing in it survives.

mod check;
mod layout;
mod write;

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use self::layout::*;
use crate::record::MAX_WRAPPED_DATA_KEY;
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::sync::{AtomicU32, Ordering, fence, spin_loop};

/// Attempts of a reader before it reports [`DirectoryError::Busy`].
pub const RETRIES: usize = 64;
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
    /// A key's wrapping changed during each attempt to read it. Try again.
    #[error("key is being rewrapped, try again")]
    Busy,
    /// The memory is too small, or was overwritten.
    #[error("key directory in shared memory is damaged")]
    Damaged,
}

type Result<T> = std::result::Result<T, DirectoryError>;

/// The place of a file in the directory. Valid as long as the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileSlot(u32);

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

    /// The slot of a file, `None` if nothing was recorded about it.
    pub fn find(&self, wanted: RelFile) -> Result<Option<FileSlot>> {
        let mut next = self.word(self.bucket(wanted))?.load(Ordering::Acquire);
        let mut bound = u32::MAX;
        while let Some(index) = step(next, &mut bound)? {
            let entry = self.file(FileSlot(index))?;
            if identity(entry) == wanted {
                return Ok(Some(FileSlot(index)));
            }
            next = entry[file::NEXT].load(Ordering::Acquire);
        }
        Ok(None)
    }

    /// Version and cipher for writes to the file, `None` for plaintext.
    pub fn current(&self, slot: FileSlot) -> Result<Option<(DataKeyVersion, u8)>> {
        Ok(unpack_current(self.file(slot)?[file::PHASE].load(Ordering::Acquire)))
    }

    /// Whether pages of the file on disk may be in another state than new ones.
    pub fn is_mixed(&self, slot: FileSlot) -> Result<bool> {
        Ok(self.writing(slot)?.mixed)
    }

    /// Whether the file contains sealed pages only, so that a page in plaintext is not its own.
    pub fn is_sealed_only(&self, slot: FileSlot) -> Result<bool> {
        Ok(unpack_is_sealed_only(self.file(slot)?[file::PHASE].load(Ordering::Acquire)))
    }

    /// See [`File::floor`](crate::state::File::floor).
    pub fn floor(&self, slot: FileSlot) -> Result<Option<DataKeyVersion>> {
        let entry = self.file(slot)?;
        let word = entry[file::PHASE].load(Ordering::Acquire);
        if !unpack_is_sealed_only(word) {
            return Ok(None);
        }
        // May be later than the word. Then it has ended, or is that of a later key.
        let since = unpack_sealed_only(entry[file::SEALED_ONLY].load(Ordering::Acquire));
        let current = unpack_phase(word).0.current();
        Ok(since.current().filter(|since| Some(*since) <= current))
    }

    /// A number that changes when the floor of a file is raised.
    pub fn floors(&self) -> Result<u32> {
        Ok(self.word(head::FLOORS)?.load(Ordering::Acquire))
    }

    /// How a page of the file is to be written; both fields are from the same moment.
    pub fn writing(&self, slot: FileSlot) -> Result<Writing> {
        let word = self.file(slot)?[file::PHASE].load(Ordering::Acquire);
        Ok(Writing { current: unpack_current(word), mixed: unpack_mixed(word) })
    }

    /// All that is known about a file, except its keys.
    pub fn info(&self, slot: FileSlot) -> Result<FileInfo> {
        let entry = self.file(slot)?;
        let (phase, cipher) = unpack_phase(entry[file::PHASE].load(Ordering::Acquire));
        Ok(FileInfo {
            slot,
            file: identity(entry),
            current: phase.current().map(|version| (version, cipher)),
            phase,
            destroyed: self.destroyed(slot)?.0,
        })
    }

    /// The last version of the file whose key was destroyed, and the LSN at or before which all WAL
    /// records about pages under such keys end.
    pub fn destroyed(&self, slot: FileSlot) -> Result<(Option<DataKeyVersion>, Lsn)> {
        let entry = self.file(slot)?;
        let word = &entry[file::DESTROYED];
        let mut found = word.load(Ordering::Acquire);
        for _ in 0..RETRIES {
            let destroyed = Destroyed::unpack(found);
            let [low, high] = destroyed.lsn().map(|word| entry[word].load(Ordering::Relaxed));
            // Pairs with the fence in `destroy`.
            fence(Ordering::Acquire);
            let again = word.load(Ordering::Acquire);
            if again == found {
                return Ok((destroyed.through, Lsn(u64::from(high) << 32 | u64::from(low))));
            }
            found = again;
        }
        Err(DirectoryError::Busy)
    }

    /// Copies the wrapped key of a version to the start of `wrapped`. Never mixes two wrappings.
    pub fn key(
        &self,
        slot: FileSlot,
        version: DataKeyVersion,
        wrapped: &mut [u8; MAX_WRAPPED_DATA_KEY],
    ) -> Result<KeyInfo> {
        let entry = self.find_key(slot, version)?;
        let entry = entry.ok_or_else(|| self.no_key(slot, version))?;
        self.read_key(entry, wrapped)?.ok_or_else(|| self.no_key(slot, version))
    }

    /// The highest version that has a key, or had one that was destroyed.
    pub fn last_version(&self, slot: FileSlot) -> Result<Option<DataKeyVersion>> {
        let (destroyed, _) = self.destroyed(slot)?;
        self.keys(slot)?.try_fold(destroyed, |last, key| Ok(last.max(Some(key?.version))))
    }

    /// The version for a new key of the file; `None` after the last version.
    pub fn next_version(&self, slot: FileSlot) -> Result<Option<DataKeyVersion>> {
        Ok(DataKeyVersion::after(self.last_version(slot)?))
    }

    /// All files at the time of the call, oldest first. Takes time proportional to their number.
    pub fn files(&self) -> Result<impl Iterator<Item = Result<FileInfo>> + use<'a>> {
        let this = *self;
        let count = this.word(head::FILES)?.load(Ordering::Acquire).min(this.capacity);
        Ok((0..count).map(move |index| this.info(FileSlot(index))))
    }

    /// All keys of a file, newest entry first.
    pub fn keys(&self, slot: FileSlot) -> Result<impl Iterator<Item = Result<KeyInfo>> + use<'a>> {
        let this = *self;
        let mut next = this.file(slot)?[file::KEYS].load(Ordering::Acquire);
        let mut bound = u32::MAX;
        let mut advance = move || -> Result<Option<KeyInfo>> {
            while let Some(index) = step(next, &mut bound)? {
                let entry = this.key_entry(index)?;
                next = entry[key::NEXT].load(Ordering::Acquire);
                let key = this.read_key(entry, &mut [0; MAX_WRAPPED_DATA_KEY])?;
                if key.is_some() {
                    return Ok(key);
                }
            }
            Ok(None)
        };
        // An error ends the iteration: what follows cannot be trusted.
        let mut failed = false;
        Ok(std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let key = advance().transpose();
            failed = matches!(key, Some(Err(_)));
            key
        }))
    }

    /// How full the directory is.
    pub fn counts(&self) -> Result<Counts> {
        Ok(Counts {
            files: self.word(head::FILES)?.load(Ordering::Acquire),
            keys: self.word(head::KEYS)?.load(Ordering::Acquire),
            capacity: self.capacity,
        })
    }

    /// `None` if the key was destroyed.
    fn read_key(
        &self,
        entry: &[AtomicU32; KEY_WORDS],
        wrapped: &mut [u8; MAX_WRAPPED_DATA_KEY],
    ) -> Result<Option<KeyInfo>> {
        for _ in 0..RETRIES {
            // Read before the rest: a reader that sees the sequence of a destruction also sees the
            // rest of its changes.
            let sequence = entry[key::SEQUENCE].load(Ordering::Acquire);
            let meta = entry[key::META].load(Ordering::Acquire);
            if is_wiped(meta) {
                return Ok(None);
            }
            let (version, cipher, length) = unpack_meta(meta);
            let body = entry[key::BODY].load(Ordering::Acquire);
            let [scope, key_version, words @ ..] = self.body(body)?;
            let scope = Scope::database(scope.load(Ordering::Relaxed));
            let key_version = KeyVersion::new(key_version.load(Ordering::Relaxed));
            for (bytes, word) in wrapped.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *bytes = word.load(Ordering::Relaxed).to_le_bytes();
            }
            // Pairs with the fences in `replace_wrapping` and `destroy`.
            fence(Ordering::Acquire);
            if entry[key::BODY].load(Ordering::Acquire) == body
                && entry[key::SEQUENCE].load(Ordering::Acquire) == sequence
            {
                let (Some(version), Some(key_version)) = (version, key_version) else {
                    return Err(DirectoryError::Damaged);
                };
                return Ok(Some(KeyInfo { version, cipher, scope, key_version, length }));
            }
            spin_loop();
        }
        Err(DirectoryError::Busy)
    }

    fn find_key(
        &self,
        slot: FileSlot,
        version: DataKeyVersion,
    ) -> Result<Option<&'a [AtomicU32; KEY_WORDS]>> {
        let mut next = self.file(slot)?[file::KEYS].load(Ordering::Acquire);
        let mut bound = u32::MAX;
        while let Some(index) = step(next, &mut bound)? {
            let entry = self.key_entry(index)?;
            let meta = entry[key::META].load(Ordering::Acquire);
            if unpack_meta(meta).0 == Some(version) {
                return Ok(Some(entry).filter(|_| !is_wiped(meta)));
            }
            next = entry[key::NEXT].load(Ordering::Acquire);
        }
        Ok(None)
    }

    fn word(&self, index: usize) -> Result<&'a AtomicU32> {
        self.words.get(index).ok_or(DirectoryError::Damaged)
    }

    fn bucket(&self, file: RelFile) -> usize {
        HEADER_WORDS + (hash(file) & (self.buckets - 1)) as usize
    }

    fn file(&self, FileSlot(index): FileSlot) -> Result<&'a [AtomicU32; FILE_WORDS]> {
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

    fn no_key(&self, slot: FileSlot, version: DataKeyVersion) -> DirectoryError {
        match self.file(slot) {
            Ok(entry) => DirectoryError::NoKey { file: identity(entry), version },
            Err(error) => error,
        }
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
                let mut bound = u32::MAX;
                loop {
                    let found = step(next.load(Ordering::Acquire), &mut bound).unwrap();
                    let entry = directory.file(super::FileSlot(found.unwrap())).unwrap();
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
