//! The records of which a keystore is made.
//!
//! ```text
//! type u8 | version u8 | length u32 | payload (length bytes)          little-endian throughout
//!
//! 1 Provider      programs u8, name text, kind text, options text
//! 2 DropProvider  name text
//! 3 DatabaseKey   scope u32, version u32, master_version u64, created i64, check value 16 bytes,
//!                 provider text, master_key text, wrapped bytes
//! 4 DataKey       file, epoch u16, cipher u8, zero u8, scope u32, key_version u32, created i64, wrapped bytes
//! 5 Current       file, epoch u16
//! 6 Plaintext     file, after u16
//! 7 Rewriting     file, epoch u16, plaintext u8, done u8
//! 8 Destroyed     file, through u16, cipher u8, whole u8, lsn u64, at i64
//! 9 WalSwitch     step u32, start u64, generation u32, plaintext u8
//! 10 Job          job, relation u32, kind u8, cipher u8, requested_by u32, at i64, transaction u64
//! 11 JobStep      job, step u32, state u8, started i64, at i64, error text
//! 12 JobBegun     job, relation u32
//! 13 JobsForgotten database u32, through u64, all u8
//!
//! text, bytes: length u32, then as many bytes; text is UTF-8        file: tablespace, database, relation u32
//! job: database u32, number u64
//! ```
//!
//! Types are never reused. A change of layout is a new version of its type; readers of old versions
//! stay for ever. A type or version from the future is an error, not something to skip: it might be
//! a key, and compaction would lose it.

use std::fmt;

use pagevault_cipher::{CipherId, Epoch, wrap};

use crate::check_value::CheckValue;
use crate::error::{FormatError, Problem};
use crate::job::{JobId, JobKind, JobState, MAX_ERROR, MAX_NUMBER, Request, Step};
use crate::wal::{self, Switch, WalPhase};
use crate::wire::{Reader, put_bytes, put_i64, put_u8, put_u16, put_u32, put_u64};

/// Longest provider name, provider kind and master key name, in bytes.
pub const MAX_NAME: usize = 255;
/// Longest provider options, in bytes of JSON text.
pub const MAX_OPTIONS: usize = 64 << 10;
/// Longest wrapped database key, in bytes.
pub const MAX_WRAPPED_DATABASE_KEY: usize = 64 << 10;
/// Longest wrapped data key, in bytes: 64 key bytes and 28 of nonce and tag.
pub const MAX_WRAPPED_DATA_KEY: usize = 92;
/// Shortest wrapped data key of any cipher, known or not: one byte of key.
const MIN_WRAPPED_DATA_KEY: usize = wrap::OVERHEAD + 1;
/// Highest epoch that fits a page's 13 bits.
pub const MAX_EPOCH: u16 = Epoch::LAST.get();

/// A relation's file, as PostgreSQL's `RelFileLocator` (`RelFileNode` before 16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelFile {
    /// Tablespace OID.
    pub tablespace: u32,
    /// Database OID, 0 for shared relations.
    pub database: u32,
    /// Relation file number.
    pub relation: u32,
}

