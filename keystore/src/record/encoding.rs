//! Binary encoding of records.
//!
//! ```text
//! type u8 | version u8 | length u32 | payload (length bytes)          little-endian throughout
//!
//! 1 Provider      programs u8, name text, kind text, options text
//! 2 DropProvider  name text
//! 3 DatabaseKey   scope u32, version u32, master_version u64, at i64, check value 16 bytes,
//!                 provider text, master_key text, wrapped bytes; in version 2 also made i64,
//!                 since i64, which version 1 has if all three times are the same; in version 3
//!                 also others u8, then for each: master_version u64, at i64, since i64, provider
//!                 text, master_key text, wrapped bytes
//! 4 DataKey       file, version u16, cipher u8, zero u8, scope u32, key_version u32, created i64,
//!                 wrapped bytes
//! 5 Current       file, version u16
//! 6 Plaintext     file, after u16
//! 7 Rewriting     file, version u16, plaintext u8, done u8
//! 8 Destroyed     file, through u16, cipher u8, whole u8, lsn u64, at i64
//! 9 WalSwitch     step u32, start u64, version u32, plaintext u8
//! 10 Job          job, relation u32, kind u8, cipher u8, requested_by u32, at i64, transaction u64
//! 11 JobStep      job, step u32, state u8, started i64, at i64, error text
//! 12 JobBegun     job, relation u32
//! 13 JobsForgotten database u32, through u64, all u8
//! 14 SealedOnly   file, version u16, plaintext u8
//! 15 FormerFiles  database u32, first u32, last u32, through u16, gone u64
//! 16 KeysForgotten database u32, by u64
//! 17 KeyGroup     group u32, at i64, name text
//! 18 EndedKeyGroup group u32, at i64
//! 19 Switched     file, version u16, plaintext u8, lsn u64
//!
//! text, bytes: length u32, then as many bytes; text is UTF-8
//! file: tablespace, database, relation u32        job: database u32, number u64
//! ```
//!
//! Types are never used again. A change of layout is a new version of its type; readers of old
//! versions stay for ever. An unknown type or version is an error and never skipped: it might be a
//! key, which compaction would lose.

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use super::limits::NOT_A_DATA_KEY_VERSION;
use super::{DatabaseKey, Record, Wrapping};
use crate::check_value::CheckValue;
use crate::error::{FormatError, Problem};
use crate::former::Range;
use crate::job::{JobId, JobKind, JobState, Request, Step};
use crate::rel_file::{Phase, RelFile};
use crate::scope::{KeyGroup, Scope};
use crate::wal::{Switch, WalPhase};
use crate::wire::{Reader, put_bytes, put_i64, put_u8, put_u16, put_u32, put_u64};

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
    pub(super) const SEALED_ONLY: u8 = 14;
    pub(super) const FORMER_FILES: u8 = 15;
    pub(super) const KEYS_FORGOTTEN: u8 = 16;
    pub(super) const KEY_GROUP: u8 = 17;
    pub(super) const ENDED_KEY_GROUP: u8 = 18;
    pub(super) const SWITCHED: u8 = 19;
}

/// Version of every record type so far, but for the following.
const VERSION: u8 = 1;
/// Version of database keys with three times.
const TIMES: u8 = 2;
/// Version of database keys with several master keys.
const OTHERS: u8 = 3;

