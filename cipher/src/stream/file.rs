//! Reading, writing and cutting a sealed file at any byte: read, merge, write.

use super::{BLOCK, UNIT, open, seal};
use crate::key::PageKey;

/// The file underneath, as `pread`, `pwrite`, `fstat` and `ftruncate` give it. Nobody else changes the
/// bytes of a block while one of the methods of [`Stream`] works on it.
pub trait File {
    /// What a failed call leaves behind.
    type Error;

    /// Reads at `offset`; returns how many bytes, 0 at the end of the file.
    ///
    /// # Errors
    /// What the file says.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, Self::Error>;

    /// Writes at `offset`; returns how many bytes.
    ///
    /// # Errors
    /// What the file says.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, Self::Error>;

    /// Length in bytes.
    ///
    /// # Errors
    /// What the file says.
    fn length(&mut self) -> Result<u64, Self::Error>;

    /// Cuts the file, or extends it by a hole.
    ///
    /// # Errors
    /// What the file says.
    fn set_length(&mut self, length: u64) -> Result<(), Self::Error>;
}

/// Bytes of [`Scratch`]: a multiple of the unit, so that only the first and last access of a long run
/// are not whole units.
pub const SCRATCH: usize = 8 * UNIT;

/// Where bytes are sealed and opened.
pub type Scratch = [u8; SCRATCH];

/// A sealed file, for the time of one call.
pub struct Stream<'a, F> {
    /// Its key.
    pub key: &'a PageKey,
    /// The file underneath.
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

impl<F: File> Stream<'_, F> {
    /// Reads plaintext at `offset`. Fewer bytes than asked for mean the end of the file, or an error
    /// behind them; 0 is the end.
    ///
    /// # Errors
    /// What the file says, if nothing was read.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, F::Error> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let start = block_of(at);
            let skip = (at - start) as usize;
            // Up to the end of a unit, so that the next round begins with one.
            let room = SCRATCH - (start % UNIT as u64) as usize;
            let wanted = (skip + into.len() - done).next_multiple_of(BLOCK).min(room);
            let got = match fill(&mut self.file, start, &mut self.scratch[..wanted]) {
                Ok(got) => got,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            open(self.key, start, &mut self.scratch[..got]);
            let plain = self.scratch[..got].get(skip..).unwrap_or_default();
            let count = plain.len().min(into.len() - done);
            into[done..done + count].copy_from_slice(&plain[..count]);
            done += count;
            if got < wanted {
                break;
            }
        }
        Ok(done)
    }

    /// Writes plaintext at `offset`. Fewer bytes than given mean an error behind them (no space left,
    /// mostly), as with `pwrite`; the block in which it struck is lost.
    ///
    /// # Errors
    /// What the file says, if nothing was written.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, F::Error> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let length = self.file.length()?;
        if block_of(offset) > length {
            self.make_whole(length)?;
        }
        let end = offset + bytes.len() as u64;
        let (front, front_len) = self.existing_around(offset, length)?;
        let (back, back_len) = self.existing_around(end, length)?;
        let before = within_block(offset);
        let head = &front[..front_len.min(before)];
        let tail = back[..back_len].get(within_block(end)..).unwrap_or_default();
        // What lies between the end of the file and `offset` becomes zeros.
        let zeros = before - head.len();

        let mut merged = Merged { parts: [head, &[0; BLOCK][..zeros], bytes, tail] };
        let mut at = block_of(offset);
        loop {
            let room = SCRATCH - (at % UNIT as u64) as usize;
            let count = merged.take(&mut self.scratch[..room]);
            if count == 0 {
                return Ok(bytes.len());
            }
            let sealed = &mut self.scratch[..count];
            seal(self.key, at, sealed);
            let (written, error) = put(&mut self.file, at, sealed);
            if written < count {
                let done = block_of(at + written as u64).saturating_sub(offset) as usize;
                return error.filter(|_| done == 0).map_or(Ok(done), Err);
            }
            at += count as u64;
        }
    }

    /// Cuts the file at any byte, or extends it: what is added reads as zeros.
    ///
    /// # Errors
    /// What the file says.
    pub fn truncate(&mut self, new: u64) -> Result<(), F::Error> {
        let old = self.file.length()?;
        let (mut last, _) = self.existing(block_of(new), old)?;
        if block_of(old) < block_of(new) {
            self.make_whole(old)?;
        }
        self.file.set_length(new)?;
        let last = &mut last[..within_block(new)];
        seal(self.key, block_of(new), last);
        put(&mut self.file, block_of(new), last).1.map_or(Ok(()), Err)
    }

    /// Seals the partial block at the end of a file of this length as a whole one, filled up with zeros:
    /// the file is about to grow beyond it.
    fn make_whole(&mut self, length: u64) -> Result<(), F::Error> {
        if length.is_multiple_of(BLOCK as u64) {
            return Ok(());
        }
        let (mut block, _) = self.existing(block_of(length), length)?;
        seal(self.key, block_of(length), &mut block);
        put(&mut self.file, block_of(length), &block).1.map_or(Ok(()), Err)
    }

    /// Opens what a file of this length holds of the block that `offset` cuts in two.
    fn existing_around(
        &mut self,
        offset: u64,
        length: u64,
    ) -> Result<([u8; BLOCK], usize), F::Error> {
        match within_block(offset) {
            0 => Ok(([0; BLOCK], 0)),
            _ => self.existing(block_of(offset), length),
        }
    }

    /// Opens what a file of this length holds of the block at `start`: how much, then zeros.
    fn existing(&mut self, start: u64, length: u64) -> Result<([u8; BLOCK], usize), F::Error> {
        let mut block = [0; BLOCK];
        let wanted = length.saturating_sub(start).min(BLOCK as u64) as usize;
        let got = fill(&mut self.file, start, &mut block[..wanted])?;
        open(self.key, start, &mut block[..got]);
        Ok((block, got))
    }
}

