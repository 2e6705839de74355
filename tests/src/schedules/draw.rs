//! Operations drawn from a seed.

use super::database::{Kind, Label};
use super::operation::{Operation, Order, Process, Setup, Target};
use super::statement::{Asked, Catalog, Change, GROUPS, Statement};
use super::world::{MAIN, SESSIONS, World};
use pagevault_powercut_disk::Random;

/// Tables are numbered below this.
const TABLES: u64 = 6;
/// Databases are numbered below this.
const DATABASES: u64 = 3;

/// Fault points that statements and key operations come by, or workers for them.
const POINTS: [&str; 26] = [
    "keys.compaction",
    "keys.in_file",
    "keys.in_file",
    "keys.in_wal",
    "keys.in_wal",
    "keys.settling",
    "rekey.requested",
    "rekey.barrier_passed",
    "rekey.batch_done",
    "rekey.begun",
    "rekey.claimed",
    "rekey.ended",
    "rekey.flushed",
    "rekey.looked",
    "rekey.page_done",
    "rekey.proved",
    "rekey.retired",
    "rekey.switched",
    "rekey.synced",
    "remnants.cleared",
    "remnants.page_cleared",
    "remnants.synced",
    "shred.compacted",
    "shred.decided",
    "shred.destroyed",
    "shred.forgotten",
];

/// Fault points of recovery.
const POINTS_OF_REDO: [&str; 3] = ["redo.keys", "redo.keys_in_file", "redo.keys_in_use"];

/// Of what a schedule has more than others: the first and the last of the numbers in [`operation`].
const THEMES: [(u64, u64); 8] = [
    (0, 999),
    (0, 999),
    (0, 579),   // statements and transactions
    (490, 519), // databases
    (615, 756), // jobs and keys
    (775, 889), // crashes and outages
    (890, 962), // standbys and backups
    (980, 993), // what is copied or destroyed
];

/// Setup and operations of a schedule, as they are if all goes as the model foresees it.
pub(super) fn schedule(seed: u64, length: usize) -> (Setup, Vec<Operation>) {
    let mut random = Random::new(seed);
    let setup = Setup {
        wal_encryption: random.once_in(3),
        checksums: !random.once_in(4),
        minimal_wal: random.once_in(6),
        tablespace: random.once_in(2),
        labelled_tablespace: false,
        logical_wal: random.once_in(4),
        forgets: random.once_in(2),
        key_groups: random.once_in(3),
    };
    let setup = Setup {
        logical_wal: setup.logical_wal && !setup.minimal_wal,
        labelled_tablespace: setup.tablespace && random.once_in(2),
        ..setup
    };
    let theme = random.one_of(&THEMES);
    let mut world = World::new(setup);
    let mut operations = Vec::new();
    if random.once_in(3) {
        operations.push(Operation::Jobs { always: true });
    }
    if random.once_in(6) {
        operations.push(Operation::Crawl { on: true });
    }
    operations.iter().for_each(|operation| world.apply(operation));
    while operations.len() < length {
        let operation = operation(&mut random, &world, theme);
        if world.allows(&operation) {
            world.apply(&operation);
            operations.push(operation);
        }
    }
    (setup, operations)
}

fn small(random: &mut Random, end: u64) -> u8 {
    u8::try_from(random.below(end)).unwrap_or_default()
}

fn asked(random: &mut Random) -> Asked {
    random.one_of(&[Asked::Not, Asked::ByLabel, Asked::ByLabel, Asked::BySetting])
}

/// A table that is there, if any is.
fn existing(random: &mut Random, world: &World, session: u8) -> u8 {
    let tables: Vec<u8> = world.seen_by(session).tables.keys().copied().collect();
    if tables.is_empty() { small(random, TABLES) } else { random.one_of(&tables) }
}

