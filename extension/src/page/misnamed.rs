//! Pages that name a key version which the file does not have, because bits of their header were
//! changed: they are under a key that it has, or in plaintext.
//!
//! Recovery must not mistake such a damaged page for one whose key is missing ([`written_over`]):
//! no key will ever come for it, and WAL is about to restore it. One bit is enough for that where
//! there are no data checksums. A page whose key is missing opens under no other key.
//!
//! [`written_over`]: super::written_over

use pagevault_cipher::{Page, page};

use super::io::fork_of;
use crate::keys::store::directory;
use crate::keys::usage::cache;
use crate::pg::compat::SmgrFile;
use crate::pg::process::data_checksums;

/// Whether this page of the file, as it is on disk, is under one of the file's keys or in
/// plaintext, other than it says. Not if the key is locked.
#[cold]
pub(super) fn is_misnamed(file: SmgrFile, fork: i32, block: u32, on_disk: &Page) -> bool {
    let (fork, checksums) = (fork_of(fork), data_checksums());
    page::is_misnamed_plaintext(on_disk)
        || directory::any_version(file.file, |version| {
            let is_it = cache::with_page_key(file, version, |key| {
                page::is_misnamed(&mut { *on_disk }, key, version, block, fork, checksums)
            });
            is_it.is_ok_and(|is_it| is_it)
        })
}
