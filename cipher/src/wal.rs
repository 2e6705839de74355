//! WAL page format version 1: a sealed page of a WAL segment on disk.
//!
//! ```text
//! byte   0       2       4        8               16                                 8192
//!        +-------+-------+--------+---------------+-------------------------------------+
//! plain  | magic | info  | tli    | pageaddr      | xlp_rem_len, long header, records   |
//!        +-------+-------+--------+---------------+-------------------------------------+
//! sealed | magic | INFO  | tli    | pageaddr      |###### AES-XTS, 511 whole blocks #####|
//!        +-------+-------+--------+---------------+-------------------------------------+
//!         clear     |      clear    clear
//!                   +- low 4 bits: xlp_info; high 12 bits: the mark of the key
//! ```
//!
//! A page has `XLOG_BLCKSZ` bytes, 8192 unless PostgreSQL was built otherwise. All integers are
//! little-endian. The tweak, before its own encryption under the second XTS key:
//!
//! ```text
//! byte   0              8        12              16
//!        +--------------+--------+---------------+
//!        | xlp_pageaddr | tli    | "WAL1"        |
//!        +--------------+--------+---------------+
//! ```
//!
//! Both values are those in the page itself, so a segment may be renamed, recycled or copied to
//! another timeline and stays readable. Byte 12 of a relation page's tweak is the fork, never `W`.
//!
//! Rules that follow from the layout:
//!
//! * A WAL page is written repeatedly as it fills, under the same tweak. XTS reveals which blocks
//!   of 16 bytes have changed since, and nothing else; a stream cipher would reuse its keystream.
//! * A torn write mixes an older and a newer state of the page. The bytes of the older state are
//!   the same in both, and each block is decrypted separately: no record is lost that plaintext
//!   would have kept. This requires that a page is never written under two keys.
//! * A page without a mark is plaintext. An all-zero page was never written, and stays zero.

use crate::lsn::Lsn;
use crate::page_key::PageKey;
use crate::version::KeyVersion;
use crate::xts::{Block, Direction, Tweak};

/// Number of this format.
pub const FORMAT_VERSION: u8 = 1;

/// Bytes of a page that are never encrypted: the first fields of `XLogPageHeaderData`
/// (src/include/access/xlog_internal.h). The constants below are offsets in it.
pub const HEADER_SIZE: usize = 16;

/// Bytes of `XLogLongPageHeaderData`, which the first page of a segment begins with.
const LONG_HEADER: usize = 40;
/// `XLP_LONG_HEADER`
const HAS_LONG_HEADER: u16 = 0x0002;
/// Behind `xlp_rem_len`, up to `SizeOfXLogShortPHD`.
const PADDING: usize = 20;
const SEGMENT_SIZE: usize = 32;
const BLOCK_SIZE: usize = 36;

const INFO: usize = 2;
const TIMELINE: usize = 4;
const ADDRESS: usize = 8;

/// `XLP_ALL_FLAGS`: the bits of `xlp_info` that PostgreSQL uses.
const VALID_FLAGS: u16 = 0x000F;
const MARK_SHIFT: u32 = 4;
/// Number of marks; odd, so that of two versions with the same mark one is always nearer.
const MARKS: u32 = 4095;

const DOMAIN: [u8; 4] = *b"WAL1";

const _: () =
    assert!(VALID_FLAGS == (1 << MARK_SHIFT) - 1 && MARKS == (u16::MAX >> MARK_SHIFT) as u32);

/// Identifies the key of a sealed WAL page, 1 to 4095: the version of the WAL key, reduced to 12
/// bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark(u16);

impl Mark {
    /// The mark of a version, which counts from 1: 1 to 4095, then 1 again.
    #[must_use]
    pub const fn of_version(version: KeyVersion) -> Self {
        Self(((version.get() - 1) % MARKS + 1) as u16)
    }

