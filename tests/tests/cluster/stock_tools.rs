//! Stock tools and a stock server, which know nothing of pagevault, on sealed files.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 20000) i;
    SET pagevault.default_encryption = off;
    CREATE TABLE plain_beside (id int)";

#[test]
fn pg_checksums_is_clean() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("VACUUM t")?;
    cluster.stop(StopMode::Fast)?;
    let report = cluster.pg_checksums()?;
    ensure!(report.contains("Bad checksums:  0"), "{report}");
    cluster.start_server()?;
    assert_sealed(&cluster.family_files("t")?)?;
    cluster.finish()
}

#[test]
fn checksums_can_be_enabled_and_disabled_by_pg_checksums() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().without_checksums())?;
    cluster.sql(TABLE)?;
    for flag in ["--enable", "--disable", "--enable"] {
        cluster.stop(StopMode::Fast)?;
        let mut program = cluster.program("pg_checksums");
        pagevault_tests::installation::run(
            program.arg(flag).arg("-D").arg(cluster.data_directory()),
        )?;
        cluster.start_server()?;
        ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "{flag}: rows are missing");
        cluster.sql("UPDATE t SET name = name WHERE id % 3 = 0; CHECKPOINT")?;
        ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "{flag}: rows are missing");
    }
    cluster.stop(StopMode::Fast)?;
    cluster.pg_checksums()?;
    cluster.finish()
}

#[test]
fn pg_basebackup_verifies_and_its_restore_opens() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("connection to client lost"); // the load is ended the hard way
    cluster.sql(TABLE)?;
    // Under load, so that neither data files nor the keystore are at rest.
    let mut churn = {
        let script = cluster.directory().join("churn.sql");
        std::fs::write(
            &script,
            "\\set n random(1, 1000000000)
             CREATE TABLE churn_:n (id int);
             INSERT INTO churn_:n SELECT generate_series(1, 10);
             INSERT INTO churned VALUES ('churn_:n');",
        )?;
        cluster.sql("CREATE TABLE churned (name text)")?;
        let script = script.to_string_lossy().into_owned();
        cluster.sql("ALTER SYSTEM SET pagevault.default_encryption = on")?;
        cluster.sql("SELECT pg_reload_conf()")?;
        cluster.pgbench_in_background(&["-n", "-c", "1", "-T", "600", "-f", &script])?
    };
    let mut load = {
        cluster.pgbench(&["-i", "-q", "-s", "1"])?;
        cluster.pgbench_in_background(&["-c", "2", "-T", "600"])?
    };
    let restored = Cluster::from_files(|target| cluster.base_backup(target))?;
    for program in [&mut load, &mut churn] {
        let _ = program.kill();
        program.wait()?;
    }
    restored.start_server()?;
    ensure!(restored.text("SELECT count(name) FROM t")? == "20000", "rows are missing");
    let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
                     = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
    ensure!(restored.text(sums)? == "t", "balances differ in the restored cluster");
    // Every table whose transaction is in the backup can be read: no key is missing.
    let tables = pagevault_tests::cluster::column(
        &mut restored.client()?,
        "SELECT name FROM churned WHERE to_regclass(name) IS NOT NULL",
    )?;
    ensure!(!tables.is_empty(), "no table was made during the backup");
    for table in tables {
        ensure!(restored.text(&format!("SELECT count(*) FROM {table}"))? == "10", "{table}");
    }
    restored.sql("SET pagevault.default_encryption = on; CREATE TABLE later AS SELECT 1 AS id")?;
    restored.sql("CHECKPOINT")?;
    assert_sealed(&restored.family_files("t")?)?;
    // Neither the backup nor the data directory holds the master key file.
    ensure!(keys.path().starts_with(cluster.directory()), "the key file is elsewhere");
    ensure!(!keys.path().starts_with(cluster.data_directory()), "the key file is in PGDATA");
    restored.finish()?;
    cluster.finish()
}

#[test]
fn a_server_without_pagevault_refuses_sealed_pages() -> Result<()> {
    // With sealed statistics such a server could plan no query at all.
    let statistics = Settings::default().conf("pagevault.protect_statistics = off");
    let (mut cluster, _keys) = Cluster::with_keys(&statistics)?;
    cluster.sql(TABLE)?;
    cluster.sql("INSERT INTO plain_beside VALUES (7)")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM t")?;
    ensure!(error.message.contains("invalid page in block 0 of relation"), "{error}");
    ensure!(error.sqlstate == "XX001", "{error}");
    ensure!(cluster.text("SELECT id FROM plain_beside")? == "7", "the plain table");
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "rows are missing");

    // The planner asks for statistics: where these are sealed, plaintext tables are of no use either.
    cluster.sql("SELECT pagevault.encrypt('pg_statistic')")?;
    cluster.sql("CREATE DATABASE other TEMPLATE template0")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT id FROM plain_beside")?;
    ensure!(error.sqlstate == "XX001", "{error}");
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE TABLE plain AS SELECT 7 AS id; SELECT id FROM plain")?;
    drop(other);
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM plain_beside")? == "7", "the plain table, again");
    cluster.allow_log("page verification failed");
    cluster.finish()
}

#[test]
fn amcheck_finds_nothing() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("shared_buffers = 1MB"))?;
    if cluster.sql("CREATE EXTENSION amcheck").is_err() {
        eprintln!("skipped: this installation has no amcheck");
        return cluster.finish();
    }
    cluster.sql(TABLE)?;
    cluster.sql("DELETE FROM t WHERE id % 7 = 0; UPDATE t SET name = name || 'x'")?;
    cluster.sql("VACUUM t")?;
    cluster.sql("SELECT bt_index_parent_check('t_pkey', true)")?;
    ensure!(cluster.text("SELECT count(*) FROM verify_heapam('t')")? == "0", "amcheck complains");
    cluster.finish()
}
