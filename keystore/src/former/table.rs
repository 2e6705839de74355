//! Former files in shared memory.
//!
//! ```text
//! header   2 words: ranges, 0
//! ranges   6 words each, ascending: database, first, last, through, gone (low, high)
//! ```
//!
//! Readers and writers exclude each other by a lock.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use pagevault_cipher::{DataKeyVersion, Lsn};

use super::{FormerFiles, Range};

const HEADER: usize = 2;
const STRIDE: usize = 6;

/// There is no room for so many ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// The table.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    words: &'a [AtomicU32],
}

impl<'a> Table<'a> {
    /// Words of shared memory for as many ranges.
    pub const fn words_needed(ranges: usize) -> usize {
        HEADER + ranges * STRIDE
    }

    /// The table in these words; zeroed words are an empty one.
    pub const fn new(words: &'a [AtomicU32]) -> Self {
        Self { words }
    }

    fn entries(&self) -> &'a [[AtomicU32; STRIDE]] {
        let (header, rest) = self.words.split_at(HEADER.min(self.words.len()));
        let used = header.first().map_or(0, |used| used.load(Relaxed)) as usize;
        let entries = rest.as_chunks().0;
        &entries[..used.min(entries.len())]
    }

    /// Forgets everything.
    pub fn clear(&self) {
        if let Some(used) = self.words.first() {
            used.store(0, Relaxed);
        }
    }

    /// Whether there is room for these.
    pub fn has_room_for(&self, former: &FormerFiles) -> bool {
        Self::words_needed(former.ranges().count()) <= self.words.len()
    }

    /// Replaces the contents.
    ///
    /// # Errors
    /// If there is no room. Nothing was changed then.
    pub fn store(&self, former: &FormerFiles) -> Result<(), Full> {
        if !self.has_room_for(former) {
            return Err(Full);
        }
        let count = former.ranges().count();
        let ranges = former.ranges().zip(self.words[HEADER..].chunks(STRIDE));
        for (Range { database, first, last, through, gone }, entry) in ranges {
            let values =
                [database, first, last, through.get().into(), gone.0 as u32, (gone.0 >> 32) as u32];
            entry.iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
        }
        // No more than there are words.
        self.words[0].store(count as u32, Relaxed);
        Ok(())
    }

    /// The contents.
    pub fn load(&self) -> FormerFiles {
        let mut former = FormerFiles::default();
        self.entries().iter().filter_map(read).for_each(|range| former.add(range));
        former
    }

    /// The highest version of former files with this number.
    pub fn through(&self, database: u32, number: u32) -> Option<DataKeyVersion> {
        let entries = self.entries();
        let begins_before = |entry: &[AtomicU32; STRIDE]| {
            let [of, first, ..] = entry;
            (of.load(Relaxed), first.load(Relaxed)) <= (database, number)
        };
        let found = entries.partition_point(begins_before).checked_sub(1)?;
        let range = read(entries.get(found)?)?;
        (range.database == database && number <= range.last).then_some(range.through)
    }
}

fn read(entry: &[AtomicU32; STRIDE]) -> Option<Range> {
    let [database, first, last, through, low, high] =
        [0, 1, 2, 3, 4, 5].map(|word: usize| entry[word].load(Relaxed));
    let through = u16::try_from(through).ok().and_then(DataKeyVersion::new)?;
    let gone = Lsn(u64::from(high) << 32 | u64::from(low));
    Some(Range { database, first, last, through, gone })
}
