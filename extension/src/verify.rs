//! What is on disk: the state of each page of a relation file, read from the file itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use pagevault_cipher::{DataKeyVersion, Lsn, PAGE_SIZE};
pub(crate) use pagevault_core::page::PageState;
use pagevault_core::page::Target;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber, Oid};

use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::page::errors;
use crate::page::io::PageFault;
use crate::pg::compat::{self, SHARED_BACKEND, SmgrFile};
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, process, relation_files};

/// Number of pages of one fork in one state.
pub(crate) struct PageCount {
    pub(crate) fork: &'static str,
    pub(crate) state: PageState,
    pub(crate) pages: i64,
    /// The server refuses them.
    pub(crate) is_refused: bool,
}

/// All forks of a relation.
pub(crate) const ALL_FORKS: std::ops::RangeInclusive<ForkNumber::Type> =
    ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM;

const FORKS: [(ForkNumber::Type, &str); 4] = [
    (ForkNumber::MAIN_FORKNUM, "main"),
    (ForkNumber::FSM_FORKNUM, "fsm"),
    (ForkNumber::VISIBILITYMAP_FORKNUM, "vm"),
    (ForkNumber::INIT_FORKNUM, "init"),
];

/// Which pages of a file the server refuses at a moment; see
/// [`page::io::open`](crate::page::io::open).
struct Refused {
    file: RelFile,
    plaintext: bool,
    /// Those under earlier versions.
    below: Option<DataKeyVersion>,
}

impl Refused {
    fn now(file: RelFile) -> Refused {
        Refused { file, plaintext: directory::is_sealed_only(file), below: directory::floor(file) }
    }

    fn contains(&self, fork: ForkNumber::Type, state: PageState) -> bool {
        let refuses = match state {
            PageState::Empty => false,
            PageState::Plaintext => self.plaintext,
            PageState::Sealed(version) => directory::is_below(self.file, version, self.below),
        };
        refuses && matches!(fork, ForkNumber::MAIN_FORKNUM | ForkNumber::INIT_FORKNUM)
    }
}

/// Counts the pages in all segments of all forks of a file.
///
/// Pages are refused that were so before they were read, and still are. A job may end meanwhile, so
/// that pages which were right when they were read would be refused now; or one may begin that
/// decrypts.
pub(crate) fn count_pages(file: RelFile) -> Result<Vec<PageCount>> {
    let before = Refused::now(file);
    fault::point_of("verify.begins", file.relation);
    let mut counted = Vec::new();
    for (fork, name) in FORKS {
        let mut states = BTreeMap::new();
        let path = compat::relation_path(file, fork);
        for segment in 0u32.. {
            let path = if segment == 0 { path.clone() } else { format!("{path}.{segment}") };
            match File::open(&path) {
                Ok(file) => count_segment(&file, &path, &mut states)?,
                Err(e) if e.kind() == ErrorKind::NotFound => break,
                Err(e) => return Err(unreadable(&path, &e)),
            }
        }
        counted.extend(states.into_iter().map(|(state, pages)| (fork, name, state, pages)));
    }
    fault::point_of("verify.counted", file.relation);
    let after = Refused::now(file);
    let count = |(fork, name, state, pages)| {
        let is_refused = before.contains(fork, state) && after.contains(fork, state);
        PageCount { fork: name, state, pages, is_refused }
    };
    Ok(counted.into_iter().map(count).collect())
}

/// [`count_pages`] of a relation, which has a file, except for an unlogged one in recovery. If that
/// is missing, its file system is not mounted, perhaps.
pub(crate) fn count_pages_of(relation: &Facts) -> Result<Vec<PageCount>> {
    if !relation_files::exists(relation.file)? && !process::in_recovery() {
        let path = compat::relation_path(relation.file, ForkNumber::MAIN_FORKNUM);
        return Err(unreadable(&path, &std::io::Error::from_raw_os_error(libc::ENOENT)));
    }
    count_pages(relation.file)
}

/// The pages of a relation and of those that follow it, except for temporary storage. Waits for no
/// lock: if a file is replaced while it is read, everything is read again. Of replacements in
/// progress, the former state is returned.
pub(crate) fn pages_of(relation: Oid) -> Result<Vec<(Facts, Vec<PageCount>)>> {
    /// Limits repetitions if files are replaced all the time.
    const ATTEMPTS: u32 = 10;
    let stored = || {
        relation::accept_invalidations();
        let mut members = relation::family_unlocked(relation);
        members.retain(Facts::is_stored);
        members
    };
    let files = |members: &[Facts]| members.iter().map(|m| m.file).collect::<Vec<_>>();
    let (mut members, mut attempts) = (stored(), ATTEMPTS);
    loop {
        let counts: Result<Vec<_>> = members.iter().map(count_pages_of).collect();
        let after = stored();
        attempts -= 1;
        if files(&after) == files(&members) || attempts == 0 {
            return Ok(members.into_iter().zip(counts?).collect());
        }
        members = after;
    }
}

