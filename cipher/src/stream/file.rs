//! Reading, writing and truncating a sealed file at any byte: read, merge, write.

#[cfg(test)]
mod tests;

use super::{BLOCK, UNIT, open, seal};
use crate::page_key::PageKey;

/// The underlying file, with the semantics of `pread`, `pwrite`, `fstat` and `ftruncate`. Nobody
/// else may change the bytes of a block while a method of [`Stream`] works on it.
pub trait File {
    /// Error of a failed call.
    type Error;

    /// Reads at `offset`; returns the number of bytes, 0 at the end of the file.
    ///
    /// # Errors
    /// Those of the file.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, Self::Error>;

    /// Writes at `offset`; returns the number of bytes.
    ///
    /// # Errors
    /// Those of the file.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, Self::Error>;

    /// Length in bytes.
    ///
    /// # Errors
    /// Those of the file.
    fn length(&mut self) -> Result<u64, Self::Error>;

    /// Truncates the file, or extends it by a hole.
    ///
    /// # Errors
    /// Those of the file.
    fn set_length(&mut self, length: u64) -> Result<(), Self::Error>;
}

/// Maximum number of bytes per read or write, except at the end of a file. A multiple of the unit,
/// so that only the first and last access of a long operation are not whole units.
pub const SCRATCH: usize = 8 * UNIT;

/// Buffer in which bytes are sealed and opened. One block longer, for the end of a file that is
/// sealed together.
pub type Scratch = [u8; SCRATCH + BLOCK];

/// A sealed file, for the duration of one call.
pub struct Stream<'a, F> {
    /// Its key.
    pub key: &'a PageKey,
    /// The underlying file.
    pub file: F,
    /// Overwritten by every call.
    pub scratch: &'a mut Scratch,
}

const fn within_block(offset: u64) -> usize {
    (offset % BLOCK as u64) as usize
}

const fn block_of(offset: u64) -> u64 {
    offset - offset % BLOCK as u64
}

/// For a file of this length, the start of the bytes at its end that are sealed together: the last
/// whole block before a partial one, or 0 for a file shorter than a block. The length itself if the
/// file ends with a whole block.
const fn end_of_whole(length: u64) -> u64 {
    match within_block(length) {
        0 => length,
        _ => block_of(length).saturating_sub(BLOCK as u64),
    }
}

