//! Segments of relations after one that is missing or not full.
//!
//! A backup copies the segments of a relation at different moments. If the relation grows beyond a
//! segment meanwhile, or is truncated or dropped, those that the backup has do not fit together.
//! Recovery fills the earlier segment before it reads a later one (`_mdfd_getseg`, md.c), and
//! writes all pages that are new since its redo pointer. So a gap is no damage if WAL from there on
//! removes or makes the file, cuts off what is missing, or writes each page in the gap and after it
//! before it reads it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use pagevault_cipher::Fork;
use pagevault_cipher::page::{PAGE_SIZE, Page, is_zero};
use pagevault_keystore::RelFile;

use super::blocks::Place;
use super::databases::replaced_by;
use super::pages::{SEGMENT, fill, open_segment};
use super::wal_record::{HASH, SMGR, SMGR_CREATE, XACT, data, file, kind, word};

/// Operations and parts of records (xact.h, storage_xlog.h).
const OPERATION: u8 = 0x70;
const ENDS: [u8; 4] = [0x00, 0x20, 0x30, 0x40];
const HAS_INFO: u8 = 0x80;
const HAS_DATABASE: u32 = 1 << 0;
const HAS_SUBTRANSACTIONS: u32 = 1 << 1;
const HAS_FILES: u32 = 1 << 2;
const SMGR_TRUNCATE: u8 = 0x20;
const TRUNCATE_HEAP: u32 = 1;

/// Most pages that a process adds at once; they are in WAL when they are used
/// (`RelationAddExtraBlocks`, hio.c; since 16 fewer).
const ADDED: usize = 512;

const FORKS: [Fork; 4] = [Fork::Main, Fork::FreeSpaceMap, Fork::VisibilityMap, Fork::Init];

/// A segment after one that is missing or not full.
pub(super) struct Gap {
    pub(super) file: RelFile,
    pub(super) fork: Fork,
    pub(super) segment: u32,
    pub(super) path: PathBuf,
    /// The first block that is missing.
    pub(super) end: u32,
    /// As it is shown.
    pub(super) shown: String,
    pub(super) what: String,
}

/// All of them, and what WAL does with their relations.
#[derive(Default)]
pub(super) struct Gaps {
    pub(super) found: Vec<Gap>,
    changes: HashMap<(RelFile, Fork), Changes>,
    /// Their tablespaces and databases, and whether these are copied or dropped as a whole.
    databases: HashMap<(u32, u32), bool>,
}

#[derive(Default)]
struct Changes {
    /// The file is made or removed.
    is_replaced: bool,
    /// The least number of blocks to which it is truncated.
    truncated: Option<u32>,
    /// Whether the first record about a block writes all of it.
    blocks: BTreeMap<u32, bool>,
    /// A hash index grows by any number of pages that it uses later (`_hash_alloc_buckets`,
    /// hashpage.c).
    is_hash: bool,
}

impl Gaps {
    pub(super) fn add(&mut self, gap: Gap) {
        self.changes.entry((gap.file, gap.fork)).or_default();
        self.databases.insert((gap.file.tablespace, gap.file.database), false);
        self.found.push(gap);
    }

    /// Recovery replays this record, which has these blocks.
    pub(super) fn replayed(&mut self, record: &[u8], blocks: &[(Place, bool)]) {
        if self.found.is_empty() {
            return;
        }
        for ((file, fork, block), restores) in blocks {
            if let Some(changes) = self.changes.get_mut(&(*file, *fork)) {
                changes.blocks.entry(*block).or_insert(*restores);
                changes.is_hash |= kind(record).is_some_and(|(manager, _)| manager == HASH);
            }
        }
        for place in replaced_by(record) {
            self.databases.entry(place).and_modify(|is_replaced| *is_replaced = true);
        }
        for place in removed(record).into_iter().flat_map(|file| FORKS.map(|fork| (file, fork))) {
            self.changes.entry(place).and_modify(|changes| changes.is_replaced = true);
        }
        let _ = self.resized(record);
    }

