//! A batch: the records of one change, which take effect together or not at all.
//!
//! ```text
//!  0  magic     "\xDB" "pv" "\xB1"; not UTF-8, so no text field can imitate it
//!  4  version   u16, 1
//!  6  zero      u16
//!  8  length    u32, of the body
//! 12  checksum  u32, CRC-32C of the body
//! 16  header    u32, CRC-32C of bytes 0 to 15
//! 20  body      records, see `record`
//! ```
//!
//! The same bytes are a frame of a key log and the payload of a WAL record. The header has its own
//! checksum so that a log can tell where a frame begins even when its body is damaged (see `log`).

use std::fmt::Write as _;

use crate::error::{FormatError, Problem};
use crate::record::{Record, cipher_name};
use crate::wire::Reader;

/// First bytes of every batch.
pub const MAGIC: [u8; 4] = [0xDB, b'p', b'v', 0xB1];
/// Batch format version.
pub const VERSION: u16 = 1;
/// Bytes before the body.
pub const HEADER: usize = 20;
/// Largest body (256 MiB).
pub const MAX_BODY: usize = 256 << 20;
/// Most records in a batch, so that a small hostile batch cannot ask for much memory.
pub const MAX_RECORDS: usize = 1 << 20;

/// The records as one batch. Fails where a record is outside its limits, so that nothing is ever
/// written that could not be read.
pub fn encode(records: &[Record]) -> Result<Vec<u8>, FormatError> {
    let mut out = vec![0; HEADER];
    let here = |out: &Vec<u8>, problem| FormatError { offset: out.len() as u64, problem };
    if records.is_empty() {
        return Err(here(&out, Problem::Empty));
    }
    if records.len() > MAX_RECORDS {
        return Err(here(&out, Problem::TooLarge(MAX_RECORDS as u64)));
    }
    for record in records {
        record.validate().map_err(|problem| here(&out, problem))?;
        record.put(&mut out);
        if out.len() - HEADER > MAX_BODY {
            return Err(here(&out, Problem::TooLarge(MAX_BODY as u64)));
        }
    }
    let (head, body) = out.split_at_mut(HEADER);
    let header = Header { length: body.len(), checksum: crc32c::crc32c(body) };
    head.copy_from_slice(&header.bytes());
    Ok(out)
}

/// The records of exactly one batch. All of it is checked before anything is returned.
pub fn decode(bytes: &[u8]) -> Result<Vec<Record>, FormatError> {
    let (records, length) = decode_at(bytes, 0)?;
    if length != bytes.len() {
        return Err(FormatError { offset: length as u64, problem: Problem::Trailing });
    }
    Ok(records)
}

/// The batch at the start of `bytes`, which lie at `offset` in their file, and its length.
pub(crate) fn decode_at(bytes: &[u8], offset: u64) -> Result<(Vec<Record>, usize), FormatError> {
    let header = Header::parse(bytes).map_err(|problem| FormatError { offset, problem })?;
    let end = HEADER + header.length;
    let body = bytes
        .get(HEADER..end)
        .ok_or(FormatError { offset: offset + bytes.len() as u64, problem: Problem::Short })?;
    if !header.matches(bytes) {
        return Err(FormatError { offset, problem: Problem::Checksum });
    }
    let mut from = Reader::new(body, offset + HEADER as u64);
    let mut records = Vec::new();
    while !from.is_empty() {
        if records.len() == MAX_RECORDS {
            return Err(from.error(Problem::TooLarge(MAX_RECORDS as u64)));
        }
        records.push(Record::take(&mut from)?);
    }
    if records.is_empty() {
        return Err(from.error(Problem::Empty));
    }
    Ok((records, end))
}

/// A header that has passed its own checksum.
pub(crate) struct Header {
    /// Bytes of the body; at most [`MAX_BODY`].
    pub(crate) length: usize,
    checksum: u32,
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
            .chain(self.checksum.to_le_bytes());
        out.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
        let (fields, checksum) = out.split_at_mut(HEADER - 4);
        checksum.copy_from_slice(&crc32c::crc32c(fields).to_le_bytes());
        out
    }

    /// Whether the body of `batch`, all of which must be there, has the right checksum.
    pub(crate) fn matches(&self, batch: &[u8]) -> bool {
        let body = batch.get(HEADER..HEADER + self.length);
        body.map(crc32c::crc32c) == Some(self.checksum)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Problem> {
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
            Ok((from.u16()?, from.u16()?, from.u32()?, from.u32()?))
        };
        let (version, zero, length, checksum) = parse().map_err(|error| error.problem)?;
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
        Ok(Self { length, checksum })
    }
}

/// One record in words, without key material, in the style of PostgreSQL's `rmgrdesc` functions.
pub fn describe(record: &Record) -> String {
    match record {
        Record::Provider { name, kind, .. } => format!("provider {name} kind {kind}"),
        Record::DropProvider { name } => format!("drop provider {name}"),
        Record::DatabaseKey { scope, version, provider, master_key, master_version, .. } => {
            format!(
                "database key {scope}/{version} provider {provider} master key {master_key} \
                 version {master_version}"
            )
        }
        Record::DataKey { file, epoch, cipher, scope, key_version, .. } => {
            let mut text = format!("data key rel {file} epoch {epoch} ");
            // Writing to a String does not fail.
            let _ = match cipher_name(*cipher) {
                Some(name) => write!(text, "{name}"),
                None => write!(text, "cipher {cipher}"),
            };
            let _ = write!(text, " key {scope}/{key_version}");
            text
        }
        Record::Current { file, epoch: 0, owner } => {
            format!("current rel {file} plaintext owner {owner}")
        }
        Record::Current { file, epoch, owner } => {
            format!("current rel {file} epoch {epoch} owner {owner}")
        }
        Record::Retired { file, lsn } => {
            format!("retired rel {file} lsn {:X}/{:X}", lsn >> 32, lsn & 0xFFFF_FFFF)
        }
    }
}

/// All records of a batch in words, separated by `"; "`.
pub fn describe_all(records: &[Record]) -> String {
    records.iter().map(describe).collect::<Vec<_>>().join("; ")
}
