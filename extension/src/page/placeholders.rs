//! Placeholder pages (placeholders): redo gets them instead of pages that it cannot open yet.
//!
//! A base backup copies the keystore at one moment and pages at others. So pages may be sealed
//! under keys that only its WAL brings. Redo may read such a page before it has replayed the key,
//! because not every record restores its pages completely (list:
//! docs/design/0010-what-redo-reads.md). The key was logged in WAL before the page was sealed under
//! it. All earlier records about the page had been applied to it, because a page is changed and
//! written under its lock. So redo has nothing to do to the page until it replays the key, and gets
//! a page whose LSN is higher than any in WAL ([`pagevault_cipher::page::placeholder`]).
//!
//! A placeholder is never written: the page on disk stays as it is. When its key is replayed, the
//! placeholder is dropped from shared buffers, and the real page is read from then on. A full-page
//! image, or another record that initialises the page, also replaces it. If a key is still missing
//! when the data directory would become consistent, the server stops.

use std::time::{Duration, Instant};

use pagevault_cipher::{CipherId, DataKeyVersion, interim, page};
use pagevault_keystore::{Record, RelFile};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::flushing;
use super::written_over::{self, is_unknown};
use crate::fault;
use crate::keys::store::{directory, unsettled};
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::Report;
use crate::pg::{buffers, relation_files};
use crate::shmem::written_over::Note;
use crate::shmem::{self, Shared};

/// Returns the unknown key that a page on disk is under. Passed as a function, because only the
/// hooks can call the storage manager's own functions.
pub(crate) type UnknownVersionOnDisk = fn(SmgrFile, i32, u32) -> Option<DataKeyVersion>;

/// A power of two. Memory is allocated only for entries in use.
const PLACES: usize = 1 << 16;

/// Maximum number of awaited keys. Each belongs to a file that was encrypted or got a new key, and
/// was written to, while a backup was taken.
pub(crate) const LIMIT: usize = PLACES / 4 * 3;

/// An awaited key.
#[derive(Clone, Copy)]
struct Awaited {
    file: RelFile,
    /// `None` in a free entry.
    version: Option<DataKeyVersion>,
    /// Whether WAL has brought it.
    arrived: bool,
    /// The first page that required it.
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
    arrived: false,
    block: 0,
};

/// The keys that the startup process waits for. In static memory, because pages are opened in
/// critical sections.
static TABLE: ProcessLocal<Table> =
    ProcessLocal::new(Table { places: [FREE; PLACES], used: 0, missing: 0 });

