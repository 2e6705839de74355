//! Servers that still need what others have forgotten.

use super::versions::{database_keys, wal_keys};
use super::*;

/// A standby writes the WAL that it receives under the switches that it has replayed. What it has
/// received before it replays a switch is under the former key, whatever the list of switches says.
#[test]
fn wal_that_a_standby_has_received_but_not_replayed_keeps_its_key() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let standby = standby_of(&cluster, &["wal_keep_size = 0"])?;
    wait_for(&standby, &cluster)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    // Behind the switch, in several segments, with checkpoints for restart points.
    let mut switched = None;
    for round in 0..4 {
        cluster.sql(&format!("UPDATE t SET name = name || '{round}'; SELECT pg_switch_wal()"))?;
        cluster.sql("CHECKPOINT")?;
        switched = switched.or(Some(cluster.text("SELECT pg_current_wal_lsn()")?));
    }
    let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
    standby.eventually(&format!("SELECT pg_last_wal_receive_lsn() >= '{end}'"), "t")?;
    // It replays the switch, and stops somewhere in the middle of what it has received.
    let switched = switched.context("an address")?;
    standby.append_conf(&format!("recovery_target_lsn = '{switched}'"))?;
    standby.restart()?;
    standby.eventually(&format!("SELECT pg_last_wal_replay_lsn() >= '{switched}'"), "t")?;
    standby.sql("CHECKPOINT")?;
    thread::sleep(2 * TWO_ROUNDS);
    standby.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(wal_keys(&standby)? == [1, 2], "a key of WAL in pg_wal is forgotten");
    // The segments from before the switch are gone; it is needed nevertheless.
    let needed =
        "SELECT needed_for LIKE 'WAL from %' FROM pagevault.former_keys WHERE kind = 'wal'";
    ensure!(standby.text(needed)? == "t", "{}", standby.text(needed)?);
    standby.append_conf("recovery_target_lsn = ''")?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

/// Versions do not rise from one segment to the next: complete segments come from the archive
/// again, under the new key, and the last one, which is not complete, stays as it was received.
#[test]
fn a_segment_that_is_not_complete_keeps_its_key() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    cluster.allow_log("connection to client lost");
    let archive = cluster.directory().join("archive");
    fs::create_dir(&archive)?;
    cluster.installation().give(&archive)?;
    cluster.append_conf(&format!(
        "archive_mode = on\narchive_command = 'cp %p {0}/%f.new && mv {0}/%f.new {0}/%f'",
        archive.display()
    ))?;
    cluster.restart()?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let restore = format!("restore_command = 'cp {}/%f %p'", archive.display());
    let mut standby = standby_of(&cluster, &["wal_keep_size = 0", &restore])?;
    standby.allow_log("could not");
    wait_for(&standby, &cluster)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    let mut switched = None;
    for round in 0..3 {
        cluster.sql(&format!("UPDATE t SET name = name || '{round}'; SELECT pg_switch_wal()"))?;
        cluster.sql("CHECKPOINT")?;
        switched = switched.or(Some(cluster.text("SELECT pg_current_wal_lsn()")?));
    }
    let last = cluster.text("SELECT pg_walfile_name(pg_switch_wal())")?;
    cluster
        .eventually(&format!("SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver"), "t")?;
    cluster.sql("UPDATE t SET name = 'the last rows'")?;
    let sum = cluster.text(SUM)?;
    let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
    standby.eventually(&format!("SELECT pg_last_wal_receive_lsn() >= '{end}'"), "t")?;
    // It replays the switch and more, from the archive.
    let switched = switched.context("an address")?;
    standby.append_conf(&format!("recovery_target_lsn = '{switched}'"))?;
    standby.restart()?;
    standby.eventually(&format!("SELECT pg_last_wal_replay_lsn() >= '{switched}'"), "t")?;
    standby.sql("CHECKPOINT")?;
    let needed =
        "SELECT needed_for LIKE 'WAL from %' FROM pagevault.former_keys WHERE kind = 'wal'";
    ensure!(standby.text(needed)? == "t", "the key of the last segment is not needed");
    // The last rows are nowhere else.
    cluster.without_witness("its WAL is lost");
    cluster.kill()?;
    standby.append_conf("recovery_target_lsn = ''")?;
    standby.kill()?;
    standby.start_server()?;
    standby.eventually_that("the last rows are there", || {
        ensure!(standby.text(SUM)? == sum, "rows are lost");
        Ok(())
    })?;
    ensure!(wal_keys(&standby)? == [1, 2], "a key is forgotten");
    Ok(())
}

