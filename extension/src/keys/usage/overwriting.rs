//! Overwriting pages under interim keys of files whose data keys are destroyed: they would open
//! still.

use std::collections::HashSet;
use std::fs;

use pagevault_keystore::interim::{groups_of_mark, mark_of, marked_by};
use pagevault_keystore::wal::is_key_place;
use pagevault_keystore::{KeyGroup, RelFile};

use super::interim::{
    any, any_unmarked, away, folder, is_under_interim_key, mark_as_now, marked_as, unreadable,
    warn_once,
};
use crate::pg::report::Result;
use crate::pg::{buffers, process, relation_files};
use crate::shmem;

/// When the keys of these files are destroyed: overwrites their pages under interim keys; marks
/// files whose tablespaces are away, and in recovery those that cannot be written. Nobody uses the
/// files, and none of their pages is in shared buffers.
///
/// In recovery only of files that are marked, or have the number of one (raw copies). Otherwise of
/// all that were in a group: whoever destroys them has read all of their pages.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn destroy(files: &[RelFile]) -> Result<()> {
    let is_recovery = process::in_recovery();
    if is_recovery && !any() {
        return Ok(());
    }
    let marked = if is_recovery { marked_as(marked_by)? } else { Vec::new() };
    let is_all = !is_recovery || shmem::required()?.control.any_unmarked_interim();
    let is_meant =
        |file: &&RelFile| is_all || marked.iter().any(|marked| marked.relation == file.relation);
    for &file in files.iter().filter(is_meant) {
        if !relation_files::is_away(file) {
            match overwrite(&[file]) {
                Ok(()) => continue,
                // Recovery goes on: the pages are refused anyway.
                Err(report) if is_recovery => warn_once(file, report),
                Err(report) => return Err(report),
            }
        }
        mark_as_now(file).map_err(|error| unreadable(&error))?;
    }
    Ok(())
}

/// When the data directory is consistent for the first time: overwrites pages under interim keys of
/// files whose data keys had been destroyed before. Redo has seen to others ([`destroy`]), but for
/// those whose tablespaces were away.
///
/// # Errors
/// If the directory cannot be read, or a file not be written.
pub(crate) fn destroy_former() -> Result<()> {
    if !any() || !shmem::anything_destroyed() {
        return Ok(());
    }
    let files = match any_unmarked() {
        true => destroyed_files()?,
        false => with_copies(&marked_as(marked_by)?)?,
    };
    let there: Vec<_> =
        files.iter().copied().filter(|file| !relation_files::is_away(*file)).collect();
    buffers::flush_and_drop_files(&there);
    destroy(&files)
}

/// Before a group ends: of marked files, and of raw copies of them, overwrites pages under interim
/// keys where the data keys are destroyed. Not in recovery.
///
/// # Errors
/// If a file cannot be written, or its tablespace is away, unless its pages are under interim keys
/// of another group.
pub(crate) fn destroy_left(group: KeyGroup) -> Result<()> {
    if !any() || !shmem::anything_destroyed() {
        return Ok(());
    }
    let marked = marked_as(marked_by)?;
    let files = if any_unmarked() { destroyed_files()? } else { with_copies(&marked)? };
    for file in files {
        let is_away = relation_files::is_away(file);
        let done = if is_away { Err(away(file)) } else { overwrite(&[file]) };
        match done {
            // Of what is away, and has no name of a group, nobody knows whether it was in one.
            Err(report) if may_be_of(file.relation, group, &marked, !is_away) => {
                return Err(report);
            }
            Err(report) => warn_once(file, report),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Whether a page of a file with this number, which raw copies have as well, may be under an
/// interim key of the group, as marks say; `if_unknown` if one names no group.
fn may_be_of(relation: u32, group: KeyGroup, marked: &[RelFile], if_unknown: bool) -> bool {
    let mut same = marked.iter().filter(|file| file.relation == relation);
    same.any(|file| {
        let content = fs::read_to_string(folder().join(mark_of(*file))).unwrap_or_default();
        groups_of_mark(&content).map_or(if_unknown, |groups| groups.contains(&group))
    })
}

/// The files with destroyed data keys that have the numbers of these files.
pub(super) fn with_copies(files: &[RelFile]) -> Result<Vec<RelFile>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let numbers: HashSet<u32> = files.iter().map(|file| file.relation).collect();
    let mut destroyed = destroyed_files()?;
    destroyed.retain(|file| numbers.contains(&file.relation));
    Ok(destroyed)
}

/// The files with destroyed data keys.
fn destroyed_files() -> Result<Vec<RelFile>> {
    let known = shmem::required()?.directory.files()?.filter_map(std::result::Result::ok);
    Ok(known.filter(|info| info.is_destroyed()).map(|info| info.file).collect())
}

pub(super) fn overwrite(files: &[RelFile]) -> Result<()> {
    let files = files.iter().filter(|file| !is_key_place(**file));
    files.copied().try_for_each(|file| relation_files::overwrite(file, is_under_interim_key))
}
