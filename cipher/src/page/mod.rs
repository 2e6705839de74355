//! Sealing and opening relation pages. The cipher of the key says in which format ([`PageFormat`]).
//!
//! Of a sealed page of whichever format the first [`HEADER_SIZE`] bytes are clear, and say under
//! which version of the data key it is sealed ([`version_of`]): that key says the cipher. So a file
//! may be a mixture of formats, and whoever looks at the version alone need not know any of them.
//! Outside the page carries PostgreSQL's checksum over the sealed bytes.

mod blank;
mod v1;

#[cfg(test)]
mod tests;

pub use self::blank::{blank, bury, is_bare, is_stand_in, stand_in};
use crate::checksum::page_checksum;
use crate::key::{CipherId, Fork, PageKey};
use crate::layout::{CHECKSUM, FLAGS, LOWER, LSN, UPPER, VALID_FLAGS, get};
pub use crate::layout::{PAGE_SIZE, Page, is_zero};
use crate::lsn::Lsn;
use crate::version::DataKeyVersion;

/// Bytes of a page that stay clear: all that [`version_of`] needs, and all that a proof of what is
/// on disk has to read.
pub const HEADER_SIZE: usize = 16;

/// The version of the data key stands above the bits of `pd_flags` that PostgreSQL uses.
const VERSION_SHIFT: u32 = 3;

const _: () = {
    assert!(DataKeyVersion::LAST.get() == u16::MAX >> VERSION_SHIFT);
    assert!(VALID_FLAGS == (1 << VERSION_SHIFT) - 1);
    assert!(FLAGS + 2 <= HEADER_SIZE);
};

/// How a sealed page looks. The numbers are those of docs/formats.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageFormat {
    /// AES-XTS, not authenticated: module `v1`.
    V1 = 1,
}

impl PageFormat {
    /// The format of pages that are sealed with this cipher.
    #[must_use]
    pub const fn of(cipher: CipherId) -> Self {
        match cipher {
            CipherId::Aes256Xts | CipherId::Aes128Xts => Self::V1,
        }
    }
}

/// The page is not as it was sealed, or not where. Only a format that authenticates pages can tell:
/// what [`PageFormat::V1`] opens has a wrong checksum then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the page is not as it was sealed")]
pub struct NotAuthentic;

/// The version a page is sealed under, from its first [`HEADER_SIZE`] bytes; `None` for a plaintext
/// or all-zero page, and if `header` is too short to tell.
#[must_use]
pub fn version_of(header: &[u8]) -> Option<DataKeyVersion> {
    match header {
        [_, _, _, _, _, _, _, _, _, _, low, high, _, _, _, _, ..] => {
            DataKeyVersion::new(u16::from_le_bytes([*low, *high]) >> VERSION_SHIFT)
        }
        _ => None,
    }
}

/// `pd_lsn`, which is clear in a sealed page too.
#[inline]
#[must_use]
pub fn lsn_of(page: &Page) -> Lsn {
    page[LSN..].first_chunk().map_or(Lsn::INVALID, |stored| Lsn::from_page(*stored))
}

/// Most often that one byte may stand in the sealed part of a page. In 8176 random bytes each
/// stands 32 times on average; the chance that any stands more than four times as often is below
/// 2^-100 (Chernoff's bound).
const MOST_OF_ONE_BYTE: u16 = 128;

/// Whether a page that names a version, of which there is no key, can be a sealed page at all, and
/// is not a damaged one or something else that has bits there: its checksum is right (with
/// `checksums` off, or none), its header is one that PostgreSQL accepts, and the rest looks like
/// ciphertext.
///
/// Whatever was sealed and written wholly passes. Of what was not little does, but some may.
#[must_use]
pub fn may_be_sealed(page: &Page, block: u32, checksums: bool) -> bool {
    let checksum = get(page, CHECKSUM);
    let is_summed = checksum == 0 && !checksums || checksum == page_checksum(page, block);
    let (lower, upper) = (get(page, LOWER), get(page, UPPER));
    // PageIsVerified (bufpage.c)
    let is_header = lower <= upper && 0 < upper && usize::from(upper) <= PAGE_SIZE;
    let mut counts = [0_u16; 256];
    page[HEADER_SIZE..].iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    version_of(page).is_some()
        && is_summed
        && is_header
        && counts.iter().all(|count| *count <= MOST_OF_ONE_BYTE)
}

/// Seals a plaintext page in place, in the format of the key's cipher; false for an all-zero page,
/// which is left as it is.
///
/// `block` is the block number in the fork. With `checksums`, the page must carry its plaintext
/// checksum already, as PostgreSQL sets it before every write (`PageSetChecksumCopy`); it travels
/// inside, and the sealed page gets one of its own. Without, both are zero.
pub fn seal(
    page: &mut Page,
    key: &PageKey,
    version: DataKeyVersion,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> bool {
    if is_zero(page) {
        return false;
    }
    match PageFormat::of(key.cipher()) {
        PageFormat::V1 => v1::seal(page, key, version, block, fork, checksums),
    }
    true
}

/// Opens a sealed page in place; `key` is that of its version ([`version_of`]). A page that is not
/// sealed is left as it is.
///
/// # Errors
/// [`NotAuthentic`], where the format can tell; what is in the page is undefined then.
pub fn open(
    page: &mut Page,
    key: &PageKey,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> Result<(), NotAuthentic> {
    if version_of(page).is_none() {
        return Ok(());
    }
    match PageFormat::of(key.cipher()) {
        PageFormat::V1 => {
            v1::open(page, key, block, fork, checksums);
            Ok(())
        }
    }
}
