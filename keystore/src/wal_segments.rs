//! Reading and writing any range of bytes of a WAL segment, by way of the pages that contain it.
//! Used by the server and, through `preload/`, by PostgreSQL's own programs.

use pagevault_cipher::Lsn;

use crate::wal_pages::{self, Fault, WalKeys};

/// An open segment.
///
/// The functions return what the system calls do: the number of bytes transferred, which may be
/// fewer than requested, or a negative number for an error, with the cause in `errno`.
pub trait Segment {
    /// `pread`.
    fn pread(&self, to: &mut [u8], at: u64) -> isize;

    /// `pwrite`.
    fn pwrite(&self, from: &[u8], at: u64) -> isize;

    /// Whether a page with this address belongs at the offset `at`.
    fn belongs(&self, address: Lsn, at: u64) -> bool;

    /// Whether a page of this timeline at its address was left there by a parent of the segment's
    /// timeline ([`wal_timelines::is_left_over`](crate::wal_timelines::is_left_over)).
    fn is_left_over(&self, timeline: u32, address: Lsn) -> bool;

    /// The address of the page at the offset `at`, into which `bytes` will be copied from its byte
    /// `offset` on. `page` holds what is on disk.
    fn address(&self, at: u64, page: &[u8], offset: usize, bytes: &[u8]) -> Lsn;
}

/// The parts of a segment's name: three words of 8 hexadecimal digits (`XLogFileName`,
/// src/include/access/xlog_internal.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// The timeline.
    pub timeline: u32,
    /// The number, in two parts of 32 bits.
    pub number: (u32, u32),
}

impl Name {
    /// The address of the segment's first byte, for segments of this size (`XLogFromFileName`).
    #[inline]
    #[must_use]
    pub const fn start(self, segment_size: u64) -> Lsn {
        let (high, low) = (self.number.0 as u64, self.number.1 as u64);
        Lsn((high << 32).saturating_add(low.saturating_mul(segment_size)))
    }
}

/// Parses a segment's name; `None` if it is not one.
#[must_use]
pub fn parse_name(name: &[u8]) -> Option<Name> {
    let [timeline, high, low] = name.as_chunks::<8>().0 else { return None };
    if name.len() != 24 {
        return None;
    }
    let number = (hexadecimal(high)?, hexadecimal(low)?);
    Some(Name { timeline: hexadecimal(timeline)?, number })
}

/// Parses up to 8 hexadecimal digits.
pub(crate) fn hexadecimal(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |number, digit| Some(number << 4 | char::from(*digit).to_digit(16)?))
}

/// Reads a range. `scratch` holds some whole pages of `page_size`.
///
/// A page may be written again while it is read. The requested bytes are the same before and after,
/// except for those that share a 16-byte cipher block with new bytes; of such a block the kernel
/// must not copy a mixture. It copies at least 16 bytes at once if source and target are aligned,
/// as files are and `scratch` must be; `to` need not be. Nothing is returned of a page whose end is
/// missing: an encrypted page cannot be decrypted up to an unknown end.
///
/// # Errors
/// If a page cannot be decrypted; the contents of `to` are undefined then.
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

/// Writes a range: reads the pages, decrypts and completes them, encrypts and writes them. A page
/// on disk keeps its key; unknown bytes of a page become zero. `scratch` is as for [`read`].
///
/// # Errors
/// If a page cannot be decrypted or encrypted; the pages before it were written.
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
            // The bytes of the first page before the range do not count.
            let ours = usize::try_from(wrote).unwrap_or(0).saturating_sub(skip);
            return Ok(if ours > 0 { (done + ours) as isize } else { partial(done, wrote.min(0)) });
        }
        done += bytes.len();
    }
    Ok(done as isize)
}

/// Writes all of some pages. If a call fails, returns the number of bytes in whole pages that were
/// written, or the call's result if there are none. An encrypted page cannot be continued from its
/// middle.
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

/// The result of a transfer of `before` bytes, followed by a call that failed or transferred fewer
/// bytes than requested.
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
