//! Pages that redo is given in the place of pages which it cannot open yet.
//!
//! A base backup copies the keystore at one moment and pages at others, so pages may be sealed
//! under keys that only its WAL brings. Redo reads such pages before it has come there: not every
//! record restores the pages that it names as a whole (docs/design/0010-what-redo-reads.md has the
//! list). Whoever sealed a page had shown everybody the key, and its record stood in WAL; and all
//! records before that one that concern the page were in the page already, since a page is changed
//! and written under its lock. So redo has nothing to do to the page before it replays the key, and
//! is given one that says that it was changed later than anything
//! ([`pagevault_cipher::page::stand_in`]).
//!
//! A stand-in is never written: the page on disk stays what it is. When its key is replayed, it is
//! dropped from shared buffers, and the real page is read from then on. A full-page image, or
//! whatever makes a page anew, takes its place as well. What must not be is that the data directory
//! counts as consistent while a key is missing: then the server stops.

use std::time::{Duration, Instant};

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::{Record, RelFile};
use pgrx::PgSqlErrorCode;

use super::written_over::{self, is_unknown};
use crate::keys::store::{directory, unsettled};
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::report::Report;
use crate::pg::{buffers, relation_files};
use crate::shmem;
use crate::shmem::written_over::Note;

/// How to look at a page on disk: the version that it is sealed under. Given by who has the storage
/// manager's own functions.
pub(crate) type VersionOnDisk = fn(SmgrFile, i32, u32) -> Option<DataKeyVersion>;

/// A power of two. The memory is used only where there are that many.
const PLACES: usize = 1 << 16;

/// Most keys that are waited for. Each is one of a file that was encrypted or got another key while
/// a backup was taken, and that is written to at the same time.
pub(crate) const MOST: usize = PLACES / 4 * 3;

/// A key that is waited for, or was.
#[derive(Clone, Copy)]
struct Awaited {
    file: RelFile,
    /// `None` in a free place.
    version: Option<DataKeyVersion>,
    /// WAL has brought it.
    came: bool,
    /// The first page that wanted it.
    block: u32,
}

struct Table {
    places: [Awaited; PLACES],
    used: usize,
    missing: usize,
}

const FREE: Awaited = Awaited {
    file: RelFile { tablespace: 0, database: 0, relation: 0 },
    version: None,
    came: false,
    block: 0,
};

/// Of the startup process: the keys that it waits for. In a fixed place, because pages are opened
/// in critical sections.
static TABLE: ProcessLocal<Table> =
    ProcessLocal::new(Table { places: [FREE; PLACES], used: 0, missing: 0 });

