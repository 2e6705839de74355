//! Rows of catalogs, read from their files: all row versions that were not removed yet.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use pagevault_cipher::Fork;
use pagevault_cipher::page::{self, PAGE_SIZE, Page};

use super::Context;
use super::btree::Btree;
use super::pages::{self, Files, Keys};
use crate::regular::{open_regular, read_regular};

/// Size of `pg_filenode.map` since 16 in bytes; before, it was smaller.
pub(super) const LARGEST_MAP: u64 = 524;

/// A catalog whose file is in the map, and a unique index of it that is never null.
pub(super) struct Catalog {
    pub(super) table: u32,
    pub(super) index: u32,
}

/// The catalogs of a database, or the shared ones.
pub(super) struct Catalogs<'a> {
    context: &'a Context<'a>,
    files: &'a Files,
    database: u32,
    map: Vec<(u32, u32)>,
}

impl<'a> Catalogs<'a> {
    /// `None` if the map is not there, or damaged. `database` is 0 for the shared ones.
    pub(super) fn of(context: &'a Context<'a>, files: &'a Files, database: u32) -> Option<Self> {
        let of_database = files.whole.iter().filter(|file| file.file.database == database);
        let directories: HashSet<PathBuf> =
            of_database.filter_map(|file| Some(file.path.parent()?.to_owned())).collect();
        // The map exists only in the database's own tablespace.
        let read = |place: &PathBuf| read_regular(&place.join("pg_filenode.map"), LARGEST_MAP).ok();
        let map = mappings(&directories.iter().find_map(read)?)?;
        Some(Self { context, files, database, map })
    }

    /// The numbers of all files in the map.
    pub(super) fn mapped(&self) -> impl Iterator<Item = u32> {
        self.map.iter().map(|(_, file)| *file)
    }

    /// The number of a relation's file.
    pub(super) fn file_of(&self, relation: u32) -> Option<u32> {
        self.map.iter().find(|(mapped, _)| *mapped == relation).map(|(_, file)| *file)
    }

    /// Reads all rows of a catalog. `None` if that fails, or if rows may be missing: the index
    /// names pages that are behind the end, or zero. Others may be zero in a healthy cluster: a
    /// relation grows before WAL says so, by several pages at a time (`RelationAddBlocks`, hio.c),
    /// and a crash may come before they are used.
    pub(super) fn rows(
        &self,
        catalog: &Catalog,
        mut each: impl FnMut(Row<'_>) -> Option<()>,
    ) -> Option<()> {
        let mut used = BTreeSet::new();
        self.pages(catalog.table, |block, page| {
            if !page::is_zero(page) {
                used.insert(block);
            }
            rows(page, &mut each)
        })?;
        let mut index = Btree::default();
        self.pages(catalog.index, |block, page| index.add(block, page))?;
        index.rows()?.is_subset(&used).then_some(())
    }

    /// Reads the pages of a relation.
    fn pages(&self, relation: u32, mut each: impl FnMut(u32, &Page) -> Option<()>) -> Option<()> {
        let number = self.file_of(relation)?;
        let is_it = |file: &&pages::RelationFile| {
            file.file.database == self.database
                && file.file.relation == number
                && file.fork == Fork::Main
        };
        let mut segments: Vec<_> = self.files.whole.iter().filter(is_it).collect();
        segments.sort_by_key(|file| file.segment);
        // In an incremental backup only a part of it may be there.
        if !segments.iter().map(|file| file.segment).eq(0..=segments.last()?.segment)
            || self.files.incremental.iter().any(|file| is_it(&file))
        {
            return None;
        }
        let mut keys = Keys::default();
        for segment in segments {
            let (mut input, _) = pages::open_segment(&segment.path).ok()?;
            let mut page: Page = [0; PAGE_SIZE];
            let mut block = segment.segment.saturating_mul(pages::SEGMENT);
            while pages::fill(&mut input, &mut page).ok()? == PAGE_SIZE {
                pages::open(self.context, segment, &mut page, block, &mut keys).ok()?;
                each(block, &page)?;
                block = block.saturating_add(1);
            }
        }
        Some(())
    }
}

/// Relations and the numbers of their files from `pg_filenode.map` (`RelMapFile`, relmapper.c; it
/// is larger since 16).
pub(super) fn mappings(map: &[u8]) -> Option<Vec<(u32, u32)>> {
    const MAGIC: u32 = 0x0059_2717;
    const MOST: [(usize, usize); 2] = [(512, 62), (524, 64)];
    const HEAD: usize = 8;
    let most = MOST.iter().find(|(length, _)| *length == map.len())?.1;
    let crc = HEAD + most * 8;
    let count = word(map, 4)? as usize;
    if word(map, 0)? != MAGIC || count > most || word(map, crc)? != crc32c::crc32c(map.get(..crc)?)
    {
        return None;
    }
    (0..count).map(|at| Some((word(map, HEAD + at * 8)?, word(map, HEAD + at * 8 + 4)?))).collect()
}

pub(super) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// All numbers of 4 bytes in it, wherever they begin.
pub(super) fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.windows(4).filter_map(|number| word(number, 0))
}

