//! Destroying data keys, for good.
//!
//! The tombstone of a key is written down as every fact about keys: to the keystore, to WAL, to the
//! directory. It stays, so that older WAL and older records do not bring the key back. Then the
//! file is written anew without the key, and every process forgets what it had expanded before it
//! uses a key again.
//!
//! Killed after the tombstone is in the keystore and before it is in WAL, this server has destroyed
//! the keys and its standbys have not: destroying once more tells them.
//!
//! Pages of such a file may be in shared buffers only in recovery, which repeats changes from
//! before. What it reads is blank ([`crate::page::io`]); what it writes is sealed under a key that
//! is lost; and when it ends, or meets the tombstone, all of it is dropped.
//!
//! Of a file that lives on, the keys before its present one can be destroyed
//! ([`Fate::LosesKeysThrough`]). Between the record of the present key and the tombstone WAL must
//! have an image of every page that the file had then, be it written under the present key already:
//! a standby or a restored backup that begins before may have any of them under a key that it will
//! not know, and is given a blank page until it comes to the image.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};
use pagevault_keystore::{Record, RelFile, Scope};

use super::data_keys;
use crate::keys::store::{directory, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{buffers, process, relation_files, wal};
use crate::{fault, shmem};

/// A file whose keys were destroyed.
pub(crate) struct Destroyed {
    pub(crate) file: RelFile,
    /// The last version that is destroyed.
    pub(crate) through: DataKeyVersion,
    /// How many keys there were to destroy.
    pub(crate) keys: u32,
}

/// What is to become of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Nothing of it can be read any more.
    IsDestroyed,
    /// It goes on under a later key than this.
    LosesKeysThrough(DataKeyVersion),
}

/// What was done, and what it meant.
pub(crate) struct Outcome {
    pub(crate) files: Vec<Destroyed>,
    /// Of files that live on.
    pub(crate) former_keys: Vec<Destroyed>,
    /// The database keys that wrapped what was destroyed: scope and version.
    pub(crate) wrapped_by: BTreeSet<(Scope, KeyVersion)>,
    /// End of the WAL record.
    pub(crate) lsn: Lsn,
    /// Files outside that have one of these keys too, as raw copies of these files have.
    pub(crate) same_keys: Vec<RelFile>,
    /// Why the keystore's file could not be written anew.
    pub(crate) not_compacted: Option<Report>,
}

/// Destroys every key that files of one database have. Nobody uses the files, and none of their
/// pages is in shared buffers. Of the files `living`, those through the version that is said: see
/// the module.
///
/// `whole`: these are all files of the database that have keys.
pub(crate) fn destroy(
    database: u32,
    files: &[RelFile],
    living: &[(RelFile, DataKeyVersion)],
    whole: bool,
) -> Result<Outcome> {
    destroy_locked(&KeystoreLock::acquire(), database, files, living, whole)
}

/// As [`destroy`], for files that are gone, of which none has got a new key since they were found
/// so: one that has is in use again under the same number.
pub(crate) fn destroy_former(
    database: u32,
    found: &[Former],
    living: &[(RelFile, DataKeyVersion)],
) -> Result<Outcome> {
    let lock = KeystoreLock::acquire();
    let directory = &shmem::required()?.directory;
    let mut files = Vec::new();
    for former in found {
        if let Some(slot) = directory.find(former.file)?
            && directory.last_version(slot)? == former.last_version
        {
            files.push(former.file);
        }
    }
    let mut outcome = destroy_locked(&lock, database, &files, living, false)?;
    // What has moved to another tablespace has the same keys, and is in use.
    outcome.same_keys.retain(|file| living.iter().any(|(one, _)| one.relation == file.relation));
    Ok(outcome)
}

fn destroy_locked(
    lock: &KeystoreLock,
    database: u32,
    files: &[RelFile],
    living: &[(RelFile, DataKeyVersion)],
    whole: bool,
) -> Result<Outcome> {
    let directory = &shmem::required()?.directory;
    let lsn = wal::end();
    let (mut records, mut destroyed, mut former_keys) = (Vec::new(), Vec::new(), Vec::new());
    let mut wrapped_by = BTreeSet::new();
    let doomed = files.iter().map(|&file| (file, Fate::IsDestroyed));
    let living = living.iter().map(|&(file, through)| (file, Fate::LosesKeysThrough(through)));
    for (file, fate) in doomed.chain(living) {
        let no_keys = || internal(format!("relation file {file} has no keys"));
        let slot = directory.find(file)?.ok_or_else(no_keys)?;
        let (info, last) = (directory.info(slot)?, directory.last_version(slot)?);
        let through = match fate {
            Fate::IsDestroyed => last.ok_or_else(no_keys)?,
            Fate::LosesKeysThrough(through) => through,
        };
        let mut keys = 0;
        for key in directory.keys(slot)? {
            let key = key?;
            if key.version <= through {
                wrapped_by.insert((key.scope, key.key_version));
                keys += 1;
            }
        }
        let cipher = info.current.map_or(0, |(_, cipher)| cipher);
        let whole = whole && fate == Fate::IsDestroyed;
        records.push(Record::Destroyed { file, through, cipher, whole, lsn, at: process::now() });
        let which = match fate {
            Fate::IsDestroyed => &mut destroyed,
            Fate::LosesKeysThrough(_) => &mut former_keys,
        };
        which.push(Destroyed { file, through, keys });
    }
    let same_keys = files_with_same_keys(destroyed.iter().chain(&former_keys))?;
    fault::point("shred.decided");
    let lsn = persist::append_durably(lock, Scope::database(database), &records)?;
    wal::flush(lsn);
    fault::point("shred.destroyed");
    let not_compacted = persist::compact(lock, Scope::database(database)).err();
    fault::point("shred.compacted");
    Ok(Outcome { files: destroyed, former_keys, wrapped_by, lsn, same_keys, not_compacted })
}

