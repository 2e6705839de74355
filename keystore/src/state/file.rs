//! What is known of a relation file.

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use super::StateError;
use crate::record::Record;
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::sorted::SortedMap;

/// The present wrapping of a data key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataKey {
    /// Number of the cipher; may be unknown to this version of pagevault.
    pub cipher: u8,
    /// Scope of the database key that wraps.
    pub scope: Scope,
    /// Version of the database key that wraps.
    pub key_version: KeyVersion,
    /// Nonce, ciphertext, tag.
    pub wrapped: Vec<u8>,
    /// Seconds since 1970.
    pub created: i64,
}

/// A relation file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct File {
    /// Its state.
    pub phase: Phase,
    /// Keys by version.
    pub keys: SortedMap<DataKeyVersion, DataKey>,
    /// The destroyed keys, if any.
    pub destroyed: Option<Destroyed>,
    /// The last state change that began when the file had pages, and whether all of them have been
    /// rewritten.
    pub rewriting: Option<(Phase, bool)>,
    /// Where in WAL the file entered its last state, if known and while pages are rewritten.
    pub switched: Option<(Phase, Lsn)>,
    /// Since when it contains sealed pages only, or after which version it does not any more; see
    /// [`File::floor`].
    pub sealed_only: Phase,
    /// The earliest state in which pages may be on disk; see [`File::first_version`].
    pub earliest: Phase,
}

/// Tombstone of destroyed keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destroyed {
    /// The highest destroyed version; all lower ones are destroyed, too.
    pub through: DataKeyVersion,
    /// All WAL records about pages under these keys end at this LSN or before.
    pub lsn: Lsn,
    /// Cipher of the file's pages; 0 if the file was plaintext by then.
    pub cipher: u8,
    /// The keys of all files of the database were destroyed.
    pub whole: bool,
    /// Time, in seconds since 1970.
    pub at: i64,
}

impl File {
    /// Whether pages on disk may be in another state than new ones. A `Rewriting` record precedes
    /// the record of the state that it announces.
    pub fn is_mixed(&self) -> bool {
        self.rewriting.is_some_and(|(phase, done)| phase >= self.phase && !done)
    }

    /// Where in WAL the file entered its present state, if its pages are being rewritten since
    /// then. `None` if that is not known.
    pub fn switched_at(&self) -> Option<Lsn> {
        let (phase, lsn) = self.switched?;
        (phase == self.phase).then_some(lsn)
    }

    /// Whether all pages of the file are sealed or zero, so that a page in plaintext was not
    /// written by a server.
    pub fn is_sealed_only(&self) -> bool {
        self.floor().is_some()
    }

    /// The first version under which pages may be, if the file contains sealed pages only. No
    /// server wrote what is under an earlier one, or has it still.
    pub fn floor(&self) -> Option<DataKeyVersion> {
        self.sealed_only.current().filter(|since| Some(*since) <= self.phase.current())
    }

    /// The first version under which pages may be on the disk of a server that keeps up, if none is
    /// in plaintext there: that of the last rewriting that was done, if the file was not written in
    /// plaintext since; or the floor. Other than below the floor, pages are not refused below it.
    pub fn first_version(&self) -> Option<DataKeyVersion> {
        self.floor().max(self.earliest.current())
    }

    /// Whether the key of a version was destroyed, or would be when it is recorded.
    pub fn is_destroyed(&self, version: DataKeyVersion) -> bool {
        self.destroyed.is_some_and(|destroyed| version <= destroyed.through)
    }

