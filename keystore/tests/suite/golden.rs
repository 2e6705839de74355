//! Format version 1, in files that never change. `vectors/make.py` wrote them from the description.

use pagevault_keystore::former::Range;
use pagevault_keystore::job::{JobId, JobKind, JobState, MAX_NUMBER, Request as Asked, Step};
use pagevault_keystore::log::{Log, replay};
use pagevault_keystore::protocol::{Reply, Request};
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::wal::{Switch, WalPhase, key_place};
use pagevault_keystore::{
    CheckValue, DatabaseKey, KeyGroup, Lsn, Record, RelFile, Scope, Wrapping, data_key_aad,
    master_context,
};

use crate::arbitrary::{key_version, version};
use crate::faulty::FaultyStorage;
use crate::protocol::{reply, request};

const CLUSTER: &[u8] = include_bytes!("../../vectors/v1/cluster.keys");
const WAL: &[u8] = include_bytes!("../../vectors/v1/wal.keys");
const DATABASE: &[u8] = include_bytes!("../../vectors/v1/5.keys");
const SHREDDED: &[u8] = include_bytes!("../../vectors/v1/6.keys");
const REWRITTEN: &[u8] = include_bytes!("../../vectors/v1/7.keys");
const JOBS: &[u8] = include_bytes!("../../vectors/v1/8.keys");
const BORN: &[u8] = include_bytes!("../../vectors/v1/9.keys");
const FORMER: &[u8] = include_bytes!("../../vectors/v1/10.keys");
const SWITCHED: &[u8] = include_bytes!("../../vectors/v1/11.keys");
const GROUPS: &[u8] = include_bytes!("../../vectors/v1/groups.keys");
const SEVERAL: &[u8] = include_bytes!("../../vectors/v1/several.keys");
const ROTATED: &[u8] = include_bytes!("../../vectors/v1/rotated.keys");
const REQUEST: &[u8] = include_bytes!("../../vectors/v1/request.json");
const REPLY: &[u8] = include_bytes!("../../vectors/v1/reply.json");
const ID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn wrapped(from: u8, length: u8) -> Vec<u8> {
    (from..from + length).collect()
}

/// The batches of the cluster's log.
fn cluster() -> Vec<Vec<Record>> {
    let file = RelFile { tablespace: 1664, database: 0, relation: 1260 };
    vec![
        vec![
            Record::Provider {
                name: "disk".into(),
                kind: "file".into(),
                options: r#"{"path": "/etc/pagevault/keys"}"#.into(),
                programs: false,
            },
            Record::Provider {
                name: "Schlüssel".into(),
                kind: "vault".into(),
                options: "{}".into(),
                programs: true,
            },
        ],
        vec![
            Record::DatabaseKey {
                scope: Scope::CLUSTER,
                version: key_version(1),
                key: DatabaseKey::new(
                    CheckValue::from_bytes([0xC1; 16]),
                    Wrapping::new(("disk", "main"), 1, vec![1, 2, 3], 1_700_000_000),
                ),
            },
            Record::DatabaseKey {
                scope: Scope::database(5),
                version: key_version(2),
                key: DatabaseKey::new(
                    CheckValue::from_bytes(ID),
                    Wrapping::new(("disk", "schlüssel"), (1 << 40) + 7, wrapped(0, 60), -1),
                ),
            },
        ],
        vec![Record::DropProvider { name: "Schlüssel".into() }],
        vec![
            Record::DataKey {
                file,
                version: version(1),
                cipher: 2,
                scope: Scope::CLUSTER,
                key_version: key_version(1),
                wrapped: wrapped(100, 60),
                created: 1_700_000_001,
            },
            Record::Current { file, version: version(1) },
        ],
    ]
}

/// The cluster's log after a rotation of its master key and of its database key.
fn rotated() -> Vec<Vec<Record>> {
    let key = |number, check, made, first| {
        let check = CheckValue::from_bytes([check; 16]);
        let key = DatabaseKey { made, ..DatabaseKey::new(check, first) };
        Record::DatabaseKey { scope: Scope::CLUSTER, version: key_version(number), key }
    };
    let by = |version, wrapped: &[u8], at| Wrapping::new(MAIN, version, wrapped.into(), at);
    let second = Wrapping { since: 1_700_000_008, ..by(2, &[5], 1_700_000_009) };
    vec![vec![
        key(1, 0xC1, 1_700_000_000, by(1, &[1, 2, 3], 1_700_000_000)),
        key(1, 0xC1, 1_700_000_000, by(2, &[4], 1_700_000_008)),
        key(2, 0xC2, 1_700_000_009, second),
    ]]
}