    /// The number that is stored in the page.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The versions that the mark can stand for, given the version in use at the page's address:
    /// the nearest with this mark, and the next nearest on the other side of it, if any.
    ///
    /// It is the nearest, unless the page was sealed under a key that was in use 2048 versions
    /// earlier or later: a standby seals what it receives under the key that it has replayed.
    #[must_use]
    pub fn versions_near(self, reference: Option<KeyVersion>) -> [Option<KeyVersion>; 2] {
        let reference = u64::from(KeyVersion::get_or_zero(reference));
        let mark = u64::from(self.0);
        let marks = u64::from(MARKS);
        // A mark is at least 1, and so is this.
        let below = mark + reference.saturating_sub(mark) / marks * marks;
        let mut two = [below, below + marks];
        two.sort_by_key(|version| version.abs_diff(reference));
        let mut versions = two.map(|version| u32::try_from(version).ok().and_then(KeyVersion::new));
        if versions[0].is_none() {
            versions.swap(0, 1);
        }
        versions
    }

    /// The nearest of [`Mark::versions_near`].
    #[must_use]
    pub fn version_near(self, reference: Option<KeyVersion>) -> KeyVersion {
        self.versions_near(reference)[0].unwrap_or(KeyVersion::FIRST)
    }
}

/// The mark of a page, from its first [`HEADER_SIZE`] bytes; `None` for plaintext, and if `header`
/// is too short to tell.
#[must_use]
pub fn mark_of(header: &[u8]) -> Option<Mark> {
    let info = header.first_chunk::<HEADER_SIZE>().map(info)?;
    Some(Mark(info >> MARK_SHIFT)).filter(|mark| mark.0 != 0)
}

/// `xlp_pageaddr`, the LSN of the page's first byte; `None` if `header` is too short.
#[must_use]
pub fn address_of(header: &[u8]) -> Option<Lsn> {
    header.first_chunk::<HEADER_SIZE>().map(|header| Lsn(address(header)))
}

/// `xlp_tli`, the timeline of the first record on the page; `None` if `header` is too short.
#[must_use]
pub fn timeline_of(header: &[u8]) -> Option<u32> {
    header.first_chunk::<HEADER_SIZE>().map(timeline)
}

/// Clears the mark and leaves the rest as it is: for pages that are not part of the WAL at their
/// address, such as those of a recycled segment.
pub fn clear_mark(page: &mut [u8]) {
    if let Some(header) = page.first_chunk_mut::<HEADER_SIZE>() {
        put_mark(header, 0);
    }
}

/// Seals a plaintext page in place; false for an all-zero page, which is left as it is.
///
/// `page` is a whole page; its length is a multiple of 16 bytes.
pub fn seal(page: &mut [u8], key: &PageKey, mark: Mark) -> bool {
    if is_zero(page) {
        return false;
    }
    let Some((header, body)) = page.split_first_chunk_mut::<HEADER_SIZE>() else { return false };
    put_mark(header, mark.0);
    key.schedule.run(Direction::Encrypt, tweak(header), blocks(body));
    true
}

/// Opens a sealed page in place; `key` is the key of its mark. A page without a mark is not
/// changed.
///
/// There is no error: [`is_opened`] tells whether the key was the right one, and PostgreSQL checks
/// every record's CRC.
pub fn open(page: &mut [u8], key: &PageKey) {
    if mark_of(page).is_none() {
        return;
    }
    let Some((header, body)) = page.split_first_chunk_mut::<HEADER_SIZE>() else { return };
    put_mark(header, 0);
    key.schedule.run(Direction::Decrypt, tweak(header), blocks(body));
}

