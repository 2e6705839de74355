//! Rows that WAL brings to `pg_class`: whether one of them may name a file.
//!
//! Rows are not asked who inserted them, and a number counts wherever its bytes are: what names a
//! file, contains its number. A new row is in the record as a whole, in the data of its block or in
//! an image of the page (`heap_insert`, `heap_multi_insert`, `log_heap_update`, heapam.c;
//! `XLogRecordAssemble`, xloginsert.c). Only an update within a page may omit the beginning and the
//! end that are those of the row before (`XLH_UPDATE_PREFIX_FROM_OLD`,
//! `XLH_UPDATE_SUFFIX_FROM_OLD`; redo: `heap_xlog_update`, heapam.c, since 18 heapam_xlog.c). If
//! all of the number is in one of these, the row before contains it, too, though perhaps in another
//! place. That row has come from WAL; or it was on disk at the redo pointer, and there is that row
//! still, or one that was made of it in the same way. If there is none, it was removed for good.
//!
//! Images count in any record: a torn page may lack any row, and the first record about it restores
//! it; and `CREATE DATABASE` copies whole pages (`RelationCopyStorageUsingBuffer`, bufmgr.c).
//!
//! All of this is the same from 15 to 18 (heapam_xlog.h, xlogrecord.h).

use std::collections::{HashMap, HashSet};

use pagevault_cipher::Fork;
use pagevault_keystore::RelFile;

use super::blocks::{Block, Place, contents_of};
use super::catalogs::{half, numbers};
use super::wal_record::{HEAP, HEAP2, XLOG, kind};

/// Offset of `relfilenode` in FormData_pg_class (pg_class.h), the same in 15 to 18.
pub(super) const FILE: usize = 88;
const FILE_END: usize = FILE + 4;

/// Operations (heapam_xlog.h, pg_control.h).
const OPERATION: u8 = 0x70;
const INSERT: u8 = 0x00;
const UPDATE: u8 = 0x20;
const HOT_UPDATE: u8 = 0x40;
const MULTI_INSERT: u8 = 0x50;
const FPI_FOR_HINT: u8 = 0xA0;
const FPI: u8 = 0xB0;

/// `xl_heap_update`: the offset of its flags; two of them.
const FLAGS: usize = 7;
const PREFIX: u8 = 1 << 5;
const SUFFIX: u8 = 1 << 6;

/// `SizeOfHeapHeader`; the offset of `t_hoff` in it, which counts `SizeofHeapTupleHeader`, too.
const ROW_HEADER: usize = 5;
const BEGIN: usize = 4;
const OMITTED: usize = 23;

/// By the database and the file of its `pg_class`: numbers that no row names.
pub(super) struct NewRows(HashMap<(u32, u32), HashSet<u32>>);

impl NewRows {
    /// To look for these numbers.
    pub(super) fn of(files: HashMap<(u32, u32), HashSet<u32>>) -> Self {
        Self(files)
    }

    /// A complete record with these blocks.
    pub(super) fn add(&mut self, record: &[u8], blocks: &[(Place, bool)]) {
        for ((file, fork, _), _) in blocks {
            let unnamed = self.0.get_mut(&(file.database, file.relation));
            if *fork == Fork::Main
                && let Some(unnamed) = unnamed.filter(|unnamed| !unnamed.is_empty())
                && remove_named(record, *file, unnamed).is_none()
            {
                unnamed.clear();
            }
        }
    }

    /// Whether the number is one of those, and no row may name it.
    pub(super) fn misses(&self, database: u32, file: u32) -> bool {
        self.0.iter().any(|((of, _), unnamed)| *of == database && unnamed.contains(&file))
    }
}