/// The cluster's log with a database key that three master keys wrap.
fn several() -> Vec<Vec<Record>> {
    let first = Wrapping::new(MAIN, 3, vec![1, 2, 3], 1_700_000_005);
    let vault = Wrapping::new(("Tresor", "schlüssel"), 1 << 40, wrapped(0, 60), 1_700_000_006);
    let kms = Wrapping::new(("kms", "alias/x"), 0, vec![9], -1);
    let others = vec![Wrapping { since: 1_700_000_001, ..vault }, kms];
    let check = CheckValue::from_bytes([0xC3; 16]);
    let key = DatabaseKey { others, made: 1_700_000_004, ..DatabaseKey::new(check, first) };
    vec![vec![Record::DatabaseKey { scope: Scope::CLUSTER, version: key_version(7), key }]]
}

const MAIN: (&str, &str) = ("disk", "main");

/// The batches of the database's log.
fn database() -> Vec<Vec<Record>> {
    let file = RelFile { tablespace: 1663, database: 5, relation: 16384 };
    vec![
        vec![
            Record::DataKey {
                file,
                version: version(1),
                cipher: 1,
                scope: Scope::database(5),
                key_version: key_version(1),
                wrapped: wrapped(0, 92),
                created: 1_700_000_002,
            },
            Record::Current { file, version: version(1) },
        ],
        vec![Record::DataKey {
            file,
            version: version(8191),
            cipher: 2,
            scope: Scope::CLUSTER,
            key_version: key_version(4_000_000_000),
            wrapped: wrapped(100, 60),
            created: 1_700_000_003,
        }],
        vec![Record::Plaintext { file, after: version(8191) }],
        vec![Record::Rewriting { file, phase: Phase::plaintext_after(version(8191)), done: true }],
    ]
}

/// The log of a database with destroyed keys.
fn shredded() -> Vec<Vec<Record>> {
    let file = |relation| RelFile { tablespace: 1663, database: 6, relation };
    vec![vec![
        Record::Destroyed {
            file: file(16384),
            through: version(3),
            cipher: 1,
            whole: false,
            lsn: Lsn(0x1_6B37_4D8F),
            at: 1_800_000_000,
        },
        Record::Current { file: file(16384), version: version(3) },
        Record::Destroyed {
            file: file(16385),
            through: version(8191),
            cipher: 0,
            whole: true,
            lsn: Lsn(0x2_A000_0028),
            at: 1_800_000_001,
        },
    ]]
}

/// The log of a database in which a table is encrypted, and then decrypted.
fn rewritten() -> Vec<Vec<Record>> {
    let file = RelFile { tablespace: 1663, database: 7, relation: 16384 };
    let rewriting = |plaintext, done| {
        let phase = Phase { version: Some(version(1)), plaintext };
        Record::Rewriting { file, phase, done }
    };
    let key = Record::DataKey {
        file,
        version: version(1),
        cipher: 1,
        scope: Scope::database(7),
        key_version: key_version(1),
        wrapped: wrapped(0, 92),
        created: 1_700_000_006,
    };
    vec![
        vec![key, Record::Current { file, version: version(1) }, rewriting(false, false)],
        vec![rewriting(false, true)],
        vec![Record::Plaintext { file, after: version(1) }, rewriting(true, false)],
    ]
}

/// The log of a database with a file that contains sealed pages only, not any more, and again.
fn born() -> Vec<Vec<Record>> {
    let file = RelFile { tablespace: 1663, database: 9, relation: 16384 };
    let key = Record::DataKey {
        file,
        version: version(1),
        cipher: 1,
        scope: Scope::database(9),
        key_version: key_version(1),
        wrapped: wrapped(0, 92),
        created: 1_700_000_007,
    };
    let sealed_only = |phase| Record::SealedOnly { file, phase };
    let since = |number| sealed_only(Phase::under(version(number)));
    vec![
        vec![key, Record::Current { file, version: version(1) }, since(1)],
        vec![sealed_only(Phase::plaintext_after(version(1)))],
        vec![since(8191)],
    ]
}