impl Table {
    /// Where a key is, or may be put. There is always a free place.
    fn place(&self, file: RelFile, version: DataKeyVersion) -> usize {
        let mixed =
            u64::from(file.relation) << 13 ^ u64::from(file.database) ^ u64::from(version.get());
        let hash = (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize;
        let places = (0..PLACES).map(|step| (hash + step) % PLACES);
        let is_it = |at: &usize| {
            let place = &self.places[*at];
            place.version.is_none() || (place.file, place.version) == (file, Some(version))
        };
        places.into_iter().find(is_it).unwrap_or(0)
    }
}

/// Notes that a page is stood in for until the key of this version comes. False if there are too
/// many.
pub(crate) fn wait_for(file: RelFile, version: DataKeyVersion, block: u32) -> bool {
    TABLE.with(|table| {
        let at = table.place(file, version);
        if table.places[at].version.is_none() {
            if table.used >= MOST {
                return false;
            }
            table.places[at] = Awaited { file, version: Some(version), came: false, block };
            table.used += 1;
            table.missing += 1;
        }
        true
    })
}

/// True while a key is waited for.
pub(crate) fn are_there() -> bool {
    TABLE.with(|table| table.missing > 0)
}

/// Redo has taken in these records. Of the files whose keys have come, or will never be wanted
/// again, the stand-ins are dropped, and what has taken their places is written.
pub(crate) fn replayed(records: &[Record]) {
    let mut files = Vec::new();
    for record in records {
        match *record {
            Record::DataKey { file, version, .. } => files.extend(came(file, version)),
            Record::Destroyed { file, through, .. } => {
                let destroyed = (1..=through.get()).filter_map(DataKeyVersion::new);
                files.extend(destroyed.filter_map(|version| came(file, version)));
            }
            _ => {}
        }
    }
    buffers::flush_and_drop_files(&files);
}

/// The file, if this key was missing and is not any more.
fn came(file: RelFile, version: DataKeyVersion) -> Option<RelFile> {
    if !directory::has_key(file, version) && directory::destroyed_at(file, version).is_none() {
        return None;
    }
    TABLE.with(|table| {
        let at = table.place(file, version);
        let place = &mut table.places[at];
        if place.version.is_none() || place.came {
            return None;
        }
        place.came = true;
        table.missing -= 1;
        Some(file)
    })
}

/// Ends recovery if a key is missing where the data directory is said to be consistent: a key that
/// redo waits for, or one under which pages are sealed that recovery would have written over.
pub(crate) fn require_none(version_on_disk: VersionOnDisk) {
    if are_there()
        && let Some(Awaited { file, version: Some(version), block, .. }) = missing()
    {
        refuse(file, version, block);
    }
    let Some(shared) = shmem::get() else { return };
    if !shmem::anything_sealed() && !shmem::any_database_key() {
        return;
    }
    // First, so that what is not noted yet is refused.
    shared.written_over.settle();
    let is_missing =
        |note: &Note| is_unknown(note.file, note.version) && relation_files::may_exist(note.file);
    if let Some(Note { file, version, block }) = shared.written_over.notes().find(is_missing) {
        refuse(file, version, block);
    }
    written_over::refuse_overflow();
    require_none_in_buffers(version_on_disk);
    unsettled::forget();
}

/// What redo has changed and nobody has written yet, and what is written later without a look:
/// after a promotion.
fn require_none_in_buffers(version_on_disk: VersionOnDisk) {
    if let Some(Note { file, version, block }) =
        dirty().find_map(|page| over_sealed_page(page, version_on_disk))
    {
        refuse(file, version, block);
    }
}

/// The pages in shared buffers that are to be written: file, fork, block.
fn dirty() -> impl Iterator<Item = (RelFile, i32, u32)> {
    let dirty = (0..buffers::count()).filter_map(buffers::dirty);
    dirty.filter(|(file, fork, _)| buffers::is_there(*file, *fork))
}

/// The key that is missing where the page on disk is sealed.
fn over_sealed_page(
    (file, fork, block): (RelFile, i32, u32),
    version_on_disk: VersionOnDisk,
) -> Option<Note> {
    let whole = SmgrFile { file, backend: SHARED_BACKEND };
    let version = version_on_disk(whole, fork, block)?;
    is_unknown(file, version).then_some(Note { file, version, block })
}

/// Where recovery would have to begin before this moment if a key never comes: a file with pages
/// that redo has not changed, or whose changes are not written, for want of the key. Called when a
/// checkpoint record is replayed.
///
/// Pages in shared buffers are compared with the disk, as the restart point would write them. Where
/// that takes long and is asked again soon, any page counts: then there is a restart point later.
pub(crate) fn file_at_stake(version_on_disk: VersionOnDisk) -> Option<RelFile> {
    /// When that was done last, and how long it took.
    static LAST: ProcessLocal<Option<(Instant, Duration)>> = ProcessLocal::new(None);
    const SHARE: u32 = 20;
    let shared = shmem::get()?;
    if !shmem::anything_sealed() && !shmem::any_database_key() {
        return None;
    }
    let last = LAST.get();
    // In this order: what is written meanwhile is noted before.
    let in_buffers = if last.is_some_and(|(end, took)| end.elapsed() < SHARE * took) {
        dirty().map(|(file, _, _)| file).find(|file| relation_files::may_exist(*file))
    } else {
        let start = Instant::now();
        let found =
            dirty().find_map(|page| over_sealed_page(page, version_on_disk)).map(|note| note.file);
        LAST.set(Some((Instant::now(), start.elapsed())));
        found
    };
    let noted = || {
        let missing = |note: &Note| is_unknown(note.file, note.version);
        shared
            .written_over
            .notes()
            .filter(missing)
            .map(|note| note.file)
            .find(|f| relation_files::may_exist(*f))
    };
    in_buffers.or_else(noted).or_else(|| {
        let awaited = if are_there() { missing() } else { None };
        awaited.map(|awaited| awaited.file)
    })
}

/// A key that redo waits for, of a file that exists.
fn missing() -> Option<Awaited> {
    TABLE.with(|table| {
        let missing = table.places.iter().filter(|place| place.version.is_some() && !place.came);
        missing.copied().find(|place| relation_files::may_exist(place.file))
    })
}

/// Ends recovery.
fn refuse(file: RelFile, version: DataKeyVersion, block: u32) {
    let file = super::errors::path(file);
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("WAL has not brought the data key of version {version} of relation file {file}"),
    )
    .detail(format!("Block {block} is encrypted under it and was needed in recovery. All WAL is replayed that makes the data directory consistent, and the keystore does not hold the key."))
    .hint(format!("Restore a base backup as a whole: data directory, keystore and the WAL that belongs to it. If only the keystore was replaced, put the right one back and start the server again. Do not zero or reset the page.{}", unsettled::hint().unwrap_or_default()))
    .fatal();
}

/// More keys are missing at once than there is room for.
pub(crate) fn too_many(file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("recovery waits for the data keys of too many relation files, {file} among them"),
    )
    .detail(format!("It has read pages of {MOST} relation files whose keys it has not replayed yet."))
    .hint("Restore a base backup that was taken while fewer relations were encrypted or given new keys.")
}
