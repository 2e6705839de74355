//! Destroying data keys permanently.
//!
//! The tombstone of a key is recorded like every change of keys: in the keystore, in WAL, in the
//! directory. It is kept, so that older WAL and older records do not bring the key back. Then the
//! key file is rewritten without the key, and every process drops its expanded keys before it uses
//! a key again.
//!
//! If the server crashes before the tombstone is in WAL, nothing is destroyed: the next start cuts
//! the staged tombstone off the key file.
//!
//! Pages of such a file can be in shared buffers only in recovery, which repeats earlier changes.
//! Pages that it reads are replaced by blank ones ([`crate::page::io`]); pages that it writes are
//! sealed under a random key that is not kept. At the tombstone, or at the end of recovery, all of
//! them are written and dropped.
//!
//! In a file that stays in use, the keys before its current one can be destroyed
//! ([`Fate::LosesKeysThrough`]). Between the record of the current key and the tombstone, WAL must
//! contain an image of every page that the file had then, even of pages already under the current
//! key. A standby or a restored backup that begins earlier may have any of them under a key that it
//! cannot get, and reads a blank page until it replays the image.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};
use pagevault_keystore::given_up::AFTER_ALL_WAL;
use pagevault_keystore::wal::is_key_place;
use pagevault_keystore::{Record, RelFile, Scope};

use super::closing::Closed;
use super::{dropped, overwriting, same_keys};
use crate::keys::store::{compact, directory, given_up, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{buffers, process, processes, relation_files, survey, wal};
use crate::writers::{self, Activity};
use crate::{backups, fault, shmem};

/// A file whose keys were destroyed.
pub(crate) struct Destroyed {
    pub(crate) file: RelFile,
    /// The last destroyed version.
    pub(crate) through: DataKeyVersion,
    /// The number of keys that were destroyed.
    pub(crate) keys: u32,
}

/// What is destroyed of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// All keys: the contents become unreadable.
    IsDestroyed,
    /// The keys up to this version: the file stays in use under a later key.
    LosesKeysThrough(DataKeyVersion),
}

/// The result of a destruction.
pub(crate) struct Outcome {
    pub(crate) files: Vec<Destroyed>,
    /// Of files that stay in use.
    pub(crate) former_keys: Vec<Destroyed>,
    /// The database keys that had wrapped the destroyed keys: scope and version.
    pub(crate) wrapped_by: BTreeSet<(Scope, KeyVersion)>,
    /// End of the WAL record.
    pub(crate) lsn: Lsn,
    /// Other files with one of these keys, as raw copies of these files have.
    pub(crate) same_keys: Vec<RelFile>,
    /// Other files of which this cannot be told, because a key is locked.
    pub(crate) perhaps_same_keys: Vec<RelFile>,
    /// Why the key file could not be rewritten.
    pub(crate) not_compacted: Option<Report>,
    /// Why pages under interim keys could not be overwritten.
    pub(crate) not_overwritten: Option<Report>,
}

impl Outcome {
    /// What could not be done after the keys were destroyed.
    pub(crate) fn failure(&mut self) -> Option<Report> {
        self.not_compacted.take().or(self.not_overwritten.take())
    }

    /// Nothing was destroyed.
    pub(crate) fn nothing() -> Outcome {
        Outcome {
            files: Vec::new(),
            former_keys: Vec::new(),
            wrapped_by: BTreeSet::new(),
            lsn: wal::end(),
            same_keys: Vec::new(),
            perhaps_same_keys: Vec::new(),
            not_compacted: None,
            not_overwritten: None,
        }
    }
}

