//! Forgetting files that are gone, whose entries are used again. Callers hold an exclusive lock.

use pagevault_cipher::DataKeyVersion;

use super::layout::{file, head, identity, key, pack_meta, step, unpack_meta};
use super::{Directory, DirectoryError, FileSlot, Result};
use crate::rel_file::RelFile;
use crate::sync::{AtomicU32, Ordering, fence};

impl Directory<'_> {
    /// Forgets the files that `is_gone` names, by file and last version, and wipes their keys.
    /// Nobody reads or writes these files. Returns the number of their keys that were not destroyed
    /// before.
    pub fn forget(&self, is_gone: impl Fn(RelFile, Option<DataKeyVersion>) -> bool) -> Result<u32> {
        let mut keys = 0;
        for bucket in 0..self.buckets as usize {
            let mut link = self.word(super::HEADER_WORDS + bucket)?;
            let mut left = self.capacity;
            while let Some(index) = step(link.load(Ordering::Relaxed), &mut left)? {
                let entry = self.file(index)?;
                let generation = entry[file::GENERATION].load(Ordering::Relaxed);
                let last = self.last_version(FileSlot { index, generation })?;
                if is_gone(identity(entry), last) {
                    link.store(entry[file::NEXT].load(Ordering::Relaxed), Ordering::Release);
                    keys += self.free(index)?;
                } else {
                    link = &entry[file::NEXT];
                }
            }
        }
        // The spare body may hold an older wrapping of one of them.
        fence(Ordering::Release);
        self.wipe_body(self.word(head::SPARE)?.load(Ordering::Relaxed))?;
        Ok(keys)
    }

    /// Wipes these keys of files in use, under which no page is read any more. Their entries are
    /// used again when the file is forgotten, or after a restart. Returns the number of keys that
    /// were wiped.
    pub fn forget_versions<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k (RelFile, DataKeyVersion)>,
    ) -> Result<u32> {
        let mut wiped = 0;
        for &(file, version) in keys {
            let Some(slot) = self.find(file)? else { continue };
            let Some(entry) = self.find_key(slot, version)? else { continue };
            let (_, cipher, _) = unpack_meta(entry[key::META].load(Ordering::Relaxed));
            self.wipe_key(entry, pack_meta(version, cipher, 0))?;
            wiped += 1;
        }
        // As in `forget`.
        fence(Ordering::Release);
        self.wipe_body(self.word(head::SPARE)?.load(Ordering::Relaxed))?;
        Ok(wiped)
    }

    /// Makes the entry of an unlinked file free, with those of its keys. Its link stays: a reader
    /// may stand on it.
    fn free(&self, index: u32) -> Result<u32> {
        let entry = self.file(index)?;
        let generation = entry[file::GENERATION].load(Ordering::Relaxed);
        entry[file::GENERATION].store(generation.wrapping_add(1), Ordering::Relaxed);
        // A reader that sees anything of what follows, or of a later use of these entries, also
        // sees the new generation (`still_there`).
        fence(Ordering::Release);
        let mut keys = 0;
        let mut next = entry[file::KEYS].load(Ordering::Relaxed);
        let mut left = self.capacity;
        while let Some(index) = step(next, &mut left)? {
            let entry = self.key_entry(index)?;
            next = entry[key::NEXT].load(Ordering::Relaxed);
            let (version, cipher, length) = unpack_meta(entry[key::META].load(Ordering::Relaxed));
            let version = version.ok_or(DirectoryError::Damaged)?;
            keys += u32::from(length != 0);
            self.wipe_key(entry, pack_meta(version, cipher, 0))?;
            self.push(head::FREE_KEY, head::FREE_KEYS, &entry[key::NEXT], index)?;
        }
        self.push(head::FREE_FILE, head::FREE_FILES, &entry[file::KEYS], index)?;
        Ok(keys)
    }

    /// Adds an entry to a list of free ones, by the word `link` in it.
    fn push(&self, first: usize, count: usize, link: &AtomicU32, index: u32) -> Result<()> {
        let (first, count) = (self.word(first)?, self.word(count)?);
        link.store(first.load(Ordering::Relaxed), Ordering::Relaxed);
        first.store(index + 1, Ordering::Relaxed);
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
        Ok(())
    }

    fn pop(&self, first: usize, count: usize, link: &AtomicU32) -> Result<()> {
        self.word(first)?.store(link.load(Ordering::Relaxed), Ordering::Relaxed);
        let count = self.word(count)?;
        count.store(count.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        Ok(())
    }

    fn free_one(&self, first: usize) -> Result<Option<u32>> {
        step(self.word(first)?.load(Ordering::Relaxed), &mut 1)
    }

    /// The index of a free entry for a file, to be written now.
    pub(super) fn take_free_file(&self) -> Result<Option<u32>> {
        let Some(index) = self.free_one(head::FREE_FILE)? else { return Ok(None) };
        self.pop(head::FREE_FILE, head::FREE_FILES, &self.file(index)?[file::KEYS])?;
        let reuses = self.word(head::REUSES)?;
        reuses.store(reuses.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        // A reader that sees anything of what is written now also sees the new number (`find`).
        fence(Ordering::Release);
        Ok(Some(index))
    }

    /// Index and body of a free entry for a key, to be written now.
    pub(super) fn take_free_key(&self) -> Result<Option<(u32, u32)>> {
        let Some(index) = self.free_one(head::FREE_KEY)? else { return Ok(None) };
        let entry = self.key_entry(index)?;
        self.pop(head::FREE_KEY, head::FREE_KEYS, &entry[key::NEXT])?;
        let sequence = entry[key::SEQUENCE].load(Ordering::Relaxed);
        entry[key::SEQUENCE].store(sequence.wrapping_add(1), Ordering::Release);
        // As in `wipe_key`.
        fence(Ordering::Release);
        Ok(Some((index, entry[key::BODY].load(Ordering::Relaxed))))
    }
}
