//! Files with the same keys: raw copies of each other, and places where one file was and is.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;
use pagevault_keystore::directory::FileSlot;

use super::data_keys;
use super::destruction::Destroyed;
use crate::pg::relation_files;
use crate::pg::report::Result;
use crate::shmem;

/// Other files with the same relfilenumber and the same keys, as CREATE DATABASE with the strategy
/// file_copy and ALTER DATABASE SET TABLESPACE leave them; false if this cannot be told, because a
/// key is locked.
pub(super) fn files_with<'a>(
    destroyed: impl Iterator<Item = &'a Destroyed>,
) -> Result<Vec<(RelFile, bool)>> {
    let mut chosen = BTreeSet::new();
    let mut by_number: BTreeMap<u32, Vec<&Destroyed>> = BTreeMap::new();
    for one in destroyed {
        chosen.insert(one.file);
        by_number.entry(one.file.relation).or_default().push(one);
    }
    let directory = &shmem::required()?.directory;
    let mut same = Vec::new();
    for info in directory.files()? {
        let info = info?;
        let Some(same_number) = by_number.get(&info.file.relation) else { continue };
        if chosen.contains(&info.file) {
            continue;
        }
        let mut found = Some(false);
        for key in directory.keys(info.slot)? {
            let version = key?.version;
            for one in same_number.iter().filter(|one| version <= one.through) {
                match data_keys::have_same_key(info.file, one.file, version) {
                    Some(false) => {}
                    Some(true) => found = Some(true),
                    None => found = found.filter(|is_same| *is_same),
                }
            }
        }
        if found != Some(false) {
            same.push((info.file, found.is_some()));
        }
    }
    Ok(same)
}

/// The last key of a file that is gone up to which its keys can be destroyed. `None`: none can.
///
/// It may be a place where its database was before. Then the file of a relation, `in_use`, has the
/// same number and the same keys. To destroy those here would not make anything unreadable. But a
/// server that follows, or was rewound, may still have to replay changes of the file that is gone,
/// and then that it was copied (`dbase_redo`, dbcommands.c). So only those before the first such
/// key can be destroyed.
///
/// If the last key is its own, a relation has begun there after that, when OIDs began again: all
/// can be destroyed.
pub(super) fn last_to_destroy(
    file: RelFile,
    slot: FileSlot,
    in_use: &HashSet<RelFile>,
    tablespaces: &[u32],
) -> Result<Option<DataKeyVersion>> {
    let others: Vec<_> = relation_files::elsewhere(file, tablespaces)
        .filter(|other| in_use.contains(other))
        .collect();
    let mut versions = Vec::new();
    for key in shmem::required()?.directory.keys(slot)? {
        versions.push(key?.version);
    }
    versions.sort_unstable();
    let is_own = |version: &DataKeyVersion| {
        let same = |other: &RelFile| data_keys::have_same_key(file, *other, *version);
        others.iter().all(|other| same(other) == Some(false))
    };
    let last = versions.last().copied().filter(is_own);
    Ok(last.or_else(|| versions.into_iter().take_while(is_own).last()))
}