/// Destroys all keys of `files`, which belong to one database. No process uses the files, and none
/// of their pages is in shared buffers. Of the files `living`, destroys the keys up to the given
/// version: see the module's description. Likewise with those that these files have left where the
/// database was before: mostly the same.
///
/// `whole`: `files` are all files of the database that have keys.
pub(crate) fn destroy(
    database: u32,
    files: &[RelFile],
    living: &[(RelFile, DataKeyVersion)],
    whole: bool,
) -> Result<Outcome> {
    let (mut places, mut living) = (Vec::new(), living.to_vec());
    if !whole {
        places = former_among(dropped::former_places(files)?.iter())?;
        living.extend(at_former_places(&living)?);
        // A process may have made a key for one of them, and be about to create the file.
        for place in &places {
            writers::await_others(Activity::Creating, Some(place.file.relation))?;
        }
        places.retain(Former::is_gone);
    }
    let lock = KeystoreLock::acquire();
    places.retain(Former::has_no_later_key);
    living.retain(|(file, _)| has_slot(*file));
    let all: Vec<_> = files.iter().copied().chain(places.iter().map(|place| place.file)).collect();
    destroy_locked(&lock, database, &all, &living, whole)
}

/// Whether something is known of a file: it may be forgotten while nobody holds the lock.
fn has_slot(file: RelFile) -> bool {
    shmem::get().is_some_and(|shared| matches!(shared.directory.find(file), Ok(Some(_))))
}

/// The files that these were before their database was moved, as far as they have such keys.
fn at_former_places(
    living: &[(RelFile, DataKeyVersion)],
) -> Result<Vec<(RelFile, DataKeyVersion)>> {
    let files: Vec<_> = living.iter().map(|(file, _)| *file).collect();
    let directory = &shmem::required()?.directory;
    let mut places = Vec::new();
    for place in dropped::former_places(&files)? {
        let same = living.iter().find(|(file, _)| file.relation == place.relation);
        if let (Some((_, through)), Some(slot)) = (same, directory.find(place)?) {
            let mut last = None;
            for key in directory.keys(slot)? {
                last = last.max(Some(key?.version).filter(|version| version <= through));
            }
            places.extend(last.map(|last| (place, last)));
        }
    }
    Ok(places)
}

/// Like [`destroy`], under a lock that the caller holds. The files do not exist any more.
pub(super) fn destroy_with(lock: &KeystoreLock, database: u32, files: &[RelFile]) -> Result<()> {
    destroy_locked(lock, database, files, &[], false)?.failure().map_or(Ok(()), Err)
}

/// With the keystore of now, redo of a backup may copy files from where a database was before it
/// was moved (`dbase_redo`, dbcommands.c), with pages that it cannot write there.
///
/// # Errors
/// While a base backup of this server is in progress.
pub(crate) fn require_no_backup(_lock: &KeystoreLock) -> Result<()> {
    if backups::any() { Err(backups::in_progress()) } else { Ok(()) }
}

