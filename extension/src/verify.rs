//! What is really on disk: the state of every page of a relation file, read from the file itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;

use pagevault_cipher::{Epoch, PAGE_SIZE, Page, page};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::keys::shared;
use crate::page_io;
use crate::pg::catalog;
use crate::pg::compat::{self, SHARED_BACKEND, SmgrFile};
use crate::pg::process;
use crate::pg::report::{Report, Result};

/// What one page is on disk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PageState {
    /// All zero: allocated, never written.
    Empty,
    /// Readable without a key.
    Plaintext,
    /// Sealed under the data key of this epoch.
    Sealed(Epoch),
}

/// Number of pages of one fork in one state.
pub(crate) struct PageCount {
    pub(crate) fork: &'static str,
    pub(crate) state: PageState,
    pub(crate) pages: i64,
}

const FORKS: [(ForkNumber::Type, &str); 4] = [
    (ForkNumber::MAIN_FORKNUM, "main"),
    (ForkNumber::FSM_FORKNUM, "fsm"),
    (ForkNumber::VISIBILITYMAP_FORKNUM, "vm"),
    (ForkNumber::INIT_FORKNUM, "init"),
];

/// Reads every segment of every fork of a file, relative to the data directory.
pub(crate) fn count_pages(file: RelFile) -> Result<Vec<PageCount>> {
    let mut counts = Vec::new();
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
        counts.extend(states.into_iter().map(|(state, pages)| PageCount {
            fork: name,
            state,
            pages,
        }));
    }
    Ok(counts)
}

/// What was shredded can neither be rewritten nor begun anew in place.
pub(crate) fn refuse_destroyed(file: RelFile) -> Result<()> {
    if !shared::is_destroyed(file) {
        return Ok(());
    }
    let file = SmgrFile { file, backend: SHARED_BACKEND };
    Err(page_io::report(page_io::PageFault { file, cause: page_io::Cause::Destroyed }, 0))
}

/// A page sealed under an epoch that the keystore does not know belongs to a keystore that was lost; a
/// new key of that epoch would make it unreadable for ever.
pub(crate) fn refuse_lost_epochs(file: RelFile) -> Result<()> {
    for count in count_pages(file)? {
        if let PageState::Sealed(epoch) = count.state
            && !shared::has_key(file, epoch.get())
        {
            let cause = page_io::Cause::of_missing_key(file, epoch.get());
            let file = SmgrFile { file, backend: SHARED_BACKEND };
            return Err(page_io::report(page_io::PageFault { file, cause }, 0));
        }
    }
    Ok(())
}

/// The blocks of a fork in `range` whose pages on disk are written otherwise than under `wanted` (`None`:
/// in plaintext). What is all zero, or not on disk yet, is not among them.
pub(crate) fn stale_blocks(
    file: RelFile,
    fork: ForkNumber::Type,
    range: std::ops::Range<u32>,
    wanted: Option<Epoch>,
) -> Result<Vec<u32>> {
    let wanted = wanted.map_or(PageState::Plaintext, PageState::Sealed);
    let path = compat::relation_path(file, fork);
    let mut stale = Vec::new();
    let mut next = range.start;
    while next < range.end {
        let segment = next / pg_sys::RELSEG_SIZE;
        let first = next % pg_sys::RELSEG_SIZE;
        let end = range.end.min((segment + 1) * pg_sys::RELSEG_SIZE);
        let path = if segment == 0 { path.clone() } else { format!("{path}.{segment}") };
        let mut pages = vec![0u8; (end - next) as usize * PAGE_SIZE];
        let filled = match File::open(&path) {
            Ok(file) => read_at_most(&file, &mut pages, u64::from(first) * PAGE_SIZE as u64)
                .map_err(|e| unreadable(&path, &e))?,
            Err(e) if e.kind() == ErrorKind::NotFound => 0,
            Err(e) => return Err(unreadable(&path, &e)),
        };
        let pages = pages[..filled].as_chunks::<PAGE_SIZE>().0;
        let states = (next..end).zip(pages.iter().map(state_of));
        stale
            .extend(states.filter(|(_, s)| *s != PageState::Empty && *s != wanted).map(|(b, _)| b));
        next = end;
    }
    Ok(stale)
}

/// Fills `buffer` from `offset` on, as far as the file goes.
fn read_at_most(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

fn count_segment(mut file: &File, path: &str, states: &mut BTreeMap<PageState, i64>) -> Result<()> {
    const PAGES_AT_ONCE: usize = 128;
    let mut buffer = vec![0u8; PAGES_AT_ONCE * PAGE_SIZE];
    let mut filled = 0;
    loop {
        process::check_for_interrupts();
        match file.read(&mut buffer[filled..]) {
            Ok(0) => return Ok(()), // a partial page at the end is one being added just now
            Ok(n) => filled += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(unreadable(path, &e)),
        }
        let whole = filled / PAGE_SIZE * PAGE_SIZE;
        for page in buffer[..whole].as_chunks::<PAGE_SIZE>().0 {
            *states.entry(state_of(page)).or_insert(0) += 1;
        }
        buffer.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

fn state_of(page: &Page) -> PageState {
    match page::epoch_of(page) {
        Some(epoch) => PageState::Sealed(epoch),
        None if page::is_zero(page) => PageState::Empty,
        None => PageState::Plaintext,
    }
}

fn unreadable(path: &str, error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not read file \"{path}\": {error}"),
    )
}

/// How many relation files of a database, in all tablespaces, are not written sealed.
pub(crate) fn plaintext_files(database: u32) -> Result<usize> {
    let mut count = 0;
    for tablespace in catalog::tablespaces() {
        let directory = compat::database_path(database, tablespace.to_u32());
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(unreadable(&directory, &e)),
        };
        for entry in entries {
            let name = entry.map_err(|e| unreadable(&directory, &e))?.file_name();
            // Main forks, their first segments: names that are numbers.
            let Some(relation) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let file = RelFile { tablespace: tablespace.to_u32(), database, relation };
            count += usize::from(!shared::is_sealed(file));
        }
    }
    Ok(count)
}
