//! A batch: the records of one change, which take effect together or not at all.
//!
//! ```text
//!  0  magic     "\xDB" "pv" "\xB1"; not UTF-8, so no text field can imitate it
//!  4  version   u16, 1
//!  6  zero      u16
//!  8  length    u32, of the body
//! 12  checksum  u32, CRC-32C of the body
//! 16  settled   u64, in a log: how many of its bytes were known to be durable; else 0
//! 24  logged    u64, in a log: a WAL address at or before the batch's WAL record; 0: none needed
//! 32  header    u32, CRC-32C of bytes 0 to 31
//! 36  body      records, see `record`
//! ```
//!
//! The same bytes are the payload of a WAL record and, except for `settled` and `logged`, a frame
//! of a key log. The header has its own checksum, so that `settled` can be trusted even if the body
//! is damaged (see `log`). In a log, a frame without a body is a *mark*: it serves only to record
//! what its header states.

use std::borrow::Borrow;
use std::fmt::Write as _;

use pagevault_cipher::{DataKeyVersion, Lsn};

use crate::error::{FormatError, Problem};
use crate::former::Range;
use crate::job::Request;
use crate::record::{Record, Wrapping, cipher_name};
use crate::wal::Switch;
use crate::wire::Reader;

/// First bytes of each batch.
pub const MAGIC: [u8; 4] = [0xDB, b'p', b'v', 0xB1];
/// Batch format version.
pub const VERSION: u16 = 1;
/// Bytes before the body.
pub const HEADER: usize = 36;
/// Largest body (256 MiB).
pub const MAX_BODY: usize = 256 << 20;
/// Most records in a batch, so that a small malicious batch cannot demand much memory.
pub const MAX_RECORDS: usize = 1 << 20;

/// Encodes records as one batch. Fails if a record exceeds its limits, so that nothing is written
/// that cannot be read again.
pub fn encode(records: &[Record]) -> Result<Vec<u8>, FormatError> {
    let mut out = Vec::new();
    put(&mut out, records, 0)?;
    Ok(out)
}

/// Appends a batch to a log of which `settled` bytes are known to be durable, and that needs no WAL
/// record. What was appended before an error is worthless.
pub(crate) fn put(
    out: &mut Vec<u8>,
    records: &[impl Borrow<Record>],
    settled: u64,
) -> Result<(), FormatError> {
    let start = out.len();
    out.resize(start + HEADER, 0);
    let here = |out: &Vec<u8>, problem| FormatError { offset: (out.len() - start) as u64, problem };
    if records.is_empty() {
        return Err(here(out, Problem::Empty));
    }
    if records.len() > MAX_RECORDS {
        return Err(here(out, Problem::TooLarge(MAX_RECORDS as u64)));
    }
    for record in records {
        let record = record.borrow();
        record.validate().map_err(|problem| here(out, problem))?;
        record.put(out);
        if out.len() - start - HEADER > MAX_BODY {
            return Err(here(out, Problem::TooLarge(MAX_BODY as u64)));
        }
    }
    let (head, body) = out[start..].split_at_mut(HEADER);
    let checksum = crc32c::crc32c(body);
    let header = Header { length: body.len(), checksum, settled, logged: Lsn::INVALID };
    head.copy_from_slice(&header.bytes());
    Ok(())
}

/// Decodes exactly one batch. All of it is checked before anything is returned.
pub fn decode(bytes: &[u8]) -> Result<Vec<Record>, FormatError> {
    let mut records = Vec::new();
    let head = decode_onto(&mut records, bytes, 0)?;
    let fail = |offset: usize, problem| Err(FormatError { offset: offset as u64, problem });
    if head.length != bytes.len() {
        return fail(head.length, Problem::Trailing);
    }
    if records.is_empty() {
        return fail(HEADER, Problem::Empty);
    }
    Ok(records)
}

/// What a batch or mark in a log states.
pub(crate) struct Head {
    /// Number of bytes of the log that were known to be durable when this was written.
    pub(crate) settled: u64,
    /// A WAL address at or before the batch's WAL record; 0 if none is needed.
    pub(crate) logged: Lsn,
    /// Length in bytes, including the header.
    pub(crate) length: usize,
}