    /// Applies a record about this file. On error the file is unchanged, and so it is by records
    /// about other things.
    pub(super) fn apply(&mut self, record: Record) -> Result<(), StateError> {
        match record {
            Record::DataKey { file, version, cipher, scope, key_version, wrapped, created } => {
                if self.is_destroyed(version) {
                    return Ok(());
                }
                let is_another =
                    |key: &DataKey| (key.cipher, key.wrapped.len()) != (cipher, wrapped.len());
                if self.keys.get(&version).is_some_and(is_another) {
                    return Err(StateError::KeyReplaced { file, version });
                }
                let key = DataKey { cipher, scope, key_version, wrapped, created };
                self.keys.insert(version, key);
            }
            Record::Current { file, version } => {
                self.require(file, version)?;
                self.enter(Phase::under(version));
            }
            Record::Plaintext { file, after } => {
                self.require(file, after)?;
                self.enter(Phase::plaintext_after(after));
            }
            Record::Rewriting { file, phase, done } => {
                if let Some(version) = phase.version {
                    self.require(file, version)?;
                    self.rewriting = self.rewriting.max(Some((phase, done)));
                    if done {
                        self.earliest = self.earliest.max(phase);
                    }
                }
            }
            Record::Switched { file, phase, lsn } => {
                if let Some(version) = phase.version {
                    self.require(file, version)?;
                    self.switched = self.switched.max(Some((phase, lsn)));
                }
            }
            Record::SealedOnly { file, phase } => {
                if let Some(version) = phase.version {
                    self.require(file, version)?;
                    self.sealed_only = self.sealed_only.max(phase);
                }
            }
            Record::Destroyed { through, cipher, whole, lsn, at, .. } => {
                self.destroy(Destroyed { through, lsn, cipher, whole, at });
            }
            _ => {}
        }
        let rewritten_to = self.rewriting.filter(|_| self.is_mixed()).map(|(phase, _)| phase);
        self.switched = self.switched.filter(|(phase, _)| Some(*phase) == rewritten_to);
        Ok(())
    }

    /// Whether the version has a key, or had one that was destroyed.
    pub(super) fn has_version(&self, version: DataKeyVersion) -> bool {
        self.keys.contains_key(&version) || self.is_destroyed(version)
    }

    fn require(&self, file: RelFile, version: DataKeyVersion) -> Result<(), StateError> {
        if self.has_version(version) { Ok(()) } else { Err(StateError::NoKey { file, version }) }
    }

    /// Removes destroyed keys.
    fn destroy(&mut self, destroyed: Destroyed) {
        self.destroyed = self.destroyed.max(Some(destroyed));
        self.keys.retain(|version, _| *version > destroyed.through);
    }

    /// Enters a state, if it is a later one.
    fn enter(&mut self, phase: Phase) {
        self.phase = self.phase.max(phase);
        if phase.plaintext {
            self.sealed_only = self.sealed_only.max(phase);
            self.earliest = self.earliest.max(phase);
        }
    }

    /// The version for a new key: numbering continues even if a file number is used again. `None`
    /// after the last version.
    pub fn next_version(&self) -> Option<DataKeyVersion> {
        DataKeyVersion::after(self.last_version())
    }

    /// The highest version that has a key, or had one that was destroyed.
    pub fn last_version(&self) -> Option<DataKeyVersion> {
        let last = self.keys.last_key_value().map(|(version, _)| *version);
        last.max(self.destroyed.map(|destroyed| destroyed.through))
    }

    /// The records that describe this file.
    pub(super) fn records(&self, file: RelFile) -> impl Iterator<Item = Record> {
        let destroyed = self.destroyed.map(|Destroyed { through, lsn, cipher, whole, at }| {
            Record::Destroyed { file, through, cipher, whole, lsn, at }
        });
        let keys = self.keys.iter().map(move |(&version, key)| Record::DataKey {
            file,
            version,
            cipher: key.cipher,
            scope: key.scope,
            key_version: key.key_version,
            wrapped: key.wrapped.clone(),
            created: key.created,
        });
        let Phase { version, plaintext } = self.phase;
        let phase = version.map(|version| match plaintext {
            true => Record::Plaintext { file, after: version },
            false => Record::Current { file, version },
        });
        let rewriting = self.rewriting.map(|(phase, done)| Record::Rewriting { file, phase, done });
        let switched = self.switched.map(|(phase, lsn)| Record::Switched { file, phase, lsn });
        // Not if one of these two says the same. Where the rewriting was recorded, its record says
        // nothing else; where it was not, the file has entered that state by now.
        let is_said = self.earliest.plaintext && self.earliest == self.phase
            || self.rewriting == Some((self.earliest, true));
        let was_done = self.rewriting >= Some((self.earliest, true));
        let earliest = self.earliest.version.filter(|_| !is_said).map(|version| {
            match self.earliest.plaintext && !was_done {
                true => Record::Plaintext { file, after: version },
                false => Record::Rewriting { file, phase: self.earliest, done: true },
            }
        });
        // Not if the record of the phase says the same.
        let is_said = self.sealed_only.version.is_none()
            || self.phase.plaintext && self.sealed_only == self.phase;
        let sealed_only = Some(self.sealed_only).filter(|_| !is_said);
        let sealed_only = sealed_only.map(|phase| Record::SealedOnly { file, phase });
        let states =
            earliest.into_iter().chain(phase).chain(rewriting).chain(switched).chain(sealed_only);
        destroyed.into_iter().chain(keys).chain(states)
    }
}
