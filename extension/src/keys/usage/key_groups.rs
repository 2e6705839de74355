//! Key groups: making them, and ending them with their keys.
//!
//! A group ends when no data key is under its database key any more, on this server. All of them
//! are looked at under the lock that serialises changes of keys, so none is made meanwhile.
//! Standbys end it at the same place in WAL, where they have replayed all changes of pages under
//! its keys.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_keystore::interim::key_place;
use pagevault_keystore::{KeyGroup, Record, RelFile, Scope};
use pgrx::PgSqlErrorCode as Code;

use super::destruction::{self, Former};
use super::overwriting;
use crate::keys::store::{compact, directory, given_up, key_groups, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{compat, process, relation_files, wal};
use crate::{fault, shmem};

/// Makes a key group.
pub(crate) fn create(name: &str) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let state = persist::cluster_state(&lock)?;
    if state.key_group_named(name).is_some() {
        return Err(Report::new(
            Code::ERRCODE_DUPLICATE_OBJECT,
            format!("key group \"{name}\" already exists"),
        ));
    }
    let group = state.next_key_group().ok_or_else(|| {
        Report::new(Code::ERRCODE_PROGRAM_LIMIT_EXCEEDED, "the numbers of key groups are used up")
            .detail("Numbers of groups that have ended are not used again.")
    })?;
    let record = Record::KeyGroup { group, name: name.to_owned(), at: process::now() };
    let end = persist::append(&lock, Scope::CLUSTER, &[record])?;
    drop(lock);
    wal::flush(end);
    Ok(())
}

/// A key group that this session shreds. While this exists, no data key is made under its key: what
/// is in the group does not grow. Other sessions notice if this one dies.
pub(crate) struct Shredding(());

impl Shredding {
    /// # Errors
    /// If another session shreds a key group.
    pub(crate) fn begin(group: KeyGroup) -> Result<Shredding> {
        let _lock = KeystoreLock::acquire();
        let control = &shmem::required()?.control;
        if let Some((other, pid)) = key_groups::being_shredded() {
            return Err(Report::new(
                Code::ERRCODE_OBJECT_IN_USE,
                format!("{} is being shredded", key_groups::describe(other.scope())),
            )
            .detail(format!("Process {pid} does it. Nothing was destroyed."))
            .hint("Try again when it has ended."));
        }
        let process = compat::process_number().unwrap_or_default();
        control.shredding_begins(group, process, std::process::id());
        Ok(Shredding(()))
    }
}

impl Drop for Shredding {
    fn drop(&mut self) {
        if let Some(shared) = shmem::get() {
            shared.control.shredding_ends();
        }
    }
}

/// What is under the key of a group.
#[derive(Default)]
pub(crate) struct Contents {
    /// Files that are written under it.
    pub(crate) files: BTreeSet<RelFile>,
    /// Files that have former keys under it, and are written under another one.
    pub(crate) left: BTreeSet<RelFile>,
    /// The number of data keys.
    pub(crate) keys: usize,
}

/// What is under the keys of all groups; former files included.
pub(crate) fn contents() -> Result<BTreeMap<KeyGroup, Contents>> {
    let directory = &shmem::required()?.directory;
    let mut all: BTreeMap<KeyGroup, Contents> = BTreeMap::new();
    for info in directory.files()? {
        let info = info?;
        let current = info.current.map(|(version, _)| version);
        for key in directory.keys(info.slot)? {
            let key = key?;
            let Some(group) = key.scope.key_group() else { continue };
            let contents = all.entry(group).or_default();
            contents.keys += 1;
            if Some(key.version) == current {
                contents.files.insert(info.file);
            } else {
                contents.left.insert(info.file);
            }
        }
    }
    for contents in all.values_mut() {
        let Contents { files, left, .. } = contents;
        left.retain(|file| !files.contains(file));
    }
    Ok(all)
}

/// What is under the key of a group.
pub(crate) fn contents_of(group: KeyGroup) -> Result<Contents> {
    Ok(contents()?.remove(&group).unwrap_or_default())
}

/// Refuses to end a group while a former key under it is kept for a file that exists.
pub(crate) fn require_none_kept(group: KeyGroup) -> Result<()> {
    let contents = contents_of(group)?;
    match contents.left.iter().find(|file| relation_files::may_exist(**file)) {
        Some(file) => Err(still_kept(group, *file)),
        None => Ok(()),
    }
}

/// Ends a group: destroys the keys of these files, which do not exist any more, and then the key of
/// the group.
///
/// # Errors
/// If anything else is under the key of the group: nothing is destroyed then.
pub(crate) fn end(group: KeyGroup, gone: &[Former]) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let contents = contents_of(group)?;
    let is_gone = |file: &&RelFile| {
        gone.iter().any(|former| former.file == **file && former.has_no_later_key())
            && !relation_files::may_exist(**file)
    };
    if let Some(file) = contents.files.iter().find(|file| !is_gone(file)) {
        return Err(in_use(group, *file));
    }
    if let Some(file) = contents.left.iter().find(|file| !is_gone(file)) {
        return Err(still_kept(group, *file));
    }
    let mut databases: BTreeMap<u32, Vec<RelFile>> = BTreeMap::new();
    for file in contents.files.iter().chain(&contents.left) {
        databases.entry(file.database).or_default().push(*file);
    }
    for (database, files) in databases {
        destruction::destroy_with(&lock, database, &files)?;
    }
    fault::point("key_group.files_destroyed");
    overwriting::destroy_left(group)?;
    let mut records = vec![Record::EndedKeyGroup { group, at: process::now() }];
    let (root, version) = key_place(group);
    if directory::has_key(root, version) {
        records.push(given_up::root_destroyed(group, wal::end(), process::now()));
    }
    let end = persist::append_durably(&lock, Scope::CLUSTER, &records, None)?;
    wal::flush(end);
    fault::point("key_group.ended");
    compact::compact(&lock, Scope::CLUSTER)
}

fn in_use(group: KeyGroup, file: RelFile) -> Report {
    let whose = key_groups::describe(group.scope());
    let where_else = match file.database == process::my_database() {
        true => String::new(),
        false => format!(" It is in another database, with the OID {}.", file.database),
    };
    Report::new(
        Code::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
        format!("{whose} is in use"),
    )
    .detail(format!("Relation file {file} is written under its key.{where_else}"))
    .hint("Drop its relations or move them to another key group, in every database; or destroy them with pagevault.shred_key_group().")
}

fn still_kept(group: KeyGroup, file: RelFile) -> Report {
    let whose = key_groups::describe(group.scope());
    Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("keys of {whose} are still kept for a relation that has left it"),
    )
    .detail(format!("Relation file {file} has a later key, but standbys and backups may need the former one."))
    .hint("Try again when its rekey job has ended and the server has forgotten the former key: after pagevault.keep_former_keys and a checkpoint, and not while a base backup is in progress; pagevault.former_keys shows it. A relation in plaintext keeps its keys until it has a new file: use VACUUM FULL.")
}

/// The group of this name.
///
/// # Errors
/// If there is none.
pub(crate) fn require(name: &str) -> Result<KeyGroup> {
    key_groups::named(name)?
        .ok_or_else(|| key_groups::missing(name).hint("See pagevault.key_groups."))
}