/// Decodes the frame at the start of `bytes`, which are at `offset` in their file, and adds its
/// records, of which a mark has none. On error some may have been added.
pub(crate) fn decode_onto(
    records: &mut Vec<Record>,
    bytes: &[u8],
    offset: u64,
) -> Result<Head, FormatError> {
    let fail = |problem| FormatError { offset, problem };
    let header = Header::parse(bytes).map_err(fail)?;
    let end = HEADER + header.length;
    let body = bytes.get(HEADER..end).ok_or(fail(Problem::Short))?;
    if !header.matches(bytes) {
        return Err(fail(Problem::Checksum));
    }
    if header.settled > offset {
        return Err(fail(Problem::Field(
            "batch header",
            "settled position is after the start of the batch",
        )));
    }
    let mut from = Reader::new(body, offset + HEADER as u64);
    let mut added = 0;
    while !from.is_empty() {
        if added == MAX_RECORDS {
            return Err(from.error(Problem::TooLarge(MAX_RECORDS as u64)));
        }
        records.push(Record::take(&mut from)?);
        added += 1;
    }
    Ok(Head { settled: header.settled, logged: header.logged, length: end })
}

/// Turns an encoded batch into a frame of a log of which `settled` bytes are known to be durable.
/// `logged`: see the module's description.
pub(crate) fn stamp(batch: &[u8], settled: u64, logged: Lsn) -> Vec<u8> {
    let mut out = batch.to_vec();
    if let Ok(header) = Header::parse(batch) {
        let stamped = Header { settled, logged, ..header }.bytes();
        out.iter_mut().zip(stamped).for_each(|(byte, stamped)| *byte = stamped);
    }
    out
}

/// A frame without records. It states how many bytes of the log are durable, and the WAL address
/// before which the log contains all WAL records about it.
pub(crate) fn mark(settled: u64, logged: Lsn) -> [u8; HEADER] {
    Header { length: 0, checksum: crc32c::crc32c(&[]), settled, logged }.bytes()
}

/// Whether a frame is as it was written, that is, its checksums match. Its version may be unknown.
pub(crate) fn is_intact(bytes: &[u8]) -> bool {
    match Header::parse(bytes) {
        Ok(header) => header.matches(bytes),
        Err(problem) => had_right_checksum(&problem),
    }
}

/// Whether a frame, which may be incomplete, states that more than `offset` bytes of its log were
/// durable. A frame of a later version cannot be interpreted, and counts as if it did.
pub(crate) fn proves_durable_beyond(bytes: &[u8], offset: u64) -> bool {
    match Header::parse(bytes) {
        Ok(header) => header.settled > offset,
        Err(problem) => had_right_checksum(&problem),
    }
}

/// Whether a header that was refused for this reason had a correct checksum.
fn had_right_checksum(problem: &Problem) -> bool {
    !matches!(problem, Problem::Short | Problem::Magic | Problem::HeaderChecksum)
}

/// A header whose own checksum is correct.
struct Header {
    /// Length of the body in bytes; at most [`MAX_BODY`].
    length: usize,
    checksum: u32,
    settled: u64,
    logged: Lsn,
}

impl Header {
    fn bytes(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        let fields = MAGIC
            .into_iter()
            .chain(VERSION.to_le_bytes())
            .chain([0, 0])
            .chain(length.to_le_bytes())
            .chain(self.checksum.to_le_bytes())
            .chain(self.settled.to_le_bytes())
            .chain(self.logged.0.to_le_bytes());
        out.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
        let (fields, checksum) = out.split_at_mut(HEADER - 4);
        checksum.copy_from_slice(&crc32c::crc32c(fields).to_le_bytes());
        out
    }

    /// Whether the body in `batch` is complete and matches its checksum.
    fn matches(&self, batch: &[u8]) -> bool {
        let body = batch.get(HEADER..HEADER + self.length);
        body.map(crc32c::crc32c) == Some(self.checksum)
    }

    fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let mut from = Reader::new(bytes, 0);
        let mut parse = || -> Result<_, FormatError> {
            let fields = from.take(HEADER - 4)?;
            Ok((fields, from.u32()?))
        };
        let (fields, checksum) = parse().map_err(|error| error.problem)?;
        if !fields.starts_with(&MAGIC) {
            return Err(Problem::Magic);
        }
        if crc32c::crc32c(fields) != checksum {
            return Err(Problem::HeaderChecksum);
        }
        let mut from = Reader::new(fields, 0);
        let mut parse = || -> Result<_, FormatError> {
            from.take(MAGIC.len())?;
            Ok((from.u16()?, from.u16()?, from.u32()?, from.u32()?, from.u64()?, Lsn(from.u64()?)))
        };
        let (version, zero, length, checksum, settled, logged) =
            parse().map_err(|error| error.problem)?;
        if version != VERSION {
            return Err(Problem::Version(version));
        }
        if zero != 0 {
            return Err(Problem::Field("batch header", "reserved bytes are set"));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_BODY {
            return Err(Problem::TooLarge(MAX_BODY as u64));
        }
        Ok(Self { length, checksum, settled, logged })
    }
}

/// Describes a record as text, without key material, in the style of PostgreSQL's `rmgrdesc`
/// functions.
pub fn describe(record: &Record) -> String {
    match record {
        Record::Provider { name, kind, .. } => format!("provider {name} kind {kind}"),
        Record::DropProvider { name } => format!("drop provider {name}"),
        Record::DatabaseKey { scope, version, key } => {
            let mut text = format!("database key {scope}/{version}");
            for Wrapping { provider, master_key, master_version, .. } in key.wrappings() {
                // Writing to a String does not fail.
                let _ = write!(
                    text,
                    " provider {provider} master key {master_key} version {master_version}"
                );
            }
            text
        }
        Record::DataKey { file, version, cipher, scope, key_version, .. } => {
            let mut text = format!("data key rel {file} version {version} ");
            // Writing to a String does not fail.
            let _ = match cipher_name(*cipher) {
                Some(name) => write!(text, "{name}"),
                None => write!(text, "cipher {cipher}"),
            };
            let _ = write!(text, " key {scope}/{key_version}");
            text
        }
        Record::Current { file, version } => format!("current rel {file} version {version}"),
        Record::Plaintext { file, after } => format!("plaintext rel {file} after version {after}"),
        Record::WalSwitch(Switch { step, start, phase }) => {
            format!("WAL from {start} {phase} step {step}")
        }
        Record::Destroyed { file, through, whole, .. } => {
            let what = if *whole { " with its database" } else { "" };
            format!("destroyed rel {file} through version {through}{what}")
        }
        Record::Rewriting { file, phase, done } => {
            let state = if *done { "rewritten" } else { "rewriting" };
            let how = if phase.plaintext { "in plaintext after version" } else { "with version" };
            format!("{state} rel {file} {how} {}", DataKeyVersion::get_or_zero(phase.version))
        }
        Record::Switched { file, phase, lsn } => {
            let how = if phase.plaintext { "plaintext after version" } else { "version" };
            let version = DataKeyVersion::get_or_zero(phase.version);
            format!("switched rel {file} to {how} {version} at {lsn}")
        }
        Record::SealedOnly { file, phase } => {
            let how = if phase.plaintext { "not sealed only after" } else { "sealed only since" };
            let version = DataKeyVersion::get_or_zero(phase.version);
            format!("{how} version {version} rel {file}")
        }
        Record::Job { job, request } => {
            let Request { relation, kind, transaction, .. } = request;
            format!("job {job} {} of {relation} xid {transaction}", kind.name())
        }
        Record::JobStep { job, step } => {
            format!("job {job} step {} {}", step.step, step.state.name())
        }
        Record::JobBegun { job, relation } => format!("job {job} begun {relation}"),
        Record::JobsForgotten { database, through, all } => {
            let which = if *all { "all" } else { "old" };
            format!("{which} jobs through {database}/{through} forgotten")
        }
        Record::FormerFiles(Range { database, first, last, through, gone }) => {
            format!(
                "former rels {database}/{first} to {last} through version {through} gone at {gone}"
            )
        }
        Record::KeysForgotten { database, by } => {
            format!("keys of former rels of {database} gone at {by} forgotten")
        }
        Record::KeyGroup { group, name, .. } => format!("key group {group} {name}"),
        Record::EndedKeyGroup { group, .. } => format!("key group {group} ended"),
    }
}

/// Describes all records of a batch, separated by `"; "`.
pub fn describe_all(records: &[Record]) -> String {
    records.iter().map(describe).collect::<Vec<_>>().join("; ")
}
