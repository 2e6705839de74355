//! Former files: relation files that are gone, and whose keys need not be kept.
//!
//! A pair of file and version is never used twice. So the last version of each file must be known
//! for ever, also when its keys are forgotten. PostgreSQL numbers files in ascending order, so most
//! former files are next to each other, and a range of numbers with the highest version of any of
//! them takes their place. A range may contain numbers that no file ever had: the first file with
//! such a number begins with a higher version than it must, by no more than `FEW_VERSIONS`. A
//! range contains no number of a file that existed when the range was recorded, so there are no
//! more ranges than files in use and files with many versions.
//!
//! Numbers are of a database, whatever the tablespace: a database that moves to another tablespace
//! takes its files, their numbers, and their versions with it.

mod table;

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::{DataKeyVersion, Lsn};

pub use self::table::{Full, Table};
use crate::rel_file::RelFile;
use crate::wal;

/// Files with more versions than this are not joined with others: a number that is used again
/// begins after the highest version of its range, and there are no more than 8191.
const FEW_VERSIONS: u16 = 256;

/// Former files of a database, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    /// Database OID, 0 for shared relations.
    pub database: u32,
    /// First relation file number.
    pub first: u32,
    /// Last relation file number.
    pub last: u32,
    /// The highest version of the files with these numbers that are gone.
    pub through: DataKeyVersion,
    /// End of WAL at a moment at which they were gone: a server that replays WAL from there on, or
    /// from a later address, does not need their keys.
    pub gone: Lsn,
}

/// A range without database and first number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rest {
    last: u32,
    through: DataKeyVersion,
    gone: Lsn,
}

/// All former files: ranges that do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FormerFiles {
    ranges: BTreeMap<(u32, u32), Rest>,
}

impl FormerFiles {
    /// Adds a range. Where ranges overlap, the highest version counts, and the last address.
    pub fn add(&mut self, new: Range) {
        if new.first > new.last {
            return;
        }
        let mut parts = Vec::new();
        let mut from = Some(new.first);
        for known in self.take_overlapping(&new) {
            let part = |first: Option<u32>, last: Option<u32>, like: Range| {
                let (first, last) = (first?, last?);
                (first <= last).then_some(Range { first, last, ..like })
            };
            // Before the new range, before the known one, in both, after the new range.
            parts.extend(part(Some(known.first), new.first.checked_sub(1), known));
            parts.extend(part(from, known.first.checked_sub(1), new));
            let both = Range {
                through: known.through.max(new.through),
                gone: known.gone.max(new.gone),
                ..new
            };
            let last = known.last.min(new.last);
            parts.extend(part(Some(known.first.max(new.first)), Some(last), both));
            parts.extend(part(new.last.checked_add(1), Some(known.last), known));
            from = last.checked_add(1).filter(|from| *from <= new.last);
        }
        if let Some(first) = from {
            parts.push(Range { first, ..new });
        }
        parts.sort_unstable_by_key(|part| part.first);
        parts.into_iter().for_each(|part| self.put(part));
        self.join_after(new.database, new.last);
    }

    fn take_overlapping(&mut self, new: &Range) -> Vec<Range> {
        let before = self.ranges.range(..(new.database, new.first)).next_back();
        let before = before
            .filter(|((database, _), rest)| *database == new.database && rest.last >= new.first);
        let within = self.ranges.range((new.database, new.first)..=(new.database, new.last));
        let found: Vec<Range> = before.into_iter().chain(within).map(range).collect();
        for known in &found {
            self.ranges.remove(&(known.database, known.first));
        }
        found
    }

    /// Puts a range where none is, joined with the one before it if they say the same.
    fn put(&mut self, new: Range) {
        let before = self.ranges.range_mut(..(new.database, new.first)).next_back();
        match before {
            Some(((database, _), rest))
                if *database == new.database
                    && rest.last.checked_add(1) == Some(new.first)
                    && rest.through == new.through =>
            {
                rest.last = new.last;
                rest.gone = rest.gone.max(new.gone);
            }
            _ => {
                let Range { database, first, last, through, gone } = new;
                self.ranges.insert((database, first), Rest { last, through, gone });
            }
        }
    }

