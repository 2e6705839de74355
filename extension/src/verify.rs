//! What is really on disk: the state of every page of a relation file, read from the file itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};

use pagevault_cipher::{Epoch, PAGE_SIZE, Page, page};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::ForkNumber;

use crate::pg::compat;
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
