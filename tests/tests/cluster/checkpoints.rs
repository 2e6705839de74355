//! Key files and checkpoints. Records that a power failure removes from a key file are restored
//! from WAL if they are newer than the last checkpoint; older ones must be in the file. Key files
//! and checkpoints do not wait for each other indefinitely.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

/// The file of the data keys of the database that tests connect to.
fn key_file(cluster: &Cluster) -> Result<PathBuf> {
    let database =
        cluster.text("SELECT oid FROM pg_database WHERE datname = current_database()")?;
    Ok(cluster.data_directory().join(format!("pagevault/{database}.keys")))
}

fn length(path: &PathBuf) -> Result<u64> {
    Ok(File::open(path)?.metadata()?.len())
}

fn cut(path: &PathBuf, length: u64) -> Result<()> {
    Ok(OpenOptions::new().write(true).open(path)?.set_len(length)?)
}

/// A cluster with an encrypted table created before a checkpoint.
fn cluster_with_old_table() -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let settings = Settings::default()
        .conf("pagevault.default_encryption = on")
        .conf("fsync = on") // else checkpoints sync nothing
        .conf("checkpoint_timeout = 1h")
        .conf("autovacuum = off");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE old AS SELECT generate_series(1, 5000) AS id; CHECKPOINT")?;
    Ok((cluster, keys))
}

#[test]
fn keys_newer_than_the_checkpoint_are_restored_from_wal() -> Result<()> {
    let (cluster, _keys) = cluster_with_old_table()?;
    let file = key_file(&cluster)?;
    // The new record is missing, truncated, or lacks its last byte.
    for (round, keep) in [|_| 0, |_| 17, |new: u64| new - 1].into_iter().enumerate() {
        cluster.sql("CHECKPOINT")?;
        let settled = length(&file)?;
        cluster
            .sql(&format!("CREATE TABLE new_{round} AS SELECT generate_series(1, 5000) AS id"))?;
        let new = length(&file)? - settled;
        ensure!(new > 17, "the new table's key is in the file before any checkpoint");
        cluster.kill()?;
        cut(&file, settled + keep(new))?;
        cluster.start_server()?;
        for table in ["old".to_owned(), format!("new_{round}")] {
            let rows = cluster.text(&format!("SELECT count(*) FROM {table}"))?;
            ensure!(rows == "5000", "{rows} rows in {table} in round {round}");
        }
    }
    // The restored records are durable.
    cluster.restart()?;
    for table in ["old", "new_0", "new_1", "new_2"] {
        ensure!(cluster.text(&format!("SELECT count(*) FROM {table}"))? == "5000", "{table}");
        assert_sealed(&cluster.family_files(table)?)?;
    }
    cluster.finish()
}

#[test]
fn keys_older_than_the_checkpoint_are_required() -> Result<()> {
    let (mut cluster, _keys) = cluster_with_old_table()?;
    let file = key_file(&cluster)?;
    cluster.allow_log("is not readable");
    cluster.kill()?;
    // Damage in the middle, before a mark that states that the file was durable.
    let mut bytes = std::fs::read(&file)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes)?;
    let refused = cluster.start_server();
    ensure!(refused.is_err(), "a damaged key file is refused");
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM old")? == "5000", "nothing was changed");
    cluster.finish()
}

#[test]
fn an_unreadable_end_is_damage_after_a_clean_shutdown() -> Result<()> {
    let (mut cluster, _keys) = cluster_with_old_table()?;
    let file = key_file(&cluster)?;
    cluster.allow_log("is damaged: its last");
    cluster.stop(StopMode::Fast)?;
    let bytes = std::fs::read(&file)?;
    std::fs::write(&file, &bytes[..bytes.len() - 1])?;
    ensure!(cluster.start_server().is_err(), "a key file cut short is refused");
    ensure!(std::fs::read(&file)? == bytes[..bytes.len() - 1], "and left as it is");
    std::fs::write(&file, &bytes)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM old")? == "5000", "nothing was changed");
    cluster.finish()
}

#[test]
fn an_incomplete_keystore_is_refused() -> Result<()> {
    let (mut cluster, _keys) = cluster_with_old_table()?;
    let cluster_keys = cluster.data_directory().join("pagevault/cluster.keys");
    let away = cluster.directory().join("cluster.keys.away");
    cluster.allow_log("is missing");
    cluster.stop(StopMode::Fast)?;
    std::fs::rename(&cluster_keys, &away)?;
    ensure!(cluster.start_server().is_err(), "data keys without the key that wraps them");
    ensure!(!cluster_keys.exists(), "nothing was made up");
    std::fs::rename(&away, &cluster_keys)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM old")? == "5000", "nothing was changed");
    cluster.finish()
}