/// What the line pointers of a page lead to, and is not dead.
pub(super) fn items(page: &Page) -> impl Iterator<Item = Option<&[u8]>> {
    /// `SizeOfPageHeaderData`; ItemIdData (itemid.h): offset, flags and length of 15, 2 and 15
    /// bits.
    const HEADER: usize = 24;
    const ITEM: usize = 4;
    const NORMAL: u32 = 1;
    let lower = half(page, 12).map_or(0, usize::from);
    (HEADER..lower).step_by(ITEM).filter_map(|at| match word(page, at) {
        Some(item) if item >> 15 & 3 != NORMAL => None,
        Some(item) => {
            let (begin, length) = ((item & 0x7FFF) as usize, (item >> 17) as usize);
            Some(page.get(begin..begin + length))
        }
        None => Some(None),
    })
}

/// `None` if the page cannot be read.
fn rows(page: &Page, each: &mut impl FnMut(Row<'_>) -> Option<()>) -> Option<()> {
    items(page).try_for_each(|row| each(Row(row?)))
}

/// A row version of a catalog, from its header on (HeapTupleHeaderData, htup_details.h).
pub(super) struct Row<'a>(&'a [u8]);

impl Row<'_> {
    const XMAX: usize = 4;
    const INFOMASK: usize = 20;
    const BEGIN: usize = 22;
    /// Flags of `t_infomask`.
    const LOCKED_ONLY: u16 = 0x0080;
    const COMMITTED: u16 = 0x0100;
    const INVALID: u16 = 0x0200;
    const XMAX_COMMITTED: u16 = 0x0400;
    const XMAX_INVALID: u16 = 0x0800;
    const XMAX_IS_MULTI: u16 = 0x1000;

    /// A column at an offset: it and those before it are never null, and of a fixed length.
    pub(super) fn column(&self, at: usize) -> Option<u32> {
        word(self.0, usize::from(*self.0.get(Self::BEGIN)?) + at)
    }

    /// As [`Row::column`], of one byte.
    pub(super) fn byte(&self, at: usize) -> Option<u8> {
        self.0.get(usize::from(*self.0.get(Self::BEGIN)?) + at).copied()
    }

    /// All numbers that its columns may contain, wherever they begin.
    pub(super) fn numbers(&self) -> Option<impl Iterator<Item = u32>> {
        Some(numbers(self.0.get(usize::from(*self.0.get(Self::BEGIN)?)..)?))
    }

    /// False only if its transaction certainly did not commit.
    pub(super) fn may_exist(&self, transactions: &Transactions) -> Option<bool> {
        Some(match half(self.0, Self::INFOMASK)? & (Self::COMMITTED | Self::INVALID) {
            0 => transactions.may_have_committed(word(self.0, 0)?),
            hints => hints != Self::INVALID,
        })
    }

    /// Whether a transaction has certainly removed or replaced it, as a hint says.
    pub(super) fn is_removed(&self) -> Option<bool> {
        let others = Self::XMAX_INVALID | Self::LOCKED_ONLY | Self::XMAX_IS_MULTI;
        let flags = half(self.0, Self::INFOMASK)? & (Self::XMAX_COMMITTED | others);
        Some(flags == Self::XMAX_COMMITTED)
    }

    /// True only if its transaction has certainly committed, and none may have removed it.
    pub(super) fn exists(&self, transactions: &Transactions) -> Option<bool> {
        let flags = half(self.0, Self::INFOMASK)?;
        let is_there = match flags & (Self::COMMITTED | Self::INVALID) {
            0 => transactions.has_committed(word(self.0, 0)?),
            hints => hints != Self::INVALID,
        };
        let remover = word(self.0, Self::XMAX)?;
        let may_be_removed = remover != 0
            && flags & (Self::XMAX_INVALID | Self::LOCKED_ONLY) == 0
            && (flags & Self::XMAX_IS_MULTI != 0 || transactions.may_have_committed(remover));
        Some(is_there && !may_be_removed)
    }
}

/// The state of transactions according to `pg_xact`.
pub(super) struct Transactions {
    directory: PathBuf,
    /// Those in progress may still be committed: there are prepared transactions, of which they may
    /// be subtransactions, or there is WAL to replay.
    may_commit: bool,
}

#[derive(PartialEq, Eq)]
enum Outcome {
    Committed,
    Aborted,
    /// Or it was, when the server ended.
    InProgress,
}

impl Transactions {
    pub(super) fn of(context: &Context<'_>) -> io::Result<Self> {
        let root = context.keystore.data_directory();
        let prepared = fs::read_dir(root.join("pg_twophase"))?.next().is_some();
        let may_commit = prepared || !context.control.ended;
        Ok(Self { directory: root.join("pg_xact"), may_commit })
    }

