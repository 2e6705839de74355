use super::*;
use crate::stream::tests::key;
use proptest::prelude::*;

#[derive(Debug, PartialEq, Eq)]
struct NoSpace;

/// A file in memory. The length of reads and writes is random; it cannot grow beyond `room`.
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

/// Mostly near the beginning and at block boundaries, so that steps overlap; sometimes beyond
/// [`SCRATCH`].
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

/// Space runs out between two pieces of a long write.
#[test]
fn no_space_between_two_pieces_is_reported() {
    for before in [0, 5, 16, 37] {
        let (key, mut memory) = (key(4), Memory::new(usize::MAX));
        let mut scratch = [0; SCRATCH + BLOCK];
        let mut stream = Stream { key: &key, file: &mut memory, scratch: &mut scratch };
        let mut model = vec![1; before];
        stream.write(0, &model).unwrap();
        stream.file.room = SCRATCH;
        let written = stream.write(before as u64, &[2; 2 * SCRATCH]);
        assert_eq!(written, Ok(SCRATCH - before));
        model.resize(SCRATCH, 2);
        open(&key, 0, &mut memory.bytes);
        assert!(memory.bytes == model, "{before}");
    }
}

proptest! {
    #[test]
    fn a_sealed_file_behaves_like_a_file(
        steps in prop::collection::vec(step(), 1..20),
        longest in prop_oneof![1 => 1..40_usize, 3 => 1000..100_000_usize],
    ) {
        let (key, mut memory, mut model) = (key(3), Memory::new(longest), Vec::new());
        let mut scratch = [0; SCRATCH + BLOCK];
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
            // The format alone, without the code of this module, has the same content.
            let mut all = memory.bytes.clone();
            open(&key, 0, &mut all);
            prop_assert!(all == model);
        }
    }

    /// When the disk is full, `write` reports exactly the bytes that are in the file, and the file
    /// can still be read and written.
    #[test]
    fn no_space_is_reported(
        before in some_bytes(), bytes in some_bytes(), offset in 0..SCRATCH, room in 0..2 * SCRATCH,
        after in some_bytes(),
    ) {
        let (key, mut memory) = (key(4), Memory::new(5000));
        let mut scratch = [0; SCRATCH + BLOCK];
        let mut stream = Stream { key: &key, file: &mut memory, scratch: &mut scratch };
        stream.write(0, &before).unwrap();
        let offset = offset.min(before.len());
        stream.file.room = room.max(before.len());
        let room = stream.file.room;
        let written = stream.write(offset as u64, &bytes);
        let end = offset + bytes.len();
        let fits = bytes.len().min(room - offset);
        prop_assert_eq!(&written, &if fits == 0 { Err(NoSpace) } else { Ok(fits) });
        let mut model = before.clone();
        write_model(&mut model, offset, &bytes[..fits]);
        let mut all = memory.bytes.clone();
        open(&key, 0, &mut all);
        prop_assert!(all == model, "{} {}", end, room);

        memory.room = usize::MAX;
        let mut stream = Stream { key: &key, file: &mut memory, scratch: &mut scratch };
        prop_assert_eq!(stream.write(model.len() as u64, &after), Ok(after.len()));
        model.extend(&after);
        let mut all = memory.bytes.clone();
        open(&key, 0, &mut all);
        prop_assert!(all == model);
    }
}
