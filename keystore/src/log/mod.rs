//! A key log: an append-only file of batches.
//!
//! ```text
//!  0  magic       "pvkeys\r\n"        28  scope       u32, database OID or 0
//!  8  version     u16, 1             32  generation  u32, counts compactions
//! 10  zero        u16                36  checksum    u32, CRC-32C of bytes 0 to 35
//! 12  keystore id 16 bytes           40  batches, one after another (see `batch`)
//! ```
//!
//! `cluster.keys` (scope 0) holds providers, all database keys and the files of shared relations,
//! so that unlocking reads one small file; `<database oid>.keys` holds the data keys of that
//! database.
//!
//! # Durability
//!
//! WAL is authoritative, and checkpoints bring the log up to date: every change is in WAL, and redo
//! begins where the last checkpoint began and repeats what came after it. A batch is *staged* at
//! the end of the log before its WAL record is inserted, which proves that there is room for it,
//! but does not count yet. It is *settled* once its WAL record and the batch are durable and the
//! log states so. Every checkpoint settles; a caller that needs a key at the next start settles at
//! once.
//!
//! To settle, a process takes the log's [`Position`] (under the callers' lock), makes WAL durable
//! up to the last record about it, syncs the log ([`Log::sync`]; both without the lock), appends
//! a *mark* that all up to that position is durable ([`Log::append_settled`], under the lock), and
//! syncs again. A mark is a batch without records. Like a mark, the header of each batch states
//! how many bytes of the log were settled when it was written. So the log itself shows which part
//! of it can be missing only through damage.
//!
//! A mark must find room on a full disk: WAL has the batch by then. So a batch that ends less than
//! a mark before the end of a sector is staged together with another mark, which states nothing
//! new and takes the next sector.
//!
//! # What counts after a crash
//!
//! A start that replays WAL ([`Trust::Settled`]) uses batches that are settled, that are `logged`
//! before the address where replay begins, or that need no WAL record. From the first other batch
//! on, everything is cut off, even if it is readable. Either WAL contains it, or it has never
//! happened: then the WAL record was lost in the crash and will never be in any standby, archive or
//! backup. (With `fsync = off` checkpoints settle nothing; hence the address. It is the end of WAL
//! when the batch was staged, and no checkpoint that passes it ends before the batch is logged.)
//!
//! The highest address of a batch that counts is also kept in marks: replay repeats older records,
//! and a record from before that address must not replace a newer one.
//!
//! # What is cut off, and what is damage
//!
//! Let X be the offset of the first unreadable batch or mark: incomplete, or not matching its
//! checksums. All bytes behind its first are searched for headers with a correct checksum.
//!
//! - If one of them states that more than X bytes were durable, X is damaged: opening the log
//!   fails, and the error names X. The same holds for a header of a later version, which cannot be
//!   interpreted.
//! - Otherwise nothing from X on was ever settled, and all of it is cut off, even if it is
//!   readable.
//!
//! A log that is too short for the mark with which each begins is damaged, too. Otherwise one that
//! is cut behind its header would seem to be one that never had records.
//!
//! A batch with correct checksums but unknown contents is always an error: a later version of
//! pagevault has written it.
//!
//! This does not detect damage by the disk behind the last such header: to the records since the
//! last settling, which redo brings back; to the last synced append, until the next append or
//! settling; and to the last mark, which has no consequences. Nor does it detect damage to records
//! together with all headers behind them.
//!
//! Callers exclude each other by a lock, for appending and reading alike. The only state between
//! calls is a [`Position`], which many processes can share.

mod position;
mod replay;
mod settle;
pub mod unsettled;

use std::borrow::Borrow;
use std::io;

use pagevault_cipher::Lsn;

pub use self::position::{Contents, Position, Trust};
pub use self::replay::{batches, replay};
use self::replay::{check_scope, header, parse_header, was_never_settled};
pub use self::settle::Settle;

