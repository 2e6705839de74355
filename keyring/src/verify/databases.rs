//! Databases whose directories a WAL record replaces or removes as a whole (`dbase_redo`,
//! dbcommands.c). Their pages have no images in WAL: `CREATE DATABASE ... STRATEGY file_copy`
//! copies files that were on disk, and redo copies them again.

use super::wal_record::{DATABASES, data, kind};

/// `XLOG_DBASE_CREATE_FILE_COPY`, `XLOG_DBASE_DROP` (dbcommands_xlog.h, the same from 15 to 19).
const CREATE_BY_COPY: u8 = 0x00;
const DROP: u8 = 0x20;

/// Tablespaces and databases of which a complete record replaces or removes everything.
pub(super) fn replaced_by(record: &[u8]) -> Vec<(u32, u32)> {
    let Some((DATABASES, operation)) = kind(record) else { return Vec::new() };
    let data = data(record).unwrap_or_default();
    let words: Vec<u32> = data.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    match (operation, words.as_slice()) {
        // `xl_dbase_create_file_copy_rec`
        (CREATE_BY_COPY, [database, tablespace, _, _]) => vec![(*tablespace, *database)],
        // `xl_dbase_drop_rec`
        (DROP, [database, count, tablespaces @ ..]) => {
            tablespaces.iter().take(*count as usize).map(|space| (*space, *database)).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::wal_record::record;
    use super::*;

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
