//! `pagevault.rekey_rate = auto`, the default.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::standby::{standby_of, wait_for};
use rustix::process::{Pid, Signal, kill_process};

use super::{SUM, cluster, versions};

#[test]
fn values_of_the_setting() -> Result<()> {
    let cluster = cluster("")?;
    ensure!(cluster.text("SHOW pagevault.rekey_rate")? == "auto");
    for value in ["AUTO", "0", "32MB", "16", "1GB", "2147483647"] {
        cluster.set(&[("pagevault.rekey_rate", value)])?;
        cluster.eventually("SHOW pagevault.rekey_rate", value)?;
    }
    for value in ["", "fast", "auto 1", "-1", "1 page", "3000000000"] {
        let error = cluster.error(&format!("ALTER SYSTEM SET pagevault.rekey_rate = '{value}'"))?;
        ensure!(error.sqlstate == "22023", "{value}: {error}");
    }
    cluster.finish()
}

#[test]
fn a_job_ends_though_sessions_commit() -> Result<()> {
    let cluster = cluster("")?;
    let before = cluster.text(SUM)?;
    cluster.sql("CREATE TABLE beside (id int)")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    let state = format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}");
    cluster.eventually_that("the end of the job", || {
        (0..20).try_for_each(|_| cluster.sql("INSERT INTO beside VALUES (1)"))?;
        ensure!(cluster.text(&state)? == "done");
        Ok(())
    })?;
    for (relation, versions) in versions(&cluster)? {
        ensure!(versions == [2], "{relation} has pages of versions {versions:?}");
    }
    ensure!(cluster.text(SUM)? == before);
    cluster.finish()
}

/// It says why it goes slower.
#[test]
fn a_job_waits_for_a_standby_that_falls_behind() -> Result<()> {
    let cluster = cluster("max_wal_size = 1GB")?;
    let standby = standby_of(&cluster, &[])?;
    wait_for(&standby, &cluster)?;
    // The primary knows how far it is.
    let is_there =
        "SELECT bool_and(flush_lsn = pg_current_wal_flush_lsn()) FROM pg_stat_replication";
    cluster.eventually(is_there, "t")?;
    let receivers = "SELECT pid FROM pg_stat_wal_receiver";
    let receiver: Vec<i32> = column(&mut standby.client()?, receivers)?
        .iter()
        .map(|pid| pid.parse())
        .collect::<Result<_, _>>()?;
    ensure!(receiver.len() == 1, "{receiver:?}");
    let stopped = receiver.first().and_then(|pid| Pid::from_raw(*pid));
    stopped.map_or(Ok(()), |pid| kill_process(pid, Signal::STOP))?;
    cluster.sql(
        "CREATE TABLE beside AS SELECT i AS id, repeat('x', 1000) FROM generate_series(1, 80000) i",
    )?;
    cluster.stop_at("rekey.flushed")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.flushed")?;
    let said = "SELECT string_agg(query, '; ') FROM pg_stat_activity
         WHERE backend_type = 'pagevault rekey'";
    let said = cluster.text(said)?;
    ensure!(said.contains(": a standby falls behind"), "{said}");
    cluster.resume();
    stopped.map_or(Ok(()), |pid| kill_process(pid, Signal::CONT))?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    standby.finish()?;
    cluster.finish()
}
