//! Databases that exist, and their maps of the files of catalogs (`pg_filenode.map`). No session
//! starts without a valid one (`load_relmap_file`, relmapper.c). Redo writes a whole map, and does
//! not read it before: of all that makes a database, too.
//!
//! A database has its map in its own tablespace. What an interrupted command leaves of a database
//! may have none: `CREATE DATABASE` and `SET TABLESPACE` copy files in any order, and `DROP
//! DATABASE` removes them so. `pg_database` does not name it then, or marks it as invalid.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use super::Context;
use super::catalogs::{Catalog, Catalogs, LARGEST_MAP, Transactions, mappings};
use super::databases::replaced_by;
use super::pages::{DEFAULT_TABLESPACE, Files};
use super::wal_record::{RELMAP, data, kind};
use crate::regular::read_regular;
use crate::tablespaces;

const NAME: &str = "pg_filenode.map";
const VERSION: &str = "PG_VERSION";

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

/// What is wrong, by tablespace and database, and whether nothing is there.
#[derive(Default)]
pub(super) struct Maps(BTreeMap<(u32, u32), (String, bool)>);

impl Maps {
    /// Reads them, in the directories of databases that exist or have relations. `version`: the
    /// directory of the server in tablespaces. `unknown`: what could not be examined.
    pub(super) fn of(
        context: &Context<'_>,
        files: &Files,
        version: Option<&str>,
        unknown: &mut Vec<String>,
    ) -> Self {
        let known = databases(context, files);
        // An incremental backup has only parts of it.
        if known.is_none() && files.incremental.is_empty() {
            unknown.push(
                "pg_database cannot be read: whether all databases are there was not checked"
                    .into(),
            );
        }
        let directory = |path: &Path| path.parent().map(Path::to_owned);
        let with_relations = files
            .whole
            .iter()
            .filter_map(|it| Some(((it.file.tablespace, it.file.database), directory(&it.path)?)));
        let mut directories: BTreeMap<_, _> = with_relations.collect();
        for &place in known.iter().flatten() {
            if let Entry::Vacant(entry) = directories.entry(place)
                && let Some(directory) = directory_of(context, place, version)
            {
                entry.insert(directory);
            }
        }
        let is_needed = |place: (u32, u32), directory: &Path| match (place, &known) {
            ((_, 0), _) => true,
            (_, Some(known)) => known.contains(&place),
            (_, None) => directory.join(VERSION).exists(),
        };
        let what = |(place, directory): ((u32, u32), PathBuf)| {
            let is_needed = is_needed(place, &directory);
            if is_needed && !directory.exists() {
                let what = "the directory is missing, and pg_database has its database";
                return Some((place, (format!("{}: {what}", context.show(&directory)), true)));
            }
            let path = directory.join(NAME);
            let what = match read_regular(&path, LARGEST_MAP) {
                Ok(map) => mappings(&map).is_none().then(|| "not valid".to_owned()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    is_needed.then(|| "missing".to_owned())
                }
                Err(error) => Some(error.to_string()),
            };
            // `CheckMyDatabase`, `InitPostgres` (postinit.c: `ValidatePgVersion`).
            let version = directory.join(VERSION);
            let lacks_version = place.1 != 0 && is_needed && !version.is_file();
            let (path, what) = match what {
                Some(what) => (path, what),
                None if lacks_version => (version, "missing".to_owned()),
                None => return None,
            };
            let what = format!("{}: {what}; a server needs it", context.show(&path));
            Some((place, (what, false)))
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

    /// Those that recovery does not replace; and those of databases of which nothing is there, and
    /// of which WAL that is not there may say more.
    pub(super) fn rest(self, is_all_known: bool) -> (Vec<String>, Vec<String>) {
        let (is_damage, is_unknown): (Vec<_>, Vec<_>) =
            self.0.into_values().partition(|(_, is_absent)| is_all_known || !is_absent);
        let what = |(what, _)| what;
        let unknown = is_unknown
            .into_iter()
            .map(|(what, _)| format!("{what}: WAL that is not here may create, move or remove it"));
        (is_damage.into_iter().map(what).collect(), unknown.collect())
    }
}

/// The directory of a database. `None` if its tablespace is not mounted ([`super::absent`]).
fn directory_of(
    context: &Context<'_>,
    (tablespace, database): (u32, u32),
    version: Option<&str>,
) -> Option<PathBuf> {
    let root = context.keystore.data_directory();
    if tablespace == DEFAULT_TABLESPACE {
        return Some(root.join("base").join(database.to_string()));
    }
    let known = context.tablespaces.iter().find(|known| known.number() == Some(tablespace));
    let Some(known) = known else {
        return Some(root.join(tablespaces::DIRECTORY).join(tablespace.to_string()));
    };
    let of_all = known.path.join(version?);
    of_all.is_dir().then(|| of_all.join(database.to_string()))
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
        let what = |what: &str| (what.to_owned(), false);
        let all = || Maps([((1663, 5), what("a")), ((1664, 0), what("b"))].into());
        let after = |manager: u8, info: u8, words: &[u32]| {
            let mut maps = all();
            maps.replayed(&record(manager, info, words));
            maps.rest(false).0.concat()
        };
        assert_eq!(after(RELMAP, UPDATE | 1, &[5, 1663, 512]), "b");
        assert_eq!(after(RELMAP, UPDATE, &[0, 1664, 512]), "a");
        assert_eq!(after(RELMAP, 0x10, &[0, 1664, 512]), "ab");
        assert_eq!(after(RELMAP, UPDATE, &[5]), "ab");
        assert_eq!(after(4, 0x20, &[5, 1, 1663]), "b");
    }
}