/// Length of the main fork of a file in bytes; 0 if the file does not exist.
pub(crate) fn main_fork_bytes(file: RelFile) -> Result<i64> {
    let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
    let mut bytes = 0;
    for segment in 0u32.. {
        process::check_for_interrupts();
        let path = if segment == 0 { path.clone() } else { format!("{path}.{segment}") };
        match std::fs::metadata(&path) {
            Ok(found) => bytes += found.len() as i64,
            Err(e) if e.kind() == ErrorKind::NotFound => break,
            Err(e) => return Err(unreadable(&path, &e)),
        }
    }
    Ok(bytes)
}

/// Whether new pages of a file are encrypted, or pages on disk are and have not been rewritten.
pub(crate) fn may_be_sealed(file: RelFile) -> Result<bool> {
    if !directory::is_known(file) || directory::is_sealed(file) {
        return Ok(directory::is_sealed(file));
    }
    Ok(count_pages(file)?.iter().any(|count| matches!(count.state, PageState::Sealed(_))))
}

/// Refuses a shredded file: it can be neither rewritten nor restarted in place.
pub(crate) fn refuse_destroyed(file: RelFile) -> Result<()> {
    if !directory::is_destroyed(file) {
        return Ok(());
    }
    let file = SmgrFile { file, backend: SHARED_BACKEND };
    Err(errors::report(PageFault::of_key(file, KeyError::Destroyed), 0))
}

/// Refuses a page encrypted under a version that the keystore does not know. It belongs to a lost
/// keystore, and a new key of that version would make it unreadable for ever.
///
/// Examines these blocks of one fork; true if there may be more behind them.
pub(crate) fn refuse_lost_versions(
    file: RelFile,
    fork: ForkNumber::Type,
    range: Range<u32>,
) -> Result<bool> {
    let mut lost = None;
    // Such a page is read as an empty one.
    let is_read_as_empty = |version: DataKeyVersion| {
        directory::destroyed_at(file, version).is_some()
            && !directory::is_lost_key(file, version)
            && !directory::is_destroyed(file)
    };
    let more = scan(file, fork, range, |block, state, _| {
        if let PageState::Sealed(version) = state
            && lost.is_none_or(|(_, known)| known != version)
            && !directory::has_key(file, version)
            && !is_read_as_empty(version)
        {
            lost.get_or_insert((block, version));
        }
    })?;
    match lost {
        None => Ok(more),
        Some((block, version)) => {
            let cause = KeyError::of_missing_key(file, version);
            let file = SmgrFile { file, backend: SHARED_BACKEND };
            Err(errors::report(PageFault::of_key(file, cause), block))
        }
    }
}

/// The blocks of a fork in `range` whose pages on disk are not in the target state. Pages of zeros,
/// and pages that are not on disk yet, are not included. `unchanged_since`: also the blocks whose
/// pages no WAL record has changed since this address, whatever state they are in.
pub(crate) fn stale_blocks(
    target: Target,
    fork: ForkNumber::Type,
    range: Range<u32>,
    unchanged_since: Option<Lsn>,
) -> Result<Vec<u32>> {
    let mut stale = Vec::new();
    scan(target.file, fork, range, |block, state, lsn| {
        let is_unchanged = state != PageState::Empty && Some(lsn) <= unchanged_since;
        if is_unchanged || !target.is_met_by(state) {
            stale.push(block);
        }
    })?;
    Ok(stale)
}

/// Whether all pages of these blocks are in the target state or not included, see [`stale_blocks`];
/// and whether there may be more blocks behind them.
pub(crate) fn are_fresh(
    target: Target,
    fork: ForkNumber::Type,
    range: Range<u32>,
) -> Result<(bool, bool)> {
    let mut fresh = true;
    let more = scan(target.file, fork, range, |_, state, _| fresh &= target.is_met_by(state))?;
    Ok((fresh, more))
}