/// Removes numbers that may be in a row of a record about `pg_class`. `None` if that may be any.
fn remove_named(record: &[u8], pg_class: RelFile, unnamed: &mut HashSet<u32>) -> Option<()> {
    let (manager, info) = kind(record)?;
    let operation = info & OPERATION;
    let is_update = manager == HEAP && matches!(operation, UPDATE | HOT_UPDATE);
    let is_new = is_update || (manager, operation) == (HEAP, INSERT);
    let is_new = is_new || (manager, operation) == (HEAP2, MULTI_INSERT);
    let has_rows = match manager {
        XLOG if matches!(info, FPI | FPI_FOR_HINT) => false,
        HEAP => true,
        HEAP2 => is_new,
        _ => return None,
    };
    let (blocks, data) = contents_of(record)?;
    for block in blocks.iter().filter(|block| block.place.0 == pg_class) {
        if block.is_compressed {
            return None;
        }
        let rows = if has_rows { block.data } else { &[] };
        for number in numbers(block.image).chain(numbers(rows)) {
            unnamed.remove(&number);
        }
    }
    // Of an update, the first block is that of the new row.
    let Block { image, data: row, .. } = blocks.first()?;
    if is_new && row.is_empty() && image.is_empty() {
        return None;
    }
    if is_update && !row.is_empty() {
        let (begin, part) = part_of(row, *data.get(FLAGS)?)?;
        let end = begin + part.len();
        if begin < FILE_END && FILE < end {
            unnamed.retain(|number| !may_be(*number, begin, part));
        }
    }
    Some(())
}

/// The part of an updated row that the record has, and where it begins in the row's columns.
fn part_of(mut data: &[u8], flags: u8) -> Option<(usize, &[u8])> {
    let mut prefix = 0;
    if flags & PREFIX != 0 {
        prefix = usize::from(half(data, 0)?);
        data = data.get(2..)?;
    }
    if flags & SUFFIX != 0 {
        data = data.get(2..)?;
    }
    let before_columns = usize::from(*data.get(BEGIN)?).checked_sub(OMITTED)?;
    Some((prefix, data.get(ROW_HEADER + before_columns..)?))
}

/// Whether a row may name this file of which the record has a part, which may be cut off within
/// the number.
fn may_be(number: u32, begin: usize, part: &[u8]) -> bool {
    let known = |at: usize| part.get(at.checked_sub(begin)?);
    number.to_le_bytes().iter().zip(FILE..).all(|(byte, at)| known(at).is_none_or(|it| it == byte))
}

#[cfg(test)]
mod tests {
    use super::super::wal_record::{HEADER, INFO, MANAGER};
    use super::*;

    const PG_CLASS: RelFile = RelFile { tablespace: 1663, database: 5, relation: 1259 };
    const PLACES: [(Place, bool); 1] = [((PG_CLASS, Fork::Main, 3), false)];
    /// Bits of a block header, and of that of an image (xlogrecord.h).
    const HAS_IMAGE: u8 = 0x10;
    const HAS_DATA: u8 = 0x20;
    const WILL_INIT: u8 = 0x40;
    const SAME_REL: u8 = 0x80;
    /// With a hole that was left out, and restored by redo.
    const WITH_HOLE: u8 = 1 | 2;
    const BY_LZ4: u8 = 8;
    /// Files whose numbers differ in one byte; and in all.
    const FILES: [u32; 4] = [0x0001_4321, 0x0001_4322, 0x0001_5521, 0x0777_6655];

    const NONE: [u32; 0] = [];

    /// A block of `pg_class`: its number, flags of it and of its image, the image, and the data.
    #[derive(Clone, Copy)]
    struct Part<'a>(u8, u8, &'a [u8], &'a [u8]);