impl<F: File> Stream<'_, F> {
    /// Reads plaintext at `offset`. Fewer bytes than requested mean the end of the file, or an
    /// error after them; 0 means the end.
    ///
    /// # Errors
    /// Those of the file, if nothing was read.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, F::Error> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let start = block_of(at);
            // Up to the end of a unit, so that the next round starts at a unit.
            let room = SCRATCH - (start % UNIT as u64) as usize;
            let asked = within_block(at) + into.len() - done;
            let wanted = asked.next_multiple_of(BLOCK).min(room);
            let (start, got) = match self.fetch(start, wanted) {
                Ok(fetched) => fetched,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            open(self.key, start, &mut self.scratch[..got]);
            let plain = self.scratch[..got].get((at - start) as usize..).unwrap_or_default();
            let count = plain.len().min(into.len() - done);
            into[done..done + count].copy_from_slice(&plain[..count]);
            done += count;
            if count == 0 {
                break;
            }
        }
        Ok(done)
    }

    /// Reads whole blocks from `start`, and at the end of the file all bytes that have to be opened
    /// together. Returns their offset and number.
    fn fetch(&mut self, start: u64, wanted: usize) -> Result<(u64, usize), F::Error> {
        // Read the next block as well: if it is partial, the block before it was not sealed
        // separately.
        let got = fill(&mut self.file, start, &mut self.scratch[..wanted + BLOCK])?;
        if got == wanted + BLOCK {
            return Ok((start, wanted));
        }
        if got == 0 || got >= BLOCK || start == 0 {
            return Ok((start, got));
        }
        let start = start - BLOCK as u64;
        Ok((start, fill(&mut self.file, start, &mut self.scratch[..2 * BLOCK])?))
    }

    /// Writes plaintext at `offset`. Fewer bytes than given mean an error after them (no space
    /// left, usually), as for `pwrite`. If that happens in the middle of a file, the bytes that are
    /// sealed together with the first unwritten byte are lost.
    ///
    /// # Errors
    /// Those of the file, if nothing was written.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, F::Error> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut old = self.file.length()?;
        if block_of(offset) > old {
            old = self.make_whole(old)?;
        }
        let end = offset + bytes.len() as u64;
        let new = old.max(end);
        let mut start = block_of(offset);
        let mut stop = end.next_multiple_of(BLOCK as u64).min(new);
        if stop > end_of_whole(new) {
            start = start.min(end_of_whole(new));
            stop = new;
        }
        if new > old && within_block(old) != 0 {
            start = start.min(end_of_whole(old));
        }
        let front = self.existing(start, offset, old)?;
        let back = self.existing(end, stop, old)?;
        // Bytes between the end of the file and `offset` become zeros.
        let zeros = (offset - start) as usize - front.bytes().len();

        let zeros = &[0; 2 * BLOCK][..zeros];
        let mut merged = Merged { parts: [front.bytes(), zeros, bytes, back.bytes()] };
        let mut at = start;
        while at < stop {
            let left = (stop - at) as usize;
            let room = SCRATCH - (at % UNIT as u64) as usize;
            // A partial block is sealed with the block before it.
            let count = if left < room + BLOCK { left } else { room };
            let piece = &mut self.scratch[..count];
            merged.take(piece);
            seal(self.key, at, piece);
            let (written, error) = put(&mut self.file, at, piece);
            if written < count {
                let good = self.reseal_end(at, count, written, [old, new])?;
                let done = (good.saturating_sub(offset) as usize).min(bytes.len());
                return error.filter(|_| done == 0).map_or(Ok(done), Err);
            }
            at += count as u64;
        }
        Ok(bytes.len())
    }

    /// Called when only `written` of `count` sealed bytes at `at` could be written. If that is now
    /// the end of the file, seals the end again. Returns the offset up to which everything can be
    /// opened. `lengths` are the old and the intended length of the file.
    fn reseal_end(
        &mut self,
        at: u64,
        count: usize,
        written: usize,
        lengths: [u64; 2],
    ) -> Result<u64, F::Error> {
        let end = at + written as u64;
        if end < lengths[0] {
            let whole = lengths.map(end_of_whole).into_iter().filter(|whole| end > *whole);
            return Ok(whole.fold(block_of(end), u64::min));
        }
        if written == 0 {
            return Ok(end); // ends with the whole blocks of the previous piece, or is unchanged
        }
        open(self.key, at, &mut self.scratch[..count]);
        let start = block_of(end).saturating_sub(BLOCK as u64);
        let mut last = [0; 2 * BLOCK];
        let before = self.existing(start, at, at)?;
        let (front, rest) = last[..(end - start) as usize].split_at_mut(before.bytes().len());
        front.copy_from_slice(before.bytes());
        rest.copy_from_slice(&self.scratch[written - rest.len()..written]);
        let last = &mut last[..(end - start) as usize];
        seal(self.key, start, last);
        put(&mut self.file, start, last).1.map_or(Ok(end), Err)
    }

    /// Truncates the file at any byte, or extends it with zeros.
    ///
    /// # Errors
    /// Those of the file.
    pub fn truncate(&mut self, new: u64) -> Result<(), F::Error> {
        let mut old = self.file.length()?;
        if old < new {
            old = if block_of(old) < block_of(new) {
                self.make_whole(old)?
            } else {
                return self.write_zeros(old, (new - old) as usize);
            };
        }
        // The last block is sealed separately, before and after.
        if within_block(new) == 0 && (new <= end_of_whole(old) || within_block(old) == 0) {
            return self.file.set_length(new);
        }
        let start = block_of(new).saturating_sub(BLOCK as u64);
        let existing = self.existing(start, new, old)?;
        let mut last = [0; 2 * BLOCK];
        let last = &mut last[..(new - start) as usize];
        last[..existing.bytes().len()].copy_from_slice(existing.bytes());
        self.file.set_length(new)?;
        seal(self.key, start, last);
        put(&mut self.file, start, last).1.map_or(Ok(()), Err)
    }

    /// Fills the partial block at the end of a file with zeros, before the file grows beyond it.
    /// Returns the new length.
    fn make_whole(&mut self, length: u64) -> Result<u64, F::Error> {
        let whole = length.next_multiple_of(BLOCK as u64);
        self.write_zeros(length, (whole - length) as usize)?;
        Ok(whole)
    }

    /// Writes less than a block of zeros.
    fn write_zeros(&mut self, mut offset: u64, mut count: usize) -> Result<(), F::Error> {
        while count > 0 {
            match self.write(offset, &[0; BLOCK][..count])? {
                0 => break,
                written => {
                    offset += written as u64;
                    count -= written;
                }
            }
        }
        Ok(())
    }

    /// Opens the bytes of a file from `start` to `stop`, at most 31 bytes.
    fn existing(&mut self, start: u64, stop: u64, length: u64) -> Result<Existing, F::Error> {
        let mut existing = Existing { bytes: [0; 3 * BLOCK], from: 0, to: 0 };
        let stop = stop.min(length);
        if start >= stop {
            return Ok(existing);
        }
        let (mut first, mut last) = (block_of(start), stop.next_multiple_of(BLOCK as u64));
        if stop > end_of_whole(length) {
            (first, last) = (first.min(end_of_whole(length)), length);
        }
        let wanted = (last - first) as usize;
        let got = fill(&mut self.file, first, &mut existing.bytes[..wanted])?;
        open(self.key, first, &mut existing.bytes[..got]);
        existing.to = got.min((stop - first) as usize);
        existing.from = existing.to.min((start - first) as usize);
        Ok(existing)
    }
}

/// Existing plaintext next to the bytes that are written.
struct Existing {
    bytes: [u8; 3 * BLOCK],
    from: usize,
    to: usize,
}

impl Existing {
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }
}

/// The plaintext of whole blocks: existing bytes, zeros, the bytes to write, existing bytes.
struct Merged<'a> {
    parts: [&'a [u8]; 4],
}

impl Merged<'_> {
    /// Moves bytes to `into` until it is full or nothing is left; returns their number.
    fn take(&mut self, into: &mut [u8]) -> usize {
        let mut done = 0;
        for part in &mut self.parts {
            let (now, later) = part.split_at(part.len().min(into.len() - done));
            into[done..done + now.len()].copy_from_slice(now);
            done += now.len();
            *part = later;
        }
        done
    }
}

/// Reads until `into` is full or the file ends: a short read alone does not mean the end of a file.
fn fill<F: File>(file: &mut F, offset: u64, into: &mut [u8]) -> Result<usize, F::Error> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(offset + done as u64, &mut into[done..])? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// Writes everything, or returns the number of bytes written and the error, if there was one.
fn put<F: File>(file: &mut F, offset: u64, bytes: &[u8]) -> (usize, Option<F::Error>) {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(offset + done as u64, &bytes[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) => return (done, Some(error)),
        }
    }
    (done, None)
}
