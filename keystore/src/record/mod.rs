//! The records of the keystore.

mod database_key;
mod encoding;
mod limits;

use pagevault_cipher::{CipherId, DataKeyVersion, KeyVersion, Lsn, wrap};

pub use self::database_key::{DatabaseKey, MAX_MASTER_KEYS, Wrapping};
pub use self::limits::is_key_group_name;
use crate::former;
use crate::job::{JobId, Request, Step};
use crate::rel_file::{Phase, RelFile};
use crate::scope::{KeyGroup, Scope};
use crate::wal::Switch;

/// Longest provider name, provider kind and master key name, in bytes.
pub const MAX_NAME: usize = 255;
/// Longest name of a key group, in bytes.
pub const MAX_KEY_GROUP_NAME: usize = 63;
/// Longest provider options, in bytes of JSON text.
pub const MAX_OPTIONS: usize = 64 << 10;
/// Longest wrapped database key, in bytes.
pub const MAX_WRAPPED_DATABASE_KEY: usize = 64 << 10;
/// Longest wrapped data key, in bytes: 64 bytes of key, 28 of nonce and tag.
pub const MAX_WRAPPED_DATA_KEY: usize = 92;

/// One change of the keystore. Records are added and never edited; [`State`](crate::state::State)
/// is the result of applying them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Record {
    /// A new or changed provider.
    Provider {
        /// Name in SQL.
        name: String,
        /// `file`, `vault`, `aws_kms`, `gcp_kms`, `azure_key_vault`, `pkcs11`, `kmip`, `command`.
        kind: String,
        /// JSON object.
        options: String,
        /// The role that set the provider may run programs on the server, so the provider may, too.
        programs: bool,
    },
    /// A provider was dropped.
    DropProvider {
        /// Name in SQL.
        name: String,
    },
    /// A database key, wrapped by master keys. If scope and version are known, it is the same key
    /// with other wrappings.
    DatabaseKey {
        /// Scope of the key.
        scope: Scope,
        /// The highest version wraps new data keys.
        version: KeyVersion,
        /// The key.
        key: DatabaseKey,
    },
    /// A data key, wrapped by a database key. If file and version are known, it is the same key
    /// with a new wrapping.
    DataKey {
        /// File of the key.
        file: RelFile,
        /// Version of the key.
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
    /// The key under which a file is written from now on; its version is higher than all before.
    Current {
        /// Which file.
        file: RelFile,
        /// Version of the key.
        version: DataKeyVersion,
    },
    /// A file is written as plaintext from now on. A file that never had a key needs no such
    /// record.
    Plaintext {
        /// Which file.
        file: RelFile,
        /// The highest version of its keys so far.
        after: DataKeyVersion,
    },
    /// The state of WAL from an address on. The key has a record of its own, see
    /// [`crate::wal::key_place`].
    WalSwitch(Switch),
    /// The keys of these versions were destroyed on purpose. A record of such a key, for example
    /// from older WAL, is ignored from now on. Replaces the keys for ever.
    Destroyed {
        /// Which file.
        file: RelFile,
        /// The highest version whose key is destroyed, with all before it.
        through: DataKeyVersion,
        /// Cipher of the file's pages; 0 if the file was plaintext by then.
        cipher: u8,
        /// The keys of all files of the database were destroyed.
        whole: bool,
        /// All WAL records about pages under these keys end at this LSN or before.
        lsn: Lsn,
        /// Time, in seconds since 1970.
        at: i64,
    },
    /// A file with pages enters another state. Until the rewriting is done, pages on disk may be in
    /// an earlier state.
    Rewriting {
        /// Which file.
        file: RelFile,
        /// The new state.
        phase: Phase,
        /// All pages on disk are in the new state.
        done: bool,
    },
    /// Where in WAL a file with pages entered a state, for which [`Self::Rewriting`] came before.
    /// Follows the records of the state: if it is missing, the place is not known.
    Switched {
        /// Which file.
        file: RelFile,
        /// The new state.
        phase: Phase,
        /// The end of the WAL record of the state. Each server that replays WAL writes a page in
        /// the new state if the page is changed by a later record.
        lsn: Lsn,
    },
    /// Whether a file contains sealed pages only, and since which version. Where it does, no page
    /// is accepted in plaintext, nor under an earlier version.
    SealedOnly {
        /// Which file.
        file: RelFile,
        /// Under a version: none but pages under this and later versions. Plaintext after a
        /// version: not any more. The latest counts, as for states of a file. [`Self::Plaintext`]
        /// says the latter too.
        phase: Phase,
    },
    /// A requested rekey job. It counts if its transaction has committed.
    Job {
        /// Which job.
        job: JobId,
        /// The request.
        request: Request,
    },
    /// A change of a rekey job's state.
    JobStep {
        /// Which job.
        job: JobId,
        /// The new state.
        step: Step,
    },
    /// A rekey job has switched the files of a relation to another key, and need not do it again.
    JobBegun {
        /// Which job.
        job: JobId,
        /// OID of the relation.
        relation: u32,
    },
    /// Rekey jobs without records before this one are forgotten. Later records of them, for example
    /// from older WAL, are ignored.
    JobsForgotten {
        /// Database OID.
        database: u32,
        /// The highest forgotten number.
        through: u64,
        /// Also known jobs: the database was dropped.
        all: bool,
    },
    /// Files that are gone. Where WAL is replayed from no earlier address, their keys may be
    /// forgotten.
    FormerFiles(former::Range),
    /// Keys of [`Record::FormerFiles`] that were gone at this address are not in the log any more.
    /// Each server records this for itself: it is not in WAL.
    KeysForgotten {
        /// Database OID, 0 for shared relations.
        database: u32,
        /// The last address of files whose keys may be missing.
        by: Lsn,
    },
    /// A new key group. Its database key has records of its own.
    KeyGroup {
        /// Its number.
        group: KeyGroup,
        /// Its name in SQL and in labels.
        name: String,
        /// Time, in seconds since 1970.
        at: i64,
    },
    /// A key group has ended, and all versions of its database key are destroyed. Records about
    /// them, for example from older WAL, are ignored from now on.
    EndedKeyGroup {
        /// Its number.
        group: KeyGroup,
        /// Time, in seconds since 1970.
        at: i64,
    },
}

