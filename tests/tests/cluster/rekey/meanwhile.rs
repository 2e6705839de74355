//! What else goes on in the cluster while a relation is rekeyed, and power cuts.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, DataFile, StopMode};

use super::{SUM, assert_epoch, cluster, epochs};

/// The job, once it has begun to write.
fn begun(cluster: &Cluster) -> Result<String> {
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    let begun = "SELECT (max(pages_done) > 100)::text FROM pagevault.rekey_progress";
    cluster.eventually(begun, "true")?;
    Ok(job)
}

fn end(cluster: &Cluster, job: &str) -> Result<()> {
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    let done = cluster.text(&format!("SELECT pagevault.rekey_wait({job}, '60s')"))?;
    ensure!(done == "t", "the job did not end");
    Ok(())
}

#[test]
fn keys_above_rotate() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 1")?;
    let before = cluster.text(SUM)?;
    let job = begun(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.set_master_key('local', 'main')")?;
    end(&cluster, &job)?;
    cluster.crash()?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    assert_epoch(&cluster, 2)?;
    cluster.finish()
}

#[test]
fn a_base_backup_is_taken() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 2")?;
    let before = cluster.text(SUM)?;
    let job = begun(&cluster)?;
    // With verification of checksums: sealed pages carry them.
    let restored = Cluster::from_files(|target| cluster.base_backup(target))?;
    end(&cluster, &job)?;
    restored.start_server()?;
    ensure!(restored.text(SUM)? == before, "the backup has other contents");
    end(&restored, &job)?;
    for (relation, epochs) in epochs(&restored)? {
        ensure!(epochs == [2], "{relation}: {epochs:?}");
    }
    restored.finish()?;
    cluster.finish()
}

#[test]
fn it_moves_to_another_tablespace() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 2")?;
    let before = cluster.text(SUM)?;
    let space = cluster.directory().join("space");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    let job = begun(&cluster)?;
    cluster.sql("ALTER TABLE t SET TABLESPACE space")?;
    end(&cluster, &job)?;
    cluster.sql("CHECKPOINT")?;
    for (relation, epochs) in epochs(&cluster)? {
        ensure!(epochs.len() == 1, "{relation}: {epochs:?}");
    }
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

#[test]
fn its_database_is_dropped() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 1")?;
    cluster.allow_log("terminating background worker");
    cluster.allow_log("terminating connection");
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT repeat(md5(i::text), 12) AS name FROM generate_series(1, 50000) i",
    )?;
    cluster.sql("CHECKPOINT")?;
    run_sql(&mut app, "SELECT pagevault.rotate_data_key('t')")?;
    drop(app);
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = 'app' AND query LIKE 'pagevault: rotate%'",
        "1",
    )?;
    let error = cluster.error("DROP DATABASE app")?;
    ensure!(error.sqlstate == "55006", "{error}");
    cluster.sql("DROP DATABASE app WITH (FORCE)")?;
    // The launcher goes on with what else there is.
    let job = begun(&cluster)?;
    end(&cluster, &job)?;
    assert_epoch(&cluster, 2)?;
    cluster.finish()
}

/// Nothing that was written since a checkpoint need be on disk after a power cut, and of what is, each sector of
/// 512 bytes on its own.
#[test]
fn the_power_fails() -> Result<()> {
    const SECTOR: usize = 512;
    let cluster = cluster("pagevault.rekey_rate = 4\nshared_buffers = 1MB")?;
    let before = cluster.text(SUM)?;
    let names = cluster.text(super::FAMILY)?;
    for round in 0..3_u16 {
        cluster.sql("CHECKPOINT")?;
        let mut files: Vec<DataFile> = Vec::new();
        for name in names.split(' ') {
            files.extend(cluster.files(name)?);
        }
        let old: Vec<Vec<u8>> = files.iter().map(DataFile::bytes).collect::<Result<_>>()?;
        let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
        let far = format!(
            "SELECT (pages_done > {})::text FROM pagevault.rekey_progress WHERE job = {job}",
            300 * (round + 1)
        );
        cluster.eventually(&far, "true")?;
        // Much of it reaches the kernel.
        cluster.sql("SELECT pg_sleep(0.3)")?;
        cluster.kill()?;
        let mut torn = 0;
        let mut random = u64::from(round) + 1;
        for (file, old) in files.iter().zip(&old) {
            let mut new = file.bytes()?;
            for (at, sector) in new.chunks_mut(SECTOR).enumerate() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let Some(before) = old.get(at * SECTOR..at * SECTOR + sector.len()) else { break };
                if random >> 63 == 0 && *sector != *before {
                    sector.copy_from_slice(before);
                    torn += 1;
                }
            }
            std::fs::write(&file.path, new)?;
        }
        ensure!(torn > 0 || round > 0, "nothing was written: the test proves nothing");
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == before, "round {round}: contents differ");
        end(&cluster, &job)?;
        cluster.set(&[("pagevault.rekey_rate", "4")])?;
        assert_epoch(&cluster, round + 2)?;
    }
    cluster.stop(StopMode::Fast)?;
    cluster.pg_checksums()?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}
