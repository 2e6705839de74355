//! Records for tests: fixed and random ones.

use std::collections::BTreeSet;

use pagevault_keystore::former::Range;
use pagevault_keystore::job::{JobId, JobKind, JobState, Request, Step};
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::state::State;
use pagevault_keystore::wal::{self, Switch, WalPhase};
use pagevault_keystore::{
    CheckValue, DataKeyVersion, DatabaseKey, KeyGroup, KeyVersion, Lsn, Record, RelFile, Scope,
    Wrapping,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// The database of the files of [`file`].
pub(crate) const DATABASE: Scope = Scope::database(5);

pub(crate) fn version(number: u16) -> DataKeyVersion {
    DataKeyVersion::new(number).unwrap()
}

pub(crate) fn key_version(number: u32) -> KeyVersion {
    KeyVersion::new(number).unwrap()
}

pub(crate) fn file(relation: u32) -> RelFile {
    RelFile { tablespace: 1663, database: 5, relation }
}

/// A number of repetitions or a length: smaller under Miri, which is slow.
pub(crate) const fn fewer(native: usize) -> usize {
    if cfg!(miri) { native.div_ceil(10) } else { native }
}

/// A data key whose wrapped bytes are all `fill`.
pub(crate) fn data_key(relation: u32, number: u16, wrapped_by: u32, fill: u8) -> Record {
    Record::DataKey {
        file: file(relation),
        version: version(number),
        cipher: 1,
        scope: DATABASE,
        key_version: key_version(wrapped_by),
        wrapped: vec![fill; 92],
        created: 1_700_000_000,
    }
}

pub(crate) fn current(relation: u32, number: u16) -> Record {
    Record::Current { file: file(relation), version: version(number) }
}

pub(crate) fn plaintext(relation: u32, after: u16) -> Record {
    Record::Plaintext { file: file(relation), after: version(after) }
}

/// `which`: one of the four combinations of `plaintext` and `done`.
pub(crate) fn rewriting(relation: u32, number: u16, which: u8) -> Record {
    let phase = Phase { version: Some(version(number)), plaintext: which & 1 != 0 };
    Record::Rewriting { file: file(relation), phase, done: which & 2 != 0 }
}

/// A file contains sealed pages only since this version; or, with `ended`, not any more after it.
pub(crate) fn sealed_only(relation: u32, number: u16, ended: bool) -> Record {
    let phase = Phase { version: Some(version(number)), plaintext: ended };
    Record::SealedOnly { file: file(relation), phase }
}

/// The keys of a file up to a version are destroyed, when WAL ends at `lsn`.
pub(crate) fn destroyed(relation: u32, through: u16, lsn: u64) -> Record {
    Record::Destroyed {
        file: file(relation),
        through: version(through),
        cipher: 1,
        whole: false,
        lsn: Lsn(lsn),
        at: 1_700_000_009,
    }
}

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9_äß-]{1,40}"
}

fn any_file() -> impl Strategy<Value = RelFile> {
    // Few, so that several records concern the same file.
    (1663..1665_u32, 4..6_u32, 1..8_u32).prop_map(|(tablespace, database, relation)| RelFile {
        tablespace,
        database,
        relation,
    })
}

fn any_data_key() -> impl Strategy<Value = Record> {
    let wrapped = prop_oneof![
        (Just(1_u8), vec(any::<u8>(), 92)),
        (Just(2_u8), vec(any::<u8>(), 60)),
        (200..203_u8, vec(any::<u8>(), 29..33)),
    ];
    let ids = (prop_oneof![1..5_u16, 8190..=8191_u16], any::<u32>(), 1..u32::MAX);
    (any_file(), ids, wrapped, any::<i64>()).prop_map(
        |(file, (number, scope, wrapped_by), (cipher, wrapped), created)| Record::DataKey {
            file,
            version: version(number),
            cipher,
            scope: Scope::database(scope),
            key_version: key_version(wrapped_by),
            wrapped,
            created,
        },
    )
}

pub(crate) fn any_record() -> impl Strategy<Value = Record> {
    let provider = (name(), name(), "\\PC{0,60}", any::<bool>()).prop_map(
        |(name, kind, options, programs)| Record::Provider { name, kind, options, programs },
    );
    let wrapping = || {
        let times = (any::<i64>(), prop_oneof![Just(None), any::<i64>().prop_map(Some)]);
        (name(), name(), any::<u64>(), vec(any::<u8>(), 1..200), times).prop_map(
            |(provider, master_key, version, wrapped, (at, since))| {
                let new = Wrapping::new((&provider, &master_key), version, wrapped, at);
                Wrapping { since: since.unwrap_or(at), ..new }
            },
        )
    };
    let others = vec(wrapping(), 0..3);
    let made = prop_oneof![Just(None), any::<i64>().prop_map(Some)];
    let database_key = (0..4_u32, 1..4_u32, made, wrapping(), others).prop_map(
        |(scope, version, made, first, mut others)| {
            let mut known = BTreeSet::from([(first.provider.clone(), first.master_key.clone())]);
            others.retain(|other| known.insert((other.provider.clone(), other.master_key.clone())));
            // The same key in each wrapping.
            let check = CheckValue::from_bytes([(16 * scope + version) as u8; 16]);
            Record::DatabaseKey {
                scope: Scope::database(scope),
                version: key_version(version),
                key: DatabaseKey { check, made: made.unwrap_or(first.at), first, others },
            }
        },
    );
    let versions = || (1..5_u16).prop_map(version);
    let current =
        (any_file(), versions()).prop_map(|(file, version)| Record::Current { file, version });
    let plaintext =
        (any_file(), versions()).prop_map(|(file, after)| Record::Plaintext { file, after });
    let rewriting = (any_file(), versions(), any::<bool>(), any::<bool>()).prop_map(
        |(file, version, plaintext, done)| Record::Rewriting {
            file,
            phase: Phase { version: Some(version), plaintext },
            done,
        },
    );
    let switched = (any_file(), versions(), any::<bool>(), any::<u64>()).prop_map(
        |(file, version, plaintext, lsn)| Record::Switched {
            file,
            phase: Phase { version: Some(version), plaintext },
            lsn: Lsn(lsn),
        },
    );
    let sealed_only =
        (any_file(), versions(), any::<bool>()).prop_map(|(file, version, plaintext)| {
            Record::SealedOnly { file, phase: Phase { version: Some(version), plaintext } }
        });
    let ids = (versions(), 0..3_u8, any::<bool>(), any::<u64>(), any::<i64>());
    let destroyed = (any_file(), ids).prop_map(|(file, (through, cipher, whole, lsn, at))| {
        let lsn = Lsn(lsn);
        Record::Destroyed { file, through, cipher, whole, lsn, at }
    });
    prop_oneof![
        provider,
        name().prop_map(|name| Record::DropProvider { name }),
        database_key,
        any_data_key(),
        current,
        plaintext,
        rewriting,
        switched,
        sealed_only,
        any_wal_key(),
        any_wal_switch(),
        destroyed,
        any_job(),
        any_former(),
        any_key_group(),
    ]
}

