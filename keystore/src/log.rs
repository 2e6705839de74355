//! A key log: an append-only file of batches.
//!
//! ```text
//!  0  magic       "pvkeys\r\n"        28  scope       u32, database OID or 0
//!  8  version     u16, 1             32  generation  u32, counts compactions
//! 10  zero        u16                36  checksum    u32, CRC-32C of bytes 0 to 35
//! 12  keystore id 16 bytes           40  batches, one after another (see `batch`)
//! ```
//!
//! `cluster.keys` (scope 0) holds providers, all database keys and the files of shared relations, so
//! that unlocking reads one small file; `<database oid>.keys` holds the data keys of that database.
//!
//! A change is acknowledged once its batch has been written and synced. A batch that is found
//! unreadable at the end of the file was never acknowledged, and is cut off; anywhere else it is
//! damage, and opening the log fails with its offset. The two are told apart as follows. An append
//! starts only where everything before is acknowledged, and writes one batch. So an unreadable batch
//! is *torn* if it can be the last thing that was ever written:
//!
//! - its header is damaged or incomplete, or says that the batch reaches to the end of the file or
//!   beyond; and
//! - no intact batch header stands anywhere behind its first byte.
//!
//! A batch whose checksums are right but whose content this version does not know is never torn: a
//! later pagevault has acknowledged it.
//!
//! What this cannot see: damage by the disk to the very last batch looks like a torn one.
//!
//! Callers exclude each other by a lock, appending and reading alike. Nothing is kept between calls but
//! a [`Position`], which many processes can share.

use std::io;

use crate::batch::{self, Header, MAGIC as BATCH_MAGIC};
use crate::error::{FormatError, Problem};
use crate::record::Record;
use crate::storage::Storage;
use crate::wire::Reader;

/// First bytes of every log.
pub const MAGIC: [u8; 8] = *b"pvkeys\r\n";
/// Log format version.
pub const VERSION: u16 = 1;
/// Bytes before the first batch.
pub const HEADER: usize = 40;
/// Largest log (1 GiB, more than five million data keys).
pub const MAX_LOG: u64 = 1 << 30;
/// Records in one batch of a compacted log.
const COMPACT_BATCH: usize = 1024;

/// Why a log could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The operating system said no; the log is as it was.
    #[error("could not {action} key file \"{name}\": {source}")]
    Io {
        /// File.
        name: String,
        /// Verb.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The operating system said no in such a way that it is not known whether the change is durable.
    /// Go on as after any failed fsync: stop, and open the log again after the restart.
    #[error("could not {action} key file \"{name}\", and its state is not known: {source}")]
    Unsettled {
        /// File.
        name: String,
        /// Verb.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// Damaged, or of a later pagevault.
    #[error("key file \"{name}\" is not readable: {error}")]
    Format {
        /// File.
        name: String,
        /// Where and what.
        error: FormatError,
    },
    /// Records outside their limits, or that belong in another log.
    #[error("record cannot be stored: {0}")]
    Record(FormatError),
    /// To be created, but exists.
    #[error("key file \"{name}\" exists already")]
    Exists {
        /// File.
        name: String,
    },
    /// To be changed, but does not exist.
    #[error("key file \"{name}\" does not exist")]
    Missing {
        /// File.
        name: String,
    },
    /// The caller's [`Position`] is not the log's end: someone else has changed it. Open it again.
    #[error("key file \"{name}\" is not as it was left")]
    Moved {
        /// File.
        name: String,
    },
}

/// Where a log ends: all a process needs to know to append to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The keystore the log belongs to.
    pub keystore_id: [u8; 16],
    /// Database OID, or 0.
    pub scope: u32,
    /// Compactions so far (wraps).
    pub generation: u32,
    /// Bytes.
    pub end: u64,
}

/// A log as it was found.
#[derive(Debug)]
pub struct Contents {
    /// All records, in order.
    pub records: Vec<Record>,
    /// End of the last intact batch.
    pub position: Position,
    /// Bytes behind it that were never acknowledged.
    pub torn: u64,
}

/// Name of the log of a scope.
pub fn file_name(scope: u32) -> String {
    match scope {
        0 => "cluster.keys".to_owned(),
        database => format!("{database}.keys"),
    }
}

/// Scopes that have a log, ascending. Other files are ignored.
pub fn scopes(storage: &impl Storage) -> Result<Vec<u32>, LogError> {
    let list = |source| LogError::Io { name: ".".to_owned(), action: "list", source };
    let mut scopes: Vec<u32> =
        storage.names().map_err(list)?.iter().filter_map(|n| scope_of(n)).collect();
    scopes.sort_unstable();
    Ok(scopes)
}

fn scope_of(name: &str) -> Option<u32> {
    let stem = name.strip_suffix(".keys")?;
    let scope = if stem == "cluster" { 0 } else { stem.parse().ok()? };
    // "007.keys" and "0.keys" are not ours.
    (file_name(scope) == name).then_some(scope)
}

