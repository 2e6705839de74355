//! Tablespaces whose files are not there, as if a file system was not mounted.
//!
//! `CREATE TABLESPACE` makes the server's own directory in the location before the link
//! (`create_tablespace_directories`, tablespace.c), so an empty tablespace has it, too. Redo makes
//! it and removes it: a backup that is taken while a tablespace is created or dropped may be
//! without it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::wal_record::{TABLESPACES, data, kind, word};
use crate::tablespaces::{DIRECTORY, Tablespace};

/// `XLOG_TBLSPC_CREATE`, `XLOG_TBLSPC_DROP` (tablespace.h).
const CREATE: u8 = 0x00;
const DROP: u8 = 0x10;

/// What is wrong, by the tablespace's number, and whether its location is there.
#[derive(Default)]
pub(super) struct Absent(BTreeMap<u32, (String, bool)>);

impl Absent {
    /// `version` is the name of the server's own directory, if that is known.
    pub(super) fn of(root: &Path, tablespaces: &[Tablespace], version: Option<&str>) -> Self {
        let links = root.join(DIRECTORY);
        let mut found = BTreeMap::new();
        for Tablespace { name, path } in tablespaces {
            let Some(number) = name.to_str().and_then(crate::tablespaces::number) else { continue };
            // Tablespaces in place have no link (`allow_in_place_tablespaces`).
            let is_in_place = path.parent() == Some(&links)
                && fs::symlink_metadata(path).is_ok_and(|it| it.is_dir());
            if !is_in_place && !path.join(version.unwrap_or_default()).is_dir() {
                let version = version.unwrap_or("PG_*");
                let what =
                    format!("{DIRECTORY}/{number}: no directory {version} in the tablespace");
                found.insert(number, (what, path.is_dir()));
            }
        }
        Self(found)
    }

    /// Recovery replays this record (`tblspc_redo`). Where there is no location it makes nothing.
    pub(super) fn replayed(&mut self, record: &[u8]) {
        let Some((TABLESPACES, operation)) = kind(record) else { return };
        let Some(number) = word(&mut data(record).unwrap_or_default()) else { return };
        let explains = match operation {
            CREATE => self.0.get(&number).is_some_and(|(_, location)| *location),
            operation => operation == DROP,
        };
        if explains {
            self.0.remove(&number);
        }
    }

    /// Those that recovery neither makes nor removes.
    pub(super) fn rest(self) -> impl Iterator<Item = String> {
        self.0.into_values().map(|(what, _)| what)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::wal_record::record;
    use super::*;

    #[test]
    fn tablespaces_without_their_directory_are_found() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for place in ["pg_tblspc/1", "two", "three/PG_15_1", "four/PG_14_1"] {
            fs::create_dir_all(root.join(place)).unwrap();
        }
        for (number, name) in [(2, "two"), (3, "three"), (4, "four"), (5, "nowhere")] {
            symlink(root.join(name), root.join(DIRECTORY).join(number.to_string())).unwrap();
        }
        let tablespaces = crate::tablespaces::read(root, &mut Vec::new()).unwrap();
        let after = |version, records: &[(u8, u8, u32)]| {
            let mut absent = Absent::of(root, &tablespaces, version);
            for (manager, info, number) in records {
                let path = u32::from_le_bytes(*b"/a\0\0");
                absent.replayed(&record(*manager, *info, &[*number, path]));
            }
            absent.0.into_keys().collect::<Vec<_>>()
        };
        let version = Some("PG_15_1");
        assert_eq!(after(version, &[]), [2, 4, 5]);
        assert_eq!(after(None, &[]), [5]);
        assert_eq!(after(version, &[(TABLESPACES, CREATE, 2), (TABLESPACES, DROP | 1, 4)]), [5]);
        // A server does not start.
        assert_eq!(after(version, &[(TABLESPACES, CREATE, 5), (4, DROP, 2)]), [2, 4, 5]);
        assert_eq!(after(version, &[(TABLESPACES, DROP, 5), (TABLESPACES, 0x20, 2)]), [2, 4]);
    }
}
