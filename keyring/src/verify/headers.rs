//! Headers of WAL pages. They have no checksum: PostgreSQL compares each field with what it must be
//! (`XLogReaderValidatePageHeader`, xlogreader.c), and reads nothing of a page that differs.

use pagevault_cipher::Lsn;

pub(super) const PAGE: usize = 8192;
/// `SizeOfXLogShortPHD`, `SizeOfXLogLongPHD`.
pub(super) const SHORT_HEADER: usize = 24;
pub(super) const LONG_HEADER: usize = 40;
/// Bits of `xlp_info`: `XLP_FIRST_IS_CONTRECORD`, `XLP_LONG_HEADER`,
/// `XLP_FIRST_IS_OVERWRITE_CONTRECORD`, `XLP_ALL_FLAGS`.
const CONTINUES: u16 = 0x01;
const HAS_LONG_HEADER: u16 = 0x02;
const OVERWRITES: u16 = 0x08;
const ALL_FLAGS: u16 = 0x0F;

/// An address behind another one; the last one, if there is none.
pub(super) fn plus(address: Lsn, bytes: usize) -> Lsn {
    Lsn(address.0.saturating_add(bytes as u64))
}

/// What a decrypted page says about itself.
pub(super) struct Header {
    info: u16,
    /// `xlp_rem_len`: bytes of a record that began before the page.
    rest: usize,
}

impl Header {
    pub(super) fn of(page: &[u8; PAGE]) -> Header {
        Header { info: u16_at(page, 2), rest: u32_at(page, 16) as usize }
    }

    /// Bytes before the first record, or before the rest of one.
    pub(super) fn size(&self) -> usize {
        if self.info & HAS_LONG_HEADER == 0 { SHORT_HEADER } else { LONG_HEADER }
    }

    /// A record that began before the page was abandoned.
    pub(super) fn overwrites(&self) -> bool {
        self.info & OVERWRITES != 0
    }

    /// How much of a record continues here (`XLogFindNextRecord`, xlogreader.c).
    pub(super) fn continued(&self) -> Option<usize> {
        (self.info & CONTINUES != 0).then_some(self.rest)
    }
}

/// What the pages of a cluster have in common.
pub(super) struct Expected {
    system: u64,
    segment: u64,
    magic: Option<u16>,
}

impl Expected {
    /// `version`: the content of the file `PG_VERSION`.
    pub(super) fn new(system: u64, segment: u64, version: &[u8]) -> Expected {
        // `XLOG_PAGE_MAGIC`. It may change until a major is released; of a later one all pages must
        // have that of the first.
        let magic = match version.trim_ascii() {
            b"15" => Some(0xD110),
            b"16" => Some(0xD113),
            b"17" => Some(0xD116),
            b"18" => Some(0xD118),
            _ => None,
        };
        Expected { system, segment, magic }
    }

    /// Whether a decrypted page, which has this address, has a valid header; except for its
    /// timeline.
    pub(super) fn accepts(&mut self, page: &[u8; PAGE], address: Lsn) -> bool {
        let (magic, info) = (u16_at(page, 0), u16_at(page, 2));
        let is_long = info & HAS_LONG_HEADER != 0;
        let is_first = address.offset_in(self.segment) == 0;
        *self.magic.get_or_insert(magic) == magic
            && info & !ALL_FLAGS == 0
            && (info & CONTINUES == 0 || u32_at(page, 16) > 0)
            && (is_long || !is_first)
            && (!is_long
                || (u64_at(page, 24), u64::from(u32_at(page, 32)), u32_at(page, 36))
                    == (self.system, self.segment, PAGE as u32))
    }
}

fn u16_at(page: &[u8; PAGE], at: usize) -> u16 {
    u16::from_le_bytes([page[at], page[at + 1]])
}

fn u32_at(page: &[u8; PAGE], at: usize) -> u32 {
    u32::from(u16_at(page, at)) | u32::from(u16_at(page, at + 2)) << 16
}

fn u64_at(page: &[u8; PAGE], at: usize) -> u64 {
    u64::from(u32_at(page, at)) | u64::from(u32_at(page, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 1 << 20;

    fn page(info: u16) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[..2].copy_from_slice(&0xD118_u16.to_le_bytes());
        page[2..4].copy_from_slice(&info.to_le_bytes());
        page[24..32].copy_from_slice(&77_u64.to_le_bytes());
        page[32..36].copy_from_slice(&(SEGMENT as u32).to_le_bytes());
        page[36..40].copy_from_slice(&8192_u32.to_le_bytes());
        page
    }

    #[test]
    fn each_bit_of_a_long_header_counts() {
        let expected = || Expected::new(77, SEGMENT, b"18\n");
        let (first, later) = (Lsn(5 * SEGMENT), Lsn(5 * SEGMENT + 8192));
        assert!(expected().accepts(&page(HAS_LONG_HEADER), first));
        assert!(expected().accepts(&page(0), later));
        assert!(!expected().accepts(&page(0), first), "a short header");
        let fields = (0..2).chain(24..LONG_HEADER);
        for (byte, bit) in fields.flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
            let mut page = page(HAS_LONG_HEADER);
            page[byte] ^= 1 << bit;
            assert!(!expected().accepts(&page, first), "{byte} {bit}");
        }
        assert!(!expected().accepts(&page(0x10), later));
        assert!(!expected().accepts(&page(CONTINUES), later), "nothing continues");
        // The bytes are those of a record.
        assert!(!Expected::new(78, SEGMENT, b"18").accepts(&page(HAS_LONG_HEADER), later));
    }

    #[test]
    fn pages_of_an_unknown_major_have_the_same_magic() {
        let mut expected = Expected::new(77, SEGMENT, b"20\n");
        let mut other = page(0);
        other[0] ^= 1;
        assert!(expected.accepts(&page(0), Lsn(8192)));
        assert!(!expected.accepts(&other, Lsn(8192)));
        assert!(!Expected::new(77, SEGMENT, b"15\n").accepts(&page(0), Lsn(8192)));
    }
}
