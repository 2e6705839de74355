//! Interim keys: what recovery writes pages of a key group under while the key of the group is
//! locked, so that one tenant's key provider holds up nobody else.
//!
//! Redo reads few pages: WAL has an image of each page that is changed for the first time after a
//! checkpoint (docs/design/0010-what-redo-reads.md). So it can bring pages of a locked group up to
//! date without their key, and only lacks one to write them with. It takes a key of the cluster
//! instead, which is derived for each file ([`pagevault_cipher::interim`]). These pages are in WAL
//! under keys of the cluster as well, so nobody can read more by it.
//!
//! - Pages name the key by a version that no key of the file itself has. So a file may have both,
//!   as while it is rekeyed, and the rekey engine takes such pages for stale.
//! - Users are refused as long as the group is locked.
//! - Files that may have such pages are marked beside the key files, before the first is written.
//!   When the group is unlocked, a primary gives these relations new data keys, and removes the
//!   marks ([`crate::rotation`]).
//! - While there is any mark, the page on disk is looked at before it is written over
//!   ([`crate::page::io::writing`]): a torn write must not mix two keys.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;

use pagevault_cipher::{CipherId, interim, page};
use pagevault_core::policy::Sealing;
use pagevault_keystore::interim::{
    ANY, FOLDER, group_at, groups_of_mark, key_place, line_of_mark, map_marked_by, mark_of,
    mark_of_map, marked_by,
};
use pagevault_keystore::{KeyGroup, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::ForkNumber;
use pgrx::prelude::PgLogLevel;

use super::data_keys;
use super::overwriting::{overwrite, with_copies};
use crate::keys::store::{directory, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result};
use crate::pg::{buffers, control_file, process, redo_record, relation_files, wal};
use crate::{fault, keystore_dir, shmem};

/// Makes the key from which interim keys of a group are derived, unless it exists, or the cluster
/// has no master key. Before the group has its first key, so that every server which has that has
/// this one, too.
pub(crate) fn make_root(group: KeyGroup) -> Result<()> {
    let has_cluster_key = shmem::required()?.secrets.newest(Scope::CLUSTER).is_some();
    if is_possible(group) || !has_cluster_key {
        return Ok(());
    }
    let (file, version) = key_place(group);
    let sealing = Sealing { cipher: CipherId::Aes256Xts, group: None };
    let end = {
        let lock = KeystoreLock::acquire();
        if is_possible(group) {
            return Ok(());
        }
        let record = data_keys::make_key(file, version, sealing)?;
        persist::append(&lock, Scope::CLUSTER, &[record])?
    };
    wal::flush(end);
    Ok(())
}

/// The same for all groups, when the cluster has got its master key.
pub(crate) fn make_roots() -> Result<()> {
    let groups: Vec<_> = persist::current_cluster_state()?.key_groups().map(|(at, _)| at).collect();
    groups.into_iter().try_for_each(make_root)
}

/// Whether there are interim keys for files of this group: not if it got its first key before the
/// cluster had a master key.
pub(crate) fn is_possible(group: KeyGroup) -> bool {
    let (file, version) = key_place(group);
    directory::has_key(file, version)
}

/// Whether redo gets a placeholder for a page under the locked key of this scope that it reads for
/// its lock only ([`redo_record`]). Reads of all other such pages are refused before they begin.
#[cold]
pub(crate) fn stands_in(scope: Scope) -> bool {
    scope.key_group().is_some_and(is_possible) && process::in_recovery()
}

/// Whether a page of a main fork under this scope's locked key may be read: for its lock only.
pub(crate) fn may_be_read(scope: Scope, file: RelFile, block: u32) -> bool {
    stands_in(scope) && redo_record::only_locks(file, block)
}

/// Whether there may be pages under interim keys on this server.
#[inline]
pub(crate) fn any() -> bool {
    shmem::get().is_some_and(|shared| shared.control.any_interim())
}

/// A page under an interim key was read: its mark may be lost, as by `pg_rewind`, which replaces
/// the folder.
pub(crate) fn was_read() {
    if !any()
        && let Some(shared) = shmem::get()
    {
        shared.control.interim_was_read();
    }
}

/// A file, and the group that its mark names.
type Marked = (RelFile, Option<KeyGroup>);

/// What this process has marked lately.
static MARKED: ProcessLocal<([Option<Marked>; 16], usize)> = ProcessLocal::new(([None; 16], 0));

/// Marks a file, before a page of it is written under an interim key of this group. The mark is
/// durable on return. Allocates; pages are not written in critical sections.
///
/// # Errors
/// As of the file system.
pub(crate) fn mark(file: RelFile, group: Option<KeyGroup>) -> std::io::Result<()> {
    if MARKED.with(|(known, _)| known.contains(&Some((file, group)))) {
        return Ok(());
    }
    make_mark(&mark_of(file), group)?;
    fault::point("interim.marked");
    MARKED.with(|(known, hand)| {
        known[*hand] = Some((file, group));
        *hand = (*hand + 1) % known.len();
    });
    Ok(())
}

pub(super) fn mark_as_now(file: RelFile) -> std::io::Result<()> {
    mark(file, directory::current_key_group(file))
}

/// Marks a file before a page of its visibility map is emptied.
///
/// # Errors
/// As of the file system.
pub(crate) fn mark_map(file: RelFile) -> std::io::Result<()> {
    make_mark(&mark_of_map(file), None)
}

fn make_mark(name: &str, group: Option<KeyGroup>) -> std::io::Result<()> {
    let folder = folder();
    match fs::create_dir(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        // Whoever has created it may have been killed before this.
        _ => File::open(keystore_dir::path())?.sync_all()?,
    }
    let mut mark = File::options().read(true).append(true).create(true).open(folder.join(name))?;
    if let Some(group) = group {
        let mut content = String::new();
        mark.read_to_string(&mut content)?;
        if !groups_of_mark(&content).is_some_and(|groups| groups.contains(&group)) {
            mark.write_all(line_of_mark(group).as_bytes())?;
            mark.sync_all()?;
        }
    }
    // Afterwards, because another process may find at the same time that there is no mark.
    if let Some(shared) = shmem::get() {
        shared.control.interim_is_marked(false);
    }
    File::open(&folder)?.sync_all()
}

pub(super) fn folder() -> PathBuf {
    keystore_dir::path().join(FOLDER)
}

/// The files that are marked, as `file_of` reads the names of marks.
///
/// # Errors
/// If the folder cannot be read.
pub(super) fn marked_as(file_of: fn(&str) -> Option<RelFile>) -> Result<Vec<RelFile>> {
    let entries = match fs::read_dir(folder()) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| unreadable(&error))?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| unreadable(&error))?.file_name();
        files.extend(name.to_str().and_then(file_of));
    }
    Ok(files)
}

