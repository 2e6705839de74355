//! A server without room for another key refuses to create one, loses none, and recovers from a
//! crash.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_keystore::log::{self, Log, Trust};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Record, Scope};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Settings, Standby, StopMode};
use rustix::process::Pid;

/// The minimum of the setting.
const MAX_KEYS: u32 = 1000;

#[test]
fn a_full_key_directory_refuses_and_survives_a_crash() -> Result<()> {
    let settings = Settings::default()
        .conf(&format!("pagevault.max_data_keys = {MAX_KEYS}"))
        .conf("pagevault.default_encryption = on")
        .conf("pagevault.data_catalog_encryption = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(&format!(
        "DO $$ BEGIN FOR i IN 1..{MAX_KEYS} LOOP
            EXECUTE format('CREATE TABLE full_%s AS SELECT %s AS id', i, i);
            IF i % 50 = 0 THEN COMMIT; END IF;
        END LOOP; END $$"
    ))?;
    let keys = || cluster.text("SELECT data_keys FROM pagevault.status");
    ensure!(keys()? == MAX_KEYS.to_string(), "{} keys", keys()?);
    for _ in 0..3 {
        let refused = cluster.error("CREATE TABLE one_more (id int)")?;
        ensure!(refused.sqlstate == "54000", "{refused:?}");
    }
    ensure!(keys()? == MAX_KEYS.to_string(), "what was refused left {} keys", keys()?);
    cluster.crash()?;
    ensure!(keys()? == MAX_KEYS.to_string(), "after a crash {} keys", keys()?);
    ensure!(cluster.text(&format!("SELECT id FROM full_{MAX_KEYS}"))? == MAX_KEYS.to_string());
    cluster.append_conf("pagevault.max_data_keys = 1010")?;
    cluster.restart()?;
    cluster.sql("CREATE TABLE one_more (id int)")?;
    cluster.finish()
}

/// A standby has not forgotten what its primary has, and has keys for more files than there may be.
/// It goes on, and makes new ones when it is promoted.
#[test]
fn a_standby_has_room_for_more_keys_than_its_primary() -> Result<()> {
    let settings = Settings::default()
        .conf(&format!("pagevault.max_data_keys = {MAX_KEYS}"))
        .conf("pagevault.keep_former_keys = 1s")
        .conf("pagevault.default_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let keeps = |slot: &str| Standby::default().slot(slot).conf("pagevault.keep_former_keys = 1d");
    let standby = keeps("s").start(&cluster)?;
    let without_sessions = keeps("w").conf("hot_standby = off").start(&cluster)?;
    cluster.sql("CREATE TABLE t (id int)")?;
    let keys = |server: &Cluster| -> Result<u32> {
        Ok(server.text("SELECT data_keys FROM pagevault.status")?.parse()?)
    };
    while keys(&standby)? <= MAX_KEYS + 100 {
        cluster.sql("DO $$ BEGIN FOR i IN 1..200 LOOP TRUNCATE t; COMMIT; END LOOP; END $$")?;
        cluster.eventually_that("forgotten keys", || {
            cluster.sql("CHECKPOINT")?;
            let left = keys(&cluster)?;
            ensure!(left < MAX_KEYS / 2, "{left} keys");
            Ok(())
        })?;
        wait_for(&standby, &cluster)?;
    }
    let both =
        "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_flush_lsn()";
    cluster.eventually(both, "2")?;
    for server in [standby, without_sessions] {
        let mut promote = server.program("pg_ctl");
        run(promote.args(["promote", "--wait", "--pgdata"]).arg(server.data_directory()))?;
        server.sql("TRUNCATE t; CREATE INDEX ON t (id); INSERT INTO t VALUES (7)")?;
        server.restart()?;
        server.sql("CREATE TABLE u (id int); INSERT INTO u VALUES (8)")?;
        ensure!(server.text("SELECT id FROM t")? == "7", "the row is lost");
        server.finish()?;
    }
    cluster.finish()
}

/// OIDs without a database.
const GONE: u32 = 4_000_000_000;

/// Memory is made for those database keys that are there at the start, and some. Versions that wrap
/// nothing leave it for newer ones, on a standby too.
#[test]
fn replaced_database_keys_make_room_for_newer_ones() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    cluster.stop(StopMode::Fast)?;
    // Databases that were created and dropped over years.
    let directory = cluster.data_directory().join("pagevault");
    let storage = FileStorage::new(&directory)?;
    let (mut log, contents) =
        Log::open(&storage, Scope::CLUSTER, Trust::All)?.context("there is no key file")?;
    let own = contents.records.iter().find(|r| matches!(r, Record::DatabaseKey { .. }));
    let mut gone = vec![own.context("the cluster has no key")?.clone(); 510];
    for (record, database) in gone.iter_mut().zip(GONE..) {
        if let Record::DatabaseKey { scope, .. } = record {
            *scope = Scope::database(database);
        }
    }
    log.append(&gone)?;
    cluster.start_server()?;
    let standby = Standby::default().slot("standby").start(&cluster)?;
    let rotate = |times: u32| {
        cluster.sql(&format!(
            "DO $$ BEGIN
                FOR i IN 1..{times} LOOP PERFORM pagevault.rotate_database_key(); END LOOP;
            END $$"
        ))
    };
    // More than there is room for at once: twice as many as there were at the start.
    rotate(520)?;
    wait_for(&standby, &cluster)?;
    // Memory is kept when only other processes are started again.
    let mut client = cluster.client()?;
    let pid: i32 = text(&mut client, "SELECT pg_backend_pid()")?.parse()?;
    cluster.crash_process(Pid::from_raw(pid).context("no process")?)?;
    drop(client);
    rotate(5)?;
    cluster.crash()?;
    rotate(5)?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        ensure!(server.text("SELECT id FROM t")? == "7", "the row is lost");
    }
    standby.finish()?;
    cluster.finish()
}

#[test]
fn more_key_files_than_usual_have_room() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    cluster.sql("CREATE DATABASE other")?;
    run_sql(&mut cluster.client_to("other")?, "CREATE EXTENSION pagevault")?;
    cluster.stop(StopMode::Fast)?;
    let directory = cluster.data_directory().join("pagevault");
    // The one of the cluster has the identity of the keystore, and an empty one its end.
    let mut empty =
        fs::read(directory.join(log::file_name(Scope::CLUSTER)))?[..log::HEADER].to_vec();
    let apart = FileStorage::new(cluster.directory())?;
    Log::create(&apart, [0; 16], Scope::CLUSTER, &[])?;
    let other = fs::read(cluster.directory().join(log::file_name(Scope::CLUSTER)))?;
    empty.extend_from_slice(&other[log::HEADER..]);
    for database in GONE..GONE + 8400 {
        empty[28..32].copy_from_slice(&database.to_le_bytes());
        let checksum = crc32c::crc32c(&empty[..36]);
        empty[36..40].copy_from_slice(&checksum.to_le_bytes());
        let file = directory.join(log::file_name(Scope::database(database)));
        fs::write(&file, &empty)?;
        cluster.installation().give(&file)?;
    }
    cluster.start_server()?;
    let encrypt = "CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')";
    run_sql(&mut cluster.client_to("other")?, encrypt)?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    cluster.finish()
}
