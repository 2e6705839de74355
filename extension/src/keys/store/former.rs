//! Former files: what is known of files that are gone, and forgetting their keys
//! (`pagevault_keystore::former`).

use std::collections::{HashMap, HashSet};

use pagevault_cipher::page::{self, Page};
use pagevault_keystore::former::{FormerFiles, Full, Range};
use pagevault_keystore::state::FormerVersions;
use pagevault_keystore::{DataKeyVersion, Lsn, Phase, Record, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{compact, failures};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{process, relation_files};
use crate::{fault, shmem};

/// Applies records about former files to shared memory. All at once: each takes time proportional
/// to all that is known.
pub(super) fn apply(lock: &KeystoreLock, records: &[Record]) -> Result<()> {
    let Some(former) = known_with(lock, records)? else { return Ok(()) };
    shmem::required()?.former.store(&former).map_err(|Full| no_room())
}

/// Whether there is room for such records.
///
/// # Errors
/// If there is none.
pub(crate) fn require_room(lock: &KeystoreLock, records: &[Record]) -> Result<()> {
    let Some(former) = known_with(lock, records)? else { return Ok(()) };
    if shmem::required()?.former.has_room_for(&former) { Ok(()) } else { Err(no_room()) }
}

fn no_room() -> Report {
    failures::recovery_needs_room("range of former files")
}

/// `None` if nothing is about former files.
fn known_with(lock: &KeystoreLock, records: &[Record]) -> Result<Option<FormerFiles>> {
    let mut ranges = ranges_in(records);
    let Some(first) = ranges.next() else { return Ok(None) };
    let mut former = known(lock)?;
    [first].into_iter().chain(ranges).for_each(|range| former.add(range));
    Ok(Some(former))
}

fn ranges_in(records: &[Record]) -> impl Iterator<Item = Range> + '_ {
    records.iter().filter_map(|record| match record {
        Record::FormerFiles(range) => Some(*range),
        _ => None,
    })
}

/// All that is known of former files.
pub(crate) fn known(_lock: &KeystoreLock) -> Result<FormerFiles> {
    Ok(shmem::required()?.former.load())
}

/// The last version of former files with the number of this one: its versions continue after that.
pub(crate) fn last_version(_lock: &KeystoreLock, file: RelFile) -> Option<DataKeyVersion> {
    shmem::get()?.former.through(file.database, file.relation)
}

/// Whether it is recorded of a file that it is gone.
pub(crate) fn recorded() -> Result<impl Fn(RelFile) -> bool> {
    let directory = &shmem::required()?.directory;
    let former = known(&KeystoreLock::acquire())?;
    let last = |file| directory.last_version(directory.find(file).ok()??).ok()?;
    Ok(move |file| former.was_gone(file, last(file), Lsn::MAX))
}

/// From now on, files with numbers of former files that were gone at the address `by` are written
/// in plaintext: see [`end`].
pub(crate) fn end_all(lock: &KeystoreLock, by: Lsn) -> Result<()> {
    let former = known(lock)?;
    match former.ranges().next() {
        Some(_) => end(lock, |file, last| former.was_gone(file, Some(last), by)),
        None => Ok(()),
    }
}

/// The same for the files in records that are replayed, whatever is known of later ones with the
/// same numbers.
pub(crate) fn end_recorded(lock: &KeystoreLock, records: &[Record]) -> Result<()> {
    let ranges: Vec<_> = ranges_in(records).collect();
    end(lock, |file, last| {
        ranges.iter().any(|range| {
            range.database == file.database
                && (range.first..=range.last).contains(&file.relation)
                && last <= range.through
        })
    })
}

/// Files with numbers of former files are written in plaintext: this server may not have forgotten
/// the keys, and a file that uses such a number again is another one. If it is encrypted, it has a
/// later key. In memory only: a start from an earlier address needs the key.
///
/// A file with pages that are not in plaintext need not be another one: its primary may be wrong.
/// It stays encrypted.
fn end(_lock: &KeystoreLock, is_former: impl Fn(RelFile, DataKeyVersion) -> bool) -> Result<()> {
    let directory = &shmem::required()?.directory;
    for info in directory.files()? {
        let info = info?;
        let Some(last) = directory.last_version(info.slot)? else { continue };
        if info.phase.current().is_none() || !is_former(info.file, last) {
            continue;
        }
        match relation_files::first_page(info.file) {
            Some(page) if !is_plaintext(&page) => still_there(info.file).send(PgLogLevel::WARNING),
            _ => directory.enter(info.slot, Phase::plaintext_after(last))?,
        }
    }
    Ok(())
}