/// Whether there may be such pages in files that are not marked.
pub(crate) fn any_unmarked() -> bool {
    shmem::get().is_some_and(|shared| shared.control.any_unmarked_interim())
}

/// Looks for pages under interim keys in all files that are in a group, or have no keys any more,
/// and marks files that have some. Not in recovery. It reads all of these files.
///
/// # Errors
/// As of the file system.
pub(crate) fn find_unmarked() -> Result<()> {
    let shared = shmem::required()?;
    let mut not_there = None;
    for info in shared.directory.files()? {
        process::check_for_interrupts();
        let info = info?;
        let file = info.file;
        if !info.is_destroyed() && !directory::has_group_key(file) {
            continue;
        }
        if relation_files::is_away(file) {
            // What was destroyed may have been in no group.
            if info.is_destroyed() {
                mark(file, None).map_err(|error| unreadable(&error))?;
                warn_once(file, away(file));
            } else {
                not_there = Some(file);
            }
        }
        let has_pages = relation_files::may_exist(file) && has_pages(file);
        // The next start looks again.
        if process::is_told_to_stop() {
            return Ok(());
        }
        if has_pages {
            mark_as_now(file).map_err(|error| unreadable(&error))?;
        }
    }
    if let Some(file) = not_there {
        let report = away(file);
        let report = report.detail("The directory of its tablespace does not exist. Until then each page on disk is compared before it is written over.");
        report.send(PgLogLevel::WARNING);
        return Ok(());
    }
    shared.control.interim_is_marked(true);
    remove_mark(ANY)
}