/// Passes the state and LSN of each of these blocks on disk to `found`. True unless the file ends
/// before the last of them.
fn scan(
    file: RelFile,
    fork: ForkNumber::Type,
    range: Range<u32>,
    mut found: impl FnMut(u32, PageState, Lsn),
) -> Result<bool> {
    let path = compat::relation_path(file, fork);
    let mut next = range.start;
    while next < range.end {
        let segment = next / pg_sys::RELSEG_SIZE;
        let base = segment * pg_sys::RELSEG_SIZE;
        let end = range.end.min(base + pg_sys::RELSEG_SIZE);
        let path = if segment == 0 { path.clone() } else { format!("{path}.{segment}") };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(unreadable(&path, &e)),
        };
        let mut seen = next - base;
        let of_segment = |block: u32, state: PageState, lsn: Lsn| {
            seen = block + 1;
            found(base + block, state, lsn);
        };
        let read = read_states(&file, next - base..end - base, of_segment);
        read.map_err(|e| unreadable(&path, &e))?;
        if seen < end - base {
            return Ok(false);
        }
        next = end;
    }
    Ok(true)
}

/// Syncs a segment of a fork, opening it for that, as `mdsyncfiletag` (md.c) does. False if it does
/// not exist.
///
/// The file need not be locked: if it is dropped, or becomes another relation's, nothing depends on
/// the sync.
pub(crate) fn sync_segment(file: RelFile, fork: ForkNumber::Type, segment: u32) -> Result<bool> {
    let path = compat::relation_path(file, fork);
    let path = if segment == 0 { path } else { format!("{path}.{segment}") };
    let opened = match File::open(&path) {
        Ok(opened) => opened,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(unreadable(&path, &e)),
    };
    if process::fsync()
        && let Err(error) = opened.sync_all()
    {
        // The kernel may forget what it could not write; then only WAL contains it
        // (data_sync_retry).
        Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not fsync file \"{path}\": {error}"),
        )
        .send(process::level_of_failed_sync());
    }
    Ok(true)
}

fn count_segment(file: &File, path: &str, states: &mut BTreeMap<PageState, i64>) -> Result<()> {
    let found = |_, state, _| *states.entry(state).or_insert(0) += 1;
    read_states(file, 0..pg_sys::RELSEG_SIZE, found).map_err(|e| unreadable(path, &e))
}

/// Passes the state and LSN of each of these blocks of a segment to `found`, up to its end.
///
/// Reads headers only: otherwise, copying whole pages from the kernel's cache takes most of the
/// time.
fn read_states(
    file: &File,
    blocks: Range<u32>,
    mut found: impl FnMut(u32, PageState, Lsn),
) -> std::io::Result<()> {
    /// Number of blocks to read ahead. The kernel does not detect that reading headers is
    /// sequential.
    const AHEAD: u32 = 128;
    // A partial page at the end is being added at this moment.
    let length = file.metadata()?.len() / PAGE_SIZE as u64;
    let end = blocks.end.min(u32::try_from(length).unwrap_or(u32::MAX));
    for block in blocks.start..end {
        if (block - blocks.start).is_multiple_of(AHEAD) {
            process::check_for_interrupts();
            read_ahead(file, block..end.min(block.saturating_add(2 * AHEAD)));
        }
        let offset = u64::from(block) * PAGE_SIZE as u64;
        match PageState::read(|into| file.read_exact_at(into, offset)) {
            Ok((state, lsn)) => found(block, state, lsn),
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => break, // truncated meanwhile
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn read_ahead(file: &File, blocks: Range<u32>) {
    let offset = i64::from(blocks.start) * PAGE_SIZE as i64;
    let length = blocks.len() as i64 * PAGE_SIZE as i64;
    relation_files::will_be_read(file, offset, length);
}

fn unreadable(path: &str, error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read file \"{path}\": {error}"),
    )
}

/// Number of relation files of a database, in all tablespaces, that are not encrypted.
pub(crate) fn plaintext_files(database: u32) -> Result<usize> {
    let mut count = 0;
    for tablespace in catalog::tablespaces() {
        count += plaintext_files_in(database, tablespace.to_u32(), 0)?;
    }
    Ok(count)
}

/// Number of relation files of a database in one tablespace, with numbers from `first` on, that are
/// not encrypted.
pub(crate) fn plaintext_files_in(database: u32, tablespace: u32, first: u32) -> Result<usize> {
    let plaintext = |file: &RelFile| file.relation >= first && !directory::is_sealed(*file);
    Ok(files_in(database, tablespace)?.iter().filter(|file| plaintext(file)).count())
}

/// The relation files of a database in one tablespace.
pub(crate) fn files_in(database: u32, tablespace: u32) -> Result<Vec<RelFile>> {
    let directory = compat::database_path(database, tablespace);
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unreadable(&directory, &e)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| unreadable(&directory, &e))?.file_name();
        // First segments of main forks: names that are numbers.
        if let Some(relation) = name.to_str().and_then(|name| name.parse().ok()) {
            files.push(RelFile { tablespace, database, relation });
        }
    }
    Ok(files)
}