    fn record(manager: u8, info: u8, parts: &[Part<'_>], data: &[u8]) -> Vec<u8> {
        let mut record = vec![0; HEADER];
        (record[MANAGER], record[INFO]) = (manager, info);
        for Part(id, flags, image, data) in parts {
            let has = if image.is_empty() { 0 } else { HAS_IMAGE };
            let has = has | if data.is_empty() { 0 } else { HAS_DATA };
            record.extend([*id, flags & (SAME_REL | WILL_INIT) | has]);
            record.extend((data.len() as u16).to_le_bytes());
            if !image.is_empty() {
                record.extend((image.len() as u16).to_le_bytes());
                record.extend([200, 0, flags & 0x1F]);
                if flags & BY_LZ4 != 0 {
                    record.extend([0, 16]);
                }
            }
            if flags & SAME_REL == 0 {
                record.extend([1663_u32, 5, 1259].into_iter().flat_map(u32::to_le_bytes));
            }
            record.extend(3_u32.to_le_bytes());
        }
        if !data.is_empty() {
            record.extend([255, data.len() as u8]);
        }
        for Part(_, _, image, data) in parts {
            record.extend([*image, *data].concat());
        }
        record.extend(data);
        record
    }

    /// Those of [`FILES`] that the record may name.
    fn named(record: &[u8]) -> Vec<u32> {
        let mut rows = NewRows::of([((5, 1259), FILES.into())].into());
        rows.add(record, &PLACES);
        FILES.into_iter().filter(|file| !rows.misses(5, *file)).collect()
    }

    /// The columns of a row, of the size that they have at least in 15 and 18 (CLASS_TUPLE_SIZE).
    fn columns(file: u32) -> Vec<u8> {
        let mut columns: Vec<u8> = (100..244).collect();
        columns[FILE..FILE_END].copy_from_slice(&file.to_le_bytes());
        columns
    }

    /// `xl_heap_header`, bitmap and padding up to `t_hoff`, and columns.
    fn row(columns: &[u8]) -> Vec<u8> {
        [&[33, 0, 1, 9, 32][..], &[0xFF; 9], columns].concat()
    }

    /// An update that takes `begin` and `end` bytes from the row before.
    fn update(file: u32, begin: usize, end: usize) -> Vec<u8> {
        let (columns, mut flags, mut data) = (columns(file), 0, Vec::new());
        for (count, flag) in [(begin, PREFIX), (end, SUFFIX)] {
            if count > 0 {
                flags |= flag;
                data.extend((count as u16).to_le_bytes());
            }
        }
        data.extend(row(&columns[begin..columns.len() - end]));
        // `xl_heap_update`
        let whole = [9, 9, 0, 0, 4, 0, 0, flags, 0, 0, 0, 0, 5, 0];
        record(HEAP, HOT_UPDATE, &[Part(0, 0, &[], &data)], &whole)
    }

    #[test]
    fn new_rows_name_files() {
        let [file, other, ..] = FILES;
        let data = row(&columns(file));
        let insert = [7, 0, 8];
        assert_eq!(named(&record(HEAP, INSERT, &[Part(0, 0, &[], &data)], &insert)), [file]);
        let first = Part(0, WILL_INIT, &[], &data);
        assert_eq!(named(&record(HEAP, INSERT | 0x80, &[first], &insert)), [file]);
        // Since 18, with the visibility map as a block of its own.
        let with_map = [Part(0, 0, &[], &data), Part(1, SAME_REL, &[], &[])];
        assert_eq!(named(&record(HEAP, INSERT, &with_map, &insert)), [file]);
        let unrelated = row(&columns(77_777));
        assert_eq!(named(&record(HEAP, INSERT, &[Part(0, 0, &[], &unrelated)], &insert)), NONE);
        // `xl_multi_insert_tuple`, of an odd length
        let tuple =
            |file| [&[9, 0, 33, 0, 1, 9, 32][..], &[0xFF; 9], &columns(file), &[1]].concat();
        let many = [tuple(77_777), tuple(other), tuple(file)].concat();
        let several = [0, 0, 3, 0, 1, 0, 2, 0, 3, 0];
        let insert = record(HEAP2, MULTI_INSERT, &[Part(0, 0, &[], &many)], &several);
        assert_eq!(named(&insert), [file, other]);
        // To another page, and with a replica identity in the data of the record.
        let blocks = [Part(0, 0, &[], &data), Part(1, SAME_REL, &[], &[])];
        let whole = [9, 9, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 1, 2, 3];
        assert_eq!(named(&record(HEAP, UPDATE, &blocks, &whole)), [file]);
        // Without the row.
        assert_eq!(named(&record(HEAP, INSERT, &[Part(0, 0, &[], &[])], &[7, 0, 8])), FILES);
        assert_eq!(named(&record(HEAP, UPDATE, &[Part(0, 0, &[], &[1, 2])], &whole)), FILES);
        assert_eq!(named(&record(HEAP, UPDATE, &[Part(0, 0, &[], &data)], &[])), FILES);
    }

    #[test]
    fn updates_name_files_by_what_they_change() {
        let [file, one, two, _] = FILES;
        assert_eq!(named(&update(file, 0, 0)), [file]);
        assert_eq!(named(&update(file, FILE, 144 - FILE_END)), [file]);
        // The number is that of the row before.
        for (begin, end) in [(FILE_END, 0), (100, 20), (0, 144 - FILE), (4, 144 - 68)] {
            assert_eq!(named(&update(file, begin, end)), NONE, "{begin} {end}");
        }
        // The lowest byte, the second, the two in the middle, and all but the lowest are there.
        assert_eq!(named(&update(file, 80, 144 - FILE - 1)), [file, two]);
        assert_eq!(named(&update(file, FILE + 1, 144 - FILE - 2)), [file, one]);
        assert_eq!(named(&update(two, FILE + 1, 144 - FILE_END + 1)), [two]);
        assert_eq!(named(&update(two, FILE + 1, 10)), [two]);
        // None of it is, and not all of it is from the same end.
        assert_eq!(named(&update(file, FILE + 2, 144 - FILE - 2)), FILES);
    }

    #[test]
    fn images_have_rows() {
        let [file, ..] = FILES;
        let image = [vec![0; 3000], row(&columns(file)), vec![0; 100]].concat();
        let image = Part(0, WITH_HOLE, &image, &[]);
        let hidden = Part(0, WITH_HOLE | BY_LZ4, &[1, 2, 3], &[]);
        let whole = [9, 9, 0, 0, 4, 0, 0, PREFIX, 0, 0, 0, 0, 5, 0];
        for (manager, info, data) in [
            (HEAP, INSERT, &[7, 0, 8][..]),
            (HEAP, HOT_UPDATE, &whole),
            (HEAP, 0x10, &[1; 8]),
            (HEAP2, MULTI_INSERT, &[0, 0, 1, 0, 1, 0]),
            (HEAP2, 0x10, &[1; 8]),
            (XLOG, FPI, &[]),
            (XLOG, FPI_FOR_HINT, &[]),
        ] {
            assert_eq!(named(&record(manager, info, &[image], data)), [file], "{manager} {info}");
            assert_eq!(named(&record(manager, info, &[hidden], data)), FILES, "{manager} {info}");
        }
        let old_page = Part(1, SAME_REL | WITH_HOLE, image.2, &[]);
        let blocks = [Part(0, 0, &[], &row(&columns(77_777))), old_page];
        assert_eq!(named(&record(HEAP, UPDATE, &blocks, &[0; 14])), [file]);
    }

    #[test]
    fn other_records_have_no_rows() {
        let block = Part(0, 0, &[], &FILES[0].to_le_bytes());
        // Offset numbers, as of pruning, are no rows.
        assert_eq!(named(&record(HEAP2, 0x10, &[block], &[1; 8])), NONE);
        assert_eq!(named(&record(HEAP, 0x60, &[Part(0, 0, &[], &[])], &[1; 8])), NONE);
        // An update in place; others may do anything.
        assert_eq!(named(&record(HEAP, 0x70, &[block], &[1, 0])), [FILES[0]]);
        assert_eq!(named(&record(20, 0, &[block], &[1, 0])), FILES);
        assert_eq!(named(&record(XLOG, 0x30, &[block], &[1, 0])), FILES);
        // What is cut off, or longer than it says, may be anything.
        let whole = record(HEAP, INSERT, &[Part(0, 0, &[], &row(&columns(7)))], &[7, 0, 8]);
        assert_eq!(named(&whole), NONE);
        for length in [0, HEADER, HEADER + 10, whole.len() - 1] {
            assert_eq!(named(&whole[..length]), FILES, "{length}");
        }
        assert_eq!(named(&[&whole[..], &[0]].concat()), FILES);
        // Other forks, relations and databases.
        let row = record(HEAP, INSERT, &[Part(0, 0, &[], &row(&columns(FILES[0])))], &[7, 0, 8]);
        let other = RelFile { relation: 1260, ..PG_CLASS };
        let elsewhere = RelFile { database: 6, ..PG_CLASS };
        for place in [(PG_CLASS, Fork::Init, 3), (other, Fork::Main, 3), (elsewhere, Fork::Main, 3)]
        {
            let mut rows = NewRows::of([((5, 1259), FILES.into())].into());
            rows.add(&row, &[(place, false)]);
            assert!(FILES.into_iter().all(|file| rows.misses(5, file)));
            assert!(!rows.misses(5, 7) && !rows.misses(6, FILES[0]));
        }
    }
}
