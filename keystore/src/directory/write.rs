//! Changing the directory. Callers hold an exclusive lock.

use pagevault_cipher::{DataKeyVersion, Lsn};

use super::layout::{
    Destroyed, FILE_WORDS, KEY_WORDS, file, head, identity, is_free, key, pack_meta, pack_phase,
    pack_rewriting, pack_sealed_only, step, unpack_meta, unpack_phase,
};
use super::{Directory, DirectoryError, FileSlot, KeyInfo, Result};
use crate::error::Problem;
use crate::record::{MAX_WRAPPED_DATA_KEY, Record};
use crate::rel_file::{Phase, RelFile};
use crate::sync::{AtomicU32, Ordering, fence};
use crate::wal::{self, Switch};

impl Directory<'_> {
    /// Applies a record, if it contains anything new. Ignores records about providers, database
    /// keys, jobs and former files ([`Directory::forget`]). Of WAL switches it only checks that the
    /// key exists.
    pub fn apply(&self, record: &Record) -> Result<()> {
        record.validate().map_err(invalid)?;
        match record {
            Record::DataKey { file, wrapped, .. } => {
                let news = self.would_change(record)?;
                if let Some(info) = key_info(record).filter(|_| news) {
                    self.insert(*file, &info, wrapped)?;
                }
            }
            Record::Current { file, version } => {
                let slot = self.find_with_version(*file, *version)?;
                self.enter(slot, Phase::under(*version))?;
            }
            Record::Plaintext { file, after } => {
                let slot = self.find_with_version(*file, *after)?;
                self.enter(slot, Phase::plaintext_after(*after))?;
            }
            Record::Rewriting { file, phase, done } => {
                let Some(version) = phase.version else { return Ok(()) };
                let entry = self.file(self.find_with_version(*file, version)?.index)?;
                let word = &entry[file::REWRITING];
                let last = word.load(Ordering::Relaxed).max(pack_rewriting(*phase, *done));
                if *done {
                    raise(&entry[file::EARLIEST], *phase);
                }
                word.store(last, Ordering::Release);
                let (present, cipher) = unpack_phase(entry[file::PHASE].load(Ordering::Relaxed));
                store_phase(entry, present, cipher);
            }
            Record::SealedOnly { file, phase } => {
                let Some(version) = phase.version else { return Ok(()) };
                let entry = self.file(self.find_with_version(*file, version)?.index)?;
                raise(&entry[file::SEALED_ONLY], *phase);
                let (present, cipher) = unpack_phase(entry[file::PHASE].load(Ordering::Relaxed));
                store_phase(entry, present, cipher);
                // The first version has no former ones.
                if version > DataKeyVersion::FIRST {
                    let floors = self.word(head::FLOORS)?;
                    let next = floors.load(Ordering::Relaxed).wrapping_add(1);
                    floors.store(next, Ordering::Release);
                }
            }
            Record::Switched { file, phase, .. } => {
                let Some(version) = phase.version else { return Ok(()) };
                self.find_with_version(*file, version)?;
            }
            Record::WalSwitch(Switch { phase, .. }) => {
                let Some(version) = phase.version else { return Ok(()) };
                let (file, data_key_version) = wal::key_place(version);
                self.find_with_version(file, data_key_version)?;
            }
            Record::Destroyed { file, through, cipher, lsn, .. } => {
                let slot = match self.find(*file)? {
                    Some(slot) => slot,
                    None => self.add_file(*file, 0)?,
                };
                self.destroy(slot, *through, *cipher, *lsn)?;
            }
            Record::Provider { .. }
            | Record::DropProvider { .. }
            | Record::DatabaseKey { .. }
            | Record::Job { .. }
            | Record::JobStep { .. }
            | Record::JobBegun { .. }
            | Record::JobsForgotten { .. }
            | Record::FormerFiles(_)
            | Record::KeysForgotten { .. }
            | Record::KeyGroup { .. }
            | Record::EndedKeyGroup { .. } => {}
        }
        Ok(())
    }

    /// Whether a record contains anything that the directory lacks: a key that was not destroyed,
    /// or another wrapping of one; a later [`Phase`] of a file; the rewriting of a file, whether it
    /// contains sealed pages only, or the destruction of its keys. So redo can skip what the
    /// keystore already has. True for records about which the directory stores nothing.
    pub fn would_change(&self, record: &Record) -> Result<bool> {
        match record {
            Record::DataKey { file, version, wrapped, .. } => {
                let Some(slot) = self.find(*file)? else { return Ok(true) };
                if Some(*version) <= self.destroyed(slot)?.0 {
                    return Ok(false);
                }
                let Some(entry) = self.find_key(slot, *version)? else { return Ok(true) };
                let mut known = [0; MAX_WRAPPED_DATA_KEY];
                let found = self.read_key(entry, &mut known)?;
                Ok(key_info(record) != found || !known.starts_with(wrapped))
            }
            Record::Current { file, version } => self.is_later(*file, Phase::under(*version)),
            Record::Plaintext { file, after } => {
                let phase = Phase::plaintext_after(*after);
                Ok(self.is_later(*file, phase)?
                    || self.raises_sealed_only(*file, phase)?
                    || self.raises_earliest(*file, phase)?)
            }
            Record::Rewriting { file, phase, done } => {
                let Some(slot) = self.find(*file)? else { return Ok(true) };
                let last = self.file(slot.index)?[file::REWRITING].load(Ordering::Acquire);
                Ok(pack_rewriting(*phase, *done) > last
                    || *done && self.raises_earliest(*file, *phase)?)
            }
            Record::Switched { file, phase, .. } => {
                let Some(slot) = self.find(*file)? else { return Ok(true) };
                let last = self.file(slot.index)?[file::REWRITING].load(Ordering::Acquire);
                Ok(pack_rewriting(*phase, false) >= last)
            }
            Record::SealedOnly { file, phase } => self.raises_sealed_only(*file, *phase),
            Record::Destroyed { file, through, lsn, .. } => {
                let Some(slot) = self.find(*file)? else { return Ok(true) };
                Ok((Some(*through), *lsn) > self.destroyed(slot)?)
            }
            Record::Provider { .. }
            | Record::DropProvider { .. }
            | Record::DatabaseKey { .. }
            | Record::Job { .. }
            | Record::JobStep { .. }
            | Record::JobBegun { .. }
            | Record::JobsForgotten { .. }
            | Record::FormerFiles(_)
            | Record::KeysForgotten { .. }
            | Record::KeyGroup { .. }
            | Record::EndedKeyGroup { .. }
            | Record::WalSwitch(_) => Ok(true),
        }
    }

    fn is_later(&self, file: RelFile, phase: Phase) -> Result<bool> {
        let Some(slot) = self.find(file)? else { return Ok(true) };
        Ok(phase > self.phase(slot)?)
    }

    fn raises_sealed_only(&self, file: RelFile, phase: Phase) -> Result<bool> {
        let Some(slot) = self.find(file)? else { return Ok(true) };
        let last = self.file(slot.index)?[file::SEALED_ONLY].load(Ordering::Acquire);
        Ok(pack_sealed_only(phase) > last)
    }

    /// Not of a version that is forgotten, although the directory may have forgotten this, too.
    fn raises_earliest(&self, file: RelFile, phase: Phase) -> Result<bool> {
        let (Some(slot), Some(version)) = (self.find(file)?, phase.version) else {
            return Ok(true);
        };
        let last = self.file(slot.index)?[file::EARLIEST].load(Ordering::Acquire);
        Ok(pack_sealed_only(phase) > last && self.cipher_of_version(slot, version)?.is_some())
    }

    fn phase(&self, slot: FileSlot) -> Result<Phase> {
        Ok(unpack_phase(self.file(slot.index)?[file::PHASE].load(Ordering::Acquire)).0)
    }

    /// The file, if it has a key of this version, or had one that was destroyed.
    pub(super) fn find_with_version(
        &self,
        file: RelFile,
        version: DataKeyVersion,
    ) -> Result<FileSlot> {
        let no_key = DirectoryError::NoKey { file, version };
        let slot = self.find(file)?.ok_or(no_key)?;
        self.cipher_of_version(slot, version)?.map(|_| slot).ok_or(no_key)
    }

    fn cipher_of_version(&self, slot: FileSlot, version: DataKeyVersion) -> Result<Option<u8>> {
        let word = self.file(slot.index)?[file::DESTROYED].load(Ordering::Acquire);
        let destroyed = Destroyed::unpack(word);
        if Some(version) <= destroyed.through {
            return Ok(Some(destroyed.cipher));
        }
        let key = self.find_key(slot, version)?;
        Ok(key.map(|entry| unpack_meta(entry[key::META].load(Ordering::Acquire)).1))
    }

    /// Cipher and length of the wrapped key of a version, if there is one.
    pub(super) fn shape_of_version(
        &self,
        slot: FileSlot,
        version: DataKeyVersion,
    ) -> Result<Option<(u8, usize)>> {
        let key = self.find_key(slot, version)?;
        Ok(key.map(|entry| {
            let (_, cipher, length) = unpack_meta(entry[key::META].load(Ordering::Acquire));
            (cipher, length)
        }))
    }

    /// Adds a key, and its file if it is new; or replaces the wrapping of an existing key.
    /// `wrapped` has `info.length` bytes. The key is used for writes only after
    /// [`enter`](Self::enter).
    pub fn insert(&self, file: RelFile, info: &KeyInfo, wrapped: &[u8]) -> Result<FileSlot> {
        if wrapped.len() != info.length || wrapped.len() > MAX_WRAPPED_DATA_KEY {
            return Err(DirectoryError::Record("wrapped data key", "wrong length"));
        }
        // A length of 0 marks destroyed keys.
        if wrapped.is_empty() {
            return Err(DirectoryError::Record("wrapped data key", "empty"));
        }
        let Some(slot) = self.find(file)? else {
            if self.counts()?.files >= self.capacity {
                return Err(self.full());
            }
            let first = self.add_key(info, wrapped, 0)?;
            return self.add_file(file, first);
        };
        if Some(info.version) <= self.destroyed(slot)?.0 {
            return Ok(slot);
        }
        match self.find_key(slot, info.version)? {
            Some(_) => self.replace_wrapping(slot, info, wrapped)?,
            None => {
                let newest = &self.file(slot.index)?[file::KEYS];
                let added = self.add_key(info, wrapped, newest.load(Ordering::Relaxed))?;
                newest.store(added, Ordering::Release);
            }
        }
        Ok(slot)
    }

    /// Enters another state of a file, if it is later than the present one. Its version must have a
    /// key.
    pub fn enter(&self, slot: FileSlot, phase: Phase) -> Result<()> {
        let Some(version) = phase.version else { return Ok(()) };
        let cipher = self.cipher_of_version(slot, version)?;
        let cipher = cipher.ok_or_else(|| self.no_key(slot, version))?;
        let entry = self.file(slot.index)?;
        let (present, its_cipher) = unpack_phase(entry[file::PHASE].load(Ordering::Relaxed));
        // Readers see both with the next `store_phase`.
        if phase.plaintext {
            raise(&entry[file::SEALED_ONLY], phase);
            raise(&entry[file::EARLIEST], phase);
        }
        match phase > present {
            true => store_phase(entry, phase, if phase.plaintext { 0 } else { cipher }),
            false => store_phase(entry, present, its_cipher),
        }
        Ok(())
    }

    /// Replaces the wrapping of the key of `info.version` by one of the same cipher and length.
    pub fn replace_wrapping(&self, slot: FileSlot, info: &KeyInfo, wrapped: &[u8]) -> Result<()> {
        let entry = self.find_key(slot, info.version)?;
        let entry = entry.ok_or_else(|| self.no_key(slot, info.version))?;
        if entry[key::META].load(Ordering::Acquire) != meta_of(info) || wrapped.len() != info.length
        {
            let file = identity(self.file(slot.index)?);
            return Err(DirectoryError::KeyReplaced { file, version: info.version });
        }
        let spare = self.word(head::SPARE)?;
        let (new, old) = (spare.load(Ordering::Relaxed), entry[key::BODY].load(Ordering::Relaxed));
        // A reader that sees a byte now written to the spare body also sees that the key that used
        // it before points elsewhere (pairs with the fence in `read_key`).
        fence(Ordering::Release);
        self.write_body(new, info, wrapped)?;
        // Sequence before body: if this key gets the same body again later, the sequence differs.
        let sequence = entry[key::SEQUENCE].load(Ordering::Relaxed);
        entry[key::SEQUENCE].store(sequence.wrapping_add(1), Ordering::Release);
        entry[key::BODY].store(new, Ordering::Release);
        spare.store(old, Ordering::Relaxed);
        Ok(())
    }

    /// Wipes the keys of a file up to a version, for good: records of them are ignored from now on.
    /// On return the wrapped keys are gone from this memory. `cipher`: of the file's pages; `lsn`:
    /// see [`Record::Destroyed`].
    pub fn destroy(
        &self,
        slot: FileSlot,
        through: DataKeyVersion,
        cipher: u8,
        lsn: Lsn,
    ) -> Result<()> {
        if (Some(through), lsn) <= self.destroyed(slot)? {
            return Ok(());
        }
        let entry = self.file(slot.index)?;
        let last = Destroyed::unpack(entry[file::DESTROYED].load(Ordering::Relaxed));
        let count = last.count.wrapping_add(1);
        let destroyed = Destroyed { through: Some(through), cipher, count };
        // The place of the LSN before the last one. Whoever sees a half of the new LSN also sees
        // that the last one is elsewhere (pairs with the fence in `destroyed`).
        fence(Ordering::Release);
        for (word, half) in destroyed.lsn().into_iter().zip([lsn.0, lsn.0 >> 32]) {
            entry[word].store(half as u32, Ordering::Relaxed);
        }
        entry[file::DESTROYED].store(destroyed.pack(), Ordering::Release);
        let mut next = entry[file::KEYS].load(Ordering::Acquire);
        let mut left = self.capacity;
        while let Some(index) = step(next, &mut left)? {
            let entry = self.key_entry(index)?;
            next = entry[key::NEXT].load(Ordering::Acquire);
            let (version, cipher, _) = unpack_meta(entry[key::META].load(Ordering::Acquire));
            let Some(version) = version.filter(|version| *version <= through) else { continue };
            self.wipe_key(entry, pack_meta(version, cipher, 0))?;
        }
        // The spare body may hold an older wrapping of one of them.
        fence(Ordering::Release);
        self.wipe_body(self.word(head::SPARE)?.load(Ordering::Relaxed))
    }

    /// `meta`: with a length of 0.
    pub(super) fn wipe_key(&self, entry: &[AtomicU32; KEY_WORDS], meta: u32) -> Result<()> {
        entry[key::META].store(meta, Ordering::Release);
        let sequence = entry[key::SEQUENCE].load(Ordering::Relaxed);
        entry[key::SEQUENCE].store(sequence.wrapping_add(1), Ordering::Release);
        // A reader that sees a byte of what follows also sees the new sequence (pairs with the
        // fence in `read_key`).
        fence(Ordering::Release);
        self.wipe_body(entry[key::BODY].load(Ordering::Relaxed))
    }

    pub(super) fn wipe_body(&self, index: u32) -> Result<()> {
        self.body(index)?.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Ok(())
    }

    /// Adds a file with the newest key `keys` (a reference, 0 for none), and links it.
    fn add_file(&self, file: RelFile, keys: u32) -> Result<FileSlot> {
        let bucket = self.word(self.bucket(file))?;
        let free = self.take_free_file()?;
        let (count, index) = match free {
            Some(index) => (None, index),
            None => {
                let count = self.word(head::FILES)?;
                (Some(count), count.load(Ordering::Relaxed))
            }
        };
        if index >= self.capacity {
            return Err(self.full());
        }
        let entry = self.file(index)?;
        let store = |word: usize, value: u32| entry[word].store(value, Ordering::Relaxed);
        store(file::TABLESPACE, file.tablespace);
        store(file::DATABASE, file.database);
        store(file::RELATION, file.relation);
        store(file::PHASE, 0);
        store(file::NEXT, bucket.load(Ordering::Relaxed));
        store(file::KEYS, keys);
        store(file::DESTROYED, 0);
        file::DESTROYED_LSN.into_iter().flatten().for_each(|word| store(word, 0));
        store(file::REWRITING, 0);
        store(file::SEALED_ONLY, 0);
        store(file::EARLIEST, 0);
        let mut generation = entry[file::GENERATION].load(Ordering::Relaxed);
        if is_free(generation) {
            generation = generation.wrapping_add(1);
            entry[file::GENERATION].store(generation, Ordering::Release);
        }
        bucket.store(index + 1, Ordering::Release);
        if let Some(count) = count {
            count.store(index + 1, Ordering::Release);
        }
        Ok(FileSlot { index, generation })
    }

    /// Adds a key before the key `next` (a reference). Returns the reference to link.
    fn add_key(&self, info: &KeyInfo, wrapped: &[u8], next: u32) -> Result<u32> {
        let (index, body) = match self.take_free_key()? {
            Some(free) => free,
            None => {
                let count = self.word(head::KEYS)?;
                let index = count.load(Ordering::Relaxed);
                if index >= self.capacity {
                    return Err(self.full());
                }
                count.store(index + 1, Ordering::Release);
                // Body `index` was never used by another key: rewrapping swaps bodies of existing
                // keys with the spare one, so only those below `index` and the last one are in
                // circulation.
                (index, index)
            }
        };
        let entry = self.key_entry(index)?;
        self.write_body(body, info, wrapped)?;
        entry[key::META].store(meta_of(info), Ordering::Relaxed);
        entry[key::NEXT].store(next, Ordering::Relaxed);
        entry[key::BODY].store(body, Ordering::Relaxed);
        Ok(index + 1)
    }

    fn write_body(&self, index: u32, info: &KeyInfo, wrapped: &[u8]) -> Result<()> {
        let [scope, key_version, words @ ..] = self.body(index)?;
        scope.store(info.scope.number(), Ordering::Relaxed);
        key_version.store(info.key_version.get(), Ordering::Relaxed);
        for (word, bytes) in words.iter().zip(wrapped.chunks(4)) {
            let mut value = [0; 4];
            value.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            word.store(u32::from_le_bytes(value), Ordering::Relaxed);
        }
        // Clears the rest of a longer key.
        words
            .iter()
            .skip(wrapped.len().div_ceil(4))
            .for_each(|word| word.store(0, Ordering::Relaxed));
        Ok(())
    }
}