    /// Joins the range that begins after `last` with the one that ends there, if they say the same.
    fn join_after(&mut self, database: u32, last: u32) {
        let Some(next) = last.checked_add(1) else { return };
        if let Some(rest) = self.ranges.remove(&(database, next)) {
            self.put(range((&(database, next), &rest)));
        }
    }

    /// All ranges, by database and number.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + '_ {
        self.ranges.iter().map(range)
    }

    /// The ranges of a database.
    pub fn ranges_of(&self, database: u32) -> impl Iterator<Item = Range> + '_ {
        self.ranges.range((database, 0)..=(database, u32::MAX)).map(range)
    }

    /// The ranges with numbers from `first` to `last`.
    fn between(&self, database: u32, first: u32, last: u32) -> impl Iterator<Item = Range> + '_ {
        let around = self.find(database, first).filter(|range| range.first < first);
        let within =
            (first <= last).then(|| self.ranges.range((database, first)..=(database, last)));
        around.into_iter().chain(within.into_iter().flatten().map(range))
    }

    /// The range of a number.
    pub fn find(&self, database: u32, number: u32) -> Option<Range> {
        let found = self.ranges.range((database, 0)..=(database, number)).next_back().map(range);
        found.filter(|range| range.last >= number)
    }

    /// Whether a file with this last version was gone at the address `by`.
    pub fn was_gone(&self, file: RelFile, last: Option<DataKeyVersion>, by: Lsn) -> bool {
        let range = self.find(file.database, file.relation).filter(|range| range.gone <= by);
        !wal::is_key_place(file)
            && range.is_some_and(|range| last.is_some_and(|last| last <= range.through))
    }

    /// Whether adding the range would change nothing.
    pub fn contains(&self, wanted: &Range) -> bool {
        let mut next = Some(wanted.first);
        while let Some(number) = next.filter(|number| *number <= wanted.last) {
            match self.find(wanted.database, number) {
                Some(found) if found.through >= wanted.through && found.gone >= wanted.gone => {
                    next = found.last.checked_add(1);
                }
                _ => return false,
            }
        }
        true
    }

    /// The ranges for files of a database that were gone at the address `gone`, given by number and
    /// last version: one for those between two files in use, with the former files that are known
    /// there, and one for each with many versions. `in_use`: numbers of all other files of the
    /// database that have a record.
    pub fn with(
        &self,
        database: u32,
        files: &BTreeMap<u32, DataKeyVersion>,
        in_use: &BTreeSet<u32>,
        gone: Lsn,
    ) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        // The number of the file in use behind the last range.
        let mut end = None;
        let has_many = |through: DataKeyVersion| through.get() > FEW_VERSIONS;
        let (many, few): (Vec<_>, Vec<_>) =
            files.iter().partition(|(_, through)| has_many(**through));
        for (&number, &through) in few {
            if let Some(last) = ranges.last_mut()
                && end.is_none_or(|end| number < end)
            {
                last.last = last.last.max(number);
                last.through = last.through.max(through);
                continue;
            }
            let mut new = Range { database, first: number, last: number, through, gone };
            let after = in_use.range(..number).next_back().map_or(0, |used| used.saturating_add(1));
            end = in_use.range(number..).next().copied();
            let before = end.map_or(u32::MAX, |used| used.saturating_sub(1));
            for known in self.between(database, after, before) {
                if has_many(known.through) {
                    continue;
                }
                new.first = new.first.min(known.first.max(after));
                new.last = new.last.max(known.last.min(before));
                new.through = new.through.max(known.through);
            }
            ranges.push(new);
        }
        ranges.extend(many.into_iter().map(|(&number, &through)| Range {
            database,
            first: number,
            last: number,
            through,
            gone,
        }));
        ranges
    }
}

fn range((&(database, first), rest): (&(u32, u32), &Rest)) -> Range {
    Range { database, first, last: rest.last, through: rest.through, gone: rest.gone }
}