fn statement(random: &mut Random, world: &World, session: u8) -> Statement {
    let seen = world.seen_by(session);
    let table = existing(random, world, session);
    let new = small(random, TABLES);
    let of_kind = |random: &mut Random, wanted: fn(Kind) -> bool| {
        let all: Vec<u8> =
            seen.tables.iter().filter(|(_, t)| wanted(t.kind)).map(|(number, _)| *number).collect();
        if all.is_empty() { table } else { random.one_of(&all) }
    };
    let schema = small(random, 2);
    // At first there must be something.
    if seen.tables.len() < 2 && !random.once_in(4) {
        return create(random, new, schema);
    }
    match random.below(100) {
        0..8 => create(random, new, schema),
        8..10 => Statement::CreatePartitioned { table: new, asked: asked(random), schema },
        10..15 => {
            let of = of_kind(random, |kind| kind == Kind::Partitioned);
            Statement::CreatePartition { table: new, of, asked: asked(random) }
        }
        15..19 => Statement::CreateAs { table: new, of: table, asked: asked(random), schema },
        19..22 => Statement::CreateView { table: new, of: table, asked: asked(random), schema },
        22..25 => {
            let view = of_kind(random, |kind| matches!(kind, Kind::View(_)));
            Statement::Refresh { table: view, concurrently: random.once_in(2) }
        }
        25..28 => {
            let to = of_kind(random, |kind| kind == Kind::Partitioned);
            Statement::Attach { table, to }
        }
        28 => {
            let attached: Vec<u8> =
                seen.tables.iter().filter(|(_, t)| t.parent.is_some()).map(|(n, _)| *n).collect();
            let table = if attached.is_empty() { table } else { random.one_of(&attached) };
            Statement::Detach { table }
        }
        29..31 => Statement::Drop { table },
        31..56 => Statement::Change { table, change: random.one_of(&Change::ALL) },
        56..72 => {
            let rows = random.one_of(&[1, 20, 200, 200, 900, 3000]);
            Statement::Insert { table, rows }
        }
        72..77 => Statement::Update { table, of_three: small(random, 3) },
        77..80 => Statement::Delete { table, of_five: small(random, 5) },
        80 => Statement::Sort { table },
        81 => Statement::RewriteCatalog { catalog: random.one_of(&Catalog::ALL) },
        82..84 => Statement::LargeObject { object: small(random, 40) },
        84..92 => {
            use Label::{Encrypted, Plaintext};
            let label = random.one_of(&[Some(Encrypted), Some(Encrypted), Some(Plaintext), None]);
            Statement::Label { table, label }
        }
        92..97 => Statement::RotateDataKey { table },
        _ => Statement::Shred { table },
    }
}

fn create(random: &mut Random, table: u8, schema: u8) -> Statement {
    Statement::Create { table, asked: asked(random), schema, unlogged: random.once_in(6) }
}

