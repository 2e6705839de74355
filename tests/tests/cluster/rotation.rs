//! Rotation of master and database keys: no page is touched, old versions stay usable, and a crash
//! at any moment ends as wholly old or wholly new.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 2000) i";

#[test]
fn master_keys_rotate_without_touching_pages() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
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
    cluster.sql("SELECT pagevault.set_master_key('local', 'of-this-database')")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE u AS SELECT * FROM t")?;
    cluster.sql("SELECT pagevault.rotate_master_key()")?;
    for _ in 0..2 {
        ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "t");
        ensure!(cluster.text("SELECT count(name) FROM u")? == "2000", "u");
        cluster.crash()?;
    }
    cluster.finish()
}

#[test]
fn the_database_key_rotates_without_touching_pages() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
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
fn kill_during_rotation_is_wholly_old_or_wholly_new() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    for round in 0..6_u64 {
        let rotations = {
            let mut client = cluster.client()?;
            // Ends with the server; that is the point.
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
    cluster.finish()
}