/// The log of a database with rekey jobs.
fn jobs() -> Vec<Vec<Record>> {
    let job = |number| JobId { database: 8, number };
    let first = Asked {
        relation: 16384,
        kind: JobKind::Encrypt,
        cipher: 2,
        requested_by: 10,
        at: 1_800_000_000_000_000,
        transaction: (1 << 32) + 7,
    };
    let last = Asked {
        relation: 16386,
        kind: JobKind::Decrypt,
        cipher: 0,
        requested_by: u32::MAX,
        at: -1,
        transaction: 9,
    };
    let begun = Step {
        step: 1,
        state: JobState::Waiting,
        started: 0,
        at: 1_800_000_000_000_001,
        error: String::new(),
    };
    let failed = Step {
        step: 2,
        state: JobState::Failed,
        started: 1_800_000_000_000_002,
        at: 1_800_000_000_000_003,
        error: "Schlüssel fehlt".into(),
    };
    vec![
        vec![Record::Job { job: job(1), request: first }],
        vec![
            Record::JobStep { job: job(1), step: begun },
            Record::JobBegun { job: job(1), relation: 16385 },
        ],
        vec![Record::Job { job: job(MAX_NUMBER), request: last }],
        vec![Record::JobStep { job: job(1), step: failed }],
        vec![Record::JobsForgotten { database: 8, through: 1, all: false }],
    ]
}

/// The batches of the log of a database in which files are gone.
fn former() -> Vec<Vec<Record>> {
    let range = |first, last, through, gone| {
        let (through, gone) = (version(through), Lsn(gone));
        Record::FormerFiles(Range { database: 10, first, last, through, gone })
    };
    vec![
        vec![range(16384, u32::MAX, 8191, 0x2_A000_0028)],
        vec![Record::KeysForgotten { database: 10, by: Lsn(0x2_A000_0028) }, range(1, 1, 1, 1)],
    ]
}

/// The log of a database with a table that is being encrypted.
fn switched() -> Vec<Vec<Record>> {
    let file = RelFile { tablespace: 1663, database: 11, relation: 16384 };
    let phase = Phase::under(version(1));
    let key = Record::DataKey {
        file,
        version: version(1),
        cipher: 1,
        scope: Scope::database(11),
        key_version: key_version(1),
        wrapped: wrapped(0, 92),
        created: 1_700_000_013,
    };
    let rewriting = Record::Rewriting { file, phase, done: false };
    vec![
        vec![key, rewriting, Record::Current { file, version: version(1) }],
        vec![Record::Switched { file, phase, lsn: Lsn(0x2_A000_0028) }],
    ]
}

/// The batches of a cluster's log with key groups.
fn groups() -> Vec<Vec<Record>> {
    let group = |number| KeyGroup::new(number).unwrap();
    let key = DatabaseKey::new(
        CheckValue::from_bytes([0xC4; 16]),
        Wrapping::new(("disk", "acme"), 1, vec![6, 7], 1_700_000_011),
    );
    vec![
        vec![Record::KeyGroup { group: group(100), name: "acme".into(), at: 1_700_000_010 }],
        vec![Record::DatabaseKey { scope: group(100).scope(), version: key_version(1), key }],
        vec![Record::KeyGroup { group: group(11_999), name: "0_x-9".into(), at: -1 }],
        vec![Record::EndedKeyGroup { group: group(11_999), at: 1_700_000_012 }],
    ]
}

/// The batches of a cluster's log with WAL keys.
fn wal() -> Vec<Vec<Record>> {
    let key = |number, cipher, wrapped, created| {
        let (file, version) = key_place(key_version(number));
        let (scope, key_version) = (Scope::CLUSTER, key_version(1));
        Record::DataKey { file, version, cipher, scope, key_version, wrapped, created }
    };
    let switch = |step, start, number, plaintext| {
        let (start, version) = (Lsn(start), Some(key_version(number)));
        Record::WalSwitch(Switch { step, start, phase: WalPhase { version, plaintext } })
    };
    vec![
        vec![key(1, 1, wrapped(0, 92), 1_700_000_004)],
        vec![switch(1, 0x1_6B37_4000, 1, false)],
        vec![switch(2, 0x2_0000_2000, 1, true)],
        vec![key(8192, 2, wrapped(100, 60), 1_700_000_005)],
        vec![switch(4_000_000_000, 0xFFFF_FFFF_0000_0000, 8192, false)],
    ]
}

#[test]
fn golden_logs_are_read() {
    for (bytes, scope, generation, batches) in [
        (CLUSTER, 0, 0, cluster()),
        (WAL, 0, 0, wal()),
        (DATABASE, 5, 3, database()),
        (SHREDDED, 6, 1, shredded()),
        (REWRITTEN, 7, 0, rewritten()),
        (JOBS, 8, 0, jobs()),
        (BORN, 9, 0, born()),
        (FORMER, 10, 0, former()),
        (SWITCHED, 11, 0, switched()),
        (ROTATED, 0, 0, rotated()),
        (SEVERAL, 0, 0, several()),
        (GROUPS, 0, 0, groups()),
    ] {
        let contents = replay(bytes, Scope::database(scope)).unwrap();
        assert_eq!(contents.records, batches.concat());
        assert_eq!((contents.position.keystore_id, contents.torn), (ID, 0));
        assert_eq!(contents.position.generation, generation);
    }
}

