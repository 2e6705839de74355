//! Pages that are judged when the data directory is consistent, because redo reads them before.
//!
//! **Torn pages** of ciphers that authenticate pages. WAL has an image of each, but redo may read
//! the page before it has come to the image: records of hash indexes register the primary bucket
//! page with `REGBUF_NO_IMAGE`, and read it for its lock only (`hash_xlog_delete` and others,
//! hash_xlog.c). So redo gets a placeholder ([`super::placeholders`]), which the image replaces. A
//! page that is not restored ends recovery. Then nothing is lost: records that redo has skipped are
//! replayed again when the right page is there.
//!
//! **Older pages**: in plaintext, or under a former key, in a file that accepts none. Redo may read
//! such a page of a base backup, or on a standby (docs/design/0041-sealed-only.md). They must not
//! stay in shared buffers, where nobody would refuse them any more. What redo has restored is
//! written, and everything is read again.

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{flushing, io};
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::Report;
use crate::pg::{buffers, relation_files};

/// Reads a page as it is on disk and says whether it can be opened; true if there is no such page.
/// Passed as a function, because only the hooks can call the storage manager's own functions.
pub(crate) type IsAuthenticOnDisk = fn(SmgrFile, i32, u32) -> bool;

/// More pages are torn by no crash: these are the ones that were being written.
const LIMIT: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Noted {
    file: RelFile,
    fork: i32,
    block: u32,
}

/// In static memory, because pages are opened in critical sections.
struct Table<T, const N: usize> {
    entries: [T; N],
    used: usize,
}

impl<T: Copy + PartialEq, const N: usize> Table<T, N> {
    const fn new(empty: T) -> Self {
        Self { entries: [empty; N], used: 0 }
    }

    /// False if there is no room.
    fn note(&mut self, entry: T) -> bool {
        if self.entries[..self.used].contains(&entry) {
            return true;
        }
        let Some(place) = self.entries.get_mut(self.used) else { return false };
        *place = entry;
        self.used += 1;
        true
    }

    fn take(&mut self) -> Vec<T> {
        self.entries[..std::mem::take(&mut self.used)].to_vec()
    }
}

const NO_FILE: RelFile = RelFile { tablespace: 0, database: 0, relation: 0 };

static TORN: ProcessLocal<Table<Noted, LIMIT>> =
    ProcessLocal::new(Table::new(Noted { file: NO_FILE, fork: 0, block: 0 }));

static OLDER: ProcessLocal<Table<RelFile, LIMIT>> = ProcessLocal::new(Table::new(NO_FILE));

/// Whether [`OLDER`] had no room for a file.
static ANY_FILE: ProcessLocal<bool> = ProcessLocal::new(false);

/// Notes a page for which redo gets a placeholder. False if there are too many.
#[cold]
pub(crate) fn note_torn(file: RelFile, fork: i32, block: u32) -> bool {
    TORN.with(|torn| torn.note(Noted { file, fork, block }))
}

/// Notes that a page of this file was accepted that would be refused later.
#[cold]
pub(crate) fn note_older(file: RelFile) {
    if !OLDER.with(|older| older.note(file)) {
        ANY_FILE.set(true);
    }
}

/// A file with a torn page that redo may not have restored yet. A restart point has to wait: redo
/// has skipped records about the page.
pub(crate) fn file_with_torn_page() -> Option<RelFile> {
    TORN.with(|torn| {
        let mut files = torn.entries[..torn.used].iter().map(|noted| noted.file);
        files.find(|file| relation_files::may_exist(*file))
    })
}

/// Judges all noted pages, at consistency, before any session can read them.
pub(crate) fn judge(is_authentic_on_disk: IsAuthenticOnDisk) {
    let torn = TORN.with(Table::take);
    let mut files = OLDER.with(Table::take);
    files.extend(torn.iter().map(|noted| noted.file));
    if ANY_FILE.get() {
        files.extend((0..buffers::count()).filter_map(buffers::file_at));
        ANY_FILE.set(false);
    }
    flushing::of(flushing::existing(files), buffers::flush_and_drop_files);
    for Noted { file, fork, block } in torn {
        let is_there = relation_files::may_exist(file) && buffers::is_there(file, fork);
        let whole = SmgrFile { file, backend: SHARED_BACKEND };
        if is_there && flushing::is_usable(file) && !is_authentic_on_disk(whole, fork, block) {
            refuse(file, block);
        }
    }
}

/// Ends recovery because of a page that is not authentic, unless the user has asked to go on.
fn refuse(file: RelFile, block: u32) {
    io::count_refusal(SmgrFile { file, backend: SHARED_BACKEND });
    let path = super::errors::path(file);
    let report = Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!(
            "WAL has not restored block {block} of relation file {path}, which is not as it was encrypted"
        ),
    );
    if process::ignores_invalid_pages() {
        let detail = "It was changed on disk, or torn. Changes of it in WAL are lost.";
        report.detail(detail).send(PgLogLevel::WARNING);
        return;
    }
    report
        .detail("It was changed on disk, or torn while full_page_writes or the other conditions of authenticated pages were off. Redo has skipped its changes.")
        .hint("Put the right file back, from a backup or a standby, and start the server again; or fail over to a standby: nothing is lost. To go on without this page, start the server with ignore_invalid_pages = on: then the page is refused when it is read.")
        .fatal();
}
