//! Raw copies of pages under interim keys in another database, where redo has copied files.
//!
//! Interim keys are those of one database ([`pagevault_cipher::interim`]), so the copies are sealed
//! again, under the interim keys of the copy, before anybody can read them. A crash meanwhile does
//! no harm: no restart point comes before the record ends, so redo copies the files again.
//!
//! Sessions copy no such pages ([`crate::keys::usage::copies`]). WAL would not have the pages of
//! the copy, and a base backup that begins after the record could have them as they were before.

use std::io;

use pagevault_cipher::page::{self, Page};
use pagevault_cipher::{DataKeyVersion, interim as interim_keys};
use pagevault_keystore::interim::group_at;
use pagevault_keystore::{KeyGroup, RelFile};

use super::errors;
use super::io::{PageFault, fork_of};
use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::{cache, interim};
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::data_checksums;
use crate::pg::redo_of_copies::Place;
use crate::pg::relation_files;
use crate::pg::report::Result;
use crate::shmem;

/// Redo has copied the files of a database.
///
/// # Errors
/// If a file cannot be read, marked or written, or a key of the cluster is missing.
pub(crate) fn replayed(from: Place, to: Place) -> Result<()> {
    if from.database == to.database || !interim::any() {
        return Ok(());
    }
    for info in shmem::required()?.directory.files()? {
        let file = info?.file;
        let is_copied = (file.tablespace, file.database) == (from.tablespace, from.database);
        if is_copied && directory::has_group_key(file) {
            let copy = RelFile { tablespace: to.tablespace, database: to.database, ..file };
            if interim::has_pages(copy) {
                seal_again(file, copy)?;
                fault::point("interim.copied");
            }
        }
    }
    Ok(())
}

fn seal_again(file: RelFile, copy: RelFile) -> Result<()> {
    let mut refused = None;
    let done = relation_files::change_pages(copy, |fork, block, page| {
        seal_page_again(file, copy, fork, block, page).map_err(|error| match error {
            Failure::Key(error) => {
                let file = SmgrFile { file, backend: SHARED_BACKEND };
                refused = Some(errors::report(PageFault::of_key(file, error), block));
                io::ErrorKind::Other.into()
            }
            Failure::Mark(error) => error,
        })
    });
    refused.map_or(done, Err)
}

enum Failure {
    Key(KeyError),
    Mark(io::Error),
}

/// Of a page under an interim key of the file, the version and the key group; `None` also if it is
/// damaged.
fn version_and_group(file: RelFile, block: u32, page: &Page) -> Option<(DataKeyVersion, KeyGroup)> {
    let version = page::version_of(page).filter(|version| interim_keys::is_interim(*version))?;
    let (_, root) = directory::interim_key(file, version)?;
    let group = group_at(root.0)?;
    page::may_be_sealed(page, block, data_checksums()).then_some((version, group))
}

/// True if the page is another one now. One that is damaged, or whose data key is destroyed, stays
/// as it is.
fn seal_page_again(
    file: RelFile,
    copy: RelFile,
    fork: i32,
    block: u32,
    page: &mut Page,
) -> std::result::Result<bool, Failure> {
    let Some((version, group)) = version_and_group(file, block, page) else { return Ok(false) };
    let checksums = data_checksums();
    let original = SmgrFile { file, backend: SHARED_BACKEND };
    let opened = cache::with_page_key(original, version, |key| {
        page::open(page, key, block, fork_of(fork), checksums)
    });
    match opened {
        Ok(Ok(_)) => {}
        Ok(Err(page::NotAuthentic)) | Err(KeyError::Destroyed) => return Ok(false),
        Err(error) => return Err(Failure::Key(error)),
    }
    interim::mark(copy, Some(group)).map_err(Failure::Mark)?;
    cache::with_interim_key_in(copy.database, file, version, |key| {
        page::seal(page, key, version, block, fork_of(fork), checksums)
    })
    .map_err(Failure::Key)
}