use crate::batch;
use crate::error::{FormatError, Problem};
use crate::record::Record;
use crate::scope::Scope;
use crate::storage::{Storage, StorageError};

/// First bytes of each log.
pub const MAGIC: [u8; 8] = *b"pvkeys\r\n";
/// Log format version.
pub const VERSION: u16 = 1;
/// Bytes before the first batch.
pub const HEADER: usize = 40;
/// A log has at least a mark behind its header: it gets its name when both are durable, and is
/// never made shorter.
const SHORTEST: usize = HEADER + batch::HEADER;
/// Largest log (1 GiB, more than five million data keys).
pub const MAX_LOG: u64 = 1 << 30;
/// Records in one batch of a compacted log.
pub(crate) const COMPACT_BATCH: usize = 1024;

/// Why a log could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The operating system reported an error; the log is unchanged.
    #[error("could not {action} key file \"{name}\": {source}")]
    Io {
        /// File.
        name: String,
        /// Verb.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The operating system reported an error that leaves it unknown whether the change is durable.
    /// Proceed as after any failed fsync: stop, and open the log again after the restart. Earlier
    /// records that are not settled may be lost, too.
    #[error("could not {action} key file \"{name}\", and its state is unknown: {source}")]
    Unsettled {
        /// File.
        name: String,
        /// Verb.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// Damaged, or of a later version of pagevault.
    #[error("key file \"{name}\" is not readable: {error}")]
    Format {
        /// File.
        name: String,
        /// Where and what.
        error: FormatError,
    },
    /// Records outside their limits, or of another log.
    #[error("record cannot be stored: {0}")]
    Record(FormatError),
    /// To be created, but exists.
    #[error("key file \"{name}\" exists already")]
    Exists {
        /// File.
        name: String,
    },
    /// To be changed, but missing.
    #[error("key file \"{name}\" does not exist")]
    Missing {
        /// File.
        name: String,
    },
    /// The caller's [`Position`] is not the log's end: another process has changed it. Open it
    /// again.
    #[error("key file \"{name}\" was changed unexpectedly")]
    Moved {
        /// File.
        name: String,
    },
}

/// Name of the log of a scope.
pub fn file_name(scope: Scope) -> String {
    if scope.is_cluster() { "cluster.keys".to_owned() } else { format!("{scope}.keys") }
}

/// Scopes that have a log, ascending. Other files are ignored.
pub fn scopes(storage: &impl Storage) -> Result<Vec<Scope>, LogError> {
    let list = |source| LogError::Io { name: ".".to_owned(), action: "list", source };
    let mut scopes: Vec<Scope> =
        storage.names().map_err(list)?.iter().filter_map(|n| scope_of(n)).collect();
    scopes.sort_unstable();
    Ok(scopes)
}

/// The scope whose log has this name.
pub fn scope_of(name: &str) -> Option<Scope> {
    let stem = name.strip_suffix(".keys")?;
    let scope = match stem {
        "cluster" => Scope::CLUSTER,
        database => Scope::database(database.parse().ok()?),
    };
    if scope.key_group().is_some() {
        return None; // files belong to databases
    }
    // "007.keys" and "0.keys" are not pagevault's.
    (file_name(scope) == name).then_some(scope)
}

/// A log open for changes.
#[derive(Debug)]
pub struct Log<'a, S> {
    storage: &'a S,
    name: String,
    position: Position,
}

impl<'a, S: Storage> Log<'a, S> {
    /// Creates the log of a scope with `records`, completely or not at all.
    pub fn create(
        storage: &'a S,
        keystore_id: [u8; 16],
        scope: Scope,
        records: &[Record],
    ) -> Result<Self, LogError> {
        let mut log = Self::resume(storage, Position::before_all(keystore_id, scope));
        if storage.len(&log.name).map_err(|error| log.failed("open", error))?.is_some() {
            return Err(LogError::Exists { name: log.name });
        }
        log.rewrite(records.chunks(COMPACT_BATCH), 0)?;
        Ok(log)
    }

