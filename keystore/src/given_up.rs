//! The file `given_up` beside the key files: key groups that `pagevault-keyring give-up-key-group`
//! has destroyed in this data directory, while the server was down, because recovery needed a key
//! that is gone for ever.
//!
//! ```text
//!  0  magic     "pvgiven1"
//!  8  keystore  16 bytes
//! 24  a batch of records (see `batch`): one `EndedKeyGroup` for each group
//! ```
//!
//! The file is written at once, by renaming: a group is given up when it is there. Whoever reads
//! the keystore applies its records after the cluster's log, and takes data keys under the groups
//! for destroyed ([`OfCluster`](crate::wrappings::OfCluster)). The server writes both to its logs
//! at its start, before it reads a page, and to WAL as soon as it may write WAL; then it removes
//! the file.
//!
//! As long as the file is there, WAL is still to be replayed about pages and keys of these groups.
//! So their tombstones have the address [`AFTER_ALL_WAL`].

use pagevault_cipher::Lsn;

use crate::batch;
use crate::error::{FormatError, Problem};
use crate::record::Record;
use crate::scope::{KeyGroup, Scope};

/// Name of the file.
pub const NAME: &str = "given_up";
/// Largest size, in bytes. There are at most 11,900 groups.
pub const LIMIT: u64 = 1 << 20;

const MAGIC: [u8; 8] = *b"pvgiven1";
const HEADER: usize = 24;

/// The address in the tombstone of a key that was destroyed while WAL about pages under it was
/// still to be replayed: after all that, whatever it is. Only a placeholder page has a higher one.
/// Redo cannot have brought such a page up to date, so nobody may take it for empty.
pub const AFTER_ALL_WAL: Lsn = Lsn(u64::MAX - 1);

/// Contents of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GivenUp {
    /// The keystore of the groups.
    pub keystore: [u8; 16],
    /// The groups, and when they were given up, in seconds since 1970.
    pub groups: Vec<(KeyGroup, i64)>,
}

impl GivenUp {
    /// Whether it is this group's scope, or that of another one.
    #[must_use]
    pub fn has(&self, scope: Scope) -> bool {
        self.groups.iter().any(|(group, _)| group.scope() == scope)
    }

    /// The ends of the groups, as records of the cluster's log.
    pub fn records(&self) -> impl Iterator<Item = Record> {
        self.groups.iter().map(|&(group, at)| Record::EndedKeyGroup { group, at })
    }

    /// The contents of the file.
    ///
    /// # Errors
    /// If there are too many groups.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let records: Vec<_> = self.records().collect();
        let batch = batch::encode(&records)?;
        Ok([MAGIC.as_slice(), &self.keystore, &batch].concat())
    }

    /// Reads the file.
    ///
    /// # Errors
    /// If it is damaged, or has records of another kind.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let not_one = || FormatError { offset: 0, problem: Problem::Magic };
        let (head, batch) = bytes.split_at_checked(HEADER).ok_or_else(not_one)?;
        let id = head.strip_prefix(&MAGIC).ok_or_else(not_one)?;
        let keystore = id.try_into().map_err(|_| not_one())?;
        let group = |record: Record| match record {
            Record::EndedKeyGroup { group, at } => Ok((group, at)),
            _ => Err(not_one()),
        };
        let groups = batch::decode(batch)?.into_iter().map(group).collect::<Result<_, _>>()?;
        Ok(Self { keystore, groups })
    }
}