/// The marked files whose group is not locked. Not in recovery.
///
/// Marks raw copies of marked ones, which have the same number in another database or tablespace.
/// Removes the marks of files that are gone; and of those whose data keys are destroyed, after
/// overwriting what [`super::overwriting::destroy`] could not, or did not come to before a crash.
/// What cannot be overwritten stays marked, and holds up no other file.
///
/// # Errors
/// If marks cannot be read or written.
pub(crate) fn to_rekey() -> Result<Vec<RelFile>> {
    let shared = shmem::required()?;
    let mut files = marked_as(marked_by)?;
    let numbers: HashSet<u32> = files.iter().map(|marked| marked.relation).collect();
    for info in shared.directory.files()? {
        let file = info?.file;
        if numbers.contains(&file.relation)
            && !files.contains(&file)
            && directory::has_group_key(file)
            && relation_files::may_exist(file)
        {
            mark_as_now(file).map_err(|error| unreadable(&error))?;
            files.push(file);
        }
    }
    let away: Vec<_> = files.extract_if(.., |file| relation_files::is_away(*file)).collect();
    let gone = files.extract_if(.., |file| !relation_files::may_have_any_fork(*file));
    gone.collect::<Vec<_>>().iter().try_for_each(|file| remove_mark(&mark_of(*file)))?;
    let destroyed: Vec<_> = files.extract_if(.., |file| directory::is_destroyed(*file)).collect();
    let mut left = HashSet::new();
    for file in with_copies(&destroyed)? {
        if relation_files::is_away(file) {
            left.insert(file.relation);
        } else if let Err(report) = overwrite(&[file]) {
            left.insert(file.relation);
            warn_once(file, report);
        }
    }
    let overwritten = destroyed.iter().filter(|file| !left.contains(&file.relation));
    overwritten.copied().try_for_each(|file| remove_mark(&mark_of(file)))?;
    let none_left = files.is_empty() && away.is_empty() && left.is_empty();
    if none_left && shared.control.interim_is_gone() {
        // Somebody may have marked a file meanwhile.
        if !marked_as(marked_by)?.is_empty() {
            shared.control.interim_is_marked(false);
            return Ok(files);
        }
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            "pagevault: no page is under an interim key any more",
        )
        .send(PgLogLevel::LOG);
    }
    files.retain(|file| directory::locked_group(*file).is_none());
    Ok(files)
}

pub(super) fn away(file: RelFile) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relation file {file} may have pages under an interim key"),
    )
    .detail("The directory of its tablespace does not exist.")
    .hint("Mount it, or drop the tablespace.")
}

/// Files of which this process has told lately that something cannot be done.
static WARNED: ProcessLocal<BTreeSet<RelFile>> = ProcessLocal::new(BTreeSet::new());

/// Tries are repeated every few seconds.
pub(super) fn warn_once(file: RelFile, report: Report) {
    if WARNED.with(|warned| warned.insert(file)) {
        report.send(PgLogLevel::WARNING);
    }
}

