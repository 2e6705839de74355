//! Files that belong to no relation, because the transaction that created them did not commit
//! before a crash.
//!
//! Recovery does not remove them, and they may be incomplete: their pages may have been written
//! before the key was flushed with WAL. PostgreSQL never reads them again. Only if something is
//! wrong with a file, `pg_class` of its database is read, with all row versions that were not
//! removed yet, to find out whether the file is a leftover.
//!
//! Before recovery, and in a base backup, WAL decides too. What was done before its redo pointer is
//! in the files (`CheckPointGuts`, xlog.c); `pg_class` may be a mixture of what it was since. So a
//! file is a leftover if none of the rows there names it, WAL does not concern it, and WAL brings
//! no new rows. A transaction in progress may still be committed.
//!
//! In doubt a file counts as needed: if pg_class cannot be read, if WAL from the redo pointer on is
//! not there, or if `pg_class` changes in it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagevault_cipher::Fork;
use pagevault_cipher::page::{PAGE_SIZE, Page};
use pagevault_keystore::RelFile;

use super::Context;
use super::pages::{self, Files, Keys};
use super::referenced::Referenced;
use crate::regular::{open_regular, read_regular};

/// `RelationRelationId`
const PG_CLASS: u32 = 1259;

/// Size of `pg_filenode.map` since 16 in bytes; before, it was smaller.
pub(super) const LARGEST_MAP: u64 = 524;

/// The files that relations need, for each database that was examined.
pub(super) struct Leftovers<'a> {
    context: &'a Context<'a>,
    files: &'a Files,
    /// What WAL says about files; `None` before it is read.
    wal: Option<Referenced>,
    /// Numbers of files that belong or may belong to a relation; `None` if unknown.
    needed: HashMap<u32, Option<HashSet<u32>>>,
}

impl<'a> Leftovers<'a> {
    pub(super) fn new(context: &'a Context<'a>, files: &'a Files) -> Self {
        Self { context, files, wal: None, needed: HashMap::new() }
    }

    /// WAL is read from the redo pointer on. `referenced`: what it says, if that was asked.
    pub(super) fn wal_is_read(&mut self, referenced: Option<Referenced>) {
        self.wal = referenced;
    }

    /// True if certainly no relation has this file.
    pub(super) fn includes(&mut self, file: RelFile) -> bool {
        let (context, files) = (self.context, self.files);
        let wal = match &self.wal {
            _ if context.control.ended => None,
            Some(wal) if !wal.includes(file) => Some(wal),
            _ => return false,
        };
        let needed = self
            .needed
            .entry(file.database)
            .or_insert_with(|| needed(context, files, file.database, wal));
        needed.as_ref().is_some_and(|needed| !needed.contains(&file.relation))
    }
}

fn needed(
    context: &Context<'_>,
    files: &Files,
    database: u32,
    wal: Option<&Referenced>,
) -> Option<HashSet<u32>> {
    // Each database has rows of shared relations.
    if database == 0 {
        return None;
    }
    let transactions = Transactions::of(context.keystore.data_directory(), wal.is_some()).ok()?;
    let of_database = || files.whole.iter().filter(|file| file.file.database == database);
    let directories: HashSet<PathBuf> =
        of_database().filter_map(|file| Some(file.path.parent()?.to_owned())).collect();
    // The map exists only in the database's own tablespace.
    let map_in = |place: &PathBuf| read_regular(&place.join("pg_filenode.map"), LARGEST_MAP).ok();
    let map = directories.iter().find_map(map_in)?;
    let mapped = mappings(&map)?;
    let pg_class = mapped.iter().find(|(relation, _)| *relation == PG_CLASS)?.1;
    if wal.is_some_and(|wal| wal.changes(database, pg_class)) {
        return None;
    }
    let mut needed: HashSet<u32> = mapped.iter().map(|(_, file)| *file).collect();
    let mut segments: Vec<_> = of_database()
        .filter(|file| file.file.relation == pg_class && file.fork == Fork::Main)
        .collect();
    segments.sort_by_key(|file| file.segment);
    // In an incremental backup only a part of it may be there.
    if !segments.iter().map(|file| file.segment).eq(0..=segments.last()?.segment)
        || files
            .incremental
            .iter()
            .any(|file| file.file.database == database && file.file.relation == pg_class)
    {
        return None;
    }
    let mut keys = Keys::default();
    for segment in segments {
        let (mut input, _) = pages::open_segment(&segment.path).ok()?;
        let mut page: Page = [0; PAGE_SIZE];
        let mut block = segment.segment.saturating_mul(pages::SEGMENT);
        while pages::fill(&mut input, &mut page).ok()? == PAGE_SIZE {
            pages::open(context, segment, &mut page, block, &mut keys).ok()?;
            rows(&page, &transactions, &mut needed)?;
            block = block.saturating_add(1);
        }
    }
    Some(needed)
}