    /// `smgr_redo` (storage.c).
    fn resized(&mut self, record: &[u8]) -> Option<()> {
        let (SMGR, operation) = kind(record)? else { return None };
        let mut data = data(record)?;
        match operation {
            SMGR_CREATE => {
                let file = file(&mut data)?;
                let fork = Fork::from_number(u8::try_from(word(&mut data)?).ok()?)?;
                self.changes.get_mut(&(file, fork))?.is_replaced = true;
            }
            SMGR_TRUNCATE => {
                let (to, file) = (word(&mut data)?, file(&mut data)?);
                if word(&mut data)? & TRUNCATE_HEAP != 0 {
                    let changes = self.changes.get_mut(&(file, Fork::Main))?;
                    changes.truncated = Some(changes.truncated.map_or(to, |least| least.min(to)));
                }
            }
            _ => {}
        }
        Some(())
    }

    /// Whether recovery, all of whose WAL is read, decides about a gap.
    pub(super) fn explain(&self, gap: &Gap) -> bool {
        let Some(changes) = self.changes.get(&(gap.file, gap.fork)) else { return false };
        changes.is_replaced
            || self.databases.get(&(gap.file.tablespace, gap.file.database)) == Some(&true)
            || changes.truncated.is_some_and(|to| to <= gap.end)
            || changes.begin(gap) && changes.write_all(gap).unwrap_or(false)
    }
}

impl Changes {
    /// Whether the missing pages are new: recovery fills the gap with zeros, and writes those that
    /// were used. Old ones would be lost.
    fn begin(&self, gap: &Gap) -> bool {
        let first = gap.segment.saturating_mul(SEGMENT);
        let among = |blocks: Range<u32>| self.blocks.range(blocks).map(|(_, restores)| *restores);
        let missing = gap.end..first;
        let written = among(missing.clone()).filter(|restores| *restores).count();
        let grows = || among(first..first.saturating_add(SEGMENT)).any(|restores| restores);
        among(missing.clone()).all(|restores| restores)
            && (self.is_hash || missing.len() - written <= written + ADDED)
            && (written > 0 || grows())
    }

    /// Whether all pages of the segment are new: recovery writes them before it reads them. Pages
    /// that were added and not used yet are zero, and not in WAL.
    fn write_all(&self, gap: &Gap) -> io::Result<bool> {
        // It has other content.
        if gap.path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"I")) {
            return Ok(false);
        }
        let (mut input, _) = open_segment(&gap.path)?;
        let mut page: Page = [0; PAGE_SIZE];
        let mut block = gap.segment.saturating_mul(SEGMENT);
        while fill(&mut input, &mut page)? == PAGE_SIZE {
            if !is_zero(&page) && self.blocks.get(&block) != Some(&true) {
                return Ok(false);
            }
            block = block.saturating_add(1);
        }
        Ok(true)
    }
}

