//! Blocks that a WAL record restores. A page that was being written at a crash, or while a backup
//! copied it, may be torn. The first record about it since the checkpoint has an image of it
//! (`full_page_writes`; a base backup requires them: `do_pg_backup_start`, xlog.c), so that
//! recovery does not read it.

use pagevault_cipher::Fork;
use pagevault_keystore::RelFile;

use super::wal_record::{HEADER, ORIGIN, TOPLEVEL_XID};

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

/// The blocks of a complete record, and whether it replaces them (`DecodeXLogRecord`,
/// xlogreader.c). Ends at what it does not understand.
pub(super) fn blocks_of(record: &[u8]) -> Vec<(Place, bool)> {
    let mut reader = Reader(record.get(HEADER..).unwrap_or_default());
    let (mut found, mut last) = (Vec::new(), None);
    // Each number is there once.
    while found.len() <= usize::from(XLR_MAX_BLOCK_ID)
        && let Some(block) = reader.block(&mut last)
    {
        found.extend(block);
    }
    found
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// The next block header; `None` in it for one without a block, or of an unknown fork. `last`
    /// is the relation of the last one.
    fn block(&mut self, last: &mut Option<RelFile>) -> Option<Option<(Place, bool)>> {
        match self.byte()? {
            ORIGIN => return self.take::<2>().map(|_| None),
            TOPLEVEL_XID => return self.take::<4>().map(|_| None),
            id if id > XLR_MAX_BLOCK_ID => return None,
            _ => {}
        }
        let flags = self.byte()?;
        let _data_length = self.take::<2>()?;
        let mut restores = flags & BKPBLOCK_WILL_INIT != 0;
        if flags & BKPBLOCK_HAS_IMAGE != 0 {
            let [_, _, _, _, image] = self.take::<5>()?;
            if image & BKPIMAGE_HAS_HOLE != 0 && image & BKPIMAGE_COMPRESSED != 0 {
                let _hole_length = self.take::<2>()?;
            }
            restores |= image & BKPIMAGE_APPLY != 0;
        }
        if flags & BKPBLOCK_SAME_REL == 0 {
            let (tablespace, database) = (self.number()?, self.number()?);
            *last = Some(RelFile { tablespace, database, relation: self.number()? });
        }
        let block = self.number()?;
        let fork = Fork::from_number(flags & BKPBLOCK_FORK_MASK);
        Some(last.zip(fork).map(|(file, fork)| ((file, fork, block), restores)))
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
        [&[id, flags, 9, 0][..], image, name, &block.to_le_bytes()].concat()
    }

    #[test]
    fn images_and_new_pages_replace_blocks() {
        let whole = [100, 0, 24, 0, BKPIMAGE_APPLY];
        let compressed = [100, 0, 24, 0, BKPIMAGE_APPLY | BKPIMAGE_HAS_HOLE | 0x08, 1, 2];
        let to_compare = [100, 0, 24, 0, BKPIMAGE_HAS_HOLE];
        let parts = [
            vec![0; HEADER],
            vec![ORIGIN, 1, 2, TOPLEVEL_XID, 1, 2, 3, 4],
            header(0, BKPBLOCK_HAS_IMAGE, &whole, &name(), 7),
            header(1, BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL | 2, &compressed, &[], 8),
            header(2, BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL, &to_compare, &[], 9),
            header(3, BKPBLOCK_WILL_INIT | BKPBLOCK_SAME_REL, &[], &[], 10),
            header(32, 0, &[], &name(), 11),
            // The data of the record, with bytes that look like a header.
            [&[255, 40][..], &header(0, BKPBLOCK_WILL_INIT, &[], &name(), 12)].concat(),
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
        for length in 0..record.len() {
            assert!(expected.starts_with(&blocks_of(&record[..length])), "{length}");
        }
        let many = header(0, BKPBLOCK_SAME_REL, &[], &[], 7).repeat(100);
        let many = [vec![0; HEADER], header(0, 0, &[], &name(), 7), many].concat();
        assert_eq!(blocks_of(&many).len(), 33);
        // Of the same relation as none.
        let same = [vec![0; HEADER], header(0, BKPBLOCK_SAME_REL, &[], &[], 7)].concat();
        assert_eq!(blocks_of(&same), []);
    }
}
