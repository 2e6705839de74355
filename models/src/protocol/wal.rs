//! WAL as the model knows it: records, each at an index, from the beginning of history.

use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::{DataKeyVersion, KeyVersion, Lsn, Record, RelFile, Scope};

/// The one relation file of the model.
pub const FILE: RelFile = RelFile { tablespace: 1663, database: DATABASE, relation: 16384 };
/// The database whose key log holds the keys of [`FILE`].
pub const SCOPE: Scope = Scope::database(DATABASE);
const DATABASE: u32 = 5;
/// The cipher of all data keys.
const CIPHER: u8 = 1;
/// Bytes of a wrapped data key of this cipher.
const WRAPPED: usize = 92;

/// A data key: its version, and which random key it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Of the file's key.
    pub version: DataKeyVersion,
    /// No two keys that are made have the same.
    pub identity: u8,
}

/// A record of WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WalRecord {
    /// pagevault's own.
    Keys(KeyChange),
    /// A change of the file's one page, which a transaction has committed.
    Row {
        /// What the page says from then on.
        row: u8,
        /// The record restores the page as a whole.
        image: bool,
    },
    /// A checkpoint.
    Checkpoint {
        /// Index at which recovery begins.
        redo: usize,
    },
}

/// What a record of pagevault says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyChange {
    /// The file is written under another key from now on.
    Made {
        /// The key.
        key: Key,
        /// The file has pages; else the record also stands for the file's creation.
        in_use: bool,
    },
    /// The file, which has pages, is written in plaintext from now on.
    Decrypted {
        /// The last version.
        after: DataKeyVersion,
    },
    /// No page is in plaintext any more, or under a former key, on any server that has replayed
    /// this.
    Proven {
        /// The version under which pages are written.
        version: DataKeyVersion,
    },
    /// Keys were destroyed.
    Destroyed {
        /// The last version.
        through: DataKeyVersion,
        /// See [`Record::Destroyed`].
        lsn: Lsn,
    },
}

/// The WAL address of the record at an index. 0 is no address.
pub fn address(index: usize) -> Lsn {
    Lsn((index as u64 + 1) * 8)
}

impl KeyChange {
    /// As pagevault writes it down: in the order of `make_version`, `write_plaintext`,
    /// `record_rewritten` and `destroy_locked`.
    pub fn records(self) -> Vec<Record> {
        match self {
            Self::Made { key: Key { version, identity }, in_use } => {
                let key = Record::DataKey {
                    file: FILE,
                    version,
                    cipher: CIPHER,
                    scope: Scope::CLUSTER,
                    key_version: KeyVersion::FIRST,
                    wrapped: vec![identity; WRAPPED],
                    created: 7,
                };
                let phase = Phase { version: Some(version), plaintext: false };
                let rewriting =
                    in_use.then_some(Record::Rewriting { file: FILE, phase, done: false });
                let current = Record::Current { file: FILE, version };
                let sealed_only = (!in_use).then_some(Record::SealedOnly { file: FILE, phase });
                [Some(key), rewriting, Some(current), sealed_only].into_iter().flatten().collect()
            }
            Self::Decrypted { after } => {
                let phase = Phase::plaintext_after(after);
                let rewriting = Record::Rewriting { file: FILE, phase, done: false };
                vec![rewriting, Record::Plaintext { file: FILE, after }]
            }
            Self::Proven { version } => {
                let phase = Phase::under(version);
                let rewriting = Record::Rewriting { file: FILE, phase, done: true };
                vec![rewriting, Record::SealedOnly { file: FILE, phase }]
            }
            Self::Destroyed { through, lsn } => {
                let (cipher, whole, at) = (CIPHER, false, 7);
                vec![Record::Destroyed { file: FILE, through, cipher, whole, lsn, at }]
            }
        }
    }
}

/// What WAL makes of the file up to some point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The file exists and its pages can be read.
    pub lives: bool,
    /// What its page says; `None` before the first row.
    pub row: Option<u8>,
    /// Keys through this version were destroyed.
    pub destroyed: Option<DataKeyVersion>,
}

/// What WAL tells. `existed`: the file was there, in plaintext, before all WAL.
pub fn told(wal: &[WalRecord], existed: bool) -> Told {
    let mut told = Told { lives: existed, row: existed.then_some(0), destroyed: None };
    for record in wal {
        match *record {
            WalRecord::Keys(KeyChange::Made { in_use: false, .. }) => {
                told = Told { lives: true, row: None, ..told };
            }
            WalRecord::Keys(KeyChange::Destroyed { through, .. }) => {
                told =
                    Told { lives: false, row: None, destroyed: told.destroyed.max(Some(through)) };
            }
            WalRecord::Row { row, .. } => told.row = Some(row),
            WalRecord::Keys(
                KeyChange::Made { in_use: true, .. }
                | KeyChange::Decrypted { .. }
                | KeyChange::Proven { .. },
            )
            | WalRecord::Checkpoint { .. } => {}
        }
    }
    told
}

/// The keys that WAL has made known.
pub fn keys_made(wal: &[WalRecord]) -> impl Iterator<Item = Key> {
    wal.iter().filter_map(|record| match record {
        WalRecord::Keys(KeyChange::Made { key, .. }) => Some(*key),
        _ => None,
    })
}