/// Like [`destroy`], for files that no longer exist. Files that got a new key after they were found
/// are left out, because their number is in use again.
pub(crate) fn destroy_former(
    database: u32,
    found: &[Former],
    living: &[(RelFile, DataKeyVersion)],
) -> Result<Outcome> {
    let mut living = living.to_vec();
    // Not under the lock: it reads catalogs, and who has locked these may wait for the lock.
    living.extend(at_former_places(&living)?);
    let in_use = survey::files_in_catalog();
    let lock = KeystoreLock::acquire();
    require_no_backup(&lock)?;
    let mut files = Vec::new();
    for former in found.iter().filter(|former| former.has_no_later_key()) {
        match former.through {
            through if through == former.last_version => files.push(former.file),
            Some(through) if !living.iter().any(|(file, _)| *file == former.file) => {
                living.push((former.file, through));
            }
            _ => {}
        }
    }
    living.retain(|(file, _)| !files.contains(file) && has_slot(*file));
    let mut outcome = destroy_locked(&lock, database, &files, &living, false)?;
    // A relation whose former place got another one, which is gone, is not to be shredded.
    outcome.same_keys.retain(|file| !in_use.contains(file));
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
    let same = same_keys::files_with(destroyed.iter().chain(&former_keys))?;
    let (same, perhaps): (Vec<_>, Vec<_>) =
        same.into_iter().partition(|(_, is_certain)| *is_certain);
    fault::point("shred.decided");
    let lsn = persist::append_durably(lock, Scope::database(database), &records, None)?;
    wal::flush(lsn);
    // They may hold rows that they have not sent yet.
    processes::end_logical_decoding(Some(database));
    fault::point("shred.destroyed");
    let not_overwritten = overwriting::destroy(files).err();
    let not_compacted = compact::compact(lock, Scope::database(database)).err();
    fault::point("shred.compacted");
    Ok(Outcome {
        files: destroyed,
        former_keys,
        wrapped_by,
        lsn,
        same_keys: same.into_iter().map(|(file, _)| file).collect(),
        perhaps_same_keys: perhaps.into_iter().map(|(file, _)| file).collect(),
        not_compacted,
        not_overwritten,
    })
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

/// A file that no longer exists and has keys.
pub(crate) struct Former {
    pub(crate) file: RelFile,
    last_version: Option<DataKeyVersion>,
    /// The keys up to this one can be destroyed.
    through: Option<DataKeyVersion>,
}

/// Existing files of a database that have keys and are not among `these`.
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

/// The number of files of this process's database that no longer exist and have keys of their own,
/// as far as can be determined.
pub(crate) fn count_former_files(database: u32) -> Result<usize> {
    // Of a dropped relation, or one that was rewritten, PostgreSQL keeps an empty file until the
    // next checkpoint (`mdunlinkfork`, md.c).
    let is_there = |file, in_use: &HashSet<RelFile>| {
        Ok(relation_files::may_exist(file)
            && (in_use.contains(&file) || !relation_files::is_empty(file)))
    };
    let found = former(database, is_there)?;
    Ok(found.iter().filter(|former| former.has_keys_of_its_own()).count())
}

/// The files of a database that no longer exist and have keys. The caller must consider that a key
/// is made just before its file.
///
/// # Errors
/// Also if it cannot be determined whether one of them exists.
pub(crate) fn former_files(database: u32) -> Result<Vec<Former>> {
    former(database, |file, _| relation_files::exists(file))
}

/// Those of these files that no longer exist.
///
/// # Errors
/// As for [`former_files`].
pub(crate) fn former_among<'a>(files: impl Iterator<Item = &'a RelFile>) -> Result<Vec<Former>> {
    let directory = &shmem::required()?.directory;
    let mut former = Vec::new();
    for &file in files {
        if let Some(slot) = directory.find(file)?
            && !relation_files::exists(file)?
        {
            let last_version = directory.last_version(slot)?;
            former.push(Former { file, last_version, through: last_version });
        }
    }
    Ok(former)
}

fn former(
    database: u32,
    is_there: impl Fn(RelFile, &HashSet<RelFile>) -> Result<bool>,
) -> Result<Vec<Former>> {
    let directory = &shmem::required()?.directory;
    let (tablespaces, in_use) = (relation_files::tablespaces()?, survey::files_in_catalog());
    let mut former = Vec::new();
    for info in directory.files()? {
        let info = info?;
        if info.file.database == database
            && directory.keys(info.slot)?.next().is_some()
            && !is_there(info.file, &in_use)?
        {
            let last_version = directory.last_version(info.slot)?;
            let through = same_keys::last_to_destroy(info.file, info.slot, &in_use, &tablespaces)?;
            former.push(Former { file: info.file, last_version, through });
        }
    }
    Ok(former)
}

impl Former {
    /// Whether it has got no other key since it was found.
    pub(super) fn has_no_later_key(&self) -> bool {
        let found = || {
            let directory = &shmem::required().ok()?.directory;
            directory.last_version(directory.find(self.file).ok()??).ok()?
        };
        found() == self.last_version
    }

    /// False if its keys are needed: they are also those of a file to which its database was moved.
    pub(crate) fn has_keys_of_its_own(&self) -> bool {
        self.through.is_some()
    }

    /// False if the file exists meanwhile, or if that can no longer be determined.
    pub(crate) fn is_gone(&self) -> bool {
        !relation_files::may_exist(self.file)
    }
}