    /// Reads the log of a scope, after syncing what a killed server may have left unsynced. Cuts
    /// off a torn end and the batches that do not count, which are kept beside it ([`unsettled`]).
    /// On return all of it is durable. `None` if there is no such log.
    pub fn open(
        storage: &'a S,
        scope: Scope,
        trust: Trust,
    ) -> Result<Option<(Self, Contents)>, LogError> {
        let mut log = Self::resume(storage, Position::before_all([0; 16], scope));
        let Some(length) = storage.len(&log.name).map_err(|error| log.failed("open", error))?
        else {
            return Ok(None);
        };
        if length > MAX_LOG {
            return Err(log.damaged(FormatError { offset: 0, problem: Problem::TooLarge(MAX_LOG) }));
        }
        storage.sync(&log.name).map_err(|error| log.failed("sync", error))?;
        let bytes = log.read(0, MAX_LOG)?;
        let contents = replay::replay_trusting(&bytes, scope, trust);
        let (mut contents, cut) = contents.map_err(|error| log.damaged(error))?;
        if !contents.position.is_settled() {
            contents.position.settled = contents.position.end;
        }
        log.position = contents.position;
        if cut.iter().any(|frame| !frame.records.is_empty()) {
            unsettled::keep(storage, &log.position.keystore_id, scope, cut)?;
        }
        if contents.torn + contents.unbelieved > 0 {
            let cut = storage.truncate(&log.name, log.position.end);
            cut.map_err(|error| log.failed("truncate", error))?;
        }
        Ok(Some((log, contents)))
    }

    /// Continues at a position of this or another process. Reads nothing; the next change detects a
    /// wrong position.
    pub fn resume(storage: &'a S, position: Position) -> Self {
        Self { storage, name: file_name(position.scope), position }
    }

