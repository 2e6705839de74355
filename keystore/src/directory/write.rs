//! Changing the directory. Callers hold an exclusive lock.

use std::sync::atomic::{Ordering, fence};

use super::layout::{file, head, identity, key, pack_meta, unpack_meta};
use super::{Directory, DirectoryError, FileSlot, KeyInfo, Result};
use crate::error::Problem;
use crate::record::{MAX_EPOCH, MAX_WRAPPED_DATA_KEY, Record, RelFile};

impl Directory<'_> {
    /// Takes a record in. Records about providers and database keys are none of the
    /// directory's business; so are dropped files that it never heard of.
    pub fn apply(&self, record: &Record) -> Result<()> {
        match record {
            Record::DataKey { file, epoch, cipher, scope, key_version, wrapped, owner, .. } => {
                record.validate().map_err(invalid)?;
                let info = KeyInfo {
                    epoch: *epoch,
                    cipher: *cipher,
                    scope: *scope,
                    key_version: *key_version,
                    length: wrapped.len(),
                };
                self.insert(*file, *owner, &info, wrapped)?;
            }
            Record::Current { file, epoch, owner } => {
                record.validate().map_err(invalid)?;
                let slot = match self.find(*file)? {
                    Some(slot) => slot,
                    None if *epoch == 0 => self.add_file(*file, *owner, 0)?,
                    None => return Err(DirectoryError::NoKey { file: *file, epoch: *epoch }),
                };
                self.set_current(slot, *epoch, *owner)?;
            }
            Record::Retired { file, .. } => {
                if let Some(slot) = self.find(*file)? {
                    self.file(slot)?[file::RETIRED].store(1, Ordering::Release);
                }
            }
            Record::Provider { .. } | Record::DropProvider { .. } | Record::DatabaseKey { .. } => {}
        }
        Ok(())
    }

    /// Adds a key, and its file if it is new; or gives a key that is there a new wrapping.
    /// `wrapped` is `info.length` bytes long. The file is written with it only from
    /// [`set_current`](Self::set_current) on.
    pub fn insert(
        &self,
        file: RelFile,
        owner: u32,
        info: &KeyInfo,
        wrapped: &[u8],
    ) -> Result<FileSlot> {
        if wrapped.len() != info.length || wrapped.len() > MAX_WRAPPED_DATA_KEY {
            return Err(DirectoryError::Record("wrapped data key", "wrong length"));
        }
        if !(1..=MAX_EPOCH).contains(&info.epoch) {
            return Err(DirectoryError::Record("epoch", "outside 1 to 8191"));
        }
        let Some(slot) = self.find(file)? else {
            if self.counts()?.files >= self.capacity {
                return Err(self.full());
            }
            let first = self.add_key(info, wrapped, 0)?;
            return self.add_file(file, owner, first);
        };
        match self.find_key(slot, info.epoch)? {
            Some(_) => self.replace_wrapping(slot, info, wrapped)?,
            None => {
                let newest = &self.file(slot)?[file::KEYS];
                let added = self.add_key(info, wrapped, newest.load(Ordering::Relaxed))?;
                newest.store(added, Ordering::Release);
            }
        }
        Ok(slot)
    }

    /// Makes an epoch that has a key the one that the file is written with; 0 for plaintext.
    pub fn set_current(&self, slot: FileSlot, epoch: u16, owner: u32) -> Result<()> {
        let current = match epoch {
            0 => 0,
            epoch => {
                let entry = self.find_key(slot, epoch)?;
                let entry = entry.ok_or_else(|| self.no_key(slot, epoch))?;
                let (_, cipher, _) = unpack_meta(entry[key::META].load(Ordering::Acquire));
                u32::from(epoch) | u32::from(cipher) << 16
            }
        };
        let entry = self.file(slot)?;
        entry[file::OWNER].store(owner, Ordering::Release);
        entry[file::RETIRED].store(0, Ordering::Release);
        entry[file::CURRENT].store(current, Ordering::Release);
        Ok(())
    }

    /// Gives the key of `info.epoch` a new wrapping, of the same cipher and length.
    pub fn replace_wrapping(&self, slot: FileSlot, info: &KeyInfo, wrapped: &[u8]) -> Result<()> {
        let entry = self.find_key(slot, info.epoch)?;
        let entry = entry.ok_or_else(|| self.no_key(slot, info.epoch))?;
        if entry[key::META].load(Ordering::Acquire) != pack_meta(info)
            || wrapped.len() != info.length
        {
            let file = identity(self.file(slot)?);
            return Err(DirectoryError::KeyReplaced { file, epoch: info.epoch });
        }
        let spare = self.word(head::SPARE)?;
        let (new, old) = (spare.load(Ordering::Relaxed), entry[key::BODY].load(Ordering::Relaxed));
        // Whoever sees a byte of what is now written to the spare body also sees that its former
        // key points elsewhere (pairs with the fence in `read_key`).
        fence(Ordering::Release);
        self.write_body(new, info, wrapped)?;
        // Sequence before body: should this body ever be this key's again, the sequence tells.
        let sequence = entry[key::SEQUENCE].load(Ordering::Relaxed);
        entry[key::SEQUENCE].store(sequence.wrapping_add(1), Ordering::Release);
        entry[key::BODY].store(new, Ordering::Release);
        spare.store(old, Ordering::Relaxed);
        Ok(())
    }

    /// Adds a file whose newest key is `keys` (a reference, 0 for none) and links it.
    fn add_file(&self, file: RelFile, owner: u32, keys: u32) -> Result<FileSlot> {
        let count = self.word(head::FILES)?;
        let index = count.load(Ordering::Relaxed);
        if index >= self.capacity {
            return Err(self.full());
        }
        let bucket = self.word(self.bucket(file))?;
        let entry = self.file(FileSlot(index))?;
        let store = |word: usize, value: u32| entry[word].store(value, Ordering::Relaxed);
        store(file::TABLESPACE, file.tablespace);
        store(file::DATABASE, file.database);
        store(file::RELATION, file.relation);
        store(file::CURRENT, 0);
        store(file::OWNER, owner);
        store(file::NEXT, bucket.load(Ordering::Relaxed));
        store(file::KEYS, keys);
        store(file::RETIRED, 0);
        bucket.store(index + 1, Ordering::Release);
        count.store(index + 1, Ordering::Release);
        Ok(FileSlot(index))
    }

    /// Adds a key in front of the key `next` (a reference) and returns the reference to link.
    fn add_key(&self, info: &KeyInfo, wrapped: &[u8], next: u32) -> Result<u32> {
        let count = self.word(head::KEYS)?;
        let index = count.load(Ordering::Relaxed);
        if index >= self.capacity {
            return Err(self.full());
        }
        let entry = self.key_entry(index)?;
        // Body `index` has never been another key's: bodies only change places with the spare one
        // when a key that has one is wrapped again, so those below `index` and the last circulate.
        self.write_body(index, info, wrapped)?;
        entry[key::META].store(pack_meta(info), Ordering::Relaxed);
        entry[key::NEXT].store(next, Ordering::Relaxed);
        entry[key::SEQUENCE].store(0, Ordering::Relaxed);
        entry[key::BODY].store(index, Ordering::Relaxed);
        count.store(index + 1, Ordering::Release);
        Ok(index + 1)
    }

    fn write_body(&self, index: u32, info: &KeyInfo, wrapped: &[u8]) -> Result<()> {
        let [scope, version, words @ ..] = self.body(index)?;
        scope.store(info.scope, Ordering::Relaxed);
        version.store(info.key_version, Ordering::Relaxed);
        for (word, bytes) in words.iter().zip(wrapped.chunks(4)) {
            let mut value = [0; 4];
            value.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            word.store(u32::from_le_bytes(value), Ordering::Relaxed);
        }
        Ok(())
    }
}

fn invalid(problem: Problem) -> DirectoryError {
    match problem {
        Problem::Field(field, what) => DirectoryError::Record(field, what),
        _ => DirectoryError::Record("record", "invalid"),
    }
}