/// Called before redo destroys keys. From now on, a restarted server is not consistent before it
/// has replayed this record; and no page changed under these keys stays in shared buffers. If a
/// whole database is destroyed, it may also have files without keys, whose replayed changes are not
/// on disk yet.
///
/// Until the keys are destroyed, nobody may read such a page again: what is returned keeps sessions
/// out.
#[must_use]
pub(crate) fn before_redo(records: &[Record]) -> Vec<Closed> {
    let mut sessions = Vec::new();
    buffers::set_recovery_minimum();
    let (mut files, mut left) = (Vec::new(), Vec::new());
    // Of a group that was given up: nobody has locked its relations.
    let mut in_use: BTreeMap<u32, Vec<RelFile>> = BTreeMap::new();
    let mut whole: BTreeMap<u32, Vec<RelFile>> = BTreeMap::new();
    for record in records {
        match record {
            // No page is under it.
            Record::Destroyed { file, .. } if is_key_place(*file) => {}
            Record::Destroyed { file, through, whole: true, .. } => {
                let doomed = whole.entry(file.database).or_default();
                // The keystore may know of keys that were made later: redo goes on.
                if !directory::has_outlived(*file, *through) {
                    doomed.push(*file);
                }
            }
            // The file and its pages stay in use. Replayed again, redo may have read pages that it
            // could not bring up to date.
            Record::Destroyed { file, through, lsn, .. }
                if directory::has_outlived(*file, *through) =>
            {
                if *lsn == AFTER_ALL_WAL && process::is_not_consistent_yet() {
                    left.push(*file);
                }
            }
            Record::Destroyed { file, lsn, .. } if *lsn == AFTER_ALL_WAL => {
                in_use.entry(file.database).or_default().push(*file);
            }
            Record::Destroyed { file, .. } => files.push(*file),
            _ => {}
        }
    }
    write_and_drop(&files);
    overwriting::destroy(&files).unwrap_or_else(|report| report.fatal());
    buffers::flush_and_drop_files(&left);
    for (database, files) in in_use {
        sessions.push(Closed::new(database));
        write_and_drop(&files);
        overwriting::destroy(&files).unwrap_or_else(|report| report.fatal());
    }
    for (database, files) in whole {
        sessions.push(Closed::new(database));
        as_destroyed(&files, || buffers::flush_and_drop_database_in_redo(database));
        overwriting::destroy(&files).unwrap_or_else(|report| report.fatal());
    }
    sessions
}

/// Called after redo, which may have ended before it replayed a tombstone that is in the keystore.
pub(crate) fn after_redo() {
    given_up::after_redo().unwrap_or_else(|report| report.fatal());
    let Ok(shared) = shmem::required() else { return };
    let files = shared.directory.files().into_iter().flatten().flatten();
    let files: Vec<_> = files.filter(|info| info.is_destroyed()).map(|info| info.file).collect();
    write_and_drop(&files);
    overwriting::destroy(&files).unwrap_or_else(|report| report.fatal());
}

/// On disk there may be pages in plaintext, from before the file was encrypted. What WAL has
/// brought since then is written over them, under keys that are being destroyed, or a random one.
fn write_and_drop(files: &[RelFile]) {
    let is_there = |file: &RelFile| relation_files::may_have_any_fork(*file);
    let there: Vec<_> = files.iter().copied().filter(is_there).collect();
    as_destroyed(&there, || buffers::flush_files(&there));
    buffers::drop_files(files);
}

/// Files whose keys are being destroyed, while this process writes their pages.
static DOOMED: ProcessLocal<BTreeSet<RelFile>> = ProcessLocal::new(BTreeSet::new());

/// While redo writes pages before their keys are destroyed: a page whose key is not there, because
/// it is locked, is written under a random key. Otherwise it would never be possible to replay the
/// destruction.
pub(crate) fn is_under_way(file: RelFile) -> bool {
    DOOMED.with(|files| files.contains(&file))
}

fn as_destroyed(files: &[RelFile], write: impl FnOnce()) {
    DOOMED.with(|doomed| doomed.extend(files));
    write();
    DOOMED.with(BTreeSet::clear);
}
