//! Pages whose header names another key version than the one that they are under: bits of
//! `pd_flags` were changed since they were written.

use super::{VERSION_SHIFT, is_plaintext, open, version_of};
use crate::checksum::page_checksum;
use crate::key::Fork;
use crate::layout::{CHECKSUM, FLAGS, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, Page, get, put};
use crate::page_key::PageKey;
use crate::version::DataKeyVersion;

/// Whether the page was sealed here with this key, which is that of `version`, although it names
/// another version. `page` is undefined afterwards.
///
/// A format with tags proves it. Of the other one PostgreSQL would accept the opened page; of
/// random bytes it accepts one in four million, or less (a checksum of 16 bits, and `pd_special`).
#[must_use]
pub fn is_misnamed(
    page: &mut Page,
    key: &PageKey,
    version: DataKeyVersion,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> bool {
    if version_of(page).is_none_or(|named| named == version) {
        return false;
    }
    put_version(page, version.get());
    if get(page, CHECKSUM) != 0 {
        put(page, CHECKSUM, page_checksum(page, block));
    }
    open(page, key, block, fork, checksums).is_ok_and(|opened| opened.is_some())
        && is_plaintext(page)
        && (get(page, CHECKSUM) == if checksums { page_checksum(page, block) } else { 0 })
}

/// Whether the page is in plaintext, although it names a version. Of sealed pages one in four
/// million looks so, or less.
#[must_use]
pub fn is_misnamed_plaintext(page: &Page) -> bool {
    let mut page = *page;
    let named = version_of(&page).is_some();
    put_version(&mut page, 0);
    named && get(&page, PAGESIZE_VERSION) == PAGESIZE_VERSION_VALUE && is_plaintext(&page)
}

fn put_version(page: &mut Page, number: u16) {
    let flags = get(page, FLAGS) & ((1 << VERSION_SHIFT) - 1);
    put(page, FLAGS, number << VERSION_SHIFT | flags);
}