#[test]
fn golden_logs_are_written() {
    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, Scope::database(0), &[]).unwrap();
    cluster().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("cluster.keys"), CLUSTER);

    let mut log = Log::create(&storage, ID, Scope::database(6), &[]).unwrap();
    log.compact::<Record>(&[]).unwrap();
    log.append(&shredded()[0]).unwrap();
    assert_eq!(storage.content("6.keys"), SHREDDED);

    let mut log = Log::create(&storage, ID, Scope::database(7), &[]).unwrap();
    rewritten().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("7.keys"), REWRITTEN);

    let mut log = Log::create(&storage, ID, Scope::database(8), &[]).unwrap();
    jobs().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("8.keys"), JOBS);

    let mut log = Log::create(&storage, ID, Scope::database(9), &[]).unwrap();
    born().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("9.keys"), BORN);

    let mut log = Log::create(&storage, ID, Scope::database(10), &[]).unwrap();
    former().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("10.keys"), FORMER);

    let mut log = Log::create(&storage, ID, Scope::database(11), &[]).unwrap();
    switched().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("11.keys"), SWITCHED);

    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, Scope::database(0), &[]).unwrap();
    rotated().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("cluster.keys"), ROTATED);

    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, Scope::database(0), &[]).unwrap();
    several().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("cluster.keys"), SEVERAL);

    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, Scope::database(0), &[]).unwrap();
    groups().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("cluster.keys"), GROUPS);

    let storage = FaultyStorage::default();
    let mut log = Log::create(&storage, ID, Scope::database(0), &[]).unwrap();
    wal().iter().for_each(|batch| log.append(batch).unwrap());
    assert_eq!(storage.content("cluster.keys"), WAL);

    let mut log = Log::create(&storage, ID, Scope::database(5), &[]).unwrap();
    for _ in 0..3 {
        log.compact::<Record>(&[]).unwrap();
    }
    let batches = database();
    log.stage(&batches[0], Lsn(0x1000)).unwrap();
    log.stage(&batches[1], Lsn(0x1_0000_1000)).unwrap();
    let position = log.position();
    log.sync().unwrap();
    assert!(log.append_settled(&position).unwrap());
    log.sync().unwrap();
    log.append(&batches[2]).unwrap();
    log.stage(&batches[3], Lsn(0x1_0000_2000)).unwrap();
    assert_eq!(storage.content("5.keys"), DATABASE);
}

#[test]
fn golden_messages_are_read_and_written() {
    let trimmed = |text: &[u8]| String::from_utf8(text.trim_ascii().to_vec()).unwrap();
    let written = |text: &[u8]| String::from_utf8(text.to_vec()).unwrap();
    assert_eq!(written(&request().to_json().unwrap()), trimmed(REQUEST));
    assert_eq!(written(&reply().to_json().unwrap()), trimmed(REPLY));
    assert_eq!(Request::from_json(REQUEST).unwrap().operations.len(), 6);
    assert_eq!(Reply::from_json(REPLY, 6).unwrap().results.len(), 6);
}

#[test]
fn golden_bindings() {
    let file = RelFile { tablespace: 1663, database: 0x0102_0304, relation: 0x0506_0708 };
    let expected = *b"PVDK\x01\x02\xff\x1f\x04\x03\x02\x01\x08\x07\x06\x05";
    assert_eq!(data_key_aad(file, version(8191), 2), expected);
    // Everything except the tablespace is bound.
    assert_eq!(data_key_aad(RelFile { tablespace: 1, ..file }, version(8191), 2), expected);
    assert_ne!(data_key_aad(RelFile { database: 1, ..file }, version(8191), 2), expected);
    assert_ne!(data_key_aad(RelFile { relation: 1, ..file }, version(8191), 2), expected);
    assert_ne!(data_key_aad(file, version(1), 2), expected);
    assert_ne!(data_key_aad(file, version(8191), 1), expected);

    let context = master_context(&ID, Scope::database(16384));
    assert_eq!(context, "pagevault/1/000102030405060708090a0b0c0d0e0f/16384");
    assert_eq!(
        master_context(&[0; 16], Scope::CLUSTER),
        "pagevault/1/00000000000000000000000000000000/0"
    );
}