/// A page of zeros may be one that is not written yet.
fn is_plaintext(page: &Page) -> bool {
    let sealed = page::may_be_sealed(page, 0, process::data_checksums())
        && page::version_of(page.as_slice()).is_some();
    !sealed && page.iter().any(|byte| *byte != 0)
}

fn still_there(file: RelFile) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("relation file {file} is said to be gone, and is there"),
    )
    .detail("It may be the one whose keys the primary has forgotten. This server keeps them, and writes the file encrypted.")
    .hint("If the primary can read the relation, ignore this. Else keep this server: do not copy it anew.")
}

/// What was forgotten.
#[derive(Clone, Copy, Default)]
pub(crate) struct Forgotten {
    pub(crate) files: usize,
    /// Of these files.
    pub(crate) keys: u32,
    /// Keys that were replaced: see [`FormerVersions`].
    pub(crate) replaced: usize,
}

/// What may be forgotten in one log.
#[derive(Default)]
pub(crate) struct Candidates {
    /// Files that are gone, as is recorded, and do not exist, with their last versions. With the
    /// same last version they still do not: whoever uses a number again makes another key, or a
    /// file in plaintext.
    pub(crate) files: HashMap<RelFile, DataKeyVersion>,
    /// Keys that were replaced. `gone` concerns the files, too.
    pub(crate) replaced: FormerVersions,
}

/// Forgets keys that nothing needs where WAL is replayed from an address of `candidates` on, as at
/// every further start of this server: first in the key file, then in memory.
pub(crate) fn forget(
    lock: &KeystoreLock,
    scope: Scope,
    candidates: Candidates,
) -> Result<Forgotten> {
    let Candidates { files: candidates, replaced: mut versions } = candidates;
    let shared = shmem::required()?;
    let directory = &shared.directory;
    let is_candidate =
        |file, last: Option<_>| last.is_some() && candidates.get(&file).copied() == last;
    let mut forgotten = HashSet::new();
    let mut replaced = 0;
    compact::compact_changed(lock, scope, |state| {
        fault::point("forget.decided");
        let files = state.forget_keys(scope.number(), versions.gone, |file| {
            let last = directory.find(file).ok().flatten();
            is_candidate(file, last.and_then(|slot| directory.last_version(slot).ok()?))
        });
        forgotten.extend(files);
        replaced = state.forget_versions(scope, &mut versions);
        !forgotten.is_empty() || replaced > 0
    })?;
    fault::point("forget.compacted");
    let mut keys = 0;
    if !forgotten.is_empty() {
        keys =
            directory.forget(|file, last| forgotten.contains(&file) && is_candidate(file, last))?;
    }
    directory.forget_versions(&versions.data_keys)?;
    for &(scope, version) in &versions.database_keys {
        shared.secrets.forget(scope, version);
    }
    Ok(Forgotten { files: forgotten.len(), keys, replaced })
}

/// Files with keys that are gone, as is recorded, and do not exist, with their last versions. Asks
/// the file system, so the lock is not held meanwhile.
pub(crate) fn missing() -> Result<HashMap<RelFile, DataKeyVersion>> {
    let former = known(&KeystoreLock::acquire())?;
    let directory = &shmem::required()?.directory;
    let mut missing = HashMap::new();
    if former.ranges().next().is_none() {
        return Ok(missing);
    }
    for info in directory.files()? {
        let info = info?;
        if let Ok(Some(last)) = directory.last_version(info.slot)
            && former.was_gone(info.file, Some(last), Lsn::MAX)
            && !relation_files::may_have_any_fork(info.file)
        {
            missing.insert(info.file, last);
        }
    }
    Ok(missing)
}
