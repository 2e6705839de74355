//! Sealing and opening relation pages, in the format of the key's cipher ([`PageFormat`]).
//!
//! In all formats the first [`HEADER_SIZE`] bytes of a sealed page are plaintext, and contain the
//! version of its data key ([`version_of`]). The keystore records the cipher of each version, so a
//! file may contain several formats, and code that needs only the version need not know them.
//! PostgreSQL's checksum in the header is that of the sealed bytes.

mod blank;
mod misnamed;
mod v1;
mod v2;

#[cfg(test)]
mod tests;

pub use self::blank::{blank, blank_heap, is_bare, is_bare_block, is_placeholder, placeholder};
pub use self::misnamed::{is_misnamed, is_misnamed_plaintext};
use crate::checksum::page_checksum;
use crate::key::{CipherId, Fork};
use crate::layout::{CHECKSUM, FLAGS, LOWER, LSN, SPECIAL, UPPER, VALID_FLAGS, get};
pub use crate::layout::{PAGE_SIZE, Page, is_zero};
use crate::lsn::Lsn;
use crate::page_key::PageKey;
use crate::tag::Position;
use crate::version::DataKeyVersion;

/// Bytes of a page that are never encrypted. They suffice for [`version_of`], and for the proof
/// that a file is encrypted.
pub const HEADER_SIZE: usize = 16;

/// The version is stored above the bits of `pd_flags` that PostgreSQL uses.
const VERSION_SHIFT: u32 = 3;

const _: () = {
    assert!(DataKeyVersion::LAST.get() == u16::MAX >> VERSION_SHIFT);
    assert!(VALID_FLAGS == (1 << VERSION_SHIFT) - 1);
    assert!(FLAGS + 2 <= HEADER_SIZE);
};

/// Format of a sealed page, with the number in docs/formats.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageFormat {
    /// AES-XTS, not authenticated: module `v1`.
    V1 = 1,
    /// AES-XTS with a tag in each page: module `v2`.
    V2 = 2,
}

impl PageFormat {
    /// The format of pages that are sealed with this cipher.
    #[must_use]
    pub const fn of(cipher: CipherId) -> Self {
        match cipher {
            CipherId::Aes256Xts | CipherId::Aes128Xts => Self::V1,
            CipherId::Aes256XtsAuth | CipherId::Aes256XtsHmac => Self::V2,
        }
    }
}

/// How much of a tag a sealed page has: how likely it is that a change of it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strength {
    /// None: [`PageFormat::V1`].
    Unauthenticated,
    /// 20 bits: the page has no room for more.
    Short,
    /// 128 bits.
    Full,
}

/// The page is damaged, or was sealed for another place. Only a format that authenticates pages
/// reports this; with [`PageFormat::V1`] such a page has a wrong checksum after it was opened.
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

/// `pd_lsn`, which is plaintext in a sealed page too.
#[inline]
#[must_use]
pub fn lsn_of(header: &[u8]) -> Lsn {
    let stored = header.get(LSN..).and_then(|stored| stored.first_chunk());
    stored.map_or(Lsn::INVALID, |stored| Lsn::from_page(*stored))
}

/// Maximum number of occurrences of a byte value in the sealed part of a page. In 8176 random bytes
/// each value occurs 32 times on average. The probability that any occurs more than four times as
/// often is below 2^-100 (Chernoff bound).
const MOST_OF_ONE_BYTE: u16 = 128;

/// Whether a page that names a key version without a key can be a sealed page at all, and not a
/// damaged page or other data. Then its checksum is right (or 0 with `checksums` off), PostgreSQL
/// accepts its header, and the rest looks like ciphertext.
///
/// True for every page that was sealed and written completely; for other data it is rarely true.
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

/// Whether PostgreSQL would accept the page as one in plaintext, if its checksum is right or
/// ignored (`PageIsVerified`, bufpage.c). Neither a sealed page nor a zero page is one.
#[must_use]
pub fn is_plaintext(page: &Page) -> bool {
    let (lower, upper, special) = (get(page, LOWER), get(page, UPPER), get(page, SPECIAL));
    version_of(page).is_none()
        && upper != 0
        && lower <= upper
        && upper <= special
        && usize::from(special) <= PAGE_SIZE
        && special.is_multiple_of(8)
}

/// Seals a plaintext page in place, in the format of the key's cipher. False for an all-zero page,
/// which is not changed. Nothing that PostgreSQL reads changes by sealing and opening.
///
/// `block` is the block number in the fork. With `checksums`, the page must have its plaintext
/// checksum already, as PostgreSQL sets it before every write (`PageSetChecksumCopy`). The sealed
/// page gets its own. Without `checksums` both are zero.
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
    match v2::Key::of(key) {
        None => v1::seal(page, key, version, block, fork, checksums),
        Some(key) => {
            v2::seal(page, key, version, Position { block, fork }, checksums);
        }
    }
    true
}

/// Opens a sealed page in place; `key` is the key of its version ([`version_of`]). `None` for a
/// page in plaintext, which is not changed.
///
/// # Errors
/// [`NotAuthentic`], if the format can tell; the content of the page is undefined then.
pub fn open(
    page: &mut Page,
    key: &PageKey,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> Result<Option<Strength>, NotAuthentic> {
    if version_of(page).is_none() {
        return Ok(None);
    }
    match v2::Key::of(key) {
        None => {
            v1::open(page, key, block, fork, checksums);
            Ok(Some(Strength::Unauthenticated))
        }
        Some(key) => v2::open(page, key, Position { block, fork }, checksums).map(Some),
    }
}