/// As in PostgreSQL's own WAL descriptions.
impl fmt::Display for RelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tablespace, self.database, self.relation)
    }
}

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
        /// Database OID, 0 for the cluster's.
        scope: u32,
        /// From 1; the highest is the one to wrap new data keys with.
        version: u32,
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
    /// A data key, wrapped by a database key. The same file and epoch again: the same key in a new
    /// wrapping.
    DataKey {
        /// Whose key.
        file: RelFile,
        /// 1 to [`MAX_EPOCH`].
        epoch: u16,
        /// Cipher number as in `pagevault_cipher::CipherId`; unknown ones are kept.
        cipher: u8,
        /// Scope of the database key that wraps.
        scope: u32,
        /// Version of the database key that wraps.
        key_version: u32,
        /// Nonce, ciphertext, tag; associated data is [`data_key_aad`](crate::data_key_aad).
        wrapped: Vec<u8>,
        /// Seconds since 1970.
        created: i64,
    },
    /// Which key a file is written with from now on: one newer than all before.
    Current {
        /// Which file.
        file: RelFile,
        /// 1 to [`MAX_EPOCH`].
        epoch: u16,
    },
    /// A file is written in plaintext from now on. One that never had a key needs no such record.
    Plaintext {
        /// Which file.
        file: RelFile,
        /// The highest epoch that it has so far.
        after: u16,
    },
    /// How WAL is written from an address on. The key has a record of its own, see
    /// [`wal::key_place`].
    WalSwitch(Switch),
    /// The keys of these epochs were destroyed on purpose, and never come back: who still hears of
    /// one, from older WAL say, ignores it. Says so for ever, in place of the keys.
    Destroyed {
        /// Which file.
        file: RelFile,
        /// The highest epoch whose key is destroyed, with all before it.
        through: u16,
        /// Cipher of the file's pages, 0 if it was not written sealed any more.
        cipher: u8,
        /// The keys of all files of the database were destroyed.
        whole: bool,
        /// All WAL records about pages under these keys end at this LSN or before.
        lsn: u64,
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

/// How a file is written: a step of its life, ordered as the steps follow one another.
///
/// Sealed with epoch n, in plaintext after epoch n, sealed with epoch n + 1, and so on; an epoch
/// that is past never comes back. So it does not matter in which order, or how often, the records
/// are heard: the latest step is what is so. Redo relies on that, as it repeats old records to a
/// keystore that has newer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Phase {
    /// Of the key; 0 before all others: nothing was decided yet.
    pub epoch: u16,
    /// Written in plaintext, although it has keys up to `epoch`.
    pub plaintext: bool,
}

impl Phase {
    /// The epoch to write with, `None` for plaintext.
    pub fn current(self) -> Option<u16> {
        Some(self.epoch).filter(|epoch| *epoch != 0 && !self.plaintext)
    }
}

mod kind {
    pub(super) const PROVIDER: u8 = 1;
    pub(super) const DROP_PROVIDER: u8 = 2;
    pub(super) const DATABASE_KEY: u8 = 3;
    pub(super) const DATA_KEY: u8 = 4;
    pub(super) const CURRENT: u8 = 5;
    pub(super) const PLAINTEXT: u8 = 6;
    pub(super) const REWRITING: u8 = 7;
    pub(super) const DESTROYED: u8 = 8;
    pub(super) const WAL_SWITCH: u8 = 9;
    pub(super) const JOB: u8 = 10;
    pub(super) const JOB_STEP: u8 = 11;
    pub(super) const JOB_BEGUN: u8 = 12;
    pub(super) const JOBS_FORGOTTEN: u8 = 13;
}

/// Version of every record type so far.
const VERSION: u8 = 1;

impl Record {
    /// The log a record belongs to: 0 is the cluster's (providers, all database keys, files of
    /// shared relations), else the database's OID.
    pub fn home(&self) -> u32 {
        match self {
            Self::Provider { .. }
            | Self::DropProvider { .. }
            | Self::DatabaseKey { .. }
            | Self::WalSwitch(_) => 0,
            Self::DataKey { file, .. }
            | Self::Current { file, .. }
            | Self::Plaintext { file, .. }
            | Self::Destroyed { file, .. }
            | Self::Rewriting { file, .. } => file.database,
            Self::Job { job, .. } | Self::JobStep { job, .. } | Self::JobBegun { job, .. } => {
                job.database
            }
            Self::JobsForgotten { database, .. } => *database,
        }
    }