/// Removes the log of a dropped database, and with it its keys.
pub fn remove(storage: &impl Storage, scope: u32) -> Result<(), LogError> {
    let name = file_name(scope);
    storage.remove(&name).map_err(|source| LogError::Unsettled { name, action: "remove", source })
}

/// Reads a log's bytes. Pure: changes nothing, also where the end is torn.
pub fn replay(bytes: &[u8], scope: u32) -> Result<Contents, FormatError> {
    let (keystore_id, generation) = parse_header(bytes, scope)?;
    let mut records = Vec::new();
    let mut end = HEADER;
    while let Some(rest) = bytes.get(end..).filter(|rest| !rest.is_empty()) {
        match batch::decode_at(rest, end as u64) {
            Ok((batch, length)) => {
                check_scope(&batch, scope, end as u64)?;
                records.extend(batch);
                end += length;
            }
            Err(_) if is_torn(rest) => break,
            Err(error) => return Err(error),
        }
    }
    let torn = (bytes.len() - end) as u64;
    let position = Position { keystore_id, scope, generation, end: end as u64 };
    Ok(Contents { records, position, torn })
}

/// Whether an unreadable batch at the start of `rest`, which reaches to the end of the file, can be an
/// append that was cut short. The rule is at the head of this file.
fn is_torn(rest: &[u8]) -> bool {
    let unreadable = match Header::parse(rest) {
        Ok(header) => {
            let end = batch::HEADER + header.length;
            rest.len() < end || rest.len() == end && !header.matches(rest)
        }
        Err(problem) => !is_intact(&problem),
    };
    let mut starts = rest.windows(BATCH_MAGIC.len()).enumerate().skip(1);
    let followed = starts.any(|(at, window)| {
        window == BATCH_MAGIC
            && rest.get(at..).is_some_and(|rest| match Header::parse(rest) {
                Ok(_) => true,
                Err(problem) => is_intact(&problem),
            })
    });
    unreadable && !followed
}

/// Whether a header that was refused for this reason had a right checksum.
fn is_intact(problem: &Problem) -> bool {
    !matches!(problem, Problem::Short | Problem::Magic | Problem::HeaderChecksum)
}

fn check_scope(records: &[Record], scope: u32, offset: u64) -> Result<(), FormatError> {
    match records.iter().map(Record::home).find(|home| *home != scope) {
        None => Ok(()),
        Some(found) => {
            Err(FormatError { offset, problem: Problem::Misplaced { expected: scope, found } })
        }
    }
}

fn header(keystore_id: &[u8; 16], scope: u32, generation: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(keystore_id);
    out.extend_from_slice(&scope.to_le_bytes());
    out.extend_from_slice(&generation.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out
}

/// Keystore id and generation of a log that must be of `scope`.
fn parse_header(bytes: &[u8], scope: u32) -> Result<([u8; 16], u32), FormatError> {
    let mut from = Reader::new(bytes, 0);
    let fail = |problem| FormatError { offset: 0, problem };
    if from.take(MAGIC.len())? != MAGIC {
        return Err(fail(Problem::Magic));
    }
    let (version, zero) = (from.u16()?, from.u16()?);
    let (keystore_id, found, generation) = (from.array()?, from.u32()?, from.u32()?);
    let checksum = from.u32()?;
    if bytes.get(..HEADER - 4).map(crc32c::crc32c) != Some(checksum) {
        return Err(fail(Problem::HeaderChecksum));
    }
    if version != VERSION {
        return Err(fail(Problem::Version(version)));
    }
    if zero != 0 {
        return Err(fail(Problem::Field("file header", "reserved bytes are set")));
    }
    if found != scope {
        return Err(fail(Problem::Misplaced { expected: scope, found }));
    }
    Ok((keystore_id, generation))
}

/// A log that can be changed.
#[derive(Debug)]
pub struct Log<'a, S> {
    storage: &'a S,
    name: String,
    position: Position,
}

impl<'a, S: Storage> Log<'a, S> {
    /// Makes the log of a scope, with `records` in it; all or nothing.
    pub fn create(
        storage: &'a S,
        keystore_id: [u8; 16],
        scope: u32,
        records: &[Record],
    ) -> Result<Self, LogError> {
        let position = Position { keystore_id, scope, generation: 0, end: 0 };
        let mut log = Self::resume(storage, position);
        if storage.len(&log.name).map_err(|error| log.failed("open", error))?.is_some() {
            return Err(LogError::Exists { name: log.name });
        }
        log.rewrite(records, 0)?;
        Ok(log)
    }