/// Stores a state, packed by [`pack_sealed_only`], if it is later than the one that is there.
fn raise(word: &AtomicU32, phase: Phase) {
    word.store(word.load(Ordering::Relaxed).max(pack_sealed_only(phase)), Ordering::Release);
}

fn store_phase(entry: &[AtomicU32; FILE_WORDS], phase: Phase, cipher: u8) {
    let rewriting = entry[file::REWRITING].load(Ordering::Relaxed);
    let sealed_only = entry[file::SEALED_ONLY].load(Ordering::Relaxed);
    let word = pack_phase(phase, cipher, rewriting, sealed_only);
    entry[file::PHASE].store(word, Ordering::Release);
}

fn meta_of(info: &KeyInfo) -> u32 {
    pack_meta(info.version, info.cipher, info.length)
}

pub(super) fn key_info(record: &Record) -> Option<KeyInfo> {
    match record {
        Record::DataKey { version, cipher, scope, key_version, wrapped, .. } => Some(KeyInfo {
            version: *version,
            cipher: *cipher,
            scope: *scope,
            key_version: *key_version,
            length: wrapped.len(),
        }),
        _ => None,
    }
}

pub(super) fn invalid(problem: Problem) -> DirectoryError {
    match problem {
        Problem::Field(field, what) => DirectoryError::Record(field, what),
        _ => DirectoryError::Record("record", "invalid"),
    }
}
