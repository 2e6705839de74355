//! Which databases a data directory has, by their directories.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::tablespaces;

/// Databases that have a directory in `base` or in a tablespace. In a backup whose tablespaces are
/// not linked yet they are where its map says.
///
/// `None` if the directories of some may be elsewhere: in a copy of the keystore alone, or while a
/// tablespace is not mounted. Whoever took these databases for dropped would lose their keys.
pub(super) fn find(data_directory: &Path) -> Option<HashSet<u32>> {
    let mut directories = vec![data_directory.join("base")];
    let ours = tablespaces::of_major(data_directory).unwrap_or_else(|| "PG_".to_owned());
    below(&data_directory.join(tablespaces::DIRECTORY)).ok()?;
    for tablespace in tablespaces::read(data_directory, &mut Vec::new()).ok()? {
        // PG_<version>/<database>
        let mut versions = below(&tablespace.path).ok()?;
        versions.retain(|(name, _)| name.starts_with(&ours));
        // It is made with the tablespace. The place where a disk is not mounted is empty.
        versions.first()?;
        directories.extend(versions.into_iter().map(|(_, path)| path));
    }
    let mut found = HashSet::new();
    for directory in directories {
        let names = below(&directory).ok()?;
        found.extend(names.iter().filter_map(|(name, _)| tablespaces::number(name)));
    }
    Some(found)
}

/// Names and paths in a directory.
fn below(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let name = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    fs::read_dir(directory)?.filter_map(|entry| entry.map(name).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn databases_are_looked_for_in_all_tablespaces() {
        let root = tempfile::tempdir().unwrap();
        let data = root.path().join("data");
        for place in ["data/base/5", "data/pg_tblspc/3/PG_15_1/8", "one/PG_15_1/6", "one/pg/4"] {
            fs::create_dir_all(root.path().join(place)).unwrap();
        }
        fs::create_dir_all(root.path().join("two/PG_15_1/7")).unwrap();
        symlink(root.path().join("one"), data.join("pg_tblspc/1")).unwrap();
        assert_eq!(find(&data), Some(HashSet::from([5, 6, 8])));
        // The links of a backup are made from its map.
        let map = format!("2 {}\n", root.path().join("two").display());
        fs::write(data.join("tablespace_map"), map).unwrap();
        assert_eq!(find(&data), Some(HashSet::from([5, 6, 8])));
        fs::write(data.join("backup_label"), "").unwrap();
        assert_eq!(find(&data), Some(HashSet::from([5, 6, 7, 8])));
        // Those of the old cluster do not count after pg_upgrade.
        fs::create_dir_all(root.path().join("one/PG_14_1/9")).unwrap();
        assert_eq!(find(&data), Some(HashSet::from([5, 6, 7, 8, 9])));
        fs::write(data.join("PG_VERSION"), "15\n").unwrap();
        assert_eq!(find(&data), Some(HashSet::from([5, 6, 7, 8])));
        // It may have any.
        fs::write(root.path().join("two/PG_15_2"), "").unwrap();
        assert_eq!(find(&data), None);
    }

    #[test]
    fn where_directories_are_missing_no_database_is_known() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(find(root), None);
        fs::create_dir_all(root.join("base/5")).unwrap();
        assert_eq!(find(root), None);
        fs::create_dir(root.join("pg_tblspc")).unwrap();
        assert_eq!(find(root), Some(HashSet::from([5])));
        symlink(root.join("disk"), root.join("pg_tblspc/1")).unwrap();
        assert_eq!(find(root), None);
        fs::create_dir(root.join("disk")).unwrap();
        assert_eq!(find(root), None);
        fs::create_dir(root.join("disk/PG_15_1")).unwrap();
        assert_eq!(find(root), Some(HashSet::from([5])));
        fs::rename(root.join("base"), root.join("other")).unwrap();
        assert_eq!(find(root), None);
    }
}
