use pagevault_keystore::batch::{self, HEADER, describe};
use pagevault_keystore::record::{MAX_NAME, MAX_OPTIONS};
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::wal::{Switch, WalPhase, key_place};
use pagevault_keystore::{CheckValue, DatabaseKey, Lsn, Problem, Record, Scope, Wrapping};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{
    DATABASE, any_record, current, data_key, destroyed, fewer, file, key_version, plaintext,
    rewriting, version,
};

proptest! {
    #[test]
    fn encoded_records_decode_to_the_same(records in vec(any_record(), 1..=fewer(39))) {
        let bytes = batch::encode(&records).unwrap();
        prop_assert_eq!(batch::decode(&bytes).unwrap(), records);
    }

    #[test]
    fn any_bytes_are_refused_without_panic(bytes in vec(any::<u8>(), 0..400)) {
        prop_assert!(batch::decode(&bytes).is_err());
    }

    #[test]
    fn any_change_is_detected(
        records in vec(any_record(), 1..6), at in any::<prop::sample::Index>(), mask in 1..=255_u8,
    ) {
        let mut bytes = batch::encode(&records).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= mask;
        prop_assert!(batch::decode(&bytes).is_err());
    }

    /// Correct checksums around malicious contents, as a forger can make them.
    #[test]
    fn malicious_bodies_never_panic(
        records in vec(any_record(), 1..6),
        cuts in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut body = batch::encode(&records).unwrap().split_off(HEADER);
        for (at, value) in cuts {
            let at = at.index(body.len());
            body[at] = value;
        }
        if let Ok(decoded) = batch::decode(&sealed(&body)) {
            // Accepted records are within all limits, and encode to what was read.
            prop_assert_eq!(batch::encode(&decoded).unwrap(), sealed(&body));
        }
    }

    #[test]
    fn descriptions_hold_no_key_bytes_and_stay_on_one_line(record in any_record()) {
        prop_assert!(!describe(&record).contains('\n'));
    }
}

/// A batch with correct checksums around any body.
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    let mut out = batch::MAGIC.to_vec();
    out.extend(batch::VERSION.to_le_bytes());
    out.extend([0, 0]);
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(crc32c::crc32c(body).to_le_bytes());
    out.extend([0; 16]);
    out.extend(crc32c::crc32c(&out).to_le_bytes());
    out.extend(body);
    out
}

