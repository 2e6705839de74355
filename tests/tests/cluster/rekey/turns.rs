//! Commands and jobs for the same relation run one after the other.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::{Cluster, Settings};

use super::versions_of;

/// A sealed table that commands rewrite themselves.
fn cluster() -> Result<Cluster> {
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("pagevault.rekey_rate = 0"))?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT repeat(md5(i::text), 10) AS name FROM generate_series(1, 2000) i",
    )?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

const OTHER_CIPHER: &str = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-128-xts'";

/// Fails unless all pages of `t` on disk have this key version.
fn assert_one_version(cluster: &Cluster, wanted: u16) -> Result<()> {
    cluster.sql("CHECKPOINT")?;
    for file in cluster.files("t")? {
        let versions = versions_of(&file)?;
        ensure!(
            versions.iter().all(|version| *version == wanted),
            "{}: {versions:?}",
            file.path.display()
        );
    }
    Ok(())
}

/// A rotation that switched keys during a command would make it rewrite pages endlessly.
#[test]
fn a_job_waits_for_a_command() -> Result<()> {
    let cluster = cluster()?;
    cluster.stop_at("rekey.page_done")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET statement_timeout = '30s'")?;
    let command = std::thread::spawn(move || run_sql(&mut client, OTHER_CIPHER));
    cluster.stopped_at("rekey.page_done")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'pagevault: rotate job% waits for %'",
        "1",
    )?;
    cluster.resume();
    command.join().map_err(|_| anyhow::anyhow!("panic"))??;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2000");
    assert_one_version(&cluster, 3)?;
    cluster.finish()
}

#[test]
fn a_command_waits_for_a_job() -> Result<()> {
    let cluster = cluster()?;
    cluster.stop_at("rekey.batch_done")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    // No other session could let the job continue.
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN; ALTER TABLE t ADD other int")?;
    let error = expect_error(&mut client, OTHER_CIPHER)?;
    ensure!(error.sqlstate == "55006" && error.message.contains("is being rekeyed"), "{error}");
    run_sql(&mut client, "ROLLBACK; SET lock_timeout = '100ms'")?;
    let error = expect_error(&mut client, OTHER_CIPHER)?;
    ensure!(error.sqlstate == "55P03", "{error}");
    run_sql(&mut client, "SET lock_timeout = '30s'")?;
    let command = std::thread::spawn(move || run_sql(&mut client, OTHER_CIPHER));
    cluster.eventually("SELECT count(*) FROM pg_locks WHERE NOT granted", "1")?;
    cluster.resume();
    command.join().map_err(|_| anyhow::anyhow!("panic"))??;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2000");
    assert_one_version(&cluster, 3)?;
    cluster.finish()
}

/// A worker that ends between two transactions releases its locks.
#[test]
fn a_terminated_worker_releases_its_locks() -> Result<()> {
    let mut cluster = cluster()?;
    cluster.allow_log("terminating");
    cluster.stop_at("rekey.batch_done")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    let pid = cluster.stopped_at("rekey.batch_done")?.as_raw_nonzero();
    cluster.sql(&format!("SELECT pg_terminate_backend({pid})"))?;
    cluster.resume();
    cluster.eventually(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"), "0")?;
    let held = "SELECT count(*) FROM pg_locks WHERE classid = 'pg_extension'::regclass AND locktype = 'object'";
    cluster.eventually(held, "0")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET lock_timeout = '30s'")?;
    run_sql(&mut client, OTHER_CIPHER)?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2000");
    cluster.finish()
}
