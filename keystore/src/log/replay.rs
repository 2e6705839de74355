//! Reading the bytes of a log. Pure. The rules are described in the module `log`.

use std::borrow::Borrow;

use pagevault_cipher::Lsn;

use super::{Contents, HEADER, MAGIC, Position, SHORTEST, Trust, VERSION};
use crate::batch::{self, Head, MAGIC as FRAME_MAGIC};
use crate::error::{FormatError, Problem};
use crate::record::Record;
use crate::scope::Scope;
use crate::wire::Reader;

/// Reads the bytes of a log. A torn end is not cut off. `position.settled` is what the log states.
pub fn replay(bytes: &[u8], scope: Scope) -> Result<Contents, FormatError> {
    replay_trusting(bytes, scope, Trust::All).map(|(contents, _)| contents)
}

/// Like [`replay`], up to the first batch that does not count. Also returns the frames from there
/// on.
pub(super) fn replay_trusting(
    bytes: &[u8],
    scope: Scope,
    trust: Trust,
) -> Result<(Contents, Vec<Frame>), FormatError> {
    // Of each frame its end, its address, and how many records there are up to it.
    let mut ends = Vec::new();
    let mut records = Vec::new();
    let (mut position, torn) = read(bytes, scope, &mut records, |records, end, head| {
        ends.push((end, head.logged, records.len()));
    })?;
    let (whole, settled) = (position.end, position.settled);
    position.end = HEADER as u64;
    let mut before = 0;
    let mut ends = ends.into_iter().peekable();
    while let Some((end, logged, count)) = ends
        .next_if(|(end, logged, count)| *count == before || trust.believes(*end, settled, *logged))
    {
        position.logged = position.logged.max(logged);
        position.end = end;
        before = count;
    }
    let mut others = records.split_off(before).into_iter();
    let cut = ends.map(|(_, logged, count)| {
        let records = others.by_ref().take(count - before).collect();
        before = count;
        Frame { records, logged }
    });
    let cut = cut.collect();
    let unbelieved = whole - position.end;
    Ok((Contents { records, position, torn, unbelieved }, cut))
}

/// A batch or mark.
pub(super) struct Frame {
    /// Empty in a mark.
    pub(super) records: Vec<Record>,
    /// A WAL address at or before the batch's WAL record; 0 if none is needed.
    pub(super) logged: Lsn,
}

/// The batches and marks of a log.
pub(super) fn frames(bytes: &[u8], scope: Scope) -> Result<Vec<Frame>, FormatError> {
    let mut frames = Vec::new();
    read(bytes, scope, &mut Vec::new(), |records, _, head| {
        frames.push(Frame { records: std::mem::take(records), logged: head.logged });
    })?;
    Ok(frames)
}

/// The records of a log in their batches. A mark is an empty one.
pub fn batches(bytes: &[u8], scope: Scope) -> Result<Vec<Vec<Record>>, FormatError> {
    Ok(frames(bytes, scope)?.into_iter().map(|frame| frame.records).collect())
}

/// Adds the records of each batch and mark, and passes them to `take` together with the offset of
/// its end. Returns the position behind the last, and the number of bytes behind it, which were
/// never settled.
fn read(
    bytes: &[u8],
    scope: Scope,
    records: &mut Vec<Record>,
    mut take: impl FnMut(&mut Vec<Record>, u64, Head),
) -> Result<(Position, u64), FormatError> {
    let (keystore_id, generation) = parse_header(bytes, scope)?;
    if bytes.len() < SHORTEST {
        return Err(FormatError { offset: bytes.len() as u64, problem: Problem::Short });
    }
    let (mut end, mut settled) = (HEADER, HEADER as u64);
    while let Some(rest) = bytes.get(end..).filter(|rest| !rest.is_empty()) {
        let before = records.len();
        match batch::decode_onto(records, rest, end as u64) {
            Ok(head) => {
                check_scope(&records[before..], scope, end as u64)?;
                settled = settled.max(head.settled);
                end += head.length;
                take(records, end as u64, head);
            }
            Err(error) => {
                records.truncate(before);
                if was_never_settled(rest, end as u64) {
                    break;
                }
                return Err(error);
            }
        }
    }
    let torn = (bytes.len() - end) as u64;
    let position =
        Position { keystore_id, scope, generation, end: end as u64, settled, logged: Lsn::INVALID };
    Ok((position, torn))
}

/// Whether the rest of a log, from the unreadable frame at `offset` on, was never settled.
pub(super) fn was_never_settled(rest: &[u8], offset: u64) -> bool {
    let mut behind = rest.windows(FRAME_MAGIC.len()).enumerate().skip(1);
    let testified = behind.any(|(at, window)| {
        window == FRAME_MAGIC
            && rest.get(at..).is_some_and(|frame| batch::proves_durable_beyond(frame, offset))
    });
    !batch::is_intact(rest) && !testified
}

pub(super) fn check_scope(
    records: &[impl Borrow<Record>],
    scope: Scope,
    offset: u64,
) -> Result<(), FormatError> {
    match records.iter().map(|record| record.borrow().home()).find(|home| *home != scope) {
        None => Ok(()),
        Some(found) => {
            Err(FormatError { offset, problem: Problem::Misplaced { expected: scope, found } })
        }
    }
}

pub(super) fn header(keystore_id: &[u8; 16], scope: Scope, generation: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(keystore_id);
    out.extend_from_slice(&scope.number().to_le_bytes());
    out.extend_from_slice(&generation.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out
}

/// Keystore id and generation from the header of a log, which must belong to `scope`.
pub(super) fn parse_header(bytes: &[u8], scope: Scope) -> Result<([u8; 16], u32), FormatError> {
    let mut from = Reader::new(bytes, 0);
    let fail = |problem| FormatError { offset: 0, problem };
    if from.take(MAGIC.len())? != MAGIC {
        return Err(fail(Problem::Magic));
    }
    let (version, zero) = (from.u16()?, from.u16()?);
    let (keystore_id, found) = (from.array()?, Scope::database(from.u32()?));
    let generation = from.u32()?;
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