/// Gives WAL images of visibility maps that recovery has emptied, in a process that can write WAL.
/// Otherwise WAL says nothing of that: an incremental backup would leave the pages out, and
/// combined with an earlier backup have bits of rows that were changed since (`heap_delete`,
/// heapam.c, names no page of the map in WAL that has none of the bits).
///
/// # Errors
/// If marks cannot be read or removed. A file that cannot be read stays marked.
pub(crate) fn log_emptied_maps() -> Result<()> {
    for file in marked_as(map_marked_by)? {
        let fork = ForkNumber::VISIBILITYMAP_FORKNUM;
        let mut block = 0;
        if relation_files::is_away(file) {
            continue;
        }
        let read = relation_files::each_page(file, fork, |page| {
            if page::is_zero(page) {
                wal::log_empty_page(file, fork, block);
            }
            block += 1;
        });
        if let Err(error) = read {
            warn_once(file, unreadable(&error));
            continue;
        }
        wal::flush(wal::end());
        remove_mark(&mark_of_map(file))?;
    }
    Ok(())
}

/// At server start, before pages are read. `pg_rewind` replaces the folder of marks, and a base
/// backup may have copied it later than the files, when marks were removed. So then any file that
/// is, or was, in a group may have such pages.
///
/// # Errors
/// As of the file system.
pub(crate) fn start() -> Result<()> {
    let control = &shmem::required()?.control;
    if control_file::is_of_backup() && any_root_ever()? {
        control.interim_was_read();
        make_mark(ANY, None).map_err(|error| unreadable(&error))?;
    }
    if folder().join(ANY).exists() {
        control.interim_was_read();
    } else if !marked_as(marked_by)?.is_empty() || !marked_as(map_marked_by)?.is_empty() {
        control.interim_is_marked(false);
    }
    Ok(())
}

/// Whether there is, or was, a key from which interim keys are derived.
fn any_root_ever() -> Result<bool> {
    let mut files = shmem::required()?.directory.files()?;
    Ok(files.any(|info| info.is_ok_and(|info| group_at(info.file).is_some())))
}

/// Whether a page on disk, in any fork, is under an interim key; true if that is not known.
pub(crate) fn has_pages(file: RelFile) -> bool {
    relation_files::any_page(file, |on_disk| is_under_interim_key(on_disk))
}

pub(super) fn is_under_interim_key(header: &[u8]) -> bool {
    page::version_of(header).is_some_and(interim::is_interim)
}

/// Removes the mark of a file that has no such page, and gets none: its group is unlocked. The
/// marks of raw copies go together, because each stands for the others.
///
/// # Errors
/// As of the file system.
pub(crate) fn unmark(file: RelFile) -> Result<()> {
    let mut same = marked_as(marked_by)?;
    same.retain(|other| other.relation == file.relation);
    let may_have = |other: RelFile| has_pages(other) || relation_files::is_away(other);
    if same.iter().any(|other| *other != file && may_have(*other)) {
        return Ok(());
    }
    same.iter().try_for_each(|file| remove_mark(&mark_of(*file)))
}

fn remove_mark(name: &str) -> Result<()> {
    match fs::remove_file(folder().join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(unreadable(&error)),
        _ => Ok(()),
    }
}

/// When the data directory is consistent, before users are admitted, and when recovery ends: writes
/// pages of locked groups, and removes them from shared buffers, where users would not be refused.
/// What redo brings there later, on a standby, a worker evicts ([`crate::page::withdrawal`]); and
/// what a session of a standby has pinned, after its promotion. The marks of these files keep the
/// worker at work.
///
/// # Errors
/// If the directory cannot be read.
pub(crate) fn drop_locked_pages() -> Result<()> {
    if !shmem::any_key_locked() {
        return Ok(());
    }
    fault::point("interim.redone");
    let files = shmem::required()?.directory.files()?.filter_map(std::result::Result::ok);
    let locked = |file: &RelFile| directory::locked_group(*file).is_some();
    let locked: Vec<_> = files.map(|info| info.file).filter(locked).collect();
    if buffers::may_have_sessions_in_redo() {
        let mut pinned = buffers::flush_and_evict_files(&locked).into_iter();
        return pinned.try_for_each(mark_as_now).map_err(|error| unreadable(&error));
    }
    buffers::flush_and_drop_files(&locked);
    Ok(())
}

pub(super) fn unreadable(error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read or write folder \"{}/{FOLDER}\": {error}", keystore_dir::NAME),
    )
}
