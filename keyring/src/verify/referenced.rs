//! What WAL that recovery replays says about files, to find those that belong to no relation.

use std::collections::HashSet;

use pagevault_keystore::RelFile;

use super::blocks::Place;
use super::wal_record::{
    DATABASES, HEAP, HEAP2, RELMAP, SMGR, SMGR_CREATE, XLOG, data, file, kind, word,
};

/// Operations (heapam_xlog.h, pg_control.h).
const FPI_FOR_HINT: u8 = 0xA0;
const FPI: u8 = 0xB0;
const HEAP_OPERATION: u8 = 0x70;
const DELETE: u8 = 0x10;
const LOCK: u8 = 0x60;
const INPLACE: u8 = 0x70;
const MULTI_INSERT: u8 = 0x50;

/// Files that WAL concerns.
#[derive(Default)]
pub(super) struct Referenced {
    files: HashSet<RelFile>,
    /// Those that may have got rows, or rows with other contents.
    rows: HashSet<RelFile>,
    /// Databases that are created or moved as a whole.
    databases: HashSet<u32>,
    /// Catalogs have got other files.
    relation_maps: bool,
}

impl Referenced {
    /// Adds what a complete record with these blocks concerns.
    pub(super) fn add(&mut self, record: &[u8], blocks: &[(Place, bool)]) {
        let Some((manager, info)) = kind(record) else { return };
        let operation = info & HEAP_OPERATION;
        let adds_rows = match manager {
            XLOG => info != FPI && info != FPI_FOR_HINT,
            HEAP => !matches!(operation, DELETE | LOCK | INPLACE),
            HEAP2 => operation == MULTI_INSERT,
            _ => true,
        };
        for ((file, _, _), _) in blocks {
            self.files.insert(*file);
            if adds_rows {
                self.rows.insert(*file);
            }
        }
        let data = || data(record).unwrap_or_default();
        match manager {
            // xl_smgr_create begins with the file; after a truncation nothing matters.
            SMGR if info == SMGR_CREATE => self.files.extend(file(&mut data())),
            // All of its records begin with the database (dbcommands_xlog.h).
            DATABASES => self.databases.extend(word(&mut data())),
            RELMAP => self.relation_maps = true,
            _ => {}
        }
    }

    /// Whether a record concerns the file.
    pub(super) fn includes(&self, file: RelFile) -> bool {
        self.files.contains(&file)
    }

    /// Whether the rows of this relation of a database may be others than those on disk.
    pub(super) fn changes(&self, database: u32, relation: u32) -> bool {
        let is_it = |file: &RelFile| file.database == database && file.relation == relation;
        self.relation_maps || self.databases.contains(&database) || self.rows.iter().any(is_it)
    }
}

#[cfg(test)]
mod tests {
    use pagevault_cipher::Fork;

    use super::super::wal_record::record;
    use super::*;

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 1259 };

    #[test]
    fn records_concern_files_and_rows() {
        let blocks = [((FILE, Fork::Main, 0), false)];
        for (manager, info, rows) in [
            (HEAP, 0, true),
            (HEAP, 0x80, true),
            (HEAP, 0x20, true),
            (HEAP, 0x40, true),
            (HEAP, DELETE, false),
            (HEAP, INPLACE, false),
            (HEAP2, MULTI_INSERT | 0x80, true),
            (HEAP2, 0x10, false),
            (XLOG, FPI_FOR_HINT, false),
            (XLOG, FPI, false),
            (20, 0, true),
        ] {
            let mut found = Referenced::default();
            found.add(&record(manager, info, &[]), &blocks);
            assert!(found.includes(FILE));
            assert_eq!(found.changes(5, 1259), rows, "{manager} {info}");
            assert!(!found.changes(6, 1259) && !found.changes(5, 1260));
        }
        let mut found = Referenced::default();
        found.add(&record(SMGR, SMGR_CREATE, &[1663, 5, 1259, 0]), &[]);
        assert!(found.includes(FILE) && !found.changes(5, 1259));
        found.add(&record(DATABASES, 0, &[5, 1663, 1, 1663]), &[]);
        assert!(found.changes(5, 7) && !found.changes(6, 7));
        found.add(&record(RELMAP, 0, &[5]), &[]);
        assert!(found.changes(6, 7));
        found.add(&[], &[]);
    }
}