/// Whether a record concerns a job that was not requested yet, or says where a file was switched of
/// which no record says that. Servers do not write such records.
pub(crate) fn is_too_early(record: &Record, state: &State) -> bool {
    if let Record::Switched { file, phase, .. } = record {
        let last = state.file(*file).and_then(|entry| entry.rewriting);
        return last.is_none_or(|(last, _)| last < *phase);
    }
    let (Record::JobStep { job, .. } | Record::JobBegun { job, .. }) = record else { return false };
    state.jobs(job.database).is_none_or(|jobs| {
        job.number > jobs.forgotten() && jobs.iter().all(|(number, _)| number != job.number)
    })
}

/// Records of rekey jobs.
pub(crate) fn any_job() -> impl Strategy<Value = Record> {
    let job = || (1..3_u32, 1..6_u64).prop_map(|(database, number)| JobId { database, number });
    let kind = (1..4_u8).prop_map(|kind| JobKind::from_number(kind).unwrap());
    let ids = (any::<u8>(), any::<u32>(), any::<i64>(), any::<u64>());
    let asked = (job(), kind, 1..u32::MAX, ids).prop_map(
        |(job, kind, relation, (cipher, requested_by, at, transaction))| {
            let request = Request { relation, kind, cipher, requested_by, at, transaction };
            Record::Job { job, request }
        },
    );
    let state = (1..7_u8).prop_map(|state| JobState::from_number(state).unwrap());
    let step = (job(), 1..5_u32, state, any::<i64>(), any::<i64>(), name()).prop_map(
        |(job, step, state, started, at, error)| Record::JobStep {
            job,
            step: Step { step, state, started, at, error },
        },
    );
    let begun = (job(), 1..4_u32).prop_map(|(job, relation)| Record::JobBegun { job, relation });
    let forgotten = (1..3_u32, 1..6_u64, any::<bool>())
        .prop_map(|(database, through, all)| Record::JobsForgotten { database, through, all });
    prop_oneof![asked, step, begun, forgotten]
}

/// Records of former files, with numbers as those of [`any_file`].
fn any_former() -> impl Strategy<Value = Record> {
    let numbers = (0..6_u32, 1..8_u32, 0..8_u32, (1..5_u16).prop_map(version), 1..9_u64);
    let former = numbers.prop_map(|(database, first, length, through, gone)| {
        let (last, gone) = (first + length, Lsn(gone));
        Record::FormerFiles(Range { database, first, last, through, gone })
    });
    let forgotten = (0..6_u32, 1..9_u64)
        .prop_map(|(database, by)| Record::KeysForgotten { database, by: Lsn(by) });
    prop_oneof![former, forgotten]
}

/// Key groups, and their keys.
fn any_key_group() -> impl Strategy<Value = Record> {
    let group = || (100..104_u32).prop_map(|number| KeyGroup::new(number).unwrap());
    let made = (group(), "[a-z0-9][a-z0-9_-]{0,20}", any::<i64>())
        .prop_map(|(group, name, at)| Record::KeyGroup { group, name, at });
    let ended = (group(), any::<i64>()).prop_map(|(group, at)| Record::EndedKeyGroup { group, at });
    prop_oneof![made, ended]
}

/// A version of the WAL key, in one of the two files of the first 16,382 versions.
fn any_wal_key() -> impl Strategy<Value = Record> {
    let version = prop_oneof![1..4_u32, 8190..8194_u32].prop_map(key_version);
    (version, vec(any::<u8>(), 92)).prop_map(|(version, wrapped)| {
        let (file, version) = wal::key_place(version);
        let (scope, key_version) = (Scope::CLUSTER, key_version(1));
        Record::DataKey { file, version, cipher: 1, scope, key_version, wrapped, created: 0 }
    })
}

pub(crate) fn any_wal_switch() -> impl Strategy<Value = Record> {
    let version = prop_oneof![1..4_u32, 8190..8194_u32].prop_map(key_version);
    (1..9_u32, 0..8_u64, version, any::<bool>()).prop_map(|(step, page, version, plaintext)| {
        let phase = WalPhase { version: Some(version), plaintext };
        Record::WalSwitch(Switch { step, start: Lsn(page << 30), phase })
    })
}