#[test]
fn every_prefix_is_refused() {
    let bytes = batch::encode(&[data_key(1, 1, 1, 7), current(1, 1)]).unwrap();
    for length in 0..bytes.len() {
        assert!(batch::decode(&bytes[..length]).is_err(), "{length}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(batch::decode(&longer).unwrap_err().problem, Problem::Trailing);
}

#[test]
fn later_versions_are_refused_by_name_and_offset() {
    let record = |kind: u8, version: u8| {
        let mut body = batch::encode(&[plaintext(9, 1)]).unwrap().split_off(HEADER);
        let at = body.len();
        body.extend([kind, version, 0, 0, 0, 0]);
        (batch::decode(&sealed(&body)).unwrap_err(), (HEADER + at) as u64)
    };
    let (error, at) = record(77, 1);
    assert_eq!(error.offset, at);
    assert_eq!(
        error.to_string(),
        format!("unknown record type 77, of a later pagevault, at byte {at}")
    );
    let (error, at) = record(4, 9);
    assert_eq!(
        error.to_string(),
        format!("unknown version 9 of record type 4, of a later pagevault, at byte {at}")
    );

    let mut bytes = batch::encode(&[plaintext(9, 1)]).unwrap();
    bytes[4] = 2;
    let checksum = crc32c::crc32c(&bytes[..32]).to_le_bytes();
    bytes[32..36].copy_from_slice(&checksum);
    assert_eq!(batch::decode(&bytes).unwrap_err().problem, Problem::Version(2));
}

#[test]
fn reserved_bytes_are_kept_for_later() {
    let mut bytes = batch::encode(&[plaintext(9, 1)]).unwrap();
    bytes[6] = 1;
    let checksum = crc32c::crc32c(&bytes[..32]).to_le_bytes();
    bytes[32..36].copy_from_slice(&checksum);
    let problem = batch::decode(&bytes).unwrap_err().problem;
    assert_eq!(problem, Problem::Field("batch header", "reserved bytes are set"));

    let mut body = batch::encode(&[data_key(1, 1, 1, 7)]).unwrap().split_off(HEADER);
    // Type, version, length, file, version, cipher.
    let reserved = 6 + 12 + 2 + 1;
    assert_eq!((body[reserved - 1], body[reserved]), (1, 0));
    body[reserved] = 1;
    let problem = batch::decode(&sealed(&body)).unwrap_err().problem;
    assert_eq!(problem, Problem::Field("data key", "reserved byte is set"));
}

/// WAL contains no marks and nothing settled.
#[test]
fn frames_of_a_log_are_not_payloads() {
    assert_eq!(batch::decode(&sealed(&[])).unwrap_err().problem, Problem::Empty);
    let mut bytes = batch::encode(&[plaintext(9, 1)]).unwrap();
    bytes[16] = 1;
    let checksum = crc32c::crc32c(&bytes[..32]).to_le_bytes();
    bytes[32..36].copy_from_slice(&checksum);
    let settles =
        Problem::Field("batch header", "settled position is after the start of the batch");
    assert_eq!(batch::decode(&bytes).unwrap_err().problem, settles);
}

#[test]
fn lengths_beyond_the_end_allocate_nothing() {
    // A record with a stated length of 4 GiB, and such a text field.
    let huge = [2, 1, 255, 255, 255, 255];
    assert_eq!(batch::decode(&sealed(&huge)).unwrap_err().problem, Problem::Short);
    let huge = [2, 1, 5, 0, 0, 0, 255, 255, 255, 255, b'x'];
    assert_eq!(batch::decode(&sealed(&huge)).unwrap_err().problem, Problem::Short);
}

#[test]
fn nothing_beyond_the_limits_is_written() {
    let provider = |name: &str, options: usize| Record::Provider {
        name: name.to_owned(),
        kind: "file".to_owned(),
        options: "x".repeat(options),
        programs: false,
    };
    let refused = |record: Record| batch::encode(&[record]).unwrap_err().problem;
    assert_eq!(refused(provider("", 0)), Problem::Field("provider name", "empty"));
    let long = "n".repeat(MAX_NAME + 1);
    assert_eq!(refused(provider(&long, 0)), Problem::Field("provider name", "too long"));
    assert_eq!(
        refused(provider("a\nb", 0)),
        Problem::Field("provider name", "has a control character")
    );
    assert_eq!(
        refused(provider("a", MAX_OPTIONS + 1)),
        Problem::Field("provider options", "too long")
    );
    assert!(batch::encode(&[provider(&"n".repeat(MAX_NAME), MAX_OPTIONS)]).is_ok());

    assert_eq!(refused(plaintext(0, 1)), Problem::Field("relation file number", "must not be 0"));
    let mut of_wal = destroyed(1, 1, 1);
    if let Record::Destroyed { file, .. } = &mut of_wal {
        *file = key_place(key_version(1)).0;
    }
    let field = Problem::Field("destroyed file", "must not be that of WAL keys");
    assert_eq!(refused(of_wal), field);
    let mut short = data_key(1, 1, 1, 0);
    if let Record::DataKey { wrapped, .. } = &mut short {
        wrapped.pop();
    }
    assert_eq!(refused(short), Problem::Field("wrapped data key", "wrong length for its cipher"));
    assert_eq!(batch::encode(&[]).unwrap_err().problem, Problem::Empty);
}

/// The types exclude such numbers, and so do the decoders.
#[test]
fn numbers_that_are_not_versions_are_refused() {
    let switch = |version| {
        let phase = WalPhase { version, plaintext: false };
        Record::WalSwitch(Switch { step: 1, start: Lsn(8192), phase })
    };
    let database_key = Record::DatabaseKey {
        scope: DATABASE,
        version: key_version(1),
        key: DatabaseKey::new(
            CheckValue::from_bytes([7; 16]),
            Wrapping::new(("disk", "main"), 1, vec![1], 0),
        ),
    };
    let of_data_key = Problem::Field("data key version", "outside 1 to 8191");
    let of_database_key = Problem::Field("database key version", "must not be 0");
    let of_wal_key = Problem::Field("WAL key version", "must not be 0");
    // Type, version, length; then the file, or the scope, or step and address.
    let (file, scope, address) = (6 + 12, 6 + 4, 6 + 4 + 8);
    for (record, at, right, wrong, problem) in [
        (data_key(1, 1, 1, 0), file, vec![1, 0], vec![0, 0], &of_data_key),
        (data_key(1, 1, 1, 0), file, vec![1, 0], vec![0, 32], &of_data_key),
        (current(1, 1), file, vec![1, 0], vec![0, 32], &of_data_key),
        (plaintext(1, 8191), file, vec![255, 31], vec![0, 0], &of_data_key),
        (rewriting(1, 1, 0), file, vec![1, 0], vec![0, 0], &of_data_key),
        (destroyed(1, 1, 1), file, vec![1, 0], vec![0, 32], &of_data_key),
        (data_key(1, 1, 1, 0), file + 8, vec![1, 0, 0, 0], vec![0; 4], &of_database_key),
        (database_key, scope, vec![1, 0, 0, 0], vec![0; 4], &of_database_key),
        (switch(Some(key_version(1))), address, vec![1, 0, 0, 0], vec![0; 4], &of_wal_key),
    ] {
        let mut body = batch::encode(std::slice::from_ref(&record)).unwrap().split_off(HEADER);
        assert_eq!(body[at..at + right.len()], right);
        body[at..at + wrong.len()].copy_from_slice(&wrong);
        let error = batch::decode(&sealed(&body)).unwrap_err();
        assert_eq!((&error.problem, error.offset), (problem, HEADER as u64), "{record:?}");
    }
    let refused = |record: Record| batch::encode(&[record]).unwrap_err().problem;
    assert_eq!(refused(switch(None)), of_wal_key);
    let phase = Phase::default();
    assert_eq!(
        refused(Record::Rewriting { file: crate::arbitrary::file(1), phase, done: false }),
        of_data_key
    );
}

#[test]
fn descriptions() {
    let all = [
        Record::Provider {
            name: "disk".into(),
            kind: "file".into(),
            options: "{}".into(),
            programs: false,
        },
        Record::DropProvider { name: "disk".into() },
        Record::DatabaseKey {
            scope: DATABASE,
            version: key_version(2),
            key: DatabaseKey::new(
                CheckValue::from_bytes([7; 16]),
                Wrapping::new(("disk", "main"), 3, vec![1], 0),
            ),
        },
        data_key(16384, 1, 1, 0),
        Record::DataKey {
            file: file(16384),
            version: version(2),
            cipher: 99,
            scope: Scope::CLUSTER,
            key_version: key_version(1),
            wrapped: vec![0; 80],
            created: 0,
        },
        current(16384, 1),
        plaintext(16384, 2),
        rewriting(16384, 1, 0),
        rewriting(16384, 2, 3),
        destroyed(16384, 2, 7),
    ];
    let lines: Vec<String> = all.iter().map(describe).collect();
    assert_eq!(
        lines,
        [
            "provider disk kind file",
            "drop provider disk",
            "database key 5/2 provider disk master key main version 3",
            "data key rel 1663/5/16384 version 1 aes-256-xts key 5/1",
            "data key rel 1663/5/16384 version 2 cipher 99 key 0/1",
            "current rel 1663/5/16384 version 1",
            "plaintext rel 1663/5/16384 after version 2",
            "rewriting rel 1663/5/16384 with version 1",
            "rewritten rel 1663/5/16384 in plaintext after version 2",
            "destroyed rel 1663/5/16384 through version 2",
        ]
    );
    assert_eq!(batch::describe_all(&all[..2]), "provider disk kind file; drop provider disk");
}
