//! Finding out which files with keys were dropped. That a file does not exist is no proof: its file
//! system may not be mounted. No relation in the catalog may have it either.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use pagevault_cipher::page::version_of;
use pagevault_keystore::directory::FileSlot;
use pagevault_keystore::wal::is_key_place;
use pagevault_keystore::{DataKeyVersion, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use pgrx::prelude::PgLogLevel;

use crate::keys::store::directory;
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, compat, process, relation_files, survey, xact};
use crate::shmem;
use crate::writers::{Activity, Others};

/// How long to wait for others, at least. Then the next worker tries again, with more patience.
const PATIENCE: Duration = Duration::from_secs(10);

/// Files with keys that do not exist, with their last versions.
pub(super) type Missing = HashMap<RelFile, (FileSlot, DataKeyVersion)>;

/// Files with keys that do not exist, among those that `is_wanted` names.
pub(super) fn missing(is_wanted: impl Fn(RelFile) -> bool) -> Result<Missing> {
    let directory = &shmem::required()?.directory;
    let mut missing = Missing::new();
    for info in directory.files()? {
        let info = info?;
        if let Ok(Some(last)) = directory.last_version(info.slot)
            && is_wanted(info.file)
            && !is_key_place(info.file)
            && !relation_files::may_have_any_fork(info.file)
        {
            missing.insert(info.file, (info.slot, last));
        }
    }
    Ok(missing)
}

/// Whether the pages may be elsewhere, and under this key. While the library is not loaded, the
/// server moves databases as files, which keep their numbers (`movedb`, dbcommands.c). Moving the
/// database back makes the pages readable.
fn was_moved(file: RelFile) -> bool {
    let moved = moved_to(file);
    if let Some(moved) = moved
        && WARNED.with(|warned| warned.insert(file.database))
    {
        without_keys(file, moved).send(PgLogLevel::WARNING);
    }
    moved.is_some()
}

/// Where the pages of a file that is gone may be then: in the database's own tablespace, because
/// databases are moved nowhere else. What a move has left in others when it failed, or the server
/// crashed, is no file of any relation.
fn moved_to(file: RelFile) -> Option<RelFile> {
    let tablespace = catalog::tablespace_of_database(file.database.into())?.to_u32();
    let moved = RelFile { tablespace, ..file };
    (moved != file && lacks_keys_of(file, moved)).then_some(moved)
}

/// Whether a file may be this one, which is gone, and lacks its keys.
fn lacks_keys_of(gone: RelFile, file: RelFile) -> bool {
    let Some(newest) = directory::newest_key(gone) else { return false };
    // It may be a place where the database was before, with the keys of then. And what was
    // decrypted needs no keys.
    let never_had_it =
        directory::last_known(file) < Some(newest) && !directory::is_in_plaintext(gone);
    directory::newest_key(file) < Some(newest)
        && relation_files::may_have_any_fork(file)
        && (never_had_it || has_pages_of(gone, file))
}

/// Whether a file has pages under keys that it lacks and `file` has. Its own may have been
/// destroyed, or forgotten, when its relation had moved away, or when it was decrypted.
fn has_pages_of(file: RelFile, other: RelFile) -> bool {
    relation_files::any_page(other, |page| {
        let version = version_of(page.as_slice());
        version.is_some_and(|version| {
            directory::has_key(file, version) && !directory::has_key(other, version)
        })
    })
}

/// Requires that none of these files, which are gone, was moved in that way.
///
/// # Errors
/// If one may have been.
pub(crate) fn require_not_moved(mut files: impl Iterator<Item = RelFile>) -> Result<()> {
    let moved = files.find_map(|file| Some((file, moved_to(file)?)));
    moved.map_or(Ok(()), |(file, moved)| Err(moved_without_keys(file, moved)))
}

fn moved_without_keys(file: RelFile, moved: RelFile) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relation file {file} is gone, and {moved} lacks its keys"),
    )
    .detail("The database may have been moved while pagevault was not loaded, and these keys are those of its pages. Nothing was changed.")
    .hint("Move the database back first; if that is refused, without pagevault, as it came.")
}

/// Before files are copied: their pages must be under keys of the place that they come from, or the
/// copies be where their keys are. Anywhere else they could get other keys, and these would no more
/// be missed there.
///
/// # Errors
/// If one of them was moved in that way.
pub(super) fn require_own_keys(
    database: Scope,
    copy_of: impl Fn(RelFile) -> Option<RelFile>,
) -> Result<()> {
    let tablespaces = relation_files::tablespaces()?;
    let gone = gone_files(|file| file.scope() == database)?;
    // Nothing can be moved back to a tablespace that was dropped.
    let gone = gone.into_iter().filter(|file| tablespaces.contains(&file.tablespace));
    for file in gone {
        let newest = directory::newest_key(file);
        let goes_elsewhere =
            |other: &RelFile| copy_of(*other).is_some_and(|to| directory::newest_key(to) < newest);
        if let Some(moved) = moved_to(file).filter(goes_elsewhere) {
            return Err(moved_without_keys(file, moved));
        }
    }
    Ok(())
}

/// Files with keys that do not exist.
fn gone_files(is_wanted: impl Fn(RelFile) -> bool) -> Result<Vec<RelFile>> {
    let mut gone = Vec::new();
    for info in shmem::required()?.directory.files()? {
        let file = info?.file;
        if is_wanted(file) && !relation_files::may_have_any_fork(file) {
            gone.push(file);
        }
    }
    Ok(gone)
}