    /// Checks all limits. What passes can be encoded and will decode to the same record.
    pub fn validate(&self) -> Result<(), Problem> {
        match self {
            Self::Provider { name, kind, options, .. } => {
                check_name("provider name", name)?;
                check_name("provider kind", kind)?;
                check(options.len() <= MAX_OPTIONS, "provider options", "too long")
            }
            Self::DropProvider { name } => check_name("provider name", name),
            Self::DatabaseKey { version, provider, master_key, wrapped, .. } => {
                check(*version > 0, "database key version", "must not be 0")?;
                check_name("provider name", provider)?;
                check_name("master key name", master_key)?;
                check(!wrapped.is_empty(), "wrapped database key", "empty")?;
                check(wrapped.len() <= MAX_WRAPPED_DATABASE_KEY, "wrapped database key", "too long")
            }
            Self::DataKey { file, epoch, cipher, key_version, wrapped, .. } => {
                check_file(file)?;
                check_epoch(*epoch)?;
                check(*cipher > 0, "cipher", "must not be 0")?;
                check(*key_version > 0, "database key version", "must not be 0")?;
                let right = match wrapped_len(*cipher) {
                    Some(length) => wrapped.len() == length,
                    None => (MIN_WRAPPED_DATA_KEY..=MAX_WRAPPED_DATA_KEY).contains(&wrapped.len()),
                };
                check(right, "wrapped data key", "wrong length for its cipher")
            }
            Self::Current { file, epoch } => {
                check_file(file)?;
                check_epoch(*epoch)
            }
            Self::Plaintext { file, after } => {
                check_file(file)?;
                check_epoch(*after)
            }
            Self::WalSwitch(Switch { step, phase, .. }) => {
                check(*step > 0, "WAL switch", "must have a number")?;
                check(phase.generation > 0, "WAL key generation", "must not be 0")
            }
            Self::Destroyed { file, through, .. } => {
                check_file(file)?;
                check(!wal::is_key_place(*file), "destroyed file", "must not be that of WAL keys")?;
                check_epoch(*through)
            }
            Self::Rewriting { file, phase, .. } => {
                check_file(file)?;
                check_epoch(phase.epoch)
            }
            Self::Job { job, request } => {
                check_job(job)?;
                check(request.relation != 0, "relation", "must not be 0")
            }
            Self::JobStep { job, step } => {
                check_job(job)?;
                check(step.step > 0, "step", "must not be 0")?;
                check(step.error.len() <= MAX_ERROR, "error", "too long")
            }
            Self::JobBegun { job, relation } => {
                check_job(job)?;
                check(*relation != 0, "relation", "must not be 0")
            }
            Self::JobsForgotten { database, through, .. } => {
                check_job(&JobId { database: *database, number: *through })
            }
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Provider { .. } => kind::PROVIDER,
            Self::DropProvider { .. } => kind::DROP_PROVIDER,
            Self::DatabaseKey { .. } => kind::DATABASE_KEY,
            Self::DataKey { .. } => kind::DATA_KEY,
            Self::Current { .. } => kind::CURRENT,
            Self::Plaintext { .. } => kind::PLAINTEXT,
            Self::WalSwitch(_) => kind::WAL_SWITCH,
            Self::Destroyed { .. } => kind::DESTROYED,
            Self::Rewriting { .. } => kind::REWRITING,
            Self::Job { .. } => kind::JOB,
            Self::JobStep { .. } => kind::JOB_STEP,
            Self::JobBegun { .. } => kind::JOB_BEGUN,
            Self::JobsForgotten { .. } => kind::JOBS_FORGOTTEN,
        }
    }

