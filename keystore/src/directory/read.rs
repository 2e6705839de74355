//! Reading the directory, without a lock.

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use super::layout::*;
use super::{
    Counts, Directory, DirectoryError, FileInfo, FileSlot, KeyInfo, RETRIES, Result, SEARCHES,
    Writing,
};
use crate::record::MAX_WRAPPED_DATA_KEY;
use crate::rel_file::RelFile;
use crate::scope::Scope;
use crate::sync::{AtomicU32, Ordering, fence, spin_loop};

impl<'a> Directory<'a> {
    /// The slot of a file, `None` if nothing was recorded about it, or it is forgotten.
    pub fn find(&self, wanted: RelFile) -> Result<Option<FileSlot>> {
        let reuses = self.word(head::REUSES)?;
        let mut before = reuses.load(Ordering::Acquire);
        for _ in 0..SEARCHES {
            // What it loads of an entry it acquires: this pairs with the fence in `take_free_file`.
            let found = self.search(wanted);
            let after = reuses.load(Ordering::Acquire);
            if after == before {
                return found;
            }
            before = after;
        }
        Err(DirectoryError::Busy)
    }

    /// Finds nothing, or something else, if an entry is used again meanwhile.
    fn search(&self, wanted: RelFile) -> Result<Option<FileSlot>> {
        let mut next = self.word(self.bucket(wanted))?.load(Ordering::Acquire);
        let mut left = self.capacity;
        while let Some(index) = step(next, &mut left)? {
            let entry = self.file(index)?;
            if identity(entry) == wanted {
                let generation = entry[file::GENERATION].load(Ordering::Acquire);
                return Ok(Some(FileSlot { index, generation }).filter(|_| !is_free(generation)));
            }
            next = entry[file::NEXT].load(Ordering::Acquire);
        }
        Ok(None)
    }

