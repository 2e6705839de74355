//! Commands and jobs that want the same relation: one after the other.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::{Cluster, Settings};

use super::versions_of;

/// A sealed table that commands rewrite by themselves.
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

/// Every page of `t` has the same version on disk.
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

/// A rotation that switches keys under a command would have it rewrite for ever.
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
    cluster.go_on();
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
    // Nobody else could let the job go on.
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
    cluster.go_on();
    command.join().map_err(|_| anyhow::anyhow!("panic"))??;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2000");
    assert_one_version(&cluster, 3)?;
    cluster.finish()
}

/// Who ends between two transactions gives back what he holds.
#[test]
fn a_worker_that_is_told_to_end_leaves_no_lock() -> Result<()> {
    let mut cluster = cluster()?;
    cluster.allow_log("terminating");
    cluster.stop_at("rekey.batch_done")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    let pid = cluster.stopped_at("rekey.batch_done")?.as_raw_nonzero();
    cluster.sql(&format!("SELECT pg_terminate_backend({pid})"))?;
    cluster.go_on();
    cluster.eventually(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"), "0")?;
    let held = "SELECT count(*) FROM pg_locks WHERE classid = 'pg_extension'::regclass AND locktype = 'object'";
    cluster.eventually(held, "0")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET lock_timeout = '30s'")?;
    run_sql(&mut client, OTHER_CIPHER)?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2000");
    cluster.finish()
}