    /// False only if it was rolled back, or was in progress when the server ended.
    fn may_have_committed(&self, number: u32) -> bool {
        match self.outcome(number) {
            Outcome::Committed => true,
            Outcome::Aborted => false,
            Outcome::InProgress => self.may_commit,
        }
    }

    fn has_committed(&self, number: u32) -> bool {
        self.outcome(number) == Outcome::Committed
    }

    fn outcome(&self, number: u32) -> Outcome {
        /// `FirstNormalTransactionId`; clog.c: two bits for a transaction, 32 pages in a file.
        const FIRST: u32 = 3;
        const IN_A_FILE: u32 = 32 * 8192 * 4;
        const IN_PROGRESS: u8 = 0;
        const ABORTED: u8 = 2;
        if number < FIRST {
            return Outcome::Committed;
        }
        let path = self.directory.join(format!("{:04X}", number / IN_A_FILE));
        let mut page: Page = [0; PAGE_SIZE];
        let at = (number % IN_A_FILE / 4) as usize;
        let start = at / PAGE_SIZE * PAGE_SIZE;
        let read = open_regular(&path).and_then(|file| file.read_exact_at(&mut page, start as u64));
        match page[at - start] >> (number % 4 * 2) & 3 {
            // `pg_xact` is truncated only for old transactions. A page of which none has ended is
            // lost.
            _ if read.is_err() || page::is_zero(&page) => Outcome::Committed,
            ABORTED => Outcome::Aborted,
            IN_PROGRESS => Outcome::InProgress,
            _ => Outcome::Committed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_if_they_are_intact() {
        for (length, crc) in [(512, 504), (524, 520)] {
            let mut map = vec![0; length];
            map[..4].copy_from_slice(&0x0059_2717_u32.to_le_bytes());
            map[4] = 2;
            map[8..12].copy_from_slice(&1259_u32.to_le_bytes());
            map[12..16].copy_from_slice(&16384_u32.to_le_bytes());
            map[16] = 7;
            map[20] = 8;
            let sum = crc32c::crc32c(&map[..crc]);
            map[crc..crc + 4].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(mappings(&map), Some(vec![(1259, 16384), (7, 8)]));
            map[12] ^= 1;
            assert_eq!(mappings(&map), None);
        }
        assert_eq!(mappings(&[]), None);
    }

    #[test]
    fn rows_are_removed_if_a_hint_says_so() {
        for (flags, is_removed) in
            [(0x0400_u16, true), (0, false), (0x0480, false), (0x1400, false)]
        {
            let mut row = [0; 24];
            row[20..22].copy_from_slice(&(flags | 0x0100).to_le_bytes());
            assert_eq!(Row(&row).is_removed(), Some(is_removed), "{flags}");
        }
    }

    #[test]
    fn rows_are_judged_by_their_transactions() {
        let directory = tempfile::tempdir().unwrap();
        // Of the transactions 4 to 7: in progress, committed, aborted, in progress.
        let mut states = vec![0; 2 * PAGE_SIZE];
        states[1] = 0b10_01_00;
        fs::write(directory.path().join("0000"), states).unwrap();
        let judged = |may_commit: bool, from: u32, to: u32, flags: u16| {
            let path = directory.path().to_owned();
            let transactions = Transactions { directory: path, may_commit };
            let mut row = [0; 24];
            row[..4].copy_from_slice(&from.to_le_bytes());
            row[4..8].copy_from_slice(&to.to_le_bytes());
            row[20..22].copy_from_slice(&flags.to_le_bytes());
            let row = Row(&row);
            (row.may_exist(&transactions).unwrap(), row.exists(&transactions).unwrap())
        };
        for may_commit in [false, true] {
            // Inserted in progress, committed, aborted, long ago; and by flags.
            assert_eq!(judged(may_commit, 4, 0, 0), (may_commit, false));
            assert_eq!(judged(may_commit, 5, 0, 0), (true, true));
            assert_eq!(judged(may_commit, 6, 0, 0), (false, false));
            assert_eq!(judged(may_commit, 2, 0, 0), (true, true));
            assert_eq!(judged(may_commit, 1 << 20, 0, 0), (true, true));
            // Of a page that is lost.
            assert_eq!(judged(may_commit, 1 << 15, 0, 0), (true, true));
            assert_eq!(judged(may_commit, 6, 0, 0x100), (true, true));
            assert_eq!(judged(may_commit, 6, 0, 0x300), (true, true));
            assert_eq!(judged(may_commit, 5, 0, 0x200), (false, false));
            // Removed in progress, committed, aborted; and by flags.
            assert_eq!(judged(may_commit, 5, 4, 0), (true, !may_commit));
            assert_eq!(judged(may_commit, 5, 5, 0), (true, false));
            assert_eq!(judged(may_commit, 5, 6, 0), (true, true));
            assert_eq!(judged(may_commit, 5, 5, 0x800), (true, true));
            assert_eq!(judged(may_commit, 5, 5, 0x80), (true, true));
            assert_eq!(judged(may_commit, 5, 6, 0x1000), (true, false));
        }
    }
}
