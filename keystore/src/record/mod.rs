//! The records of which a keystore is made.

mod encoding;
mod limits;

use pagevault_cipher::{CipherId, DataKeyVersion, KeyVersion, Lsn, wrap};

use crate::check_value::CheckValue;
use crate::job::{JobId, Request, Step};
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::wal::Switch;

/// Longest provider name, provider kind and master key name, in bytes.
pub const MAX_NAME: usize = 255;
/// Longest provider options, in bytes of JSON text.
pub const MAX_OPTIONS: usize = 64 << 10;
/// Longest wrapped database key, in bytes.
pub const MAX_WRAPPED_DATABASE_KEY: usize = 64 << 10;
/// Longest wrapped data key, in bytes: 64 key bytes and 28 of nonce and tag.
pub const MAX_WRAPPED_DATA_KEY: usize = 92;

/// One fact about keys. Facts are added, never edited; [`State`](crate::state::State) folds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A provider, new or altered.
    Provider {
        /// Name in SQL.
        name: String,
        /// `file`, `vault`, `aws_kms`, `command`.
        kind: String,
        /// JSON object.
        options: String,
        /// Who set it may have the server run programs, and so may the provider.
        programs: bool,
    },
    /// A provider is gone.
    DropProvider {
        /// Name in SQL.
        name: String,
    },
    /// A database key, wrapped by a master key. The same scope and version again: the same key in a
    /// new wrapping.
    DatabaseKey {
        /// Whose key.
        scope: Scope,
        /// The highest is the one to wrap new data keys with.
        version: KeyVersion,
        /// Provider of the master key.
        provider: String,
        /// Master key's name at the provider.
        master_key: String,
        /// Master key's version that wrapped.
        master_version: u64,
        /// Opaque.
        wrapped: Vec<u8>,
        /// Of the key that is wrapped.
        check: CheckValue,
        /// Seconds since 1970.
        created: i64,
    },
    /// A data key, wrapped by a database key. The same file and version again: the same key in a
    /// new wrapping.
    DataKey {
        /// Whose key.
        file: RelFile,
        /// Of the key.
        version: DataKeyVersion,
        /// Cipher number as in `pagevault_cipher::CipherId`; unknown ones are kept.
        cipher: u8,
        /// Scope of the database key that wraps.
        scope: Scope,
        /// Version of the database key that wraps.
        key_version: KeyVersion,
        /// Nonce, ciphertext, tag; associated data is [`data_key_aad`](crate::data_key_aad).
        wrapped: Vec<u8>,
        /// Seconds since 1970.
        created: i64,
    },
    /// Which key a file is written with from now on: one newer than all before.
    Current {
        /// Which file.
        file: RelFile,
        /// Of the key.
        version: DataKeyVersion,
    },
    /// A file is written in plaintext from now on. One that never had a key needs no such record.
    Plaintext {
        /// Which file.
        file: RelFile,
        /// The highest version that it has so far.
        after: DataKeyVersion,
    },
    /// How WAL is written from an address on. The key has a record of its own, see
    /// [`crate::wal::key_place`].
    WalSwitch(Switch),
    /// The keys of these versions were destroyed on purpose, and never come back: who still hears
    /// of one, from older WAL say, ignores it. Says so for ever, in place of the keys.
    Destroyed {
        /// Which file.
        file: RelFile,
        /// The highest version whose key is destroyed, with all before it.
        through: DataKeyVersion,
        /// Cipher of the file's pages, 0 if it was not written sealed any more.
        cipher: u8,
        /// The keys of all files of the database were destroyed.
        whole: bool,
        /// All WAL records about pages under these keys end at this LSN or before.
        lsn: Lsn,
        /// When, in seconds since 1970.
        at: i64,
    },
    /// A file with pages is written otherwise from a phase on: until the work is done, pages may
    /// lie on disk as they were written before.
    Rewriting {
        /// Which file.
        file: RelFile,
        /// How it is written from now on.
        phase: Phase,
        /// All pages on disk are written so.
        done: bool,
    },
    /// A rekey job was asked for. It counts if its transaction has committed.
    Job {
        /// Which one.
        job: JobId,
        /// What is to be done.
        request: Request,
    },
    /// What became of a rekey job.
    JobStep {
        /// Which one.
        job: JobId,
        /// How it stands.
        step: Step,
    },
    /// A rekey job has had the files of a relation written under another key: once is enough.
    JobBegun {
        /// Which one.
        job: JobId,
        /// OID of the relation.
        relation: u32,
    },
    /// Rekey jobs that are not spoken of in what stands before this are forgotten: who still hears
    /// of one, from older WAL say, ignores it.
    JobsForgotten {
        /// Database OID.
        database: u32,
        /// The highest number that is forgotten.
        through: u64,
        /// Also those that are known: the database is gone.
        all: bool,
    },
}

impl Record {
    /// The log a record belongs to: the cluster's (providers, all database keys, files of shared
    /// relations), or a database's.
    pub fn home(&self) -> Scope {
        match self {
            Self::Provider { .. }
            | Self::DropProvider { .. }
            | Self::DatabaseKey { .. }
            | Self::WalSwitch(_) => Scope::CLUSTER,
            Self::DataKey { file, .. }
            | Self::Current { file, .. }
            | Self::Plaintext { file, .. }
            | Self::Destroyed { file, .. }
            | Self::Rewriting { file, .. } => file.scope(),
            Self::Job { job, .. } | Self::JobStep { job, .. } | Self::JobBegun { job, .. } => {
                job.scope()
            }
            Self::JobsForgotten { database, .. } => Scope::database(*database),
        }
    }
}

/// Length of a wrapped data key, `None` for ciphers this version does not know.
pub fn wrapped_len(cipher: u8) -> Option<usize> {
    CipherId::try_from(cipher).ok().map(|cipher| cipher.key_len() + wrap::OVERHEAD)
}

/// SQL name of a cipher, `None` for ciphers this version does not know.
pub fn cipher_name(cipher: u8) -> Option<&'static str> {
    CipherId::try_from(cipher).ok().map(CipherId::name)
}
