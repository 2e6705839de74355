//! Blocks that a WAL record restores. A page that was being written at a crash, or while a backup
//! copied it, may be torn. The first record about it since the checkpoint has an image of it
//! (`full_page_writes`; a base backup requires them: `do_pg_backup_start`, xlog.c), so that
//! recovery does not read it.

use pagevault_cipher::Fork;
use pagevault_keystore::RelFile;

use super::wal_record::{DATA_LONG, DATA_SHORT, HEADER, ORIGIN, TOPLEVEL_XID};

/// As in xlogrecord.h.
const XLR_MAX_BLOCK_ID: u8 = 32;
const BKPBLOCK_FORK_MASK: u8 = 0x0F;
const BKPBLOCK_HAS_IMAGE: u8 = 0x10;
const BKPBLOCK_WILL_INIT: u8 = 0x40;
const BKPBLOCK_SAME_REL: u8 = 0x80;
const BKPIMAGE_HAS_HOLE: u8 = 0x01;
const BKPIMAGE_APPLY: u8 = 0x02;
const BKPIMAGE_COMPRESSED: u8 = 0x04 | 0x08 | 0x10;

/// A page of a relation.
pub(super) type Place = (RelFile, Fork, u32);

/// A block of a record, with what the record has of it.
pub(super) struct Block<'a> {
    pub(super) place: Place,
    /// An image of the page, or nothing.
    pub(super) image: &'a [u8],
    pub(super) is_compressed: bool,
    pub(super) data: &'a [u8],
}

/// The blocks of a complete record, and whether it replaces them. Ends at what it does not
/// understand.
pub(super) fn blocks_of(record: &[u8]) -> Vec<(Place, bool)> {
    let (headers, _) = headers(record);
    headers.iter().filter_map(|header| Some((header.place?, header.restores))).collect()
}

/// The blocks of a complete record, and its data. `None` if there is something that is not
/// understood.
pub(super) fn contents_of(record: &[u8]) -> Option<(Vec<Block<'_>>, &[u8])> {
    let (headers, mut reader) = headers(record);
    let of_blocks = headers.iter().map(Header::length).sum::<usize>();
    let of_record = match reader.0.len().checked_sub(of_blocks)? {
        0 => 0,
        _ => match reader.byte()? {
            DATA_SHORT => usize::from(reader.byte()?),
            DATA_LONG => reader.number()? as usize,
            _ => return None,
        },
    };
    let mut blocks = Vec::new();
    for header in headers {
        let (image, data) = (reader.bytes(header.image)?, reader.bytes(header.data)?);
        let (place, is_compressed) = (header.place?, header.is_compressed);
        blocks.push(Block { place, image, is_compressed, data });
    }
    (reader.0.len() == of_record).then_some((blocks, reader.0))
}

/// The headers of blocks, and what is behind them (`DecodeXLogRecord`, xlogreader.c).
fn headers(record: &[u8]) -> (Vec<Header>, Reader<'_>) {
    let mut reader = Reader(record.get(HEADER..).unwrap_or_default());
    let (mut found, mut last, mut length) = (Vec::new(), None, 0);
    // Each number is there once. A record may have nothing but blocks.
    while found.len() <= usize::from(XLR_MAX_BLOCK_ID)
        && reader.0.len() > length
        && let Some((header, rest)) = reader.clone().header(&mut last)
    {
        reader = rest;
        length += header.as_ref().map_or(0, Header::length);
        found.extend(header);
    }
    (found, reader)
}

struct Header {
    /// `None` if the fork is unknown.
    place: Option<Place>,
    restores: bool,
    is_compressed: bool,
    /// Lengths.
    image: usize,
    data: usize,
}

impl Header {
    fn length(&self) -> usize {
        self.image + self.data
    }
}