#[test]
fn many_new_keys_and_checkpoints_do_not_wait_for_each_other() -> Result<()> {
    const FOR: Duration = Duration::from_secs(8);
    const SESSIONS: usize = 4;
    // The queue of sync requests has as many entries as there are buffers.
    let settings = Settings::default()
        .conf("shared_buffers = 128kB")
        .conf("fsync = on") // else checkpoints sync nothing
        .conf("max_connections = 12")
        .conf("statement_timeout = 60s")
        .conf("pagevault.default_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let ends = Instant::now() + FOR;
    std::thread::scope(|scope| -> Result<()> {
        let mut sessions = Vec::new();
        for session in 0..SESSIONS {
            let mut client = cluster.client()?;
            sessions.push(scope.spawn(move || -> Result<()> {
                let mut table = 0;
                while Instant::now() < ends {
                    run_sql(&mut client, &format!("CREATE TABLE t_{session}_{table} (id int)"))?;
                    table += 1;
                }
                Ok(())
            }));
        }
        let mut client = cluster.client()?;
        while Instant::now() < ends {
            run_sql(&mut client, "CHECKPOINT")?;
        }
        for session in sessions {
            session.join().ok().context("a session died")??;
        }
        Ok(())
    })?;
    cluster.crash()?;
    cluster.sql("INSERT INTO t_0_0 VALUES (1); INSERT INTO t_3_1 VALUES (2)")?;
    cluster.finish()
}

/// A checkpoint that cannot write a key file does not happen, nor does a restart point. So WAL
/// still has what the file lacks: for a crash, a standby, a backup.
#[test]
fn a_key_file_that_cannot_be_opened_keeps_checkpoints_from_ending() -> Result<()> {
    let (mut primary, _keys) = cluster_with_old_table()?;
    let mut standby = standby_of(&primary, &["fsync = on"])?;
    for server in [&mut primary, &mut standby] {
        server.allow_log("key file");
        server.allow_log("checkpoint request failed");
        server.allow_log("abnormal database system shutdown");
        server.allow_log("checkpointer");
    }
    let file = key_file(&primary)?;
    let of_standby =
        standby.data_directory().join("pagevault").join(file.file_name().context("a name")?);
    let mode =
        |file: &PathBuf, mode| std::fs::set_permissions(file, PermissionsExt::from_mode(mode));
    let redo = "SELECT redo_lsn FROM pg_control_checkpoint()";

    primary.sql("CREATE TABLE new AS SELECT generate_series(1, 1000) AS id")?;
    wait_for(&standby, &primary)?;
    let before = primary.text(redo)?;
    mode(&file, 0)?;
    let error = primary.error("CHECKPOINT")?;
    ensure!(error.text().contains("checkpoint request failed"), "{error}");
    ensure!(primary.text(redo)? == before, "the checkpoint has ended");
    let target = primary.directory().join("backup");
    let backup = primary.base_backup_with(&target, &["--checkpoint=fast"]);
    ensure!(backup.is_err(), "a backup began");
    primary.sql("INSERT INTO new VALUES (0)")?;
    mode(&file, 0o600)?;
    primary.sql("CHECKPOINT")?;
    ensure!(primary.text(redo)? != before, "no checkpoint");

    // A restart point.
    primary.sql("CREATE TABLE newer AS SELECT generate_series(1, 1000) AS id; CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    let before = standby.text(redo)?;
    mode(&of_standby, 0)?;
    let error = standby.error("CHECKPOINT")?;
    ensure!(error.text().contains("checkpoint request failed"), "{error}");
    ensure!(standby.text(redo)? == before, "the restart point has ended");
    let _ = standby.stop(StopMode::Fast);
    standby.kill()?;
    mode(&of_standby, 0o600)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM newer")? == "1000", "standby");

    // The checkpoint of a shutdown, and a crash.
    primary.sql("CREATE TABLE newest AS SELECT generate_series(1, 1000) AS id")?;
    mode(&file, 0)?;
    let _ = primary.stop(StopMode::Fast);
    mode(&file, 0o600)?;
    primary.kill()?;
    primary.start_server()?;
    for (table, rows) in [("old", "5000"), ("new", "1001"), ("newer", "1000"), ("newest", "1000")] {
        ensure!(primary.text(&format!("SELECT count(*) FROM {table}"))? == rows, "{table}");
        assert_sealed(&primary.files(table)?)?;
    }
    standby.finish()?;
    primary.finish()
}