/// What is written: the bytes given, between those that stand before and behind them in their blocks.
struct Merged<'a> {
    parts: [&'a [u8]; 4],
}

impl Merged<'_> {
    /// Moves bytes into `into` until it is full or nothing is left; returns how many.
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

/// Reads until `into` is full or the file ends: a short read alone does not tell the end of a file.
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

/// Writes everything; else how much, and what ended it, if it was an error.
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

#[cfg(test)]
mod tests {
    use super::super::tests::key;
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, PartialEq, Eq)]
    struct NoSpace;

    /// A file in memory. Reads and writes are short at whim; it cannot grow beyond `room`.
    struct Memory {
        bytes: Vec<u8>,
        room: usize,
        whim: u32,
        longest: usize,
    }

    impl Memory {
        fn new(longest: usize) -> Self {
            Self { bytes: Vec::new(), room: usize::MAX, whim: 1, longest }
        }

        fn short(&mut self, wanted: usize) -> usize {
            self.whim = self.whim.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            wanted.min(1 + self.whim as usize % self.longest)
        }
    }

    impl File for &mut Memory {
        type Error = NoSpace;

        fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, NoSpace> {
            let there = self.bytes.len().saturating_sub(offset as usize);
            let count = self.short(into.len().min(there).max(1)).min(there);
            let rest = self.bytes.get(offset as usize..).unwrap_or_default();
            into[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }

        fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, NoSpace> {
            let offset = offset as usize;
            let count = self.short(bytes.len()).min(self.room.saturating_sub(offset));
            if count == 0 {
                return Err(NoSpace);
            }
            let length = self.bytes.len().max(offset + count);
            self.bytes.resize(length, 0);
            self.bytes[offset..offset + count].copy_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn length(&mut self) -> Result<u64, NoSpace> {
            Ok(self.bytes.len() as u64)
        }

        fn set_length(&mut self, length: u64) -> Result<(), NoSpace> {
            self.bytes.resize(length as usize, 0);
            Ok(())
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Read { offset: usize, length: usize },
        Write { offset: usize, bytes: Vec<u8> },
        Append { bytes: Vec<u8> },
        Truncate { length: usize },
    }

    /// Mostly near the beginning and around blocks, so that steps meet; at times beyond the scratch.
    fn place() -> impl Strategy<Value = usize> {
        prop_oneof![4 => 0..100_usize, 2 => 4000..4200_usize, 1 => 0..3 * SCRATCH]
    }

    fn some_bytes() -> impl Strategy<Value = Vec<u8>> {
        let length = prop_oneof![4 => 1..70_usize, 1 => 4090..4110_usize, 1 => 1..2 * SCRATCH];
        (length, any::<u8>()).prop_map(|(n, seed)| (0..n).map(|i| seed ^ (i / 7) as u8).collect())
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (place(), place()).prop_map(|(offset, length)| Step::Read { offset, length }),
            (place(), some_bytes()).prop_map(|(offset, bytes)| Step::Write { offset, bytes }),
            some_bytes().prop_map(|bytes| Step::Append { bytes }),
            place().prop_map(|length| Step::Truncate { length }),
        ]
    }

    fn write_model(model: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
        let length = model.len().max(offset + bytes.len());
        model.resize(length, 0);
        model[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    proptest! {
        #[test]
        fn a_sealed_file_is_a_file(
            steps in prop::collection::vec(step(), 1..20),
            longest in prop_oneof![1 => 1..40_usize, 3 => 1000..100_000_usize],
        ) {
            let (key, mut memory, mut model) = (key(3), Memory::new(longest), Vec::new());
            let mut scratch = [0; SCRATCH];
            for step in steps {
                let mut stream =
                    Stream { key: &key, file: &mut memory, scratch: &mut scratch };
                match step {
                    Step::Read { offset, length } => {
                        let mut into = vec![0xEE; length];
                        let count = stream.read(offset as u64, &mut into).unwrap();
                        let expected = model.get(offset..).unwrap_or_default();
                        let expected = &expected[..length.min(expected.len())];
                        prop_assert!(into[..count] == *expected);
                        prop_assert!(into[count..].iter().all(|byte| *byte == 0xEE));
                    }
                    Step::Write { offset, bytes } => {
                        prop_assert_eq!(stream.write(offset as u64, &bytes), Ok(bytes.len()));
                        write_model(&mut model, offset, &bytes);
                    }
                    Step::Append { bytes } => {
                        let end = model.len();
                        prop_assert_eq!(stream.write(end as u64, &bytes), Ok(bytes.len()));
                        write_model(&mut model, end, &bytes);
                    }
                    Step::Truncate { length } => {
                        prop_assert_eq!(stream.truncate(length as u64), Ok(()));
                        model.resize(length, 0);
                    }
                }
                prop_assert_eq!(memory.bytes.len(), model.len());
                // The format alone, without the code above, says the same.
                let mut all = memory.bytes.clone();
                open(&key, 0, &mut all);
                prop_assert!(all == model);
            }
        }

        /// What a full disk lets through is there, but for the block in which it struck; what `write`
        /// says is never more than that.
        #[test]
        fn no_space_is_told(
            before in some_bytes(), bytes in some_bytes(), offset in 0..SCRATCH, room in 0..2 * SCRATCH,
        ) {
            let (key, mut memory) = (key(4), Memory::new(5000));
            let mut scratch = [0; SCRATCH];
            let mut stream = Stream { key: &key, file: &mut memory, scratch: &mut scratch };
            stream.write(0, &before).unwrap();
            let offset = offset.min(before.len());
            stream.file.room = room.max(before.len());
            let room = stream.file.room;
            let written = stream.write(offset as u64, &bytes);
            let end = offset + bytes.len();
            prop_assert_eq!(written == Ok(bytes.len()), end <= room);
            if end > room {
                let count = written.unwrap_or(0);
                prop_assert!(count <= room - offset && count + 2 * BLOCK > room - offset);
                let mut all = memory.bytes.clone();
                open(&key, 0, &mut all);
                let intact = offset / BLOCK * BLOCK;
                prop_assert!(all[..intact] == before[..intact]);
                prop_assert!(count == 0 || all[offset..offset + count] == bytes[..count]);
            }
        }
    }
}
