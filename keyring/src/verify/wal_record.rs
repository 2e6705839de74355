//! The parts of a complete WAL record (xlogrecord.h).

use pagevault_keystore::RelFile;

/// `SizeOfXLogRecord`; offsets of `xl_info` and `xl_rmid`.
pub(super) const HEADER: usize = 24;
pub(super) const INFO: usize = 16;
pub(super) const MANAGER: usize = 17;
/// `XLR_INFO_MASK`
const OF_THE_SERVER: u8 = 0x0F;
/// `XLR_BLOCK_ID_ORIGIN` and `XLR_BLOCK_ID_TOPLEVEL_XID`: 2 and 4 bytes follow.
pub(super) const ORIGIN: u8 = 253;
pub(super) const TOPLEVEL_XID: u8 = 252;
/// `XLR_BLOCK_ID_DATA_SHORT` and `XLR_BLOCK_ID_DATA_LONG`: the length of the record's data follows,
/// in 1 and 4 bytes.
pub(super) const DATA_SHORT: u8 = 255;
pub(super) const DATA_LONG: u8 = 254;

/// Resource managers (rmgrlist.h), and pagevault's (the extension's `pg/wal.rs`).
pub(super) const XLOG: u8 = 0;
pub(super) const XACT: u8 = 1;
pub(super) const SMGR: u8 = 2;
pub(super) const DATABASES: u8 = 4;
pub(super) const TABLESPACES: u8 = 5;
pub(super) const RELMAP: u8 = 7;
pub(super) const HEAP2: u8 = 9;
pub(super) const HEAP: u8 = 10;
pub(super) const HASH: u8 = 12;
pub(super) const PAGEVAULT: u8 = 161;

/// `XLOG_SMGR_CREATE` (storage_xlog.h).
pub(super) const SMGR_CREATE: u8 = 0x10;

/// The resource manager, and the bits of `xl_info` that are its own.
pub(super) fn kind(record: &[u8]) -> Option<(u8, u8)> {
    Some((*record.get(MANAGER)?, record.get(INFO)? & !OF_THE_SERVER))
}

/// The data of a record without blocks (`DecodeXLogRecord`, xlogreader.c).
pub(super) fn data(record: &[u8]) -> Option<&[u8]> {
    let mut rest = record.get(HEADER..)?;
    loop {
        let (kind, after) = rest.split_first()?;
        rest = match *kind {
            DATA_SHORT => {
                let (length, data) = after.split_first()?;
                return (data.len() == usize::from(*length)).then_some(data);
            }
            DATA_LONG => {
                let (length, data) = after.split_first_chunk()?;
                return (data.len() == u32::from_le_bytes(*length) as usize).then_some(data);
            }
            ORIGIN => after.get(2..)?,
            TOPLEVEL_XID => after.get(4..)?,
            _ => return None,
        };
    }
}

/// Takes a number from the beginning of data.
pub(super) fn word(data: &mut &[u8]) -> Option<u32> {
    let (word, rest) = data.split_first_chunk()?;
    *data = rest;
    Some(u32::from_le_bytes(*word))
}

/// Takes a file: `RelFileNode`, since 16 `RelFileLocator`.
pub(super) fn file(data: &mut &[u8]) -> Option<RelFile> {
    let (tablespace, database) = (word(data)?, word(data)?);
    Some(RelFile { tablespace, database, relation: word(data)? })
}

/// A record without blocks.
#[cfg(test)]
pub(super) fn record(manager: u8, info: u8, words: &[u32]) -> Vec<u8> {
    let mut record = vec![0; HEADER];
    (record[INFO], record[MANAGER]) = (info, manager);
    record.extend([255, 4 * words.len() as u8]);
    record.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    record
}