/// CREATE DATABASE with the strategy file_copy and ALTER DATABASE SET TABLESPACE leave files of the
/// same number and with the same keys in two places.
fn files_with_same_keys<'a>(
    destroyed: impl Iterator<Item = &'a Destroyed>,
) -> Result<Vec<RelFile>> {
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
        let Some(namesakes) = by_number.get(&info.file.relation) else { continue };
        if chosen.contains(&info.file) {
            continue;
        }
        for key in directory.keys(info.slot)? {
            let version = key?.version;
            let is_same = |one: &&Destroyed| {
                version <= one.through && data_keys::have_same_key(info.file, one.file, version)
            };
            if namesakes.iter().any(is_same) {
                same.push(info.file);
                break;
            }
        }
    }
    Ok(same)
}

/// Every file of a database that has or had keys.
pub(crate) fn files_of_database(database: u32) -> Result<Vec<RelFile>> {
    let mut files = Vec::new();
    for info in shmem::required()?.directory.files()? {
        let info = info?;
        if info.file.database == database
            && shmem::required()?.directory.last_version(info.slot)?.is_some()
        {
            files.push(info.file);
        }
    }
    Ok(files)
}

/// A file that is gone and has keys.
pub(crate) struct Former {
    pub(crate) file: RelFile,
    last_version: Option<DataKeyVersion>,
}

/// Files of a database that are there and have keys, and are none of these.
pub(crate) fn files_besides(database: u32, these: &HashSet<RelFile>) -> Result<Vec<RelFile>> {
    let directory = &shmem::required()?.directory;
    let mut besides = Vec::new();
    for info in directory.files()? {
        let info = info?;
        if info.file.database == database
            && !these.contains(&info.file)
            && directory.keys(info.slot)?.next().is_some()
            && relation_files::may_exist(info.file)
        {
            besides.push(info.file);
        }
    }
    Ok(besides)
}

/// The number of files of a database that are gone and have keys, as far as that can be seen.
pub(crate) fn count_former_files(database: u32) -> Result<usize> {
    former(database, |file| Ok(relation_files::may_exist(file))).map(|found| found.len())
}

/// The files of a database that are gone and have keys. A key is made just before its file is.
///
/// # Errors
/// Also when it cannot be seen of one of them whether it is gone.
pub(crate) fn former_files(database: u32) -> Result<Vec<Former>> {
    former(database, relation_files::exists)
}

fn former(database: u32, is_there: impl Fn(RelFile) -> Result<bool>) -> Result<Vec<Former>> {
    let directory = &shmem::required()?.directory;
    let mut former = Vec::new();
    for info in directory.files()? {
        let info = info?;
        if info.file.database == database
            && directory.keys(info.slot)?.next().is_some()
            && !is_there(info.file)?
        {
            let last_version = directory.last_version(info.slot)?;
            former.push(Former { file: info.file, last_version });
        }
    }
    Ok(former)
}

impl Former {
    /// False if it has come to be meanwhile, or cannot be looked for any more.
    pub(crate) fn is_gone(&self) -> bool {
        !relation_files::may_exist(self.file)
    }
}

/// Redo is about to destroy keys. From here on the server is not consistent before it gets here
/// again; and no page that was changed under these keys stays in shared buffers. Of a whole
/// database there may be files without keys, too: what replay has changed of them is on no disk
/// yet.
pub(crate) fn before_redo(records: &[Record]) {
    buffers::set_recovery_minimum();
    let mut files = Vec::new();
    let mut whole = BTreeSet::new();
    for record in records {
        match record {
            Record::Destroyed { file, whole: true, .. } => {
                whole.insert(file.database);
            }
            // It lives on, and its pages with it.
            Record::Destroyed { file, through, .. } if directory::has_outlived(*file, *through) => {
            }
            Record::Destroyed { file, .. } => files.push(*file),
            _ => {}
        }
    }
    buffers::drop_files(&files);
    for database in whole {
        buffers::flush_and_drop_database_in_redo(database);
    }
}

/// Redo has ended, perhaps before it met a tombstone that the keystore has.
pub(crate) fn after_redo() {
    let Ok(shared) = shmem::required() else { return };
    let files = shared.directory.files().into_iter().flatten().flatten();
    let files: Vec<_> = files.filter(|info| info.is_destroyed()).map(|info| info.file).collect();
    buffers::drop_files(&files);
}