    /// The present end of the log.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Appends the records of one change that is not in WAL and counts nevertheless, to a log in
    /// which everything is settled. On return they are durable. On error the log is unchanged,
    /// unless the error is [`LogError::Unsettled`].
    pub fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        let batch = self.encode(records)?;
        self.add(&batch, self.position.settled, Lsn::INVALID)?;
        self.make_durable(batch.len() as u64)
    }

    /// Appends the records of one change. Their WAL record will be inserted at the WAL address
    /// `logged` or behind it, but before any checkpoint that passes this address ends. On return
    /// they are in the log. On error the log is unchanged, unless the error is
    /// [`LogError::Unsettled`].
    pub fn stage(&mut self, records: &[Record], logged: Lsn) -> Result<(), LogError> {
        let batch = self.encode(records)?;
        self.stage_checked(&batch, logged)
    }

    /// Like [`Log::stage`], with a batch that is already encoded, such as the payload of a WAL
    /// record.
    pub fn stage_batch(&mut self, batch: &[u8], logged: Lsn) -> Result<(), LogError> {
        self.check(batch)?;
        self.stage_checked(batch, logged)
    }

    fn stage_checked(&mut self, batch: &[u8], logged: Lsn) -> Result<(), LogError> {
        let settled = self.position.settled;
        let mut frames = batch::stamp(batch, settled, logged);
        if !position::has_room_for_mark(self.position.end + frames.len() as u64) {
            frames.extend(batch::mark(settled, self.position.logged));
        }
        self.write(&frames)?;
        self.position.logged = self.position.logged.max(logged);
        Ok(())
    }

    /// Makes the present contents of the log durable, without reading them: needs neither a lock
    /// nor a current position. The error is [`LogError::Unsettled`]; or, if no sync was tried,
    /// [`LogError::Missing`] if there is no log, and [`LogError::Io`].
    pub fn sync(&self) -> Result<(), LogError> {
        self.storage.sync_data(&self.name).map_err(|error| match error {
            StorageError::Open(source) if source.kind() == io::ErrorKind::NotFound => {
                LogError::Missing { name: self.name.clone() }
            }
            StorageError::Open(source) => self.failed("open", source),
            StorageError::Failed(source) => self.unsettled("sync", source),
        })
    }

    /// Appends the mark that the log is durable up to `synced`, a position that it had before a
    /// successful [`sync`](Log::sync). The mark itself is durable after another sync. Returns
    /// whether there is a mark to sync: none is appended if the log ends in one that states as
    /// much, or if it has been rewritten since, which settles it.
    pub fn append_settled(&mut self, synced: &Position) -> Result<bool, LogError> {
        let here = &self.position;
        if (synced.keystore_id, synced.scope) != (here.keystore_id, here.scope) {
            return Err(self.moved());
        }
        if synced.generation != here.generation || here.is_settled() {
            return Ok(false);
        }
        if synced.end > here.end {
            return Err(self.moved());
        }
        let settled = here.settled.max(synced.end);
        let logged = self.position.logged;
        self.add(&batch::mark(settled, logged), settled, logged)?;
        self.position.settled = settled;
        Ok(true)
    }

    fn encode(&self, records: &[Record]) -> Result<Vec<u8>, LogError> {
        check_scope(records, self.position.scope, 0).map_err(LogError::Record)?;
        batch::encode(records).map_err(LogError::Record)
    }

    fn check(&self, batch: &[u8]) -> Result<(), LogError> {
        let records = batch::decode(batch).map_err(LogError::Record)?;
        check_scope(&records, self.position.scope, 0).map_err(LogError::Record)
    }

    /// Appends a batch or mark whose header states that `settled` bytes are durable.
    fn add(&mut self, batch: &[u8], settled: u64, logged: Lsn) -> Result<(), LogError> {
        self.write(&batch::stamp(batch, settled, logged))
    }

    fn write(&mut self, frames: &[u8]) -> Result<(), LogError> {
        let end = self.position.end;
        let new_end = end + frames.len() as u64;
        if new_end > MAX_LOG {
            let problem = Problem::TooLarge(MAX_LOG);
            return Err(LogError::Record(FormatError { offset: end, problem }));
        }
        self.verify()?;
        self.storage.append(&self.name, end, frames).map_err(|error| match error {
            StorageError::Open(source) => self.failed("open", source),
            StorageError::Failed(source) => self.cut_off_append(end, "write", source),
        })?;
        self.position.end = new_end;
        Ok(())
    }

    /// Syncs, after the last `added` bytes were written.
    fn make_durable(&mut self, added: u64) -> Result<(), LogError> {
        let synced = self.storage.sync_data(&self.name);
        let end = self.position.end;
        let Err(error) = synced else {
            self.position.settled = end;
            return Ok(());
        };
        self.position.end -= added;
        match error {
            StorageError::Open(source) => {
                Err(self.cut_off_append(self.position.end, "open", source))
            }
            // The kernel reports a failure once and forgets what it could not write, which may be
            // more than this batch.
            StorageError::Failed(source) if self.position.is_durable() => {
                Err(self.cut_off_append(self.position.end, "sync", source))
            }
            StorageError::Failed(source) => Err(self.unsettled("sync", source)),
        }
    }

    /// Cuts off an incomplete append.
    fn cut_off_append(&self, end: u64, action: &'static str, source: io::Error) -> LogError {
        match self.storage.truncate(&self.name, end) {
            Ok(()) => self.failed(action, source),
            Err(_) => self.unsettled(action, source),
        }
    }

    /// Rewrites the log with `records` only, which must give the same state as the log. Until this
    /// returns `Ok`, the next start may find the old log.
    pub fn compact<R: Borrow<Record>>(&mut self, records: &[R]) -> Result<(), LogError> {
        self.verify()?;
        self.rewrite(records.chunks(COMPACT_BATCH), self.position.generation.wrapping_add(1))
    }

    /// Like [`Log::compact`], with the given batches, none of which is empty.
    pub fn compact_to<R: Borrow<Record>>(&mut self, batches: &[Vec<R>]) -> Result<(), LogError> {
        self.verify()?;
        let batches = batches.iter().map(Vec::as_slice);
        self.rewrite(batches, self.position.generation.wrapping_add(1))
    }

    fn rewrite<'r, R: Borrow<Record> + 'r>(
        &mut self,
        batches: impl Iterator<Item = &'r [R]>,
        generation: u32,
    ) -> Result<(), LogError> {
        let mut bytes = header(&self.position.keystore_id, self.position.scope, generation);
        for records in batches {
            check_scope(records, self.position.scope, 0).map_err(LogError::Record)?;
            // The file is not read by others before it is complete and durable.
            let settled = bytes.len() as u64;
            batch::put(&mut bytes, records, settled).map_err(LogError::Record)?;
        }
        let settled = bytes.len() as u64;
        bytes.extend(batch::mark(settled, self.position.logged));
        if bytes.len() as u64 > MAX_LOG {
            let problem = Problem::TooLarge(MAX_LOG);
            return Err(LogError::Record(FormatError { offset: MAX_LOG, problem }));
        }
        let new = format!("{}.new", self.name);
        if let Err(source) = self.storage.create(&new, &bytes) {
            // What is left of it is harmless and overwritten by the next attempt.
            let _ = self.storage.remove(&new);
            return Err(self.failed("write", source));
        }
        self.storage.rename(&new, &self.name).map_err(|error| match error {
            StorageError::Open(source) => self.failed("replace", source),
            StorageError::Failed(source) => self.unsettled("replace", source),
        })?;
        self.position.generation = generation;
        self.position.end = bytes.len() as u64;
        self.position.settled = settled;
        Ok(())
    }

    /// Checks that the log is the one of this position and ends there. An incomplete append that
    /// another process could not cut off is cut off now.
    fn verify(&self) -> Result<(), LogError> {
        let length = self.storage.len(&self.name).map_err(|error| self.failed("open", error))?;
        let length = length.ok_or_else(|| LogError::Missing { name: self.name.clone() })?;
        let head = self.read(0, HEADER as u64)?;
        let found =
            parse_header(&head, self.position.scope).map_err(|error| self.damaged(error))?;
        if found != (self.position.keystore_id, self.position.generation) {
            return Err(self.moved());
        }
        if length > self.position.end {
            if !was_never_settled(&self.read(self.position.end, MAX_LOG)?, self.position.end) {
                return Err(self.moved());
            }
            // Truncating includes a sync. If that fails, what is to be settled may be lost, too.
            let cut = self.storage.truncate(&self.name, self.position.end);
            return cut.map_err(|error| match self.position.is_durable() {
                true => self.failed("truncate", error),
                false => self.unsettled("truncate", error),
            });
        }
        if length < self.position.end { Err(self.moved()) } else { Ok(()) }
    }

    fn read(&self, from: u64, limit: u64) -> Result<Vec<u8>, LogError> {
        let bytes = self.storage.read(&self.name, from, limit);
        bytes
            .map_err(|error| self.failed("read", error))?
            .ok_or_else(|| LogError::Missing { name: self.name.clone() })
    }

    fn moved(&self) -> LogError {
        LogError::Moved { name: self.name.clone() }
    }

    fn failed(&self, action: &'static str, source: io::Error) -> LogError {
        LogError::Io { name: self.name.clone(), action, source }
    }

    fn unsettled(&self, action: &'static str, source: io::Error) -> LogError {
        LogError::Unsettled { name: self.name.clone(), action, source }
    }

    fn damaged(&self, error: FormatError) -> LogError {
        LogError::Format { name: self.name.clone(), error }
    }
}