impl Record {
    /// The log of a record: the cluster's (providers, all database keys, files of shared
    /// relations), or that of a database.
    pub fn home(&self) -> Scope {
        match self {
            Self::Provider { .. }
            | Self::DropProvider { .. }
            | Self::DatabaseKey { .. }
            | Self::KeyGroup { .. }
            | Self::EndedKeyGroup { .. }
            | Self::WalSwitch(_) => Scope::CLUSTER,
            Self::DataKey { file, .. }
            | Self::Current { file, .. }
            | Self::Plaintext { file, .. }
            | Self::Destroyed { file, .. }
            | Self::Rewriting { file, .. }
            | Self::Switched { file, .. }
            | Self::SealedOnly { file, .. } => file.scope(),
            Self::Job { job, .. } | Self::JobStep { job, .. } | Self::JobBegun { job, .. } => {
                job.scope()
            }
            Self::FormerFiles(former::Range { database, .. })
            | Self::KeysForgotten { database, .. }
            | Self::JobsForgotten { database, .. } => Scope::database(*database),
        }
    }
}

/// Length of a wrapped data key; `None` for unknown ciphers.
pub fn wrapped_len(cipher: u8) -> Option<usize> {
    CipherId::try_from(cipher).ok().map(|cipher| cipher.key_len() + wrap::OVERHEAD)
}

/// Name of a cipher in SQL; `None` for unknown ciphers.
pub fn cipher_name(cipher: u8) -> Option<&'static str> {
    CipherId::try_from(cipher).ok().map(CipherId::name)
}
