//! Ranges of WAL segments: reads and writes from any byte to any other, by way of the pages that
//! cover them. The server and PostgreSQL's own programs (`preload/`) do the same.

use pagevault_cipher::Lsn;

use crate::wal_pages::{self, Fault, WalKeys};

/// A segment that is open.
///
/// The calls answer as the system's do: with the number of bytes that were transferred, which may
/// be fewer than asked for, or with something negative for a failure, of which the cause stays
/// where the system put it.
pub trait Segment {
    /// `pread`.
    fn pread(&self, to: &mut [u8], at: u64) -> isize;

    /// `pwrite`.
    fn pwrite(&self, from: &[u8], at: u64) -> isize;

    /// Whether a page that says it has this address belongs `at` this offset.
    fn belongs(&self, address: Lsn, at: u64) -> bool;

    /// Whether a page of this timeline, at its address, was left there by a parent of the segment's
    /// timeline ([`wal_timelines::is_left_over`](crate::wal_timelines::is_left_over)).
    fn is_left_over(&self, timeline: u32, address: Lsn) -> bool;

    /// The address of the page `at` this offset, into which `bytes` go from its byte `offset` on;
    /// `page` is as on disk.
    fn address(&self, at: u64, page: &[u8], offset: usize, bytes: &[u8]) -> Lsn;
}

/// What a segment is named after: three words of 8 hexadecimal digits (`XLogFileName`,
/// src/include/access/xlog_internal.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// Its timeline.
    pub timeline: u32,
    /// Its number, in two parts of 32 bits.
    pub number: (u32, u32),
}

impl Name {
    /// The address of the segment's first byte, where segments have this size
    /// (`XLogFromFileName`).
    #[inline]
    #[must_use]
    pub const fn start(self, segment_size: u64) -> Lsn {
        let (high, low) = (self.number.0 as u64, self.number.1 as u64);
        Lsn((high << 32).saturating_add(low.saturating_mul(segment_size)))
    }
}

/// The parts of a segment's name; `None` if it is not one.
#[must_use]
pub fn parse_name(name: &[u8]) -> Option<Name> {
    let [timeline, high, low] = name.as_chunks::<8>().0 else { return None };
    if name.len() != 24 {
        return None;
    }
    let number = (hexadecimal(high)?, hexadecimal(low)?);
    Some(Name { timeline: hexadecimal(timeline)?, number })
}

/// The number that up to 8 hexadecimal digits make.
pub(crate) fn hexadecimal(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |number, digit| Some(number << 4 | char::from(*digit).to_digit(16)?))
}

/// Reads a range. `scratch` holds some whole pages of `page_size`.
///
/// A page may be written again while it is read. What was asked for is the same before and after,
/// but for what stands with new bytes in one block of 16: the kernel must not copy half of that. It
/// copies no less than 16 bytes at once where source and target are aligned, as files are and
/// `scratch` must be; `to` need not be. Of a page of which the end is missing nothing is returned:
/// a sealed one cannot be told from that it ends there.
///
/// # Errors
/// When a page cannot be opened; what is in `to` is worth nothing then.
pub fn read<K: WalKeys>(
    keys: &K,
    segment: &impl Segment,
    scratch: &mut [u8],
    page_size: usize,
    to: &mut [u8],
    at: u64,
) -> Result<isize, Fault<K::Error>> {
    let mut done = 0;
    while done < to.len() {
        let Run { first, skip, length } =
            run(at + done as u64, to.len() - done, scratch, page_size);
        let pages = &mut scratch[..length];
        let got = segment.pread(pages, first);
        let Ok(got) = usize::try_from(got) else { return Ok(partial(done, got)) };
        let whole = got / page_size * page_size;
        for (page, at) in
            pages[..whole].chunks_exact_mut(page_size).zip((first..).step_by(page_size))
        {
            wal_pages::open(keys, page, |timeline, address| {
                segment.belongs(address, at) && !segment.is_left_over(timeline, address)
            })?;
        }
        let bytes = pages[..whole].get(skip..).unwrap_or_default();
        let count = bytes.len().min(to.len() - done);
        to[done..done + count].copy_from_slice(&bytes[..count]);
        done += count;
        if whole < length {
            break;
        }
    }
    Ok(done as isize)
}

/// Writes a range: reads the pages, opens and completes them, seals and writes them again. A page
/// that is there already keeps its key; what is not known of a page is zero. `scratch` is as for
/// [`read`].
///
/// # Errors
/// When a page cannot be opened or sealed; those before it were written.
pub fn write<K: WalKeys>(
    keys: &K,
    segment: &impl Segment,
    scratch: &mut [u8],
    page_size: usize,
    from: &[u8],
    at: u64,
) -> Result<isize, Fault<K::Error>> {
    let mut done = 0;
    while done < from.len() {
        let Run { first, skip, length } =
            run(at + done as u64, from.len() - done, scratch, page_size);
        let pages = &mut scratch[..length];
        let got = segment.pread(pages, first);
        let Ok(known) = usize::try_from(got) else { return Ok(partial(done, got)) };
        pages[known..].fill(0);
        let bytes = &from[done..from.len().min(done + length - skip)];
        let mut rest = bytes;
        let mut offset = skip;
        for (page, at) in pages.chunks_exact_mut(page_size).zip((first..).step_by(page_size)) {
            let (part, others) = rest.split_at(rest.len().min(page_size - offset));
            let address = segment.address(at, page, offset, part);
            let is_left_over = |timeline| segment.is_left_over(timeline, address);
            wal_pages::complete(keys, page, address, is_left_over, offset, part)?;
            (rest, offset) = (others, 0);
        }
        let wrote = write_whole(segment, pages, page_size, first);
        if wrote < length as isize {
            // Of the first page, what comes before the range does not count.
            let ours = usize::try_from(wrote).unwrap_or(0).saturating_sub(skip);
            return Ok(if ours > 0 { (done + ours) as isize } else { partial(done, wrote.min(0)) });
        }
        done += bytes.len();
    }
    Ok(done as isize)
}

/// Writes all of some pages; at a failure says how much of whole pages was written, or what the
/// call said if none. A sealed page cannot be written on from its middle.
pub fn write_whole(segment: &impl Segment, bytes: &[u8], page_size: usize, at: u64) -> isize {
    let mut done = 0;
    while done < bytes.len() {
        let wrote = segment.pwrite(&bytes[done..], at + done as u64);
        if wrote <= 0 {
            let whole = done / page_size * page_size;
            return if whole > 0 { whole as isize } else { wrote };
        }
        done += wrote as usize;
    }
    done as isize
}

/// What a call says that did `before`, and then met a failure or did less than it should.
#[must_use]
pub fn partial(before: usize, last: isize) -> isize {
    match (before, last) {
        (0, last) => last,
        (before, last) => before as isize + last.max(0),
    }
}

/// Whole pages that are dealt with in one go.
struct Run {
    /// Offset of the first in the segment.
    first: u64,
    /// Bytes of the first that are not asked for.
    skip: usize,
    /// Bytes in all.
    length: usize,
}

fn run(at: u64, length: usize, scratch: &[u8], page_size: usize) -> Run {
    let skip = (at % page_size as u64) as usize;
    let length = (skip + length).next_multiple_of(page_size).min(scratch.len());
    Run { first: at - skip as u64, skip, length }
}