    /// Reads the log of a scope, after making durable what a killed server may have left unsynced,
    /// and cuts off a torn end. `None` if there is no such log.
    pub fn open(storage: &'a S, scope: u32) -> Result<Option<(Self, Contents)>, LogError> {
        let position = Position { keystore_id: [0; 16], scope, generation: 0, end: 0 };
        let mut log = Self::resume(storage, position);
        let Some(length) = storage.len(&log.name).map_err(|error| log.failed("open", error))?
        else {
            return Ok(None);
        };
        if length > MAX_LOG {
            return Err(log.damaged(FormatError { offset: 0, problem: Problem::TooLarge(MAX_LOG) }));
        }
        storage.sync(&log.name).map_err(|error| log.failed("sync", error))?;
        let bytes = log.read(0, MAX_LOG)?;
        let contents = replay(&bytes, scope).map_err(|error| log.damaged(error))?;
        log.position = contents.position;
        if contents.torn > 0 {
            let cut = storage.truncate(&log.name, log.position.end);
            cut.map_err(|error| log.failed("truncate", error))?;
        }
        Ok(Some((log, contents)))
    }

    /// Goes on where this or another process left off. Reads nothing; a wrong position is noticed by
    /// the next change.
    pub fn resume(storage: &'a S, position: Position) -> Self {
        Self { storage, name: file_name(position.scope), position }
    }

    /// Where the log ends now.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Adds the records of one change. On return they are durable, or the log is as it was, or the
    /// error is [`LogError::Unsettled`].
    pub fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        check_scope(records, self.position.scope, 0).map_err(LogError::Record)?;
        let batch = batch::encode(records).map_err(LogError::Record)?;
        self.append_checked(&batch)
    }

    /// Adds a batch that is encoded already, as a WAL record's payload is.
    pub fn append_batch(&mut self, batch: &[u8]) -> Result<(), LogError> {
        let records = batch::decode(batch).map_err(LogError::Record)?;
        check_scope(&records, self.position.scope, 0).map_err(LogError::Record)?;
        self.append_checked(batch)
    }

    fn append_checked(&mut self, batch: &[u8]) -> Result<(), LogError> {
        let end = self.position.end;
        let new_end = end + batch.len() as u64;
        if new_end > MAX_LOG {
            let problem = Problem::TooLarge(MAX_LOG);
            return Err(LogError::Record(FormatError { offset: end, problem }));
        }
        self.verify()?;
        if let Err(source) = self.storage.append(&self.name, end, batch) {
            return Err(match self.storage.truncate(&self.name, end) {
                Ok(()) => self.failed("write", source),
                Err(_) => self.unsettled("write", source),
            });
        }
        self.position.end = new_end;
        Ok(())
    }

    /// Rewrites the log with `records` only, which must say all that the log said and that matters.
    /// Until this returns `Ok`, the old log may be what the next start finds.
    pub fn compact(&mut self, records: &[Record]) -> Result<(), LogError> {
        self.verify()?;
        self.rewrite(records, self.position.generation.wrapping_add(1))
    }

    fn rewrite(&mut self, records: &[Record], generation: u32) -> Result<(), LogError> {
        check_scope(records, self.position.scope, 0).map_err(LogError::Record)?;
        let mut bytes = header(&self.position.keystore_id, self.position.scope, generation);
        for records in records.chunks(COMPACT_BATCH) {
            bytes.extend(batch::encode(records).map_err(LogError::Record)?);
        }
        if bytes.len() as u64 > MAX_LOG {
            let problem = Problem::TooLarge(MAX_LOG);
            return Err(LogError::Record(FormatError { offset: MAX_LOG, problem }));
        }
        let new = format!("{}.new", self.name);
        if let Err(source) = self.storage.create(&new, &bytes) {
            // What is left of it harms nobody and is overwritten by the next attempt.
            let _ = self.storage.remove(&new);
            return Err(self.failed("write", source));
        }
        self.storage
            .rename(&new, &self.name)
            .map_err(|source| self.unsettled("replace", source))?;
        self.position.generation = generation;
        self.position.end = bytes.len() as u64;
        Ok(())
    }

    /// Checks that the log is the one this position was taken from and ends there. What another
    /// process failed to write and to cut off again is cut off now.
    fn verify(&self) -> Result<(), LogError> {
        let length = self.storage.len(&self.name).map_err(|error| self.failed("open", error))?;
        let length = length.ok_or_else(|| LogError::Missing { name: self.name.clone() })?;
        let head = self.read(0, HEADER as u64)?;
        let found =
            parse_header(&head, self.position.scope).map_err(|error| self.damaged(error))?;
        let moved = || LogError::Moved { name: self.name.clone() };
        if found != (self.position.keystore_id, self.position.generation) {
            return Err(moved());
        }
        if length > self.position.end {
            if !is_torn(&self.read(self.position.end, MAX_LOG)?) {
                return Err(moved());
            }
            let cut = self.storage.truncate(&self.name, self.position.end);
            return cut.map_err(|error| self.failed("truncate", error));
        }
        if length < self.position.end { Err(moved()) } else { Ok(()) }
    }

    fn read(&self, from: u64, limit: u64) -> Result<Vec<u8>, LogError> {
        let bytes = self.storage.read(&self.name, from, limit);
        bytes
            .map_err(|error| self.failed("read", error))?
            .ok_or_else(|| LogError::Missing { name: self.name.clone() })
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