impl Record {
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
            Self::SealedOnly { .. } => kind::SEALED_ONLY,
            Self::FormerFiles(_) => kind::FORMER_FILES,
            Self::KeysForgotten { .. } => kind::KEYS_FORGOTTEN,
            Self::KeyGroup { .. } => kind::KEY_GROUP,
            Self::EndedKeyGroup { .. } => kind::ENDED_KEY_GROUP,
            Self::Switched { .. } => kind::SWITCHED,
        }
    }

    /// The lowest version that can express it.
    fn version(&self) -> u8 {
        match self {
            Self::DatabaseKey { key, .. } => match key {
                DatabaseKey { others, .. } if !others.is_empty() => OTHERS,
                DatabaseKey { made, first, .. } if [*made, first.since] != [first.at; 2] => TIMES,
                _ => VERSION,
            },
            _ => VERSION,
        }
    }

    /// Appends the record, which must have been validated.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_u8(out, self.kind());
        put_u8(out, self.version());
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
            Self::DatabaseKey { scope, version, key } => {
                let DatabaseKey { check, made, first, others } = key;
                put_u32(out, scope.number());
                put_u32(out, version.get());
                put_u64(out, first.master_version);
                put_i64(out, first.at);
                out.extend_from_slice(check.as_bytes());
                put_bytes(out, first.provider.as_bytes());
                put_bytes(out, first.master_key.as_bytes());
                put_bytes(out, &first.wrapped);
                if self.version() >= TIMES {
                    put_i64(out, *made);
                    put_i64(out, first.since);
                }
                if self.version() >= OTHERS {
                    put_u8(out, u8::try_from(others.len()).unwrap_or(u8::MAX));
                    others.iter().for_each(|other| put_wrapping(out, other));
                }
            }
            Self::DataKey { file, version, cipher, scope, key_version, wrapped, created } => {
                put_file(out, file);
                put_u16(out, version.get());
                put_u8(out, *cipher);
                put_u8(out, 0);
                put_u32(out, scope.number());
                put_u32(out, key_version.get());
                put_i64(out, *created);
                put_bytes(out, wrapped);
            }
            Self::Current { file, version } => {
                put_file(out, file);
                put_u16(out, version.get());
            }
            Self::Plaintext { file, after } => {
                put_file(out, file);
                put_u16(out, after.get());
            }
            Self::WalSwitch(Switch { step, start, phase }) => {
                put_u32(out, *step);
                put_u64(out, start.0);
                put_u32(out, KeyVersion::get_or_zero(phase.version));
                put_u8(out, u8::from(phase.plaintext));
            }
            Self::Rewriting { file, phase, done } => {
                put_file(out, file);
                put_u16(out, DataKeyVersion::get_or_zero(phase.version));
                put_u8(out, u8::from(phase.plaintext));
                put_u8(out, u8::from(*done));
            }
            Self::Switched { file, phase, lsn } => {
                put_file(out, file);
                put_u16(out, DataKeyVersion::get_or_zero(phase.version));
                put_u8(out, u8::from(phase.plaintext));
                put_u64(out, lsn.0);
            }
            Self::SealedOnly { file, phase } => {
                put_file(out, file);
                put_u16(out, DataKeyVersion::get_or_zero(phase.version));
                put_u8(out, u8::from(phase.plaintext));
            }
            Self::Destroyed { file, through, cipher, whole, lsn, at } => {
                put_file(out, file);
                put_u16(out, through.get());
                put_u8(out, *cipher);
                put_u8(out, u8::from(*whole));
                put_u64(out, lsn.0);
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
            Self::FormerFiles(Range { database, first, last, through, gone }) => {
                put_u32(out, *database);
                put_u32(out, *first);
                put_u32(out, *last);
                put_u16(out, through.get());
                put_u64(out, gone.0);
            }
            Self::KeysForgotten { database, by } => {
                put_u32(out, *database);
                put_u64(out, by.0);
            }
            Self::KeyGroup { group, name, at } => {
                put_u32(out, group.number());
                put_i64(out, *at);
                put_bytes(out, name.as_bytes());
            }
            Self::EndedKeyGroup { group, at } => {
                put_u32(out, group.number());
                put_i64(out, *at);
            }
        }
    }

    /// Reads and validates the next record.
    pub(crate) fn take(from: &mut Reader<'_>) -> Result<Self, FormatError> {
        let offset = from.offset();
        let at = |problem| FormatError { offset, problem };
        let kind = from.u8()?;
        let version = from.u8()?;
        if !(kind::PROVIDER..=kind::SWITCHED).contains(&kind) {
            return Err(at(Problem::RecordType(kind)));
        }
        let newest = if kind == kind::DATABASE_KEY { OTHERS } else { VERSION };
        if !(VERSION..=newest).contains(&version) {
            return Err(at(Problem::RecordVersion { kind, version }));
        }
        let payload = from.bytes()?;
        let mut fields = Reader::new(payload, from.offset() - payload.len() as u64);
        let record = Self::take_payload((kind, version), &mut fields, offset)?;
        if !fields.is_empty() {
            return Err(fields.error(Problem::Trailing));
        }
        record.validate().map_err(at)?;
        Ok(record)
    }

    /// `offset`: offset of the record.
    fn take_payload(
        (kind, version): (u8, u8),
        from: &mut Reader<'_>,
        offset: u64,
    ) -> Result<Self, FormatError> {
        let version_of_data_key = |from: &mut Reader<'_>| {
            let version = DataKeyVersion::new(from.u16()?);
            version.ok_or(FormatError { offset, problem: NOT_A_DATA_KEY_VERSION })
        };
        let key_version = |from: &mut Reader<'_>, field| {
            let problem = Problem::Field(field, "must not be 0");
            KeyVersion::new(from.u32()?).ok_or(FormatError { offset, problem })
        };
        Ok(match kind {
            kind::PROVIDER => {
                let programs = take_bool(from, "provider")?;
                let (name, kind) = (from.text()?.to_owned(), from.text()?.to_owned());
                Self::Provider { name, kind, options: from.text()?.to_owned(), programs }
            }
            kind::DROP_PROVIDER => Self::DropProvider { name: from.text()?.to_owned() },
            kind::DATABASE_KEY => {
                let layout = version;
                let scope = Scope::from_number(from.u32()?);
                let version = key_version(from, "database key version")?;
                let master_version = from.u64()?;
                let at = from.i64()?;
                let check = CheckValue::from_bytes(from.array()?);
                let provider = from.text()?.to_owned();
                let master_key = from.text()?.to_owned();
                let wrapped = from.bytes()?.to_vec();
                let (made, since) =
                    if layout >= TIMES { (from.i64()?, from.i64()?) } else { (at, at) };
                let first = Wrapping { provider, master_key, master_version, wrapped, at, since };
                let others = if layout >= OTHERS { from.u8()? } else { 0 };
                let others = (0..others).map(|_| take_wrapping(from)).collect::<Result<_, _>>()?;
                let key = DatabaseKey { check, made, first, others };
                Self::DatabaseKey { scope, version, key }
            }
            kind::DATA_KEY => {
                let file = take_file(from)?;
                let version = version_of_data_key(from)?;
                let cipher = from.u8()?;
                if from.u8()? != 0 {
                    return Err(from.error(Problem::Field("data key", "reserved byte is set")));
                }
                let scope = Scope::from_number(from.u32()?);
                let key_version = key_version(from, "database key version")?;
                let created = from.i64()?;
                let wrapped = from.bytes()?.to_vec();
                Self::DataKey { file, version, cipher, scope, key_version, wrapped, created }
            }
            kind::CURRENT => {
                Self::Current { file: take_file(from)?, version: version_of_data_key(from)? }
            }
            kind::PLAINTEXT => {
                Self::Plaintext { file: take_file(from)?, after: version_of_data_key(from)? }
            }
            kind::WAL_SWITCH => {
                let (step, start) = (from.u32()?, Lsn(from.u64()?));
                let version = Some(key_version(from, "WAL key version")?);
                let plaintext = take_bool(from, "WAL switch")?;
                Self::WalSwitch(Switch { step, start, phase: WalPhase { version, plaintext } })
            }
            kind::DESTROYED => {
                let (file, through) = (take_file(from)?, version_of_data_key(from)?);
                let cipher = from.u8()?;
                let whole = take_bool(from, "destroyed")?;
                Self::Destroyed {
                    file,
                    through,
                    cipher,
                    whole,
                    lsn: Lsn(from.u64()?),
                    at: from.i64()?,
                }
            }
            kind::REWRITING => {
                let (file, version) = (take_file(from)?, Some(version_of_data_key(from)?));
                let plaintext = take_bool(from, "rewriting")?;
                let done = take_bool(from, "rewriting")?;
                Self::Rewriting { file, phase: Phase { version, plaintext }, done }
            }
            kind::SWITCHED => {
                let (file, version) = (take_file(from)?, Some(version_of_data_key(from)?));
                let plaintext = take_bool(from, "switched")?;
                let lsn = Lsn(from.u64()?);
                Self::Switched { file, phase: Phase { version, plaintext }, lsn }
            }
            kind::SEALED_ONLY => {
                let (file, version) = (take_file(from)?, Some(version_of_data_key(from)?));
                let plaintext = take_bool(from, "sealed only")?;
                Self::SealedOnly { file, phase: Phase { version, plaintext } }
            }
            kind::JOB => {
                let (job, relation, kind) = (take_job(from)?, from.u32()?, from.u8()?);
                let kind = JobKind::from_number(kind)
                    .ok_or_else(|| from.error(Problem::Field("job", "unknown kind")))?;
                let (cipher, requested_by) = (from.u8()?, from.u32()?);
                let (at, transaction) = (from.i64()?, from.u64()?);
                let request = Request { relation, kind, cipher, requested_by, at, transaction };
                Self::Job { job, request }
            }
            kind::JOB_STEP => {
                let (job, step, state) = (take_job(from)?, from.u32()?, from.u8()?);
                let state = JobState::from_number(state)
                    .ok_or_else(|| from.error(Problem::Field("job", "unknown state")))?;
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
            kind::FORMER_FILES => {
                let (database, first, last) = (from.u32()?, from.u32()?, from.u32()?);
                let through = version_of_data_key(from)?;
                let gone = Lsn(from.u64()?);
                Self::FormerFiles(Range { database, first, last, through, gone })
            }
            kind::KEYS_FORGOTTEN => {
                Self::KeysForgotten { database: from.u32()?, by: Lsn(from.u64()?) }
            }
            kind::KEY_GROUP => {
                let (group, at) = (take_key_group(from)?, from.i64()?);
                Self::KeyGroup { group, name: from.text()?.to_owned(), at }
            }
            kind::ENDED_KEY_GROUP => {
                Self::EndedKeyGroup { group: take_key_group(from)?, at: from.i64()? }
            }
            other => return Err(from.error(Problem::RecordType(other))),
        })
    }
}

fn put_wrapping(out: &mut Vec<u8>, of: &Wrapping) {
    put_u64(out, of.master_version);
    put_i64(out, of.at);
    put_i64(out, of.since);
    put_bytes(out, of.provider.as_bytes());
    put_bytes(out, of.master_key.as_bytes());
    put_bytes(out, &of.wrapped);
}

fn take_wrapping(from: &mut Reader<'_>) -> Result<Wrapping, FormatError> {
    Ok(Wrapping {
        master_version: from.u64()?,
        at: from.i64()?,
        since: from.i64()?,
        provider: from.text()?.to_owned(),
        master_key: from.text()?.to_owned(),
        wrapped: from.bytes()?.to_vec(),
    })
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

fn take_key_group(from: &mut Reader<'_>) -> Result<KeyGroup, FormatError> {
    let number = from.u32()?;
    KeyGroup::new(number)
        .ok_or_else(|| from.error(Problem::Field("key group", "not the number of one")))
}

fn take_bool(from: &mut Reader<'_>, field: &'static str) -> Result<bool, FormatError> {
    match from.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(from.error(Problem::Field(field, "neither 0 nor 1"))),
    }
}
