//! Rekeying with standbys: they follow through WAL, and continue jobs of a lost primary.

use anyhow::{Result, ensure};
use pagevault_tests::standby::{standby_of, wait_for};

use super::{SUM, cluster, versions};

#[test]
fn a_promoted_standby_continues_jobs() -> Result<()> {
    let mut primary = cluster("pagevault.rekey_rate = 2MB\npagevault.wal_encryption = on")?;
    primary.allow_log("the cluster has no master key");
    primary.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let before = primary.text(SUM)?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    // A job that the standby follows from begin to end, with a crash.
    primary.set(&[("pagevault.rekey_rate", "0")])?;
    let job = primary.text("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(primary.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    standby.crash()?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text(SUM)? == before, "the standby has other contents");
    let error = standby.error(&format!("SELECT pagevault.resume_rekey({job})"))?;
    ensure!(error.sqlstate == "25006", "{error}");

    // A job that the primary cannot finish.
    primary.set(&[("pagevault.rekey_rate", "1MB")])?;
    let job = primary.text("SELECT pagevault.rotate_data_key('t')")?;
    let running =
        format!("SELECT (pages_done > 200)::text FROM pagevault.rekey_jobs WHERE job = {job}");
    primary.eventually(&running, "true")?;
    wait_for(&standby, &primary)?;
    primary.kill()?;
    standby.sql("SELECT pg_promote()")?;
    standby.set(&[("pagevault.rekey_rate", "0")])?;
    standby
        .eventually(&format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}"), "done")?;
    for (relation, versions) in versions(&standby)? {
        ensure!(versions == [3], "{relation} has pages of versions {versions:?}");
    }
    ensure!(standby.text(SUM)? == before, "contents differ");
    standby.crash()?;
    ensure!(standby.text(SUM)? == before, "contents differ after a crash");
    standby.finish()?;

    // The old primary would continue its job too.
    primary.append_conf("pagevault.rekey_rate = 0")?;
    std::fs::write(primary.data_directory().join("postgresql.auto.conf"), "")?;
    primary.start_server()?;
    primary
        .eventually(&format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}"), "done")?;
    ensure!(primary.text(SUM)? == before, "contents differ");
    primary.finish()
}