    /// Appends the record, which has been validated.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_u8(out, self.kind());
        put_u8(out, VERSION);
        let length_at = out.len();
        put_u32(out, 0);
        self.put_payload(out);
        let length = u32::try_from(out.len() - length_at - 4).unwrap_or(u32::MAX);
        if let Some(field) = out.get_mut(length_at..length_at + 4) {
            field.copy_from_slice(&length.to_le_bytes());
        }
    }

    fn put_payload(&self, out: &mut Vec<u8>) {
        match self {
            Self::Provider { name, kind, options, programs } => {
                put_u8(out, u8::from(*programs));
                put_bytes(out, name.as_bytes());
                put_bytes(out, kind.as_bytes());
                put_bytes(out, options.as_bytes());
            }
            Self::DropProvider { name } => put_bytes(out, name.as_bytes()),
            Self::DatabaseKey {
                scope,
                version,
                provider,
                master_key,
                master_version,
                wrapped,
                check,
                created,
            } => {
                put_u32(out, *scope);
                put_u32(out, *version);
                put_u64(out, *master_version);
                put_i64(out, *created);
                out.extend_from_slice(check.as_bytes());
                put_bytes(out, provider.as_bytes());
                put_bytes(out, master_key.as_bytes());
                put_bytes(out, wrapped);
            }
            Self::DataKey { file, epoch, cipher, scope, key_version, wrapped, created } => {
                put_file(out, file);
                put_u16(out, *epoch);
                put_u8(out, *cipher);
                put_u8(out, 0);
                put_u32(out, *scope);
                put_u32(out, *key_version);
                put_i64(out, *created);
                put_bytes(out, wrapped);
            }
            Self::Current { file, epoch } => {
                put_file(out, file);
                put_u16(out, *epoch);
            }
            Self::Plaintext { file, after } => {
                put_file(out, file);
                put_u16(out, *after);
            }
            Self::WalSwitch(Switch { step, start, phase }) => {
                put_u32(out, *step);
                put_u64(out, *start);
                put_u32(out, phase.generation);
                put_u8(out, u8::from(phase.plaintext));
            }
            Self::Rewriting { file, phase, done } => {
                put_file(out, file);
                put_u16(out, phase.epoch);
                put_u8(out, u8::from(phase.plaintext));
                put_u8(out, u8::from(*done));
            }
            Self::Destroyed { file, through, cipher, whole, lsn, at } => {
                put_file(out, file);
                put_u16(out, *through);
                put_u8(out, *cipher);
                put_u8(out, u8::from(*whole));
                put_u64(out, *lsn);
                put_i64(out, *at);
            }
            Self::Job { job, request } => {
                put_job(out, job);
                put_u32(out, request.relation);
                put_u8(out, request.kind as u8);
                put_u8(out, request.cipher);
                put_u32(out, request.requested_by);
                put_i64(out, request.at);
                put_u64(out, request.transaction);
            }
            Self::JobStep { job, step } => {
                put_job(out, job);
                put_u32(out, step.step);
                put_u8(out, step.state as u8);
                put_i64(out, step.started);
                put_i64(out, step.at);
                put_bytes(out, step.error.as_bytes());
            }
            Self::JobBegun { job, relation } => {
                put_job(out, job);
                put_u32(out, *relation);
            }
            Self::JobsForgotten { database, through, all } => {
                put_job(out, &JobId { database: *database, number: *through });
                put_u8(out, u8::from(*all));
            }
        }
    }

    /// Reads and validates the next record.
    pub(crate) fn take(from: &mut Reader<'_>) -> Result<Self, FormatError> {
        let offset = from.offset();
        let at = |problem| FormatError { offset, problem };
        let kind = from.u8()?;
        let version = from.u8()?;
        if !(kind::PROVIDER..=kind::JOBS_FORGOTTEN).contains(&kind) {
            return Err(at(Problem::RecordType(kind)));
        }
        if version != VERSION {
            return Err(at(Problem::RecordVersion { kind, version }));
        }
        let payload = from.bytes()?;
        let mut fields = Reader::new(payload, from.offset() - payload.len() as u64);
        let record = Self::take_payload(kind, &mut fields)?;
        if !fields.is_empty() {
            return Err(fields.error(Problem::Trailing));
        }
        record.validate().map_err(at)?;
        Ok(record)
    }

    fn take_payload(kind: u8, from: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(match kind {
            kind::PROVIDER => {
                let programs = take_bool(from, "provider")?;
                let (name, kind) = (from.text()?.to_owned(), from.text()?.to_owned());
                Self::Provider { name, kind, options: from.text()?.to_owned(), programs }
            }
            kind::DROP_PROVIDER => Self::DropProvider { name: from.text()?.to_owned() },
            kind::DATABASE_KEY => {
                let scope = from.u32()?;
                let version = from.u32()?;
                let master_version = from.u64()?;
                let created = from.i64()?;
                let check = CheckValue::from_bytes(from.array()?);
                let provider = from.text()?.to_owned();
                let master_key = from.text()?.to_owned();
                let wrapped = from.bytes()?.to_vec();
                Self::DatabaseKey {
                    scope,
                    version,
                    provider,
                    master_key,
                    master_version,
                    wrapped,
                    check,
                    created,
                }
            }
            kind::DATA_KEY => {
                let file = take_file(from)?;
                let epoch = from.u16()?;
                let cipher = from.u8()?;
                if from.u8()? != 0 {
                    return Err(from.error(Problem::Field("data key", "reserved byte is set")));
                }
                let scope = from.u32()?;
                let key_version = from.u32()?;
                let created = from.i64()?;
                let wrapped = from.bytes()?.to_vec();
                Self::DataKey { file, epoch, cipher, scope, key_version, wrapped, created }
            }
            kind::CURRENT => Self::Current { file: take_file(from)?, epoch: from.u16()? },
            kind::PLAINTEXT => Self::Plaintext { file: take_file(from)?, after: from.u16()? },
            kind::WAL_SWITCH => {
                let (step, start, generation) = (from.u32()?, from.u64()?, from.u32()?);
                let plaintext = take_bool(from, "WAL switch")?;
                Self::WalSwitch(Switch { step, start, phase: WalPhase { generation, plaintext } })
            }
            kind::DESTROYED => {
                let (file, through, cipher) = (take_file(from)?, from.u16()?, from.u8()?);
                let whole = take_bool(from, "destroyed")?;
                Self::Destroyed { file, through, cipher, whole, lsn: from.u64()?, at: from.i64()? }
            }
            kind::REWRITING => {
                let (file, epoch) = (take_file(from)?, from.u16()?);
                let plaintext = take_bool(from, "rewriting")?;
                let done = take_bool(from, "rewriting")?;
                Self::Rewriting { file, phase: Phase { epoch, plaintext }, done }
            }
            kind::JOB => {
                let (job, relation, kind) = (take_job(from)?, from.u32()?, from.u8()?);
                let kind = JobKind::from_number(kind)
                    .ok_or_else(|| from.error(Problem::Field("job", "of no known kind")))?;
                let (cipher, requested_by) = (from.u8()?, from.u32()?);
                let (at, transaction) = (from.i64()?, from.u64()?);
                let request = Request { relation, kind, cipher, requested_by, at, transaction };
                Self::Job { job, request }
            }
            kind::JOB_STEP => {
                let (job, step, state) = (take_job(from)?, from.u32()?, from.u8()?);
                let state = JobState::from_number(state)
                    .ok_or_else(|| from.error(Problem::Field("job", "in no known state")))?;
                let (started, at, error) = (from.i64()?, from.i64()?, from.text()?.to_owned());
                Self::JobStep { job, step: Step { step, state, started, at, error } }
            }
            kind::JOB_BEGUN => Self::JobBegun { job: take_job(from)?, relation: from.u32()? },
            kind::JOBS_FORGOTTEN => {
                let JobId { database, number } = take_job(from)?;
                Self::JobsForgotten {
                    database,
                    through: number,
                    all: take_bool(from, "forgotten jobs")?,
                }
            }
            other => return Err(from.error(Problem::RecordType(other))),
        })
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

fn put_file(out: &mut Vec<u8>, file: &RelFile) {
    put_u32(out, file.tablespace);
    put_u32(out, file.database);
    put_u32(out, file.relation);
}

fn take_file(from: &mut Reader<'_>) -> Result<RelFile, FormatError> {
    Ok(RelFile { tablespace: from.u32()?, database: from.u32()?, relation: from.u32()? })
}

fn put_job(out: &mut Vec<u8>, job: &JobId) {
    put_u32(out, job.database);
    put_u64(out, job.number);
}

fn take_job(from: &mut Reader<'_>) -> Result<JobId, FormatError> {
    Ok(JobId { database: from.u32()?, number: from.u64()? })
}

fn take_bool(from: &mut Reader<'_>, field: &'static str) -> Result<bool, FormatError> {
    match from.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(from.error(Problem::Field(field, "neither 0 nor 1"))),
    }
}

fn check(right: bool, field: &'static str, what: &'static str) -> Result<(), Problem> {
    if right { Ok(()) } else { Err(Problem::Field(field, what)) }
}

/// Names end up in messages and logs: no control characters there.
fn check_name(field: &'static str, name: &str) -> Result<(), Problem> {
    check(!name.is_empty(), field, "empty")?;
    check(name.len() <= MAX_NAME, field, "too long")?;
    check(!name.chars().any(char::is_control), field, "has a control character")
}

fn check_epoch(epoch: u16) -> Result<(), Problem> {
    check((1..=MAX_EPOCH).contains(&epoch), "epoch", "outside 1 to 8191")
}

fn check_job(job: &JobId) -> Result<(), Problem> {
    check(job.database != 0, "database of a job", "must not be 0")?;
    check((1..=MAX_NUMBER).contains(&job.number), "number of a job", "out of range")
}

fn check_file(file: &RelFile) -> Result<(), Problem> {
    check(file.relation != 0, "relation file number", "must not be 0")
}
