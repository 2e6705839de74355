//! Rotation of master and database keys: no page is rewritten, old versions stay usable, and after
//! a crash at any moment either the old key or the new one is in use.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::witnesses::Witnesses;
use pagevault_tests::{Cluster, Settings, StopMode};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 2000) i";

#[test]
fn master_keys_rotate_without_touching_pages() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    // Frozen, so that reading sets no hint bits and writes no page.
    cluster.sql("VACUUM FREEZE t")?;
    cluster.sql("CHECKPOINT")?;
    let before = cluster.files("t")?[0].bytes()?;
    let first: i64 = cluster.text("SELECT pagevault.rotate_cluster_master_key()")?.parse()?;
    let second: i64 = cluster.text("SELECT pagevault.rotate_cluster_master_key()")?.parse()?;
    ensure!(second == first + 1, "versions {first} and {second}");
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.files("t")?[0].bytes()? == before, "rotation rewrote pages");
    cluster.finish()
}

#[test]
fn a_database_gets_its_own_master_key() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    keys.add_key("of-this-database")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'of-this-database')")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE u AS SELECT * FROM t")?;
    cluster.sql("SELECT pagevault.rotate_database_master_key()")?;
    for _ in 0..2 {
        ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "t");
        ensure!(cluster.text("SELECT count(name) FROM u")? == "2000", "u");
        cluster.crash()?;
    }
    cluster.finish()
}

/// An old copy of the key file lacks a version that wraps the key of another database, and would
/// give its number to another key.
#[test]
fn an_old_copy_of_the_key_file_makes_no_second_key_of_a_version() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    run_sql(&mut other, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    let old = fs::read(keys.path())?;
    run_sql(&mut other, "SELECT pagevault.rotate_database_master_key()")?;
    let newest = fs::read(keys.path())?;
    fs::write(keys.path(), &old)?;
    for (rotate, client) in [
        ("SELECT pagevault.rotate_cluster_master_key()", &mut cluster.client()?),
        ("SELECT pagevault.rotate_database_master_key()", &mut other),
    ] {
        let error = expect_error(client, rotate)?;
        ensure!(error.detail.contains("version 2 of the key, which this file does not"), "{error}");
        ensure!(fs::read(keys.path())? == old, "{rotate} changed the key file");
    }
    fs::write(keys.path(), &newest)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    run_sql(&mut other, "SELECT pagevault.rotate_database_master_key()")?;
    // Nothing needs the key of a dropped database.
    let enough = fs::read(keys.path())?;
    run_sql(&mut other, "SELECT pagevault.rotate_database_master_key()")?;
    drop(other);
    cluster.sql("DROP DATABASE other")?;
    fs::write(keys.path(), &enough)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.finish()
}

/// Also if the other database is on a file system that is not mounted.
#[test]
fn an_old_copy_of_the_key_file_is_noticed_without_the_other_database() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("could not open directory");
    cluster.without_witness("a tablespace is not mounted");
    let far = cluster.make_tablespace("far")?;
    cluster.sql("CREATE DATABASE other TABLESPACE far")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    run_sql(&mut other, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    let old = fs::read(keys.path())?;
    run_sql(&mut other, "SELECT pagevault.rotate_database_master_key()")?;
    drop(other);
    cluster.stop(StopMode::Fast)?;
    let newest = fs::read(keys.path())?;
    fs::write(keys.path(), &old)?;
    let away = far.with_extension("away");
    fs::rename(&far, &away)?;
    fs::create_dir(&far)?;
    cluster.start_server()?;
    let error = cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(error.detail.contains("version 2 of the key, which this file does not"), "{error}");
    ensure!(fs::read(keys.path())? == old, "the key file is changed");
    fs::write(keys.path(), &newest)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir(&far)?;
    fs::rename(&away, &far)?;
    cluster.start_server()?;
    run_sql(&mut cluster.client_to("other")?, "SELECT pagevault.rotate_database_master_key()")?;
    cluster.finish()
}

