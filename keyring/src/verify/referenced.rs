//! What WAL that recovery replays says about files, to find those that belong to no relation.

use std::collections::HashSet;

use pagevault_keystore::RelFile;

use super::blocks::Place;
use super::new_rows::NewRows;
use super::wal_record::{DATABASES, RELMAP, SMGR, SMGR_CREATE, data, file, kind, word};

/// Files that WAL concerns.
pub(super) struct Referenced {
    files: HashSet<RelFile>,
    rows: NewRows,
    /// Databases that are created or moved as a whole.
    databases: HashSet<u32>,
    /// Catalogs have got other files.
    relation_maps: bool,
}

impl Referenced {
    pub(super) fn of(rows: NewRows) -> Self {
        Self { files: HashSet::new(), rows, databases: HashSet::new(), relation_maps: false }
    }

    /// Adds what a complete record with these blocks concerns.
    pub(super) fn add(&mut self, record: &[u8], blocks: &[(Place, bool)]) {
        let Some((manager, info)) = kind(record) else { return };
        self.files.extend(blocks.iter().map(|((file, _, _), _)| *file));
        self.rows.add(record, blocks);
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

    /// Whether a relation may need the file because of WAL: a record concerns it, or rows of
    /// `pg_class` may name it that are not on disk. Only of files that [`NewRows`] was asked about.
    pub(super) fn includes(&self, file: RelFile) -> bool {
        self.files.contains(&file)
            || self.relation_maps
            || self.databases.contains(&file.database)
            || !self.asks_for(file.database, file.relation)
    }

    /// Whether rows were asked for a file, and none that WAL brings names it.
    pub(super) fn asks_for(&self, database: u32, file: u32) -> bool {
        self.rows.misses(database, file)
    }
}

#[cfg(test)]
mod tests {
    use pagevault_cipher::Fork;

    use super::super::wal_record::record;
    use super::*;

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 16384 };
    const OTHER: RelFile = RelFile { database: 6, ..FILE };

    fn asked() -> Referenced {
        let files = |database| ((database, 1259), [16384].into());
        Referenced::of(NewRows::of([files(5), files(6)].into()))
    }

    #[test]
    fn records_concern_files() {
        let after = |records: &[(Vec<u8>, Option<RelFile>)]| {
            let mut found = asked();
            for (record, file) in records {
                let block = |file: &RelFile| ((*file, Fork::Main, 0), false);
                found.add(record, &file.iter().map(block).collect::<Vec<_>>());
            }
            [found.includes(FILE), found.includes(OTHER)]
        };
        assert_eq!(after(&[(Vec::new(), None)]), [false, false]);
        assert_eq!(after(&[(record(10, 0x10, &[]), Some(FILE))]), [true, false]);
        assert_eq!(
            after(&[(record(SMGR, SMGR_CREATE, &[1663, 5, 16384, 0]), None)]),
            [true, false]
        );
        assert_eq!(
            after(&[(record(SMGR, SMGR_CREATE, &[1663, 5, 16385, 0]), None)]),
            [false, false]
        );
        assert_eq!(after(&[(record(DATABASES, 0, &[6, 1663, 1, 1663]), None)]), [false, true]);
        assert_eq!(after(&[(record(RELMAP, 0, &[7]), None)]), [true, true]);
        // Of a file that was not asked about, nothing is known.
        assert!(asked().includes(RelFile { relation: 16385, ..FILE }));
        assert!(asked().includes(RelFile { database: 7, ..FILE }));
    }

    #[test]
    fn rows_name_files() {
        let mut found = asked();
        let catalog = RelFile { relation: 1259, ..FILE };
        // Of another resource manager, that may do anything.
        found.add(&record(20, 0, &[]), &[((catalog, Fork::Main, 0), false)]);
        assert!(found.includes(FILE) && !found.includes(OTHER));
    }
}
