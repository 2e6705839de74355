//! Workers start in databases with jobs, whatever the database's settings are, and another worker
//! continues a job whose worker has ended.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings, StopMode};

use super::{SUM, assert_version, cluster};
use crate::rekey::meanwhile::{begun, end};

#[test]
fn settings_of_the_database_do_not_stop_a_job() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    let before = cluster.text(SUM)?;
    let mut settings = vec![
        ("default_transaction_read_only", "on"),
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_deferrable", "on"),
        ("statement_timeout", "1ms"),
        ("lock_timeout", "1ms"),
        ("idle_in_transaction_session_timeout", "1ms"),
        ("search_path", "nowhere"),
        ("zero_damaged_pages", "on"),
        ("ignore_checksum_failure", "on"),
        ("role", "pg_monitor"),
    ];
    if cluster.text("SELECT current_setting('server_version_num')::int >= 170000")? == "t" {
        settings.push(("transaction_timeout", "1ms"));
    }
    let mut client = cluster.client()?;
    for (name, value) in settings {
        run_sql(&mut client, &format!("ALTER DATABASE postgres SET {name} = '{value}'"))?;
    }
    run_sql(&mut client, "SELECT pagevault.rotate_data_key('t')")?;
    run_sql(&mut client, "DO $$BEGIN ASSERT pagevault.wait_for_rekey('t'::regclass); END$$")?;
    run_sql(&mut client, "ALTER DATABASE postgres RESET ALL")?;
    assert_version(&cluster, 2)?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

/// At the lowest rate a batch takes minutes.
#[test]
fn orders_take_effect_at_a_low_rate() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 1kB")?;
    let before = cluster.text(SUM)?;
    cluster.stop_at("rekey.batch_done")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    cluster.resume();
    cluster.sql(&format!("SELECT pagevault.pause_rekey({job})"))?;
    let workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    cluster.eventually(workers, "0")?;
    cluster.stop_at("rekey.batch_done")?;
    cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
    cluster.stopped_at("rekey.batch_done")?;
    cluster.resume();
    // This applies to another rate too, not only to none.
    cluster.set(&[("pagevault.rekey_rate", "1GB")])?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    assert_version(&cluster, 2)?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

/// The owner of a database may set that errors end sessions. A job that fails would then be started
/// repeatedly.
#[test]
fn a_job_fails_once_where_errors_end_sessions() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 0")?;
    for output in ["invalid page", "page verification failed", "has failed"] {
        cluster.allow_log(output);
    }
    let mut files = cluster.files("t")?;
    cluster.stop(StopMode::Fast)?;
    files.remove(0).flip_bit(70, 5000, 3)?;
    cluster.start_server()?;
    cluster.sql("ALTER DATABASE postgres SET exit_on_error = on")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    let state = format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}");
    cluster.eventually(&state, "failed")?;
    cluster.finish()
}

#[test]
fn another_worker_continues_the_job_of_one_that_ended() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 1MB")?;
    cluster.allow_log("terminating");
    let before = cluster.text(SUM)?;
    let job = begun(&cluster)?;
    let worker =
        "SELECT coalesce(min(pid), 0) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    let first = cluster.text(worker)?;
    cluster.sql(&format!("SELECT pg_terminate_backend({first})"))?;
    cluster
        .eventually(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {first}"), "0")?;
    cluster.eventually("SELECT state FROM pagevault.rekey_jobs", "running")?;
    ensure!(cluster.text(worker)? != first);
    end(&cluster, &job)?;
    assert_version(&cluster, 2)?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

/// What an interrupted DROP DATABASE leaves (15.4 and newer): a database to which nobody can
/// connect.
#[test]
fn no_worker_connects_to_an_invalid_database() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(
        &Settings::default().conf("pagevault.rekey_rate = 1MB").conf("log_min_messages = debug1"),
    )?;
    cluster.sql("CREATE DATABASE app")?;
    cluster.sql("CREATE DATABASE empty")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT repeat(md5(i::text), 12) AS name FROM generate_series(1, 20000) i",
    )?;
    run_sql(&mut app, "SELECT pagevault.rotate_data_key('t')")?;
    drop(app);
    cluster.sql("UPDATE pg_database SET datconnlimit = -2 WHERE datname IN ('app', 'empty')")?;
    cluster.stop(StopMode::Fast)?;
    let ended = |cluster: &Cluster| {
        cluster.log().matches("background worker \"pagevault rekey\" (PID").count()
    };
    let before = ended(&cluster);
    cluster.start_server()?;
    // The launcher continues with other jobs, and by then has skipped these.
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    cluster.eventually_that("the worker has ended", || {
        let ended = ended(&cluster) - before;
        ensure!(ended == 1, "{ended} workers have ended");
        Ok(())
    })?;
    cluster.sql("DROP DATABASE app")?;
    cluster.finish()
}

/// A copy does not have the jobs of its template.
#[test]
fn a_copy_of_a_database_has_no_jobs() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    for strategy in ["wal_log", "file_copy"] {
        let name = format!("copy_{strategy}");
        let mut other = cluster.client_to("template1")?;
        run_sql(
            &mut other,
            &format!("CREATE DATABASE {name} TEMPLATE postgres STRATEGY {strategy}"),
        )?;
        let mut copy = cluster.client_to(&name)?;
        let jobs =
            pagevault_tests::cluster::text(&mut copy, "SELECT count(*) FROM pagevault.rekey_jobs")?;
        ensure!(jobs == "0", "{name} has {jobs} jobs");
        run_sql(&mut copy, "SELECT pagevault.rotate_data_key('t')")?;
        let done = "SELECT pagevault.wait_for_rekey(1)";
        ensure!(pagevault_tests::cluster::text(&mut copy, done)? == "t");
    }
    cluster.finish()
}