/// Whether a page is as after [`open`] with the key that it was sealed with: its header has what
/// every header has. Another key gives random bytes there: it is taken for the right one once in
/// 2^92 in the first page of a segment, and once in 2^32 in others.
///
/// What every header has, from `AdvanceXLInsertBuffer` and `BootStrapXLOG` (xlog.c) and
/// `WriteEmptyXLOG` (pg_resetwal.c), which fill the page with zeros first: no bytes between
/// `xlp_rem_len` and the end of the short header; in a long header, the size of segments
/// (`IsValidWalSegSize`) and of pages. Of a page that has only begun to arrive, all of that may be
/// zero. The system identifier says nothing about the key, since `pg_upgrade` gives the keys to
/// another system; PostgreSQL compares it.
#[must_use]
pub fn is_opened(page: &[u8]) -> bool {
    let Some(header) = page.first_chunk::<LONG_HEADER>() else { return false };
    let number =
        |at: usize| header[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if number(PADDING) != 0 {
        return false;
    }
    let is_long = header.first_chunk().is_some_and(|header| info(header) & HAS_LONG_HEADER != 0);
    let (segment, block) = (number(SEGMENT_SIZE), number(BLOCK_SIZE));
    let is_size = segment.is_power_of_two() && (1 << 20..=1 << 30).contains(&segment);
    !is_long || (segment, block) == (0, 0) || (is_size && block as usize == page.len())
}

/// Whether every byte is zero.
#[must_use]
pub fn is_zero(page: &[u8]) -> bool {
    // The header decides for nearly every page.
    let (rows, rest) = page.as_chunks::<64>();
    rows.iter().all(|row| row.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

fn info(header: &[u8; HEADER_SIZE]) -> u16 {
    u16::from_le_bytes([header[INFO], header[INFO + 1]])
}

fn address(header: &[u8; HEADER_SIZE]) -> u64 {
    header[ADDRESS..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn timeline(header: &[u8; HEADER_SIZE]) -> u32 {
    header[TIMELINE..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn put_mark(header: &mut [u8; HEADER_SIZE], mark: u16) {
    let info = info(header) & VALID_FLAGS | mark << MARK_SHIFT;
    header[INFO..INFO + 2].copy_from_slice(&info.to_le_bytes());
}

fn tweak(header: &[u8; HEADER_SIZE]) -> Tweak {
    u128::from(address(header))
        | u128::from(timeline(header)) << 64
        | u128::from(u32::from_le_bytes(DOMAIN)) << 96
}

/// The encrypted part of a page; its length is a multiple of the block size.
fn blocks(body: &mut [u8]) -> &mut [Block] {
    body.as_chunks_mut().0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{CipherId, DataKey};
    use proptest::prelude::*;

    const MARK: Mark = Mark(4711 % 4096);

    fn key(cipher: CipherId, seed: u8) -> PageKey {
        let bytes: Vec<u8> = (0..cipher.key_len()).map(|i| seed.wrapping_add(i as u8)).collect();
        PageKey::new(&DataKey::from_bytes(cipher, &bytes).unwrap())
    }

    /// A page as PostgreSQL writes it: a valid header and an arbitrary rest.
    fn plain_page(size: usize, fill: &[u8], timeline: u32, address: u64) -> Vec<u8> {
        let mut page: Vec<u8> = fill.iter().copied().cycle().take(size).collect();
        page[..2].copy_from_slice(&0xD116_u16.to_le_bytes());
        page[2..4].copy_from_slice(&(u16::from(fill[0]) & VALID_FLAGS).to_le_bytes());
        page[4..8].copy_from_slice(&timeline.to_le_bytes());
        page[8..16].copy_from_slice(&address.to_le_bytes());
        page
    }

    fn any_cipher() -> impl Strategy<Value = CipherId> {
        prop::sample::select(&CipherId::ALL[..])
    }

    fn any_fill() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 1..512)
    }

    /// All values of `XLOG_BLCKSZ` that PostgreSQL allows.
    fn any_size() -> impl Strategy<Value = usize> {
        (10..=16_u32).prop_map(|bits| 1 << bits)
    }

    /// The first page of a segment as `XLogWrite` has it.
    fn first_page(segment: u32, block: u32) -> Vec<u8> {
        let mut page = plain_page(8192, &[7], 1, 0x300_0000);
        page[2] = 0x0002;
        page[16..24].fill(0);
        page[32..36].copy_from_slice(&segment.to_le_bytes());
        page[36..40].copy_from_slice(&block.to_le_bytes());
        page
    }

    #[test]
    fn headers_of_every_server_are_valid() {
        for megabytes in (0..=10).map(|bits| 1 << bits) {
            assert!(is_opened(&first_page(megabytes << 20, 8192)), "{megabytes}");
        }
        // The first 16 to 32 bytes have arrived.
        assert!(is_opened(&first_page(0, 0)));
        for (segment, block) in [(1 << 19, 8192), (3 << 20, 8192), (1 << 24, 4096), (0, 8192)] {
            assert!(!is_opened(&first_page(segment, block)), "{segment} {block}");
        }
        let mut other = first_page(5, 5);
        other[2] = 0x0001;
        assert!(is_opened(&other), "a short header has no sizes");
        other[20] = 1;
        assert!(!is_opened(&other) && !is_opened(&other[..39]));
    }

    /// Not by chance: the keys and the page are always the same.
    #[test]
    fn another_key_gives_no_valid_header() {
        for cipher in CipherId::ALL {
            for info in [0x0002, 0x0000, 0x0001] {
                let mut page = first_page(1 << 24, 8192);
                page[2] = info;
                seal(&mut page, &key(cipher, 1), MARK);
                let mut other = page.clone();
                open(&mut page, &key(cipher, 1));
                assert!(is_opened(&page), "{cipher:?} {info}");
                open(&mut other, &key(cipher, 2));
                assert!(!is_opened(&other), "{cipher:?} {info}");
            }
        }
    }

    #[test]
    fn a_zero_page_stays_zero() {
        let mut page = [0; 8192];
        seal(&mut page, &key(CipherId::Aes256Xts, 1), MARK);
        assert!(is_zero(&page));
        open(&mut page, &key(CipherId::Aes256Xts, 1));
        assert!(is_zero(&page));
    }

    #[test]
    fn a_page_without_a_header_but_with_content_is_sealed() {
        let mut page = [0; 8192];
        page[8191] = 1;
        seal(&mut page, &key(CipherId::Aes256Xts, 1), MARK);
        assert_eq!(mark_of(&page), Some(MARK));
        assert!(page[16..32] != [0; 16]);
    }

    #[test]
    fn a_short_header_has_no_mark_and_address() {
        for length in 0..HEADER_SIZE {
            assert_eq!(mark_of(&vec![0xff; length]), None);
            assert_eq!(address_of(&vec![0xff; length]), None);
        }
        assert_eq!(mark_of(&[0xff; HEADER_SIZE]), Some(Mark(4095)));
        assert_eq!(address_of(&[0xff; HEADER_SIZE]), Some(Lsn::MAX));
    }

    #[test]
    fn versions_share_4095_marks() {
        for (version, mark) in [(1, 1), (2, 2), (4095, 4095), (4096, 1), (8190, 4095), (8191, 1)] {
            assert_eq!(Mark::of_version(KeyVersion::new(version).unwrap()).get(), mark);
        }
    }

    /// After the marks have wrapped around, the key in use at an address is still found, and so is
    /// one up to 2047 versions away (the switch to it may be unknown yet, or lost).
    #[test]
    fn a_mark_means_the_nearest_version() {
        for reference in [0, 1, 2, 2047, 2048, 4094, 4095, 4096, 10_000, u32::MAX - 3000, u32::MAX]
        {
            for distance in -2047..=2047_i64 {
                let Ok(version) = u32::try_from(i64::from(reference) + distance) else {
                    continue;
                };
                if let Some(version) = KeyVersion::new(version) {
                    let near = Mark::of_version(version).version_near(KeyVersion::new(reference));
                    assert_eq!(near, version, "near {reference}");
                }
            }
        }
    }

    #[test]
    fn a_mark_means_some_version_even_far_from_any() {
        assert_eq!(Mark(4095).version_near(None).get(), 4095);
        assert_eq!(Mark(1).version_near(None).get(), 1);
        assert_eq!(Mark(4095).version_near(Some(KeyVersion::FIRST)).get(), 4095);
    }

    proptest! {
        #[test]
        fn opening_gives_back_what_was_sealed(
            cipher in any_cipher(), size in any_size(), fill in any_fill(), timeline: u32,
            address: u64, version in 1..=u32::MAX,
        ) {
            let (key, mark) = (key(cipher, 1), Mark::of_version(KeyVersion::new(version).unwrap()));
            let plain = plain_page(size, &fill, timeline, address);
            let mut page = plain.clone();
            seal(&mut page, &key, mark);
            prop_assert_eq!(mark_of(&page), Some(mark));
            prop_assert_eq!(address_of(&page), Some(Lsn(address)));
            prop_assert_eq!(&page[..2], &plain[..2]);
            prop_assert_eq!(page[2] & 0x0F, plain[2] & 0x0F);
            prop_assert_eq!(&page[4..16], &plain[4..16]);
            let same = page[16..].iter().zip(&plain[16..]).filter(|(a, b)| a == b).count();
            prop_assert!(same < size / 16);
            let mut unmarked = page.clone();
            clear_mark(&mut unmarked);
            prop_assert_eq!(&unmarked[..16], &plain[..16]);
            prop_assert_eq!(&unmarked[16..], &page[16..]);
            open(&mut page, &key);
            prop_assert!(page == plain);
        }

        #[test]
        fn opening_a_plaintext_page_changes_nothing(fill in any_fill(), address: u64) {
            let plain = plain_page(8192, &fill, 1, address);
            let mut page = plain.clone();
            open(&mut page, &key(CipherId::Aes256Xts, 1));
            prop_assert!(page == plain);
        }

        /// The reason for XTS: a page that has filled further reveals only where it changed, and a
        /// torn write of it keeps everything that was there before.
        #[test]
        fn a_torn_write_of_a_filling_page_loses_nothing(
            cipher in any_cipher(), fill in any_fill(), address: u64,
            filled in 16..8192_usize, more in 1..4000_usize, new_sectors: u16,
        ) {
            let key = key(cipher, 1);
            let full = plain_page(8192, &fill, 1, address);
            let state = |to: usize| {
                let mut page = full.clone();
                page[to.min(8192)..].fill(0);
                let plain = page.clone();
                seal(&mut page, &key, MARK);
                (plain, page)
            };
            let (old_plain, old) = state(filled);
            let (new_plain, new) = state(filled + more);
            let changed = filled / 16 * 16..(filled + more).min(8192).div_ceil(16) * 16;
            for at in (0..8192).filter(|at| !changed.contains(at)) {
                prop_assert_eq!(old[at], new[at], "byte {}", at);
            }
            let mut torn = old.clone();
            let mut expected = old_plain.clone();
            for sector in (0..16).filter(|sector| new_sectors >> sector & 1 == 1) {
                let bytes = sector * 512..(sector + 1) * 512;
                torn[bytes.clone()].copy_from_slice(&new[bytes.clone()]);
                expected[bytes.clone()].copy_from_slice(&new_plain[bytes]);
            }
            open(&mut torn, &key);
            prop_assert!(torn == expected);
            prop_assert!(torn[..filled] == full[..filled]);
        }

        #[test]
        fn every_page_and_timeline_has_its_own_tweak(
            cipher in any_cipher(),
            fill in any_fill(),
            addresses: (u64, u64),
            timelines: (u32, u32),
        ) {
            prop_assume!(addresses.0 != addresses.1 || timelines.0 != timelines.1);
            let key = key(cipher, 1);
            let mut first = plain_page(8192, &fill, timelines.0, addresses.0);
            let mut second = plain_page(8192, &fill, timelines.1, addresses.1);
            seal(&mut first, &key, MARK);
            seal(&mut second, &key, MARK);
            let same = first[16..].chunks(16).zip(second[16..].chunks(16)).filter(|(a, b)| a == b);
            prop_assert_eq!(same.count(), 0);
        }
    }
}
