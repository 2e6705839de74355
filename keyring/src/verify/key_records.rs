//! pagevault's own records in WAL: of which files they say whether pages may be in plaintext, or
//! under former keys.
//!
//! A base backup copies the keystore at one moment and pages at others. A page may be in plaintext
//! because it is older than the record that the keystore has already, or newer than what the
//! keystore says; recovery restores it, or replays what permits it. Both are in the WAL that makes
//! the backup consistent, from its redo pointer on.

use pagevault_keystore::{Record, RelFile, batch};

use super::wal_record::{PAGEVAULT, data, kind};

/// As in the extension's `pg/wal.rs`: the operation that adds records to the keystore. Before the
/// batch are the scope and the keystore's identity.
const KEYS: u8 = 0x10;
const BEFORE_BATCH: usize = 4 + 16;

/// The keystore's records in a complete record.
pub(super) fn records_of(record: &[u8]) -> Vec<Record> {
    let is_ours = kind(record) == Some((PAGEVAULT, KEYS));
    let batch = || batch::decode(data(record)?.get(BEFORE_BATCH..)?).ok();
    let records = if is_ours { batch() } else { None };
    records.unwrap_or_default()
}

/// Files of which a complete record says that their pages are encrypted only, or only under a later
/// key, or not any more.
pub(super) fn files_concerned(record: &[u8]) -> Vec<RelFile> {
    let concerned = records_of(record).into_iter().filter_map(|record| match record {
        Record::SealedOnly { file, .. } | Record::Plaintext { file, .. } => Some(file),
        _ => None,
    });
    concerned.collect()
}

#[cfg(test)]
mod tests {
    use pagevault_keystore::rel_file::Phase;
    use pagevault_keystore::{DataKeyVersion, Record, RelFile, batch};

    use super::super::wal_record::{self, HEADER, PAGEVAULT};
    use super::{BEFORE_BATCH, KEYS, files_concerned};

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 16384 };

    fn record(records: &[Record], before: &[u8]) -> Vec<u8> {
        let data = [vec![7; BEFORE_BATCH], batch::encode(records).unwrap()].concat();
        let mut record = wal_record::record(PAGEVAULT, KEYS, &[]);
        record.truncate(HEADER);
        record.extend_from_slice(before);
        match u8::try_from(data.len()) {
            Ok(length) => record.extend([255, length]),
            Err(_) => {
                record.push(254);
                record.extend((data.len() as u32).to_le_bytes());
            }
        }
        record.extend(data);
        record
    }

    #[test]
    fn records_about_plaintext_are_found() {
        let version = DataKeyVersion::FIRST;
        let sealed_only = Record::SealedOnly { file: FILE, phase: Phase::under(version) };
        let lifted = Record::Plaintext { file: FILE, after: version };
        let other = Record::Current { file: FILE, version };
        for before in [&[][..], &[253, 1, 2], &[252, 1, 2, 3, 4, 253, 1, 2]] {
            assert_eq!(files_concerned(&record(std::slice::from_ref(&lifted), before)), [FILE]);
            let many: Vec<_> = (0..20).flat_map(|_| [other.clone(), sealed_only.clone()]).collect();
            assert_eq!(files_concerned(&record(&many, before)), [FILE; 20]);
            assert_eq!(files_concerned(&record(std::slice::from_ref(&other), before)), []);
        }
        let mut of_another = wal_record::record(PAGEVAULT - 1, KEYS, &[]);
        of_another.truncate(HEADER);
        of_another.extend(&record(std::slice::from_ref(&lifted), &[])[HEADER..]);
        assert_eq!(files_concerned(&of_another), []);
        let whole = record(&[lifted], &[]);
        for length in 0..whole.len() {
            assert_eq!(files_concerned(&whole[..length]), [], "{length}");
        }
    }
}
