//! Maps of the files of catalogs (`pg_filenode.map`). No session starts without a valid one
//! (`load_relmap_file`, relmapper.c). Redo writes a whole map, and does not read it before.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::Context;
use super::catalogs::{LARGEST_MAP, mappings};
use super::databases::replaced_by;
use super::pages::Files;
use super::wal_record::{RELMAP, data, kind};
use crate::regular::read_regular;

const NAME: &str = "pg_filenode.map";

/// `XLOG_RELMAP_UPDATE` (relmapper.h).
const UPDATE: u8 = 0x00;

/// What is wrong, by tablespace and database.
#[derive(Default)]
pub(super) struct Maps(BTreeMap<(u32, u32), String>);

impl Maps {
    /// Reads those that are there: in the directories of databases that have relations.
    pub(super) fn of(context: &Context<'_>, files: &Files) -> Self {
        let directory = |path: &Path| path.parent().map(Path::to_owned);
        let directories: BTreeMap<_, _> = files
            .whole
            .iter()
            .filter_map(|it| Some(((it.file.tablespace, it.file.database), directory(&it.path)?)))
            .collect();
        let damaged = |path: &Path| match read_regular(path, LARGEST_MAP) {
            Ok(map) if mappings(&map).is_none() => Some("not valid".to_owned()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Some(error.to_string()),
            _ => None,
        };
        let what = |(place, directory): (_, std::path::PathBuf)| {
            let path = directory.join(NAME);
            let what = damaged(&path)?;
            Some((place, format!("{}: {what}; a server needs it", context.show(&path))))
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