    /// What `read` reads of a file's entry.
    fn read<T>(
        &self,
        slot: FileSlot,
        read: impl FnOnce(&'a [AtomicU32; FILE_WORDS]) -> Result<T>,
    ) -> Result<T> {
        let entry = self.file(slot.index)?;
        let value = read(entry);
        self.still_there(slot).and(value)
    }

    /// Whether what was acquired through a slot before is of its file. Pairs with the fence in
    /// `free`.
    fn still_there(&self, slot: FileSlot) -> Result<()> {
        let generation = self.file(slot.index)?[file::GENERATION].load(Ordering::Acquire);
        if generation == slot.generation { Ok(()) } else { Err(DirectoryError::Gone) }
    }

    /// Version and cipher for writes to the file, `None` for plaintext.
    pub fn current(&self, slot: FileSlot) -> Result<Option<(DataKeyVersion, u8)>> {
        Ok(unpack_current(self.phase_word(slot)?))
    }

    fn phase_word(&self, slot: FileSlot) -> Result<u32> {
        self.read(slot, |entry| Ok(entry[file::PHASE].load(Ordering::Acquire)))
    }

    /// Whether pages of the file on disk may be in another state than new ones.
    pub fn is_mixed(&self, slot: FileSlot) -> Result<bool> {
        Ok(self.writing(slot)?.mixed)
    }

    /// Whether the file contains sealed pages only, so that a page in plaintext is not its own.
    pub fn is_sealed_only(&self, slot: FileSlot) -> Result<bool> {
        Ok(unpack_is_sealed_only(self.phase_word(slot)?))
    }

    /// The first version under which pages may be, as `File::floor` of the state.
    pub fn floor(&self, slot: FileSlot) -> Result<Option<DataKeyVersion>> {
        self.read(slot, |entry| {
            let word = entry[file::PHASE].load(Ordering::Acquire);
            if !unpack_is_sealed_only(word) {
                return Ok(None);
            }
            // May be later than the word. Then it has ended, or is that of a later key.
            let since = unpack_sealed_only(entry[file::SEALED_ONLY].load(Ordering::Acquire));
            let current = unpack_phase(word).0.current();
            Ok(since.current().filter(|since| Some(*since) <= current))
        })
    }

    /// The first version under which pages may be on disk, as `File::first_version` of the state.
    pub fn first_version(&self, slot: FileSlot) -> Result<Option<DataKeyVersion>> {
        let earliest =
            self.read(slot, |entry| Ok(entry[file::EARLIEST].load(Ordering::Acquire)))?;
        Ok(self.floor(slot)?.max(unpack_sealed_only(earliest).current()))
    }

    /// A number that changes when the floor of a file is raised.
    pub fn floors(&self) -> Result<u32> {
        Ok(self.word(head::FLOORS)?.load(Ordering::Acquire))
    }

    /// How a page of the file is to be written; both fields are from the same moment.
    pub fn writing(&self, slot: FileSlot) -> Result<Writing> {
        let word = self.phase_word(slot)?;
        Ok(Writing { current: unpack_current(word), mixed: unpack_mixed(word) })
    }

    /// All that is known about a file, except its keys.
    pub fn info(&self, slot: FileSlot) -> Result<FileInfo> {
        self.read(slot, |entry| {
            let (phase, cipher) = unpack_phase(entry[file::PHASE].load(Ordering::Acquire));
            Ok(FileInfo {
                slot,
                file: identity(entry),
                current: phase.current().map(|version| (version, cipher)),
                phase,
                destroyed: read_destroyed(entry)?.0,
            })
        })
    }

    /// The last version of the file whose key was destroyed, and the LSN at or before which all WAL
    /// records about pages under such keys end.
    pub fn destroyed(&self, slot: FileSlot) -> Result<(Option<DataKeyVersion>, Lsn)> {
        self.read(slot, read_destroyed)
    }

    /// Copies the wrapped key of a version to the start of `wrapped`. Never mixes two wrappings.
    pub fn key(
        &self,
        slot: FileSlot,
        version: DataKeyVersion,
        wrapped: &mut [u8; MAX_WRAPPED_DATA_KEY],
    ) -> Result<KeyInfo> {
        let found = self.read(slot, |_| match self.find_key(slot, version)? {
            Some(entry) => self.read_key(entry, wrapped),
            None => Ok(None),
        });
        found?.ok_or_else(|| self.no_key(slot, version))
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

    /// All files at the time of the call. Takes time proportional to their number.
    pub fn files(&self) -> Result<impl Iterator<Item = Result<FileInfo>> + use<'a>> {
        let this = *self;
        let count = this.word(head::FILES)?.load(Ordering::Acquire).min(this.capacity);
        Ok((0..count).filter_map(move |index| this.info_at(index).transpose()))
    }

    /// `None` if the entry is free.
    fn info_at(&self, index: u32) -> Result<Option<FileInfo>> {
        let generation = self.file(index)?[file::GENERATION].load(Ordering::Acquire);
        if is_free(generation) {
            return Ok(None);
        }
        match self.info(FileSlot { index, generation }) {
            Err(DirectoryError::Gone) => Ok(None),
            info => info.map(Some),
        }
    }

    /// All keys of a file, newest entry first. None if it is forgotten meanwhile.
    pub fn keys(&self, slot: FileSlot) -> Result<impl Iterator<Item = Result<KeyInfo>> + use<'a>> {
        let this = *self;
        let first = this.read(slot, |entry| Ok(entry[file::KEYS].load(Ordering::Acquire)));
        let mut next = match first {
            Err(DirectoryError::Gone) => 0,
            first => first?,
        };
        let mut left = this.capacity;
        let mut advance = move || -> Result<Option<KeyInfo>> {
            while let Some(index) = step(next, &mut left)? {
                let entry = this.key_entry(index)?;
                next = entry[key::NEXT].load(Ordering::Acquire);
                let key = this.read_key(entry, &mut [0; MAX_WRAPPED_DATA_KEY]);
                if this.still_there(slot).is_err() {
                    return Ok(None); // forgotten meanwhile, like those before
                }
                if let Some(key) = key? {
                    return Ok(Some(key));
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
        let number = |of: usize, free: usize| -> Result<u32> {
            let [of, free] = [self.word(of)?, self.word(free)?].map(|w| w.load(Ordering::Acquire));
            Ok(of.saturating_sub(free))
        };
        Ok(Counts {
            files: number(head::FILES, head::FREE_FILES)?,
            keys: number(head::KEYS, head::FREE_KEYS)?,
            capacity: self.capacity,
        })
    }

    /// `None` if the key was destroyed.
    pub(super) fn read_key(
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
            let scope = Scope::from_number(scope.load(Ordering::Relaxed));
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

    pub(super) fn find_key(
        &self,
        slot: FileSlot,
        version: DataKeyVersion,
    ) -> Result<Option<&'a [AtomicU32; KEY_WORDS]>> {
        let mut next = self.file(slot.index)?[file::KEYS].load(Ordering::Acquire);
        let mut left = self.capacity;
        while let Some(index) = step(next, &mut left)? {
            let entry = self.key_entry(index)?;
            let meta = entry[key::META].load(Ordering::Acquire);
            if unpack_meta(meta).0 == Some(version) {
                return Ok(Some(entry).filter(|_| !is_wiped(meta)));
            }
            next = entry[key::NEXT].load(Ordering::Acquire);
        }
        Ok(None)
    }

    pub(super) fn no_key(&self, slot: FileSlot, version: DataKeyVersion) -> DirectoryError {
        match self.read(slot, |entry| Ok(identity(entry))) {
            Ok(file) => DirectoryError::NoKey { file, version },
            Err(error) => error,
        }
    }
}

/// See [`Directory::destroyed`].
fn read_destroyed(entry: &[AtomicU32; FILE_WORDS]) -> Result<(Option<DataKeyVersion>, Lsn)> {
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
