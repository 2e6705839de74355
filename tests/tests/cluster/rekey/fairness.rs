//! Databases share the workers.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

/// The owner of tables in one database locks them. Jobs in another database go on.
#[test]
fn locked_tables_of_one_database_delay_no_other_database() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_workers = 0")
        .conf("pagevault.rekey_threshold = 0")
        .conf("pagevault.rekey_rate = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE DATABASE d")?;
    let tables = "CREATE TABLE t AS SELECT 1 AS id; CREATE TABLE u AS SELECT 1 AS id; CREATE TABLE v AS SELECT 1 AS id; CREATE TABLE w AS SELECT 1 AS id";
    cluster.sql(tables)?;
    cluster.sql(
        "SELECT pagevault.encrypt(name) FROM (VALUES ('t'::regclass), ('u'), ('v'), ('w')) v(name)",
    )?;
    let mut holder = cluster.client()?;
    run_sql(&mut holder, "BEGIN; LOCK TABLE t, u, v, w IN ACCESS EXCLUSIVE MODE")?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.eventually(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE NOT granted AND backend_type = 'pagevault rekey'",
        "1",
    )?;
    let mut other = cluster.client_to("d")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    run_sql(&mut other, tables)?;
    run_sql(&mut other, "SELECT pagevault.encrypt('t')")?;
    let done = text(&mut other, "SELECT pagevault.wait_for_rekey('t'::regclass, '60s')")?;
    ensure!(done == "t", "the job in the other database does not begin");
    run_sql(&mut holder, "COMMIT")?;
    for table in ["t", "u", "v", "w"] {
        cluster.sql(&format!("SELECT pagevault.wait_for_rekey('{table}'::regclass)"))?;
    }
    cluster.finish()
}

/// A decryption waits for whoever may label the table, and a rotation for a command that rewrites
/// it. Both may take as long as their transactions.
#[test]
fn what_a_job_waits_for_delays_no_other_job() -> Result<()> {
    let settings =
        Settings::default().conf("pagevault.rekey_workers = 0").conf("pagevault.rekey_rate = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id; CREATE TABLE u AS SELECT 1 AS id; CREATE TABLE v AS SELECT 1 AS id")?;
    for table in ["t", "u", "v"] {
        cluster.sql(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    cluster.sql("SELECT pagevault.decrypt('t')")?;
    let mut labeller = cluster.client()?;
    run_sql(&mut labeller, "BEGIN; LOCK TABLE t IN SHARE UPDATE EXCLUSIVE MODE")?;
    let mut rewriter = cluster.client()?;
    run_sql(
        &mut rewriter,
        "BEGIN; SECURITY LABEL FOR pagevault ON TABLE u IS 'encrypted aes-128-xts'",
    )?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'pagevault: % waits for %'";
    cluster.eventually(waits, "1")?;
    cluster.sql("SELECT pagevault.rotate_data_key('v')")?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('v'::regclass, '40s')")?;
    ensure!(done == "t", "the job of another table does not begin");
    run_sql(&mut rewriter, "COMMIT")?;
    run_sql(&mut labeller, "COMMIT")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '40s')")? == "t");
    cluster.finish()
}
