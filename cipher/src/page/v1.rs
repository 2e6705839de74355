//! Page format version 1: a sealed relation page on disk.
//!
//! ```text
//! byte   0        8    10   12   14   16   18   20                                   8192
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! plain  | pd_lsn |sum |flag|low |up  |spec|2004| pd_prune_xid, line pointers, tuples|
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! sealed | pd_lsn |SUM |FLAG|low |up  |######## AES-XTS, 511 whole blocks ###########|
//!        +--------+----+----+----+----+----------------------------------------------+
//!         clear     |    |   clear     inside, bytes 18-19 are the plain page's sum
//!                   |    +- low 3 bits: pd_flags; high 13 bits: version of the data key
//!                   +- PostgreSQL's checksum over the sealed page (0 when checksums are off)
//! ```
//!
//! All integers are little-endian, as on the platforms that pagevault runs on.
//!
//! The tweak, before its own encryption under the second XTS key:
//!
//! ```text
//! byte   0        8            12     13            16
//!        +--------+------------+------+-------------+
//!        | pd_lsn | block u32  | fork | 0   0   0   |
//!        +--------+------------+------+-------------+
//! ```
//!
//! Bytes 0 to 7 are `pd_lsn` as stored in the page, 8 to 11 the block number in the fork (not in
//! the segment file), 12 the fork (0 main and init, 1 free space map, 2 visibility map), 13 to 15
//! zero. With a new LSN the same page has another ciphertext.
//!
//! Rules that follow from the layout:
//!
//! * `pd_pagesize_version` of a plaintext page is a constant (page size 8192, layout version 4, as
//!   in every page since PostgreSQL 8.3). So its two bytes can store the plaintext checksum.
//!   Opening a page restores both, and PostgreSQL verifies its own checksum end to end.
//! * A stored checksum of 0 means that the page was sealed with checksums off. If they are on when
//!   it is opened (`pg_checksums --enable` ran in between), the plaintext checksum is recomputed.
//! * An all-zero page was never written; it stays all-zero in both directions. A page with nothing
//!   but its header may also be written as all zeros ([`super::is_bare`]).
//! * A hint bit is set without WAL and without a new LSN. So a torn write of such a page mixes two
//!   ciphertexts under one tweak. XTS decrypts each block separately, so the result is the same
//!   mixture of the two plaintexts, as harmless as without pagevault.

use super::{HEADER_SIZE, VERSION_SHIFT};
use crate::checksum::page_checksum;
use crate::key::Fork;
use crate::layout::{
    CHECKSUM, FLAGS, LSN, PAGE_SIZE, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, Page, VALID_FLAGS,
    get, put,
};
use crate::page_key::PageKey;
use crate::version::DataKeyVersion;
use crate::xts::{Block, Direction, Tweak};

const _: () = {
    assert!((PAGE_SIZE - HEADER_SIZE) == 511 * size_of::<Block>());
    assert!(HEADER_SIZE <= PAGESIZE_VERSION);
};

/// Seals a plaintext page in place that is not all zeros; see [`super::seal`].
pub(super) fn seal(
    page: &mut Page,
    key: &PageKey,
    version: DataKeyVersion,
    block: u32,
    fork: Fork,
    checksums: bool,
) {
    let carried = if checksums { get(page, CHECKSUM) } else { 0 };
    put(page, PAGESIZE_VERSION, carried);
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, version.get() << VERSION_SHIFT | flags);
    key.schedule.run(Direction::Encrypt, tweak(page, block, fork), unit(page));
    let checksum = if checksums { page_checksum(page, block) } else { 0 };
    put(page, CHECKSUM, checksum);
}

/// Opens a sealed page in place.
///
/// With `checksums`, a page that was damaged on disk gets a `pd_checksum` that cannot be right.
/// PostgreSQL then refuses it like a damaged plaintext page, and `ignore_checksum_failure` and
/// `zero_damaged_pages` work as usual.
pub(super) fn open(page: &mut Page, key: &PageKey, block: u32, fork: Fork, checksums: bool) {
    let damaged = checksums && get(page, CHECKSUM) != page_checksum(page, block);
    key.schedule.run(Direction::Decrypt, tweak(page, block, fork), unit(page));
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, flags);
    let carried = get(page, PAGESIZE_VERSION);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = match carried {
        // PostgreSQL never computes the checksum 0.
        _ if damaged => 0,
        0 if checksums => page_checksum(page, block),
        carried => carried,
    };
    put(page, CHECKSUM, checksum);
}

pub(super) fn tweak(page: &Page, block: u32, fork: Fork) -> Tweak {
    // Combined in registers: bytes that are written one by one are slow to read back as a whole.
    let lsn = page[LSN..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    u128::from(lsn) | u128::from(block) << 64 | u128::from(fork.tweak_byte()) << 96
}

/// The encrypted part of the page.
pub(super) fn unit(page: &mut Page) -> &mut [Block] {
    page[HEADER_SIZE..].as_chunks_mut().0
}