impl Table {
    /// The entry of a key, or a free entry for it. There is always a free entry.
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

/// Notes that pages of the file are replaced until the key of this version arrives. False if too
/// many keys are awaited.
pub(crate) fn wait_for(file: RelFile, version: DataKeyVersion, block: u32) -> bool {
    TABLE.with(|table| {
        let at = table.place(file, version);
        if table.places[at].version.is_none() {
            if table.used >= LIMIT {
                return false;
            }
            table.places[at] = Awaited { file, version: Some(version), arrived: false, block };
            table.used += 1;
            table.missing += 1;
        }
        true
    })
}

/// True while any key is awaited.
pub(crate) fn any_awaited() -> bool {
    TABLE.with(|table| table.missing > 0)
}

/// Redo has applied these records. For files whose keys have arrived, or will never be needed,
/// writes the pages that have replaced placeholders, and drops all buffers.
pub(crate) fn replayed(records: &[Record]) {
    let mut files = Vec::new();
    for record in records {
        match *record {
            Record::DataKey { file, version, .. } => {
                files.extend(resolved(file, version));
                let interim = CipherId::ALL.map(|cipher| interim::version_of(cipher, version));
                files.extend(interim.into_iter().filter_map(|version| resolved(file, version)));
            }
            Record::Destroyed { file, through, .. } => {
                let destroyed = (1..=through.get()).filter_map(DataKeyVersion::new);
                files.extend(destroyed.filter_map(|version| resolved(file, version)));
            }
            _ => {}
        }
    }
    buffers::flush_and_drop_files(&files);
}

/// The file, if it was waiting for this key, which is now known or destroyed.
fn resolved(file: RelFile, version: DataKeyVersion) -> Option<RelFile> {
    if !directory::has_key(file, version) && directory::destroyed_at(file, version).is_none() {
        return None;
    }
    TABLE.with(|table| {
        let at = table.place(file, version);
        let place = &mut table.places[at];
        if place.version.is_none() || place.arrived {
            return None;
        }
        place.arrived = true;
        table.missing -= 1;
        Some(file)
    })
}

/// Ends recovery if a key is missing when the data directory would become consistent: a key that
/// redo waits for, or the key of pages on disk that recovery would have overwritten. With
/// `ignore_invalid_pages` it goes on, without placeholders.
pub(crate) fn require_none(version_on_disk: UnknownVersionOnDisk) {
    let mut given_up = Vec::new();
    while any_awaited()
        && let Some(Awaited { file, version: Some(version), block, .. }) = missing()
    {
        if is_on_disk(file, version) {
            refuse(file, version, block);
            given_up.push(file);
        }
        give_up(file, version);
    }
    let Some(shared) = shmem::get() else { return };
    if !is_needed() {
        return;
    }
    // Before the notes are read, so that later pages are refused instead of noted.
    shared.written_over.settle();
    let is_missing = |note: &Note| {
        is_unknown(note.file, note.version)
            && relation_files::may_exist(note.file)
            && is_on_disk(note.file, note.version)
    };
    for Note { file, version, block } in shared.written_over.notes().filter(is_missing) {
        refuse(file, version, block);
    }
    written_over::refuse_overflow();
    // They may be written later, after promotion, without a check.
    for Note { file, version, block } in
        dirty().filter_map(|page| missing_key_on_disk(page, version_on_disk))
    {
        refuse(file, version, block);
        given_up.push(file);
    }
    flushing::of(flushing::existing(given_up), buffers::flush_and_drop_files);
    if let Err(report) = unsettled::forget() {
        report.send(PgLogLevel::WARNING);
    }
}

/// Whether a page under this version is left on disk. None is if WAL has truncated the file since:
/// `pg_rewind` leaves pages under keys of a timeline that was given up where the source truncates a
/// file while `pg_rewind` copies it. Nothing else removes such pages ([`super::written_over`]).
fn is_on_disk(file: RelFile, version: DataKeyVersion) -> bool {
    // A torn page counts, too.
    relation_files::any_page(file, |on_disk| page::version_of(on_disk) == Some(version))
}

/// The pages that the key was needed for are gone, and their buffers with them.
fn give_up(file: RelFile, version: DataKeyVersion) {
    TABLE.with(|table| {
        let at = table.place(file, version);
        table.places[at].arrived = true;
        table.missing -= 1;
    });
}

/// The dirty pages in shared buffers: file, fork, block.
fn dirty() -> impl Iterator<Item = (RelFile, i32, u32)> {
    let dirty = (0..buffers::count()).filter_map(buffers::dirty);
    dirty.filter(|(file, fork, _)| buffers::is_there(*file, *fork))
}

/// The missing key, if the page on disk is sealed under one.
fn missing_key_on_disk(
    (file, fork, block): (RelFile, i32, u32),
    version_on_disk: UnknownVersionOnDisk,
) -> Option<Note> {
    let whole = SmgrFile { file, backend: SHARED_BACKEND };
    let version = version_on_disk(whole, fork, block)?;
    Some(Note { file, version, block })
}

/// A file for which redo would have to be repeated from before this address if a key never arrives,
/// or may have to be. Called when a checkpoint record is replayed.
///
/// As [`missing_key`]. If that took long and is requested again soon, any dirty page counts, which
/// only delays the next restart point.
pub(crate) fn file_with_missing_key(version_on_disk: UnknownVersionOnDisk) -> Option<RelFile> {
    /// When the last comparison ended, and how long it took.
    static LAST: ProcessLocal<Option<(Instant, Duration)>> = ProcessLocal::new(None);
    const SHARE: u32 = 20;
    let is_soon = LAST.get().is_some_and(|(end, took)| end.elapsed() < SHARE * took);
    if is_needed() && (is_soon || fault::leaves_out("comparison")) {
        let any = dirty().map(|(file, _, _)| file).find(|file| relation_files::may_exist(*file));
        return any.or_else(|| missing_key_elsewhere(shmem::get()?));
    }
    let start = Instant::now();
    let found = missing_key(version_on_disk);
    LAST.set(Some((Instant::now(), start.elapsed())));
    found
}

/// A file that has pages which redo has not changed, or whose changes are not written, because a
/// key is missing. Dirty pages in shared buffers are compared with the disk, because a restart
/// point would write them.
pub(crate) fn missing_key(version_on_disk: UnknownVersionOnDisk) -> Option<RelFile> {
    let shared = shmem::get().filter(|_| is_needed())?;
    // In this order: pages that are written meanwhile are noted before they leave the buffers.
    let in_buffers = dirty().find_map(|page| missing_key_on_disk(page, version_on_disk));
    in_buffers.map(|note| note.file).or_else(|| missing_key_elsewhere(shared))
}

/// Whether there may be any key.
fn is_needed() -> bool {
    shmem::anything_sealed() || shmem::any_database_key()
}

/// The same, of pages that are not in shared buffers.
fn missing_key_elsewhere(shared: &Shared) -> Option<RelFile> {
    let noted = || {
        // All of them have arrived, or are not needed.
        if shared.written_over.is_settled() {
            return None;
        }
        let missing = |note: &Note| is_unknown(note.file, note.version);
        shared
            .written_over
            .notes()
            .filter(missing)
            .map(|note| note.file)
            .find(|f| relation_files::may_exist(*f))
    };
    noted().or_else(|| {
        let awaited = if any_awaited() { missing() } else { None };
        awaited.map(|awaited| awaited.file)
    })
}

/// An awaited key of a file that exists.
fn missing() -> Option<Awaited> {
    TABLE.with(|table| {
        let missing = table.places.iter().filter(|place| place.version.is_some() && !place.arrived);
        missing.copied().find(|place| relation_files::may_exist(place.file))
    })
}

/// Ends recovery because of a missing key, unless the user has asked to go on.
fn refuse(file: RelFile, version: DataKeyVersion, block: u32) {
    let file = super::errors::path(file);
    let report = Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("WAL has not brought the data key of version {version} of relation file {file}"),
    );
    if process::ignores_invalid_pages() {
        let detail = format!(
            "Block {block} is encrypted under it, or damaged. Changes of it in WAL may be lost."
        );
        return report.detail(detail).send(PgLogLevel::WARNING);
    }
    report
        .detail(format!("Block {block} is encrypted under it and was needed in recovery. All WAL is replayed that makes the data directory consistent, and the keystore does not hold the key."))
        .hint(format!("Restore a base backup as a whole: data directory, keystore and the WAL that belongs to it. If only the keystore was replaced, put the right one back and start the server again; do not zero the page before.{} If all of them belong together, the page is damaged: {}", unsettled::hint().unwrap_or_default(), super::errors::WITHOUT_THE_PAGE))
        .fatal();
}

/// The report if more keys are missing than [`LIMIT`].
pub(crate) fn too_many(file: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("recovery waits for the data keys of too many relation files, {file} among them"),
    )
    .detail(format!("It has read pages of {LIMIT} relation files whose keys it has not replayed yet."))
    .hint("Restore a base backup that was taken while fewer relations were encrypted or given new keys.")
}