fn operation(random: &mut Random, world: &World, theme: (u64, u64)) -> Operation {
    let session = small(random, u64::from(SESSIONS));
    let databases: Vec<u8> = world.databases.keys().copied().collect();
    let database = random.one_of(&databases);
    // What stops others is brought to an end soon.
    if world.keys_away && random.once_in(3) {
        return Operation::KeysBack;
    }
    if world.crawling && random.once_in(6) {
        return Operation::Crawl { on: false };
    }
    if world.setup.logical_wal && random.once_in(8) {
        return if world.slot.is_none() { Operation::MakeSlot } else { Operation::Decode };
    }
    if world.paused && random.once_in(6) {
        return Operation::Order { order: Order::Resume };
    }
    if world.prepared.is_some() && random.once_in(5) {
        return Operation::FinishPrepared { commit: !random.once_in(4) };
    }
    let in_transaction =
        world.sessions.get(usize::from(session)).is_some_and(|s| s.transaction.is_some());
    if in_transaction && random.once_in(3) {
        return match random.below(10) {
            0 => Operation::Savepoint { session },
            1 | 2 => Operation::RollbackTo { session },
            3 | 4 => Operation::Prepare { session },
            5 | 6 => Operation::Rollback { session },
            _ => Operation::Commit { session },
        };
    }
    let (first, last) = if random.once_in(4) { theme } else { (0, 999) };
    match first + random.below(last - first + 1) {
        0..490 => Operation::Run { session, statement: statement(random, world, session) },
        490..510 => Operation::CreateDatabase {
            database: small(random, DATABASES),
            template: database,
            by_files: random.once_in(2),
        },
        510..520 if world.databases.len() > 1 => {
            let database = 1 + small(random, DATABASES - 1);
            match random.below(3) {
                0 => Operation::DropDatabase { database },
                _ => Operation::MoveDatabase { database, to_other: random.below(3) > 0 },
            }
        }
        510..520 => Operation::Judge,
        520..580 => Operation::Begin { session },
        580..583 => Operation::DatabaseLabel { database, on: random.once_in(2) },
        583..590 => Operation::Connect { session, database },
        590..600 => Operation::Default { on: random.once_in(2) },
        600..615 => {
            let label = random.one_of(&[Some(Label::Encrypted), Some(Label::Encrypted), None]);
            Operation::SchemaLabel { database, schema: 1, label }
        }
        615..640 => Operation::Jobs { always: random.below(3) > 0 },
        640..655 => Operation::Crawl { on: true },
        655..672 => Operation::WaitForJobs,
        672..682 => {
            Operation::Order { order: random.one_of(&[Order::Pause, Order::Pause, Order::Cancel]) }
        }
        682..686 => Operation::RotateAllDataKeys { database },
        686..690 => Operation::EncryptDatabase { database },
        690..705 => Operation::RotateClusterMasterKey,
        705..712 => Operation::MoveClusterMasterKey,
        712..720 => Operation::OwnMasterKey { database },
        720..727 => Operation::RotateDatabaseMasterKey { database },
        740..747 if world.setup.key_groups => {
            let group = 1 + small(random, u64::from(GROUPS));
            match random.below(2) {
                0 => Operation::RotateKeyGroupMasterKey { group },
                _ => Operation::RotateKeyGroupKey { group },
            }
        }
        727..747 => Operation::RotateDatabaseKey { database },
        747..753 => Operation::RotateWalKey,
        753..757 => Operation::WalEncryption { on: random.once_in(2) },
        757..765 => Operation::ShredFormerFiles { database },
        765..775 => Operation::Checkpoint,
        785..795 => Operation::Restart,
        795..798 if world.setup.key_groups => {
            Operation::CrashWithoutGroups { again: random.once_in(2) }
        }
        795..800 => Operation::StopImmediately,
        810..825 => Operation::Crash,
        775..785 | 800..810 => {
            let kill_after = random.one_of(&[None, Some(2), Some(10), Some(50)]);
            let mut statements = Vec::new();
            for _ in 0..6 {
                statements.push(statement(random, world, 0));
                let fits = Operation::Together { statements: statements.clone(), kill_after };
                if !world.allows(&fits) {
                    statements.pop();
                }
            }
            Operation::Together { statements, kill_after }
        }
        825..832 => Operation::CrashInRecovery { point: random.one_of(&POINTS_OF_REDO).to_owned() },
        832..850 => {
            let process = random.one_of(&[
                Process::Backend,
                Process::Bgwriter,
                Process::Checkpointer,
                Process::Postmaster,
                Process::RekeyWorker,
                Process::Walwriter,
            ]);
            Operation::Kill { process }
        }
        850..875 => {
            let point = random.one_of(&POINTS);
            let operation = match random.below(14) {
                0 => Operation::RotateClusterMasterKey,
                1 => Operation::MoveClusterMasterKey,
                2 => Operation::OwnMasterKey { database: MAIN },
                3 => Operation::RotateDatabaseKey { database: MAIN },
                4 => Operation::ShredFormerFiles { database: MAIN },
                5 => Operation::Checkpoint,
                _ => {
                    // Shredding has its own points, which nothing else comes by.
                    let shreds = point.starts_with("shred.") || point.starts_with("remnants.");
                    let table = existing(random, world, 0);
                    let statement = statement(random, world, 0);
                    let statement = if shreds { Statement::Shred { table } } else { statement };
                    Operation::Run { session: 0, statement }
                }
            };
            Operation::CrashAt {
                point: point.to_owned(),
                only_there: random.once_in(2),
                operation: Box::new(operation),
            }
        }
        875..890 => Operation::KeysAway,
        890..905 => Operation::MakeStandby,
        905..915 => Operation::CrashStandby,
        915..930 => Operation::Promote { crash: random.once_in(2), rewind: random.once_in(2) },
        930..945 => {
            let count = random.below(4);
            let mut then = world.clone();
            let mut meanwhile = Vec::new();
            for _ in 0..count {
                let statement = statement(random, &then, 0);
                if then.allows_in_backup(&statement) {
                    then.commit(MAIN, &statement);
                    meanwhile.push(statement);
                }
            }
            Operation::BackUp { meanwhile }
        }
        945..952 => Operation::Mark,
        952..963 => {
            let to = random.one_of(&[Target::Itself, Target::Mark, Target::Present]);
            Operation::Restore { backup: small(random, 2), to }
        }
        963..976 => Operation::WaitForJobs,
        976..980 => Operation::Forbidden { database, table: small(random, TABLES) },
        980..986 => Operation::Dump { database: small(random, DATABASES), of: database },
        986..988 => Operation::DropExtension { database },
        988..991 => Operation::ShredSchema { database, schema: small(random, 2) },
        991..994 => Operation::ShredDatabase { database },
        _ => Operation::Judge,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::schedule;
    use crate::schedules::operation::Operation;
    use crate::schedules::world::World;

    /// The names that serde gives an operation, the statement in it, and the change in that.
    fn kinds(value: &serde_json::Value, found: &mut BTreeSet<String>) {
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    found.insert(name.clone());
                    kinds(value, found);
                }
            }
            serde_json::Value::Array(all) => all.iter().for_each(|value| kinds(value, found)),
            serde_json::Value::String(name) => {
                found.insert(name.clone());
            }
            _ => {}
        }
    }

    #[test]
    fn a_seed_is_a_schedule() {
        assert_eq!(schedule(7, 40), schedule(7, 40));
        assert_ne!(schedule(7, 40), schedule(8, 40));
    }

    #[test]
    fn each_operation_fits_where_it_stands() {
        for seed in 0..50 {
            let (setup, operations) = schedule(seed, 60);
            let mut world = World::new(setup);
            for operation in operations {
                assert!(world.allows(&operation), "{operation:?}");
                world.apply(&operation);
            }
        }
    }

    #[test]
    fn every_kind_of_operation_occurs() {
        let all = "run begin savepoint rollback_to commit rollback prepare finish_prepared connect \
            default schema_label jobs crawl wait_for_jobs rotate_cluster_master_key \
            move_cluster_master_key own_master_key rotate_database_master_key rotate_database_key \
            rotate_wal_key rotate_key_group_master_key rotate_key_group_key shred_former_files checkpoint restart stop_immediately crash kill crash_at crash_in_recovery crash_without_groups together \
            keys_away keys_back make_standby crash_standby promote back_up restore create_database \
            move_database drop_database drop_extension judge \
            make_slot decode order pause resume cancel rotate_all_data_keys encrypt_database forbidden wal_encryption dump \
            mark itself present database_label shred_schema shred_database rewrite_catalog attribute class \
            largeobject seclabel statistic \
            create create_partitioned create_partition create_as create_view refresh attach detach drop \
            change insert update delete sort large_object label rotate_data_key shred \
            analyze brin_index cluster gin_index hash_index index index_concurrently logged reindex \
            reindex_concurrently rewrite schema_open schema_vault space_default space_other truncate \
            unlogged vacuum vacuum_full backend bgwriter checkpointer postmaster rekey_worker walwriter";
        let mut missing: BTreeSet<_> = all.split_whitespace().map(str::to_owned).collect();
        // Rare kinds take many schedules: the bound is far above what any of them needs.
        for seed in 0..5000 {
            let mut found = BTreeSet::new();
            for operation in schedule(seed, 30).1 {
                kinds(&serde_json::to_value(operation).unwrap(), &mut found);
            }
            missing.retain(|kind| !found.contains(kind));
            if missing.is_empty() {
                return;
            }
        }
        panic!("{missing:?} never occur");
    }

    #[test]
    fn operations_are_written_and_read() {
        for operation in schedule(3, 200).1 {
            let text = serde_json::to_string(&operation).unwrap();
            assert_eq!(serde_json::from_str::<Operation>(&text).unwrap(), operation);
        }
    }
}