/// Files of this database with keys that do not exist, and had the numbers of these files in other
/// tablespaces: the same relations, whose database was in these. Not those that a relation has, on
/// a file system that is not mounted; nor those of which the keys may be those of another file with
/// the number, in the database's own tablespace, to which it was moved.
pub(super) fn former_places(files: &[RelFile]) -> Result<Vec<RelFile>> {
    let numbers: HashSet<(u32, u32)> =
        files.iter().map(|file| (file.database, file.relation)).collect();
    let mut places = gone_files(|file| {
        numbers.contains(&(file.database, file.relation)) && directory::newest_key(file).is_some()
    })?;
    if places.is_empty() {
        return Ok(places);
    }
    let own = catalog::tablespace_of_database(process::my_database().into()).map(Oid::to_u32);
    let is_anothers = |file: RelFile| {
        let moved = own.map(|tablespace| RelFile { tablespace, ..file });
        moved.is_some_and(|moved| {
            moved != file
                && !files.contains(&moved)
                && (relation_files::may_have_any_fork(moved) || relation_files::is_away(moved))
        })
    };
    let known = survey::files_in_catalog();
    places.retain(|&file| {
        !known.contains(&file) && !relation_files::is_away(file) && !is_anothers(file)
    });
    Ok(places)
}

/// Before a tablespace is dropped: it may be where a database is to be moved back to.
pub(crate) fn require_none_moved_from(tablespace: u32) -> Result<()> {
    let gone = gone_files(|file| file.tablespace == tablespace)?;
    // Only files in a database's own tablespace are moved with it. It is not mounted if it lacks
    // a file that each database has; recovery makes directories without it.
    let own = |database: u32| catalog::tablespace_of_database(database.into()).map(Oid::to_u32);
    let is_away = |(database, tablespace): &(u32, u32)| {
        let directory = compat::database_path(*database, *tablespace);
        !Path::new(&directory).join("PG_VERSION").exists()
    };
    let databases: BTreeSet<u32> = gone.iter().map(|file| file.database).collect();
    let places = databases.into_iter().filter_map(|database| Some((database, own(database)?)));
    let mut elsewhere = places.filter(|(_, own)| *own != tablespace);
    if let Some((database, away)) = elsewhere.find(is_away) {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("the directory of database {database} in tablespace {away} does not exist"),
        )
        .detail("A database may have been moved there while pagevault was not loaded, and need keys of the tablespace that is dropped. Nothing was changed.")
        .hint("Mount it first. If the database is invalid, drop it."));
    }
    require_not_moved(gone.into_iter())
}

/// Databases that this process has told of.
static WARNED: ProcessLocal<BTreeSet<u32>> = ProcessLocal::new(BTreeSet::new());

fn without_keys(file: RelFile, moved: RelFile) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("relation file {file} is gone, and {moved} lacks its keys"),
    )
    .detail("The database may have been moved while pagevault was not loaded. Its relations cannot be read there, and new rows are not encrypted.")
    .hint("Move the database back. Its keys are kept.")
}

/// Notes which files of this worker's database, and which shared files, were dropped.
///
/// While ALTER TABLE ... SET TABLESPACE copies a file, no row has the new one
/// (`ATExecSetTableSpace`, tablecmds.c). So transactions that run now must end first. Prepared
/// ones have their rows.
pub(crate) fn note_in_database(patience: Duration) -> Result<()> {
    let database = process::my_database();
    let mut missing = gone_for_good(|file| file.database == database || file.database == 0)?;
    missing.retain(|file, _| !was_moved(*file));
    let running = xact::running_in_database();
    if missing.is_empty() || !process::is_so_within(patience.max(PATIENCE), || running.have_ended())
    {
        return Ok(());
    }
    let known: HashSet<RelFile> = survey::files_in_catalog();
    note(missing, |file| !known.contains(&file))
}

/// Notes the files of databases that were dropped.
pub(crate) fn note_databases() -> Result<()> {
    let missing = gone_for_good(|file| file.database != 0)?;
    let known: HashSet<u32> =
        catalog::any_databases().into_iter().map(|database| database.to_u32()).collect();
    note(missing, |file| !known.contains(&file.database))
}

/// Those that do not exist, and are not being made.
fn gone_for_good(is_wanted: impl Fn(RelFile) -> bool) -> Result<Missing> {
    let found = missing(&is_wanted)?;
    still_missing(found, is_wanted)
}

/// What of `found` is still missing when nobody is making files any more; nothing if that takes
/// too long. It has been there, or never will be with this key.
pub(super) fn still_missing(
    mut found: Missing,
    is_wanted: impl Fn(RelFile) -> bool,
) -> Result<Missing> {
    let mut creators = Others::at(Activity::Creating, None);
    if found.is_empty() || !process::is_so_within(PATIENCE, || creators.are_done()) {
        return Ok(Missing::new());
    }
    let again = missing(is_wanted)?;
    found.retain(|file, known| again.get(file) == Some(known));
    Ok(found)
}

fn note(missing: Missing, is_dropped: impl Fn(RelFile) -> bool) -> Result<()> {
    let _lock = KeystoreLock::acquire();
    let shared = shmem::required()?;
    for (file, (slot, last)) in missing {
        if is_dropped(file) && shared.directory.last_version(slot) == Ok(Some(last)) {
            shared.dropped.note(slot, last);
        }
    }
    Ok(())
}
