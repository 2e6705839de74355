//! Jobs while the keys of their database are locked.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

/// A cluster that soon starts locked if its provider is unavailable, with an encrypted table.
fn cluster() -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default().conf("pagevault.unlock_timeout = 1s");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("pagevault");
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT repeat(md5(i::text), 10) AS name FROM generate_series(1, 10000) i; CHECKPOINT",
    )?;
    Ok((cluster, keys))
}

/// New pages of a table that is being decrypted need no key; the remaining pages do.
#[test]
fn a_decryption_waits_until_keys_are_back() -> Result<()> {
    let (cluster, keys) = cluster()?;
    cluster.stop_at("rekey.batch_done")?;
    cluster.sql("SELECT pagevault.decrypt('t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    cluster.sql("SELECT pagevault.pause_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.resume();
    let workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    cluster.eventually(workers, "0")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.stop_at("rekey.claimed")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM t")?;
    ensure!(error.sqlstate == "55000", "{error}");
    cluster.sql("SELECT pagevault.resume_rekey(job) FROM pagevault.rekey_jobs")?;
    let worker = cluster.stopped_at("rekey.claimed")?.as_raw_nonzero();
    cluster.resume();
    let running = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {worker}");
    cluster.eventually(&running, "0")?;
    let state = "SELECT concat(state, ' ', error) FROM pagevault.rekey_jobs";
    let left = cluster.text(state)?;
    ensure!(left.starts_with("waiting") || left.starts_with("running"), "the job is {left}");
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.rekey_jobs", "done")?;
    for file in cluster.files("t")? {
        let is_open = |state: &PageState| matches!(state, PageState::Plaintext | PageState::Zero);
        ensure!(
            file.states()?.iter().all(is_open),
            "{} has an encrypted page",
            file.path.display()
        );
    }
    cluster.finish()
}

/// Keys may come back between the error that says so and the end of the job.
#[test]
fn a_job_waits_although_keys_are_back_at_once() -> Result<()> {
    let (cluster, keys) = cluster()?;
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.stop_at("rekey.refused")?;
    cluster.start_server()?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.stopped_at("rekey.refused")?;
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    cluster.resume();
    let over = "SELECT state FROM pagevault.rekey_jobs WHERE state IN ('done', 'failed')";
    cluster.eventually(over, "done")?;
    cluster.finish()
}

/// No worker can connect to the database. The launcher does not try again and again at once.
#[test]
fn a_locked_database_is_tried_at_intervals() -> Result<()> {
    let (cluster, keys) = cluster()?;
    cluster.sql("CREATE DATABASE d")?;
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    let mut client = cluster.client_to("d")?;
    run_sql(&mut client, "CREATE EXTENSION pagevault")?;
    run_sql(&mut client, "SECURITY LABEL FOR pagevault ON DATABASE d IS 'encrypted'")?;
    run_sql(&mut client, "CREATE TABLE u AS SELECT 1 AS id")?;
    run_sql(&mut client, "SELECT pagevault.rotate_data_key('u')")?;
    drop(client);
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    std::thread::sleep(std::time::Duration::from_secs(12));
    let tried = cluster.log().matches("\"pagevault rekey\" (PID").count();
    ensure!(tried < 5, "{tried} workers in some 9 seconds");
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    let mut client = cluster.client_to("d")?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('u'::regclass)")?;
    drop(client);
    cluster.finish()
}