/// Files that the end of a transaction removes (`ParseCommitRecord`, `ParseAbortRecord`,
/// xactdesc.c, the same from 15 to 19 up to there).
fn removed(record: &[u8]) -> Vec<RelFile> {
    let files = || {
        let (XACT, info) = kind(record)? else { return None };
        if info & HAS_INFO == 0 || !ENDS.contains(&(info & OPERATION)) {
            return None;
        }
        // After the time.
        let mut data = data(record)?.get(8..)?;
        let has = word(&mut data)?;
        if has & HAS_DATABASE != 0 {
            data = data.get(8..)?;
        }
        if has & HAS_SUBTRANSACTIONS != 0 {
            let count = word(&mut data)? as usize;
            data = data.get(count.checked_mul(4)?..)?;
        }
        if has & HAS_FILES == 0 {
            return None;
        }
        let count = word(&mut data)? as usize;
        data = data.get(..count.checked_mul(12)?)?;
        Some(std::iter::from_fn(move || file(&mut data)).collect())
    };
    files().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::wal_record::record;
    use super::*;

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 16384 };
    const END: u32 = SEGMENT - 600;

    /// Whether a record with these blocks explains that the segment before one with three pages,
    /// of which the second is zero, ends at `END`.
    fn explained(record: &[u8], blocks: &[(u32, bool)]) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("16384.1");
        fs::write(&path, [[7; PAGE_SIZE], [0; PAGE_SIZE], [7; PAGE_SIZE]].concat()).unwrap();
        let (shown, what) = (String::new(), String::new());
        let gap = Gap { file: FILE, fork: Fork::Main, segment: 1, path, end: END, shown, what };
        let mut gaps = Gaps::default();
        gaps.add(gap);
        let place = |(block, restores): &(u32, bool)| ((FILE, Fork::Main, *block), *restores);
        gaps.replayed(record, &blocks.iter().map(place).collect::<Vec<_>>());
        gaps.explain(&gaps.found[0])
    }

    #[test]
    fn pages_after_a_gap_must_be_new() {
        let of = |blocks: &[(u32, bool)]| {
            let missing = (END..SEGMENT - ADDED as u32).map(|block| (block, true));
            explained(
                &record(10, 0, &[]),
                &missing.chain(blocks.iter().copied()).collect::<Vec<_>>(),
            )
        };
        let (first, third) = (SEGMENT, SEGMENT + 2);
        assert!(of(&[(first, true), (third, true)]));
        assert!(of(&[(first, true), (third, true), (third, false)]), "changed afterwards");
        assert!(!of(&[(first, true)]), "one is older");
        assert!(!of(&[(first, true), (third, false), (third, true)]), "one was read before");
    }

    #[test]
    fn pages_in_a_gap_must_be_new() {
        let of = |missing: Range<u32>| {
            let blocks = missing.chain([SEGMENT, SEGMENT + 2]).map(|block| (block, true));
            explained(&record(10, 0, &[]), &blocks.collect::<Vec<_>>())
        };
        // Of 600 pages, half of those beyond 512 were used.
        assert!(of(END + 1..END + 45) && !of(END + 1..END + 44));
        assert!(!of(0..0), "the old ones are lost");
        assert!(explained(&record(HASH, 0, &[]), &[(SEGMENT, true), (SEGMENT + 2, true)]));
        let all: Vec<_> = (END..SEGMENT + 3).map(|block| (block, true)).collect();
        let read = |at: u32| {
            let first = std::iter::once((at, false)).chain(all.iter().copied());
            explained(&record(10, 0, &[]), &first.collect::<Vec<_>>())
        };
        assert!(read(END - 1) && !read(END) && !read(SEGMENT - 1));
    }

    #[test]
    fn files_that_are_made_removed_or_cut_have_gaps() {
        let [space, database, relation] = [1663, 5, 16384];
        let by = |manager, info, words: &[u32]| explained(&record(manager, info, words), &[]);
        assert!(by(SMGR, SMGR_CREATE, &[space, database, relation, 0]));
        assert!(!by(SMGR, SMGR_CREATE, &[space, database, relation, 2]), "of another fork");
        assert!(!by(SMGR, SMGR_CREATE, &[space, database, 7, 0]));
        assert!(by(SMGR, SMGR_TRUNCATE, &[END, space, database, relation, 7]));
        assert!(
            !by(SMGR, SMGR_TRUNCATE, &[END + 1, space, database, relation, 7]),
            "more is missing"
        );
        assert!(!by(SMGR, SMGR_TRUNCATE, &[0, space, database, relation, 6]), "of a map");
        assert!(by(4, 0x20, &[database, 1, space]) && !by(4, 0x20, &[database, 1, 7]));
        for operation in ENDS {
            let info = operation | HAS_INFO;
            assert!(by(XACT, info, &[0, 0, HAS_FILES, 1, space, database, relation]));
            let all = HAS_DATABASE | HAS_SUBTRANSACTIONS | HAS_FILES;
            let more = [1, 2, 3, space, database, relation, space, database, 7, 9, 9];
            let words = [&[0, 0, all, 5, 1663, 2, 11, 12][..], &more[1..]].concat();
            assert!(!by(XACT, info, &words), "more files than there are");
            let words = [&[0, 0, all, 5, 1663, 2, 11, 12, 2][..], &more[3..]].concat();
            assert!(by(XACT, info, &words));
            assert!(!by(XACT, operation, &words), "without parts");
            assert!(!by(XACT, info, &[0, 0, HAS_FILES, u32::MAX, space, database, relation]));
        }
        assert!(!by(XACT, 0x10 | HAS_INFO, &[0, 0, HAS_FILES, 1, space, database, relation]));
    }
}