/// A database key that wraps nothing may be wrapped by a master key that is gone, on a server that
/// has not forgotten it: nobody is asked for it in vain.
#[test]
fn a_key_that_nothing_needs_does_not_prevent_a_start() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    let mut standby = standby_of(&cluster, &["pagevault.keep_former_keys = -1"])?;
    for server in [&mut cluster, &mut standby] {
        server.allow_log("could not");
        server.allow_log("does not exist");
    }
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.eventually_that("the former key is forgotten", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(database_keys(&cluster)? == [2]);
        Ok(())
    })?;
    let new = cluster.key_file("new", "main")?;
    cluster.sql(&new.add_provider("new"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('new', 'main')")?;
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    keys.take_away()?;
    wait_for(&standby, &cluster)?;
    ensure!(database_keys(&standby)? == [1, 2], "it has forgotten as well");
    for kills in [false, true] {
        if kills {
            standby.kill()?
        } else {
            standby.stop(StopMode::Fast)?
        }
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
        ensure!(standby.text("SELECT state FROM pagevault.status")? == "unlocked");
        ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows differ");
    }
    // A primary with the same key: rotation, another master key, crash.
    standby.promote()?;
    standby.sql("SELECT pagevault.rotate_database_key()")?;
    standby.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    standby.kill()?;
    standby.start_server()?;
    let sum = cluster.text(SUM)?;
    ensure!(standby.text(SUM)? == sum, "rows differ");
    // Redo does not bring back what is forgotten.
    standby.set(&[("pagevault.keep_former_keys", "0")])?;
    standby.eventually_that("former keys are forgotten", || {
        standby.sql("CHECKPOINT")?;
        ensure!(database_keys(&standby)? == [3]);
        Ok(())
    })?;
    standby.sql("UPDATE t SET name = name")?;
    standby.kill()?;
    standby.start_server()?;
    ensure!(database_keys(&standby)? == [3] && standby.text(SUM)? == sum);
    Ok(())
}

/// One of two master keys is gone. The former version of the database key, which wraps nothing, has
/// that one only.
#[test]
fn a_former_version_with_fewer_master_keys_does_not_matter() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    cluster.allow_log("could not");
    cluster.set(&[("pagevault.keep_former_keys", "-1")])?;
    let spare = cluster.key_file("spare", "main")?;
    cluster.sql(&spare.add_provider("spare"))?;
    // As if version 1 had been left out when the second master key was added.
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.add_cluster_master_key('spare', 'main')")?;
    cluster.stop(StopMode::Fast)?;
    let storage = FileStorage::new(&cluster.data_directory().join("pagevault"))?;
    let opened = log::Log::open(&storage, Scope::CLUSTER, log::Trust::All)?;
    let (mut log, contents) = opened.context("no key file")?;
    let first = contents
        .records
        .iter()
        .find(|record| matches!(record, Record::DatabaseKey { version, .. } if version.get() == 1));
    log.append(&[first.context("no record")?.clone()])?;
    log.append_settled(&log.position())?;
    drop(log);
    keys.take_away()?;
    for kills in [false, true] {
        cluster.start_server()?;
        ensure!(cluster.text("SELECT state FROM pagevault.status")? == "unlocked");
        ensure!(cluster.text("SELECT count(*) FROM t")? == "3000");
        if kills { cluster.kill()? } else { cluster.stop(StopMode::Fast)? }
    }
    cluster.start_server()?;
    cluster.sql("SELECT pagevault.drop_cluster_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "3000");
    Ok(())
}