#[derive(Clone)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn half(&mut self) -> Option<usize> {
        self.take().map(u16::from_le_bytes).map(usize::from)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// The next header, `None` in it for one that is of no block, and the reader behind it. `last`
    /// is the relation of the last block.
    fn header(mut self, last: &mut Option<RelFile>) -> Option<(Option<Header>, Self)> {
        match self.byte()? {
            ORIGIN => return self.take::<2>().map(|_| (None, self)),
            TOPLEVEL_XID => return self.take::<4>().map(|_| (None, self)),
            id if id > XLR_MAX_BLOCK_ID => return None,
            _ => {}
        }
        let flags = self.byte()?;
        let data = self.half()?;
        let (mut image, mut info) = (0, 0);
        if flags & BKPBLOCK_HAS_IMAGE != 0 {
            image = self.half()?;
            let _hole_offset = self.half()?;
            info = self.byte()?;
            if info & BKPIMAGE_HAS_HOLE != 0 && info & BKPIMAGE_COMPRESSED != 0 {
                let _hole_length = self.half()?;
            }
        }
        if flags & BKPBLOCK_SAME_REL == 0 {
            let (tablespace, database) = (self.number()?, self.number()?);
            *last = Some(RelFile { tablespace, database, relation: self.number()? });
        }
        let block = self.number()?;
        let fork = Fork::from_number(flags & BKPBLOCK_FORK_MASK);
        let place = last.zip(fork).map(|(file, fork)| (file, fork, block));
        let restores = flags & BKPBLOCK_WILL_INIT != 0 || info & BKPIMAGE_APPLY != 0;
        let is_compressed = info & BKPIMAGE_COMPRESSED != 0;
        Some((Some(Header { place, restores, is_compressed, image, data }), self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 16384 };

    fn name() -> Vec<u8> {
        [1663_u32, 5, 16384].into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn header(id: u8, flags: u8, image: &[u8], name: &[u8], block: u32) -> Vec<u8> {
        [&[id, flags, 8, 0][..], image, name, &block.to_le_bytes()].concat()
    }

    #[test]
    fn images_and_new_pages_replace_blocks() {
        let whole = [2, 0, 24, 0, BKPIMAGE_APPLY];
        let compressed = [3, 0, 24, 0, BKPIMAGE_APPLY | BKPIMAGE_HAS_HOLE | 0x08, 1, 2];
        let to_compare = [2, 0, 24, 0, BKPIMAGE_HAS_HOLE];
        let parts = [
            vec![0; HEADER],
            vec![ORIGIN, 1, 2, TOPLEVEL_XID, 1, 2, 3, 4],
            header(0, BKPBLOCK_HAS_IMAGE, &whole, &name(), 7),
            header(1, BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL | 2, &compressed, &[], 8),
            header(2, BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL, &to_compare, &[], 9),
            header(3, BKPBLOCK_WILL_INIT | BKPBLOCK_SAME_REL, &[], &[], 10),
            header(32, 0, &[], &name(), 11),
            vec![DATA_SHORT, 20],
            b"im_data_ofcmp_data_ofim_data_of_data_of_data_of".to_vec(),
            // The data of the record, with bytes that look like a header.
            header(0, BKPBLOCK_WILL_INIT, &[], &name(), 12),
        ];
        let expected = [
            ((FILE, Fork::Main, 7), true),
            ((FILE, Fork::VisibilityMap, 8), true),
            ((FILE, Fork::Main, 9), false),
            ((FILE, Fork::Main, 10), true),
            ((FILE, Fork::Main, 11), false),
        ];
        let record = parts.concat();
        assert_eq!(blocks_of(&record), expected);
        let (blocks, data) = contents_of(&record).unwrap();
        assert!(blocks.iter().map(|it| it.place).eq(expected.map(|(place, _)| place)));
        let images: [&[u8]; 5] = [b"im", b"cmp", b"im", b"", b""];
        assert!(blocks.iter().map(|it| it.image).eq(images));
        assert!(blocks.iter().map(|it| it.is_compressed).eq([false, true, false, false, false]));
        assert!(blocks.iter().all(|it| it.data.starts_with(b"_data_of")) && data.len() == 20);
        for length in 0..record.len() {
            assert!(expected.starts_with(&blocks_of(&record[..length])), "{length}");
        }
        assert!(contents_of(&record[..record.len() - 1]).is_none());
        assert!(contents_of(&[&record[..], &[0]].concat()).is_none());
        // A record may have no data but that of blocks, here an image that looks like a header.
        let image = header(1, BKPBLOCK_SAME_REL, &[], &[], 13);
        let length = [image.len() as u8, 0, 24, 0, BKPIMAGE_APPLY];
        let first = [&[0, BKPBLOCK_HAS_IMAGE, 0, 0][..], &length, &name(), &[7, 0, 0, 0]].concat();
        let record = [vec![0; HEADER], first, image.clone()].concat();
        assert_eq!(blocks_of(&record), expected[..1]);
        let (blocks, data) = contents_of(&record).unwrap();
        assert!(blocks.len() == 1 && blocks[0].image == image && data.is_empty());
        let many = header(0, BKPBLOCK_SAME_REL, &[], &[], 7).repeat(100);
        let many = [vec![0; HEADER], header(0, 0, &[], &name(), 7), many].concat();
        assert_eq!(blocks_of(&many).len(), 33);
        // Of the same relation as none.
        let same = [vec![0; HEADER], header(0, BKPBLOCK_SAME_REL, &[], &[], 7)].concat();
        assert_eq!(blocks_of(&same), []);
    }
}
