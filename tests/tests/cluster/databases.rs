//! Databases that are copied or moved as a whole, also by copying files, keep their keys.

use anyhow::{Context, Result, anyhow, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, DataFile, Installation, KeyFile, Settings};

use crate::{assert_plain, assert_sealed};

const SUM: &str = "SELECT count(*) || ' ' || md5(string_agg(t::text, '' ORDER BY id)) FROM t";

/// A cluster with the tablespace `space` and the database `model`, which has encrypted and
/// plaintext tables in its default tablespace and in `other`.
fn cluster() -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    for name in ["space", "other"] {
        let directory = cluster.directory().join(name);
        std::fs::create_dir(&directory)?;
        cluster.installation().give(&directory)?;
        cluster.sql(&format!("CREATE TABLESPACE {name} LOCATION '{}'", directory.display()))?;
    }
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(&mut model, "CREATE EXTENSION pagevault")?;
    run_sql(
        &mut model,
        "SET pagevault.default_encryption = on;
         CREATE TABLE t (id serial PRIMARY KEY, name text);
         INSERT INTO t (name) SELECT repeat('kanarienvogel', 50) FROM generate_series(1, 1000);
         CREATE UNLOGGED TABLE u AS SELECT 7 AS id;
         CREATE TABLE far TABLESPACE other AS SELECT 8 AS id;
         CREATE TABLE gone (id int); DROP TABLE gone;
         RESET pagevault.default_encryption;
         CREATE TABLE open AS SELECT 9 AS id",
    )?;
    // Pages of two versions in one file.
    run_sql(&mut model, "SELECT pagevault.encrypt('t', 'aes-128-xts')")?;
    Ok((cluster, keys))
}