/// Relations and the numbers of their files from `pg_filenode.map` (`RelMapFile`, relmapper.c; it
/// is larger since 16).
pub(super) fn mappings(map: &[u8]) -> Option<Vec<(u32, u32)>> {
    const MAGIC: u32 = 0x0059_2717;
    const MOST: [(usize, usize); 2] = [(512, 62), (524, 64)];
    const HEAD: usize = 8;
    let word = |at: usize| Some(u32::from_le_bytes(*map.get(at..)?.first_chunk()?));
    let most = MOST.iter().find(|(length, _)| *length == map.len())?.1;
    let crc = HEAD + most * 8;
    let count = word(4)? as usize;
    if word(0)? != MAGIC || count > most || word(crc)? != crc32c::crc32c(map.get(..crc)?) {
        return None;
    }
    (0..count).map(|at| Some((word(HEAD + at * 8)?, word(HEAD + at * 8 + 4)?))).collect()
}

/// Adds the files in the `pg_class` rows of a page, except rows whose transaction did not commit.
/// `None` if the page cannot be read.
fn rows(page: &Page, transactions: &Transactions, needed: &mut HashSet<u32>) -> Option<()> {
    /// `SizeOfPageHeaderData`; ItemIdData (itemid.h): offset, flags and length of 15, 2 and 15
    /// bits.
    const HEADER: usize = 24;
    const ITEM: usize = 4;
    const NORMAL: u32 = 1;
    /// HeapTupleHeaderData (htup_details.h): t_xmin, t_infomask, t_hoff; `HEAP_XMIN_COMMITTED`,
    /// `HEAP_XMIN_INVALID`.
    const INFOMASK: usize = 20;
    const BEGIN: usize = 22;
    const COMMITTED: u16 = 0x0100;
    const INVALID: u16 = 0x0200;
    /// Offset of `relfilenode` in FormData_pg_class (pg_class.h), the same in 15 to 18; the columns
    /// before it are never null.
    const FILE: usize = 88;
    let half = |at: usize| Some(u16::from_le_bytes(*page.get(at..)?.first_chunk()?));
    let word = |at: usize| Some(u32::from_le_bytes(*page.get(at..)?.first_chunk()?));
    let lower = usize::from(half(12)?);
    for item in (HEADER..lower).step_by(ITEM) {
        let item = word(item)?;
        if item >> 15 & 3 != NORMAL {
            continue;
        }
        let row = (item & 0x7FFF) as usize;
        let file = word(row + usize::from(*page.get(row + BEGIN)?) + FILE)?;
        let hints = half(row + INFOMASK)? & (COMMITTED | INVALID);
        let lost = hints == INVALID || (hints == 0 && !transactions.may_have_committed(word(row)?));
        if !lost {
            needed.insert(file);
        }
    }
    Some(())
}

/// The state of transactions according to `pg_xact`.
struct Transactions {
    directory: PathBuf,
    /// Those in progress may still be committed: there are prepared transactions, of which they may
    /// be subtransactions, or there is WAL to replay.
    may_commit: bool,
}

impl Transactions {
    fn of(data_directory: &Path, is_to_recover: bool) -> io::Result<Self> {
        let prepared = fs::read_dir(data_directory.join("pg_twophase"))?.next().is_some();
        let may_commit = prepared || is_to_recover;
        Ok(Self { directory: data_directory.join("pg_xact"), may_commit })
    }

    /// False only if it was rolled back, or was in progress when the server ended.
    fn may_have_committed(&self, number: u32) -> bool {
        /// `FirstNormalTransactionId`; clog.c: two bits for a transaction, 32 pages in a file.
        const FIRST: u32 = 3;
        const IN_A_FILE: u32 = 32 * 8192 * 4;
        const IN_PROGRESS: u8 = 0;
        const ABORTED: u8 = 2;
        if number < FIRST {
            return true;
        }
        let path = self.directory.join(format!("{:04X}", number / IN_A_FILE));
        let mut byte = [0];
        let at = u64::from(number % IN_A_FILE / 4);
        let read = open_regular(&path).and_then(|file| file.read_exact_at(&mut byte, at));
        // `pg_xact` is truncated only for old transactions.
        read.is_err()
            || match byte[0] >> (number % 4 * 2) & 3 {
                ABORTED => false,
                IN_PROGRESS => self.may_commit,
                _ => true,
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
}
