//! Pages of visibility maps under the key of a locked group: recovery empties them.
//!
//! Redo clears bits of a map without an image of its page (`visibilitymap_clear`, visibilitymap.c),
//! and makes no page dirty that has none of them. So it is not enough to give it an empty page: the
//! page on disk would keep bits of rows that were changed since. An empty map is right at
//! any time; VACUUM fills it again. Free space maps need no such care: nobody relies on them.

use std::fs::File;
use std::os::unix::fs::FileExt;

use pagevault_cipher::page::{self, HEADER_SIZE, PAGE_SIZE};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::keys::usage::cache;
use crate::keys::usage::interim;
use crate::keys::usage::key_error::KeyError;
use crate::pg::compat::{self, SmgrFile};
use crate::pg::process;
use crate::pg::report::{Report, Result};

/// Before redo reads this page of a visibility map: empties it on disk if it is under the key of a
/// locked group.
///
/// # Errors
/// As of the file system.
#[cold]
pub(crate) fn empty_if_locked(file: SmgrFile, block: u32) -> Result<()> {
    if !process::replays_wal_now() {
        return Ok(());
    }
    let path = compat::relation_path(file.file, ForkNumber::VISIBILITYMAP_FORKNUM);
    let (segment, block) = (block / pg_sys::RELSEG_SIZE, block % pg_sys::RELSEG_SIZE);
    let path = if segment == 0 { path } else { format!("{path}.{segment}") };
    empty_in(file, &path, u64::from(block) * PAGE_SIZE as u64).map_err(|error| {
        Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not empty a page of the visibility map \"{path}\": {error}"),
        )
    })
}

fn empty_in(file: SmgrFile, path: &str, offset: u64) -> std::io::Result<()> {
    let map = File::options().read(true).write(true).open(path)?;
    let mut header = [0; HEADER_SIZE];
    map.read_exact_at(&mut header, offset)?;
    let Some(version) = page::version_of(&header) else { return Ok(()) };
    let locked = cache::with_page_key(file, version, |_| ());
    let Err(KeyError::Locked { scope }) = locked else { return Ok(()) };
    if !scope.key_group().is_some_and(interim::is_possible) {
        return Ok(());
    }
    interim::mark_map(file.file)?;
    // First the header alone, which makes the rest invalid (`PageIsVerified`, bufpage.c): a torn
    // page must not open to random bits.
    map.write_all_at(&[0; HEADER_SIZE], offset)?;
    map.sync_data()?;
    map.write_all_at(&[0; PAGE_SIZE], offset)?;
    map.sync_data()
}