#[test]
fn the_database_key_rotates_without_touching_pages() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    // Frozen, so that reading sets no hint bits and writes no page.
    cluster.sql("VACUUM FREEZE t")?;
    cluster.sql("CHECKPOINT")?;
    let before = cluster.files("t")?[0].bytes()?;
    let first: i64 = cluster.text("SELECT pagevault.rotate_database_key()")?.parse()?;
    let second: i64 = cluster.text("SELECT pagevault.rotate_database_key()")?.parse()?;
    ensure!(second > first, "versions {first} and {second}");
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing after a crash");
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.files("t")?[0].bytes()? == before, "rotation rewrote pages");
    cluster.finish()
}

#[test]
fn after_a_kill_during_rotation_the_old_or_the_new_key_is_in_use() -> Result<()> {
    let settings = Settings::default().conf("fsync = on").conf("wal_keep_size = 1GB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLE)?;
    let mut witnesses = Witnesses::with(&cluster, &["fsync = off"])?;
    for round in 0..6_u64 {
        let rotations = {
            let mut client = cluster.client()?;
            // Ends with an error when the server is killed, as intended.
            std::thread::spawn(move || {
                while client
                    .batch_execute(
                        "SELECT pagevault.rotate_database_key();
                         SELECT pagevault.rotate_cluster_master_key()",
                    )
                    .is_ok()
                {}
            })
        };
        sleep(Duration::from_millis(150 + 97 * round));
        if round == 3 {
            witnesses.back_up(&cluster, "rotations")?;
        }
        cluster.crash()?;
        let _ = rotations.join();
        ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows after round {round}");
        cluster.sql(&format!(
            "SET pagevault.default_encryption = on; CREATE TABLE t_{round} AS SELECT * FROM t"
        ))?;
    }
    cluster.restart()?;
    for round in 0..6 {
        let count = cluster.text(&format!("SELECT count(name) FROM t_{round}"))?;
        ensure!(count == "2000", "t_{round} has {count} rows");
    }
    let made =
        "SELECT string_agg(version::text, ' ' ORDER BY version) FROM pagevault.database_keys";
    witnesses.judge(&cluster, &[made, "SELECT count(name) FROM t_5"], &["t", "t_0", "t_5"])?;
    cluster.finish()
}

/// Runs `statement` `times` times in each of `sessions` concurrent sessions.
fn at_once(cluster: &Cluster, sessions: usize, times: usize, statement: &str) -> Result<()> {
    let sessions: Vec<_> = (0..sessions)
        .map(|_| -> Result<_> {
            let mut client = cluster.client()?;
            let statement = statement.to_owned();
            Ok(std::thread::spawn(move || -> Result<()> {
                for _ in 0..times {
                    pagevault_tests::cluster::run_sql(&mut client, &statement)?;
                }
                Ok(())
            }))
        })
        .collect::<Result<_>>()?;
    for session in sessions {
        session.join().map_err(|_| anyhow::anyhow!("a session panicked"))??;
    }
    Ok(())
}

#[test]
fn concurrent_rotations_lose_nothing() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("CREATE SEQUENCE n; CREATE TABLE made (name text)")?;
    // Tables are created continually; none may be refused because a key is being changed.
    let make = "DO $$ DECLARE name text := 'made_' || nextval('n'); BEGIN
        SET pagevault.default_encryption = on;
        EXECUTE format('CREATE TABLE %I AS SELECT i AS id FROM generate_series(1, 10) i', name);
        INSERT INTO made VALUES (name);
        END $$";
    std::thread::scope(|scope| -> Result<()> {
        let makers = scope.spawn(|| at_once(&cluster, 2, 60, make));
        let rotations =
            scope.spawn(|| at_once(&cluster, 4, 6, "SELECT pagevault.rotate_database_key()"));
        let masters =
            scope.spawn(|| at_once(&cluster, 2, 6, "SELECT pagevault.rotate_cluster_master_key()"));
        for thread in [makers, rotations, masters] {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(())
    })?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    let mut client = cluster.client()?;
    let names = pagevault_tests::cluster::column(&mut client, "SELECT name FROM made")?;
    ensure!(names.len() == 120, "{} tables", names.len());
    for name in names {
        let count =
            pagevault_tests::cluster::text(&mut client, &format!("SELECT count(*) FROM {name}"))?;
        ensure!(count == "10", "{name} has {count} rows");
    }
    drop(client);
    cluster.finish()
}

#[test]
fn concurrent_first_master_keys_lose_nothing() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("CREATE SEQUENCE n")?;
    // Each session immediately uses the key that it has set.
    at_once(
        &cluster,
        6,
        1,
        "DO $$ BEGIN
            PERFORM pagevault.set_cluster_master_key('local', 'main');
            SET pagevault.default_encryption = on;
            EXECUTE format('CREATE TABLE made_%s AS SELECT 1 AS id', nextval('n'));
         END $$",
    )?;
    cluster.restart()?;
    for n in 1..=6 {
        ensure!(cluster.text(&format!("SELECT id FROM made_{n}"))? == "1", "made_{n}");
    }
    cluster.finish()
}

