//! Maps of the files of catalogs (`pg_filenode.map`). No session starts without a valid one
//! (`load_relmap_file`, relmapper.c). Redo writes a whole map, and does not read it before.
//!
//! A database has its map in its own tablespace. What an interrupted command leaves of a database
//! may have none: `CREATE DATABASE` and `SET TABLESPACE` copy files in any order, and `DROP
//! DATABASE` removes them so. `pg_database` does not name it then, or marks it as invalid.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use super::Context;
use super::catalogs::{Catalog, Catalogs, LARGEST_MAP, Transactions, mappings};
use super::databases::replaced_by;
use super::pages::Files;
use super::wal_record::{RELMAP, data, kind};
use crate::regular::read_regular;

const NAME: &str = "pg_filenode.map";

/// `DatabaseRelationId`, `DatabaseOidIndexId`
pub(super) const PG_DATABASE: Catalog = Catalog { table: 1262, index: 2672 };

/// Offsets in FormData_pg_database (pg_database.h), the same in 15 to 18; and
/// `DATCONNLIMIT_INVALID_DB`.
pub(super) const OID: usize = 0;
const LIMIT: usize = 80;
const TABLESPACE: usize = 92;
const INVALID: u32 = -2_i32 as u32;

/// `XLOG_RELMAP_UPDATE` (relmapper.h).
const UPDATE: u8 = 0x00;

/// What is wrong, by tablespace and database.
#[derive(Default)]
pub(super) struct Maps(BTreeMap<(u32, u32), String>);

impl Maps {
    /// Reads them, in the directories of databases that have relations.
    pub(super) fn of(context: &Context<'_>, files: &Files) -> Self {
        let directory = |path: &Path| path.parent().map(Path::to_owned);
        let directories: BTreeMap<_, _> = files
            .whole
            .iter()
            .filter_map(|it| Some(((it.file.tablespace, it.file.database), directory(&it.path)?)))
            .collect();
        let known = OnceCell::new();
        let is_needed = |place: (u32, u32), directory: &Path| match place {
            (_, 0) => true,
            _ => match known.get_or_init(|| databases(context, files)) {
                Some(known) => known.contains(&place),
                None => directory.join("PG_VERSION").exists(),
            },
        };
        let what = |(place, directory): ((u32, u32), PathBuf)| {
            let path = directory.join(NAME);
            let what = match read_regular(&path, LARGEST_MAP) {
                Ok(map) => mappings(&map).is_none().then(|| "not valid".to_owned()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    is_needed(place, &directory).then(|| "missing".to_owned())
                }
                Err(error) => Some(error.to_string()),
            };
            Some((place, format!("{}: {}; a server needs it", context.show(&path), what?)))
        };
        Self(directories.into_iter().filter_map(what).collect())
    }

    /// Recovery replays this record.
    pub(super) fn replayed(&mut self, record: &[u8]) {
        if self.0.is_empty() {
            return;
        }
        replaced_by(record).iter().for_each(|place| drop(self.0.remove(place)));
        // `xl_relmap_update`
        if kind(record) == Some((RELMAP, UPDATE))
            && let [database, tablespace, ..] = data(record).unwrap_or_default().as_chunks().0
        {
            self.0.remove(&(u32::from_le_bytes(*tablespace), u32::from_le_bytes(*database)));
        }
    }

    /// Those that recovery does not replace.
    pub(super) fn rest(self) -> impl Iterator<Item = String> {
        self.0.into_values()
    }
}

/// Tablespaces and databases that certainly exist. `None` if that is unknown.
fn databases(context: &Context<'_>, files: &Files) -> Option<HashSet<(u32, u32)>> {
    let transactions = Transactions::of(context).ok()?;
    let mut found = HashSet::new();
    Catalogs::of(context, files, 0)?.rows(&PG_DATABASE, |row| {
        if row.exists(&transactions)? && row.column(LIMIT)? != INVALID {
            found.insert((row.column(TABLESPACE)?, row.column(OID)?));
        }
        Some(())
    })?;
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::super::wal_record::record;
    use super::*;

    #[test]
    fn recovery_replaces_maps() {
        let all = || Maps([((1663, 5), "a".to_owned()), ((1664, 0), "b".to_owned())].into());
        let after = |manager: u8, info: u8, words: &[u32]| {
            let mut maps = all();
            maps.replayed(&record(manager, info, words));
            maps.rest().collect::<String>()
        };
        assert_eq!(after(RELMAP, UPDATE | 1, &[5, 1663, 512]), "b");
        assert_eq!(after(RELMAP, UPDATE, &[0, 1664, 512]), "a");
        assert_eq!(after(RELMAP, 0x10, &[0, 1664, 512]), "ab");
        assert_eq!(after(RELMAP, UPDATE, &[5]), "ab");
        assert_eq!(after(4, 0x20, &[5, 1, 1663]), "b");
    }
}