fn check(cluster: &Cluster, database: &str, sum: &str) -> Result<()> {
    let mut client = cluster.client_to(database)?;
    ensure!(text(&mut client, SUM)? == sum, "rows of t changed");
    for (table, value) in [("u", "7"), ("far", "8"), ("open", "9")] {
        let found = text(&mut client, &format!("SELECT id FROM {table}"))?;
        ensure!(found == value, "{table} holds {found}");
    }
    // The copy can be written to, and gets new versions independently.
    for statement in ["UPDATE t SET name = name", "VACUUM FULL u", "CHECKPOINT"] {
        run_sql(&mut client, statement)?;
    }
    let mut files = |relation: &str| -> Result<Vec<DataFile>> {
        let path = text(&mut client, &format!("SELECT pg_relation_filepath('{relation}')"))?;
        DataFile::find(&cluster.data_directory().join(path))
    };
    for relation in ["t", "t_pkey", "t_id_seq", "u", "far"] {
        assert_sealed(&files(relation)?).with_context(|| relation.to_owned())?;
    }
    assert_plain(&files("open")?)?;
    ensure!(text(&mut client, "SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    Ok(())
}

#[test]
fn copies_of_a_database_are_sealed_under_keys_of_their_own_database() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = text(&mut cluster.client_to("model")?, SUM)?;
    for (name, options) in [
        ("copy_wal_log", "STRATEGY wal_log"),
        ("copy_file_copy", "STRATEGY file_copy"),
        ("copy_elsewhere", "STRATEGY file_copy TABLESPACE space"),
        ("copy_default", "STRATEGY DEFAULT TABLESPACE DEFAULT"),
    ] {
        cluster.sql(&format!("CREATE DATABASE {name} TEMPLATE model {options}"))?;
        check(&cluster, name, &sum).with_context(|| name.to_owned())?;
    }
    cluster.sql("CREATE DATABASE of_template1 TEMPLATE DEFAULT STRATEGY DEFAULT")?;
    cluster.crash()?;
    for name in ["model", "copy_wal_log", "copy_file_copy", "copy_elsewhere", "copy_default"] {
        ensure!(text(&mut cluster.client_to(name)?, SUM)? == sum, "{name} after a crash");
    }
    // The copy does not depend on the original's keys: it stays readable after DROP of the
    // original, and can get its own master key.
    cluster.sql("DROP DATABASE model")?;
    let mut copy = cluster.client_to("copy_file_copy")?;
    run_sql(&mut copy, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    run_sql(&mut copy, "SELECT pagevault.rotate_database_key()")?;
    drop(copy);
    cluster.restart()?;
    ensure!(
        text(&mut cluster.client_to("copy_file_copy")?, SUM)? == sum,
        "after its own master key"
    );
    cluster.finish()
}

#[test]
fn a_database_with_its_own_master_key_is_copied_too() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut model = cluster.client_to("model")?;
    run_sql(&mut model, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    let sum = text(&mut model, SUM)?;
    drop(model);
    cluster.sql("CREATE DATABASE copy TEMPLATE model STRATEGY FILE_COPY")?;
    check(&cluster, "copy", &sum)?;
    let wrapped = "SELECT string_agg(DISTINCT scope, ' ') FROM pagevault.data_keys";
    let found = text(&mut cluster.client_to("copy")?, wrapped)?;
    ensure!(found == "cluster", "wrapped by {found}");
    cluster.finish()
}

#[test]
fn a_database_moves_to_another_tablespace_and_back() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = text(&mut cluster.client_to("model")?, SUM)?;
    for space in ["space", "pg_default", "space"] {
        cluster.sql(&format!("ALTER DATABASE model SET TABLESPACE {space}"))?;
        check(&cluster, "model", &sum).with_context(|| format!("in {space}"))?;
        // A new version of the same file, which the next move copies too.
        let mut model = cluster.client_to("model")?;
        let cipher = if space == "space" { "aes-256-xts-auth" } else { "aes-128-xts" };
        run_sql(&mut model, &format!("SELECT pagevault.encrypt('t', '{cipher}')"))?;
        drop(model);
        cluster.restart()?;
    }
    cluster.crash()?;
    ensure!(text(&mut cluster.client_to("model")?, SUM)? == sum, "after a crash");
    // Other changes of a database change no keys.
    let keys = cluster.text("SELECT data_keys FROM pagevault.status")?;
    cluster.sql("ALTER DATABASE model CONNECTION LIMIT 10")?;
    cluster.sql("ALTER DATABASE model RENAME TO renamed")?;
    ensure!(cluster.text("SELECT data_keys FROM pagevault.status")? == keys, "keys were made");
    cluster.finish()
}

/// The keys are in the copy when it becomes visible, even if the server crashes right after.
#[test]
fn a_kill_after_the_command_loses_nothing() -> Result<()> {
    let settings = Settings::default().conf("fsync = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(
        &mut model,
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i",
    )?;
    drop(model);
    cluster.sql("CREATE DATABASE copy TEMPLATE model STRATEGY file_copy")?;
    cluster.crash()?;
    let sum = "SELECT sum(id) FROM t";
    ensure!(text(&mut cluster.client_to("copy")?, sum)? == "500500", "the copy");
    cluster.crash()?;
    ensure!(text(&mut cluster.client_to("copy")?, sum)? == "500500", "the copy, again");
    cluster.finish()
}

/// The cleanup of CREATE DATABASE reads a catalog, while the session has not ended its refused
/// read.
#[test]
fn a_refused_copy_leaves_no_files_if_its_cleanup_reads_from_disk() -> Result<()> {
    if Installation::get()?.major < 17 {
        eprintln!("skipped: pg_buffercache_evict is new in PostgreSQL 17");
        return Ok(());
    }
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pg_buffercache")?;
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    // Copying the first table reads pg_tablespace, and keeps what it read (read_stream.c).
    run_sql(
        &mut model,
        "CREATE EXTENSION pagevault; CREATE TABLE first AS SELECT 7 AS id;
         SET pagevault.default_encryption = on; CREATE TABLE secret AS SELECT 8 AS id",
    )?;
    run_sql(&mut model, "SELECT pagevault.shred('secret', confirm => 'public.secret')")?;
    let at = format!("page.extend {}", text(&mut model, "SELECT pg_relation_filenode('secret')")?);
    drop(model);
    cluster.eventually("SELECT count(*) FROM pg_stat_activity WHERE datname = 'model'", "0")?;
    let databases = || -> Result<usize> {
        Ok(std::fs::read_dir(cluster.data_directory().join("base"))?.count())
    };
    let before = databases()?;
    let mut evicting = cluster.client()?;
    cluster.stop_at(&at)?;
    let error = std::thread::scope(|scope| {
        let copy = || cluster.error("CREATE DATABASE copy TEMPLATE model STRATEGY wal_log");
        let copying = scope.spawn(copy);
        cluster.stopped_at(&at)?;
        run_sql(
            &mut evicting,
            "SELECT pg_buffercache_evict(bufferid) FROM pg_buffercache
              WHERE reldatabase = 0 AND relfilenode = pg_relation_filenode('pg_tablespace')",
        )?;
        cluster.resume();
        copying.join().map_err(|_| anyhow!("panic"))?
    })?;
    ensure!(error.message.ends_with("were destroyed"), "{error}");
    ensure!(databases()? == before, "files of the copy are left");
    cluster.finish()
}