#[test]
fn moving_to_another_provider_is_one_call_and_does_not_need_the_old_one() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.sql(TABLE)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    let other = cluster.key_file("other", "elsewhere")?;
    cluster.sql(&other.add_provider("other"))?;
    // All versions of the key are in memory, so the old provider may already be unavailable.
    keys.take_away()?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('other', 'elsewhere')")?;
    let elsewhere = "SELECT count(*) FROM pagevault.database_keys
                     WHERE provider = 'other' AND master_key = 'elsewhere' AND state = 'unlocked'";
    ensure!(cluster.text(elsewhere)? == "2", "not all versions were moved");
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");

    // To another key of the same provider, which rewraps by itself.
    other.add_key("next")?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('other', 'next')")?;
    let next = "SELECT count(*) FROM pagevault.database_keys WHERE master_key = 'next'";
    ensure!(cluster.text(next)? == "2", "not all versions were moved");
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_backup_from_before_ten_rotations_opens() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup(&backup)?;
    for _ in 0..10 {
        cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    }
    let version = "SELECT max(master_key_version) FROM pagevault.database_keys";
    ensure!(cluster.text(version)? == "11", "no ten rotations");
    cluster.sql("DROP TABLE t")?;
    // Both use the same key file: its path is in the provider's options.
    let restored = Cluster::from_files(|data| Ok(std::fs::rename(&backup, data)?))?;
    restored.start_server()?;
    ensure!(restored.text(version)? == "1", "the backup is not from before");
    ensure!(restored.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    restored.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    restored.finish()?;
    cluster.finish()
}

#[test]
fn a_clean_start_removes_older_wrappings_from_key_files() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql(
        "DO $$ BEGIN FOR i IN 1..30 LOOP
            EXECUTE format('CREATE TABLE k%s (id int); SELECT pagevault.encrypt(%L)', i, 'k' || i);
        END LOOP; END $$",
    )?;
    cluster.sql(
        "DO $$ BEGIN PERFORM pagevault.rotate_database_key() FROM generate_series(1, 20); END $$",
    )?;
    let database = cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?;
    let path = cluster.data_directory().join(format!("pagevault/{database}.keys"));
    let size = || Ok::<_, anyhow::Error>(std::fs::metadata(&path)?.len());
    let before = size()?;
    for _ in 0..2 {
        cluster.restart()?;
        ensure!(size()? < before / 5, "{} bytes of {before} are left", size()?);
        ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    }
    cluster.sql("SELECT pagevault.rotate_database_key(); INSERT INTO k7 VALUES (7)")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t, k7")? == "2000", "rows are missing");
    cluster.finish()
}
