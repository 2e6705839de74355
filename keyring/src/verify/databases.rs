//! Databases whose directories a WAL record replaces or removes as a whole (`dbase_redo`,
//! dbcommands.c). Their pages have no images in WAL: `CREATE DATABASE ... STRATEGY file_copy`
//! copies files that were on disk, and redo copies them again.

use super::key_records::{HEADER, INFO, MANAGER, OF_THE_SERVER, main_data};

/// `RM_DBASE_ID`, `XLOG_DBASE_CREATE_FILE_COPY`, `XLOG_DBASE_DROP` (dbcommands_xlog.h, the same
/// from 15 to 19).
const DATABASES: u8 = 4;
const CREATE_BY_COPY: u8 = 0x00;
const DROP: u8 = 0x20;

/// Tablespaces and databases of which a complete record replaces or removes everything.
pub(super) fn replaced_by(record: &[u8]) -> Vec<(u32, u32)> {
    if record.get(MANAGER) != Some(&DATABASES) {
        return Vec::new();
    }
    let data = record.get(HEADER..).and_then(main_data).unwrap_or_default();
    let words: Vec<u32> = data.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    match (record.get(INFO).map(|info| info & !OF_THE_SERVER), words.as_slice()) {
        // `xl_dbase_create_file_copy_rec`
        (Some(CREATE_BY_COPY), [database, tablespace, _, _]) => vec![(*tablespace, *database)],
        // `xl_dbase_drop_rec`
        (Some(DROP), [database, count, tablespaces @ ..]) => {
            tablespaces.iter().take(*count as usize).map(|space| (*space, *database)).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(manager: u8, info: u8, words: &[u32]) -> Vec<u8> {
        let mut record = vec![0; HEADER];
        (record[INFO], record[MANAGER]) = (info, manager);
        record.extend([255, 4 * words.len() as u8]);
        record.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        record
    }

    #[test]
    fn databases_are_replaced_by_copies_and_removed() {
        let copied = record(DATABASES, CREATE_BY_COPY | 1, &[16390, 1663, 5, 1663]);
        assert_eq!(replaced_by(&copied), [(1663, 16390)]);
        let dropped = record(DATABASES, DROP, &[16390, 2, 1663, 16400]);
        assert_eq!(replaced_by(&dropped), [(1663, 16390), (16400, 16390)]);
        assert_eq!(replaced_by(&record(DATABASES, DROP, &[16390, u32::MAX, 1663])).len(), 1);
        // Redo of `XLOG_DBASE_CREATE_WAL_LOG` writes no relation.
        assert_eq!(replaced_by(&record(DATABASES, 0x10, &[16390, 1663])), []);
        assert_eq!(replaced_by(&record(5, CREATE_BY_COPY, &[16390, 1663, 5, 1663])), []);
        for length in 0..copied.len() {
            assert_eq!(replaced_by(&copied[..length]), [], "{length}");
        }
    }
}
