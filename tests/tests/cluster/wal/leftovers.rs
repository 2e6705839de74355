//! Switches that are durable in the keystore, and that WAL never reached: the WAL before them was
//! lost, and new WAL takes their place.

use std::fs::File;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings};

use super::{STATE, assert_hidden, count, insert, leaks, sealing, segments, switch};

const PROBLEM: &str = "SELECT coalesce(wal_error, 'none') FROM pagevault.status";

/// Changes the setting for the next start; the server is down.
fn set_offline(cluster: &Cluster, value: &str) -> Result<()> {
    let path = cluster.data_directory().join("postgresql.auto.conf");
    let mut text = std::fs::read_to_string(&path)?;
    text.push_str(&format!("pagevault.wal_encryption = '{value}'\n"));
    Ok(std::fs::write(&path, text)?)
}

/// Lets the worker switch, and kills the server when the switch is durable in the keystore but not
/// in WAL.
fn lose_a_switch(cluster: &Cluster, to: &str) -> Result<()> {
    cluster.stop_at("keys.in_file")?;
    cluster.set(&[("pagevault.wal_encryption", to)])?;
    cluster.stopped_at("keys.in_file")?;
    cluster.kill()?;
    cluster.resume();
    Ok(())
}

/// WAL continues sealed from the first record on, here and on a standby, and after further starts.
#[test]
fn a_lost_switch_to_off_has_no_effect() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    insert(&cluster, "amsel", 100)?;
    lose_a_switch(&cluster, "off")?;
    set_offline(&cluster, "on")?;
    cluster.start_server()?;
    // It is not in WAL, so it did not happen.
    let mut client = cluster.client()?;
    client.batch_execute(
        "INSERT INTO t (name) SELECT 'drossel-' || i FROM generate_series(1, 1000) i",
    )?;
    assert_hidden(&cluster, "drossel")?;
    wait_for(&standby, &cluster)?;
    insert(&cluster, "fink", 1000)?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        assert_hidden(server, "fink")?;
        ensure!(server.text(STATE)? == "t" && server.text(PROBLEM)? == "none");
    }
    for round in 1..=2 {
        cluster.crash()?;
        insert(&cluster, "meise", 1000)?;
        assert_hidden(&cluster, "meise")?;
        ensure!(count(&cluster, "meise")? == (1000 * round).to_string(), "rows are missing");
    }
    ensure!(cluster.text("SELECT wal_key_version FROM pagevault.status")? == "1", "another key");
    ensure!(count(&cluster, "drossel")? == "1000", "rows are missing");
    standby.finish()?;
    cluster.finish()
}

/// Nor after another crash, or another start, when WAL has passed its address.
#[test]
fn a_lost_switch_has_no_effect_when_wal_has_passed_it() -> Result<()> {
    for in_single_user_mode in [false, true] {
        let (cluster, _keys) = sealing(&Settings::default())?;
        // It begins four megabytes later, because there may be a standby.
        cluster.sql("SELECT pg_create_physical_replication_slot('away', true)")?;
        let writing = |kilobytes: u32| {
            format!(
                "SELECT count(pg_logical_emit_message(true, 'none', repeat('x', 1000))) \
                 FROM generate_series(1, {kilobytes})\n"
            )
        };
        cluster.stop_at("wal_switch.recorded")?;
        cluster.set(&[("pagevault.wal_encryption", "off")])?;
        cluster.stopped_at("wal_switch.recorded")?;
        cluster.sql(&writing(1000))?;
        cluster.kill()?;
        cluster.resume();
        set_offline(&cluster, "on")?;
        if in_single_user_mode {
            let mut alone = cluster.program("postgres");
            alone.args(["--single", "-D"]).arg(cluster.data_directory()).arg("postgres");
            let commands = cluster.directory().join("commands");
            std::fs::write(&commands, writing(3500))?;
            run(alone.stdin(File::open(&commands)?))?;
            cluster.start_server()?;
        } else {
            cluster.start_server()?;
            cluster.eventually(PROBLEM, "none")?;
            cluster.sql(&writing(3500))?;
            cluster.crash()?;
        }
        let mut client = cluster.client()?;
        client.batch_execute(
            "INSERT INTO t (name) SELECT 'drossel-' || i FROM generate_series(1, 1000) i",
        )?;
        assert_hidden(&cluster, "drossel")?;
        ensure!(cluster.text(STATE)? == "t" && cluster.text(PROBLEM)? == "none");
        cluster.finish()?;
    }
    Ok(())
}

/// The other way round. Also, the key of a lost rotation is not used when WAL reaches the address
/// of its switch.
#[test]
fn a_lost_switch_to_on_and_a_lost_rotation_have_no_effect() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    switch(&cluster, false)?;
    cluster.stop_at("wal_switch.in_memory")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.stopped_at("wal_switch.in_memory")?;
    cluster.stop_at("keys.in_file")?;
    cluster.stopped_at("keys.in_file")?;
    cluster.kill()?;
    cluster.resume();
    set_offline(&cluster, "off")?;
    cluster.start_server()?;
    cluster.eventually(STATE, "f")?;
    insert(&cluster, "amsel", 1000)?;
    ensure!(leaks(&segments(&cluster)?, "amsel"), "WAL is encrypted");
    ensure!(cluster.text(PROBLEM)? == "none", "{}", cluster.text(PROBLEM)?);
    switch(&cluster, true)?;
    let version = "SELECT wal_key_version FROM pagevault.status";
    ensure!(cluster.text(version)? == "3", "key {}", cluster.text(version)?);

    cluster.stop_at("wal_switch.in_memory")?;
    let mut rotating = cluster.client()?;
    let rotation =
        std::thread::spawn(move || rotating.execute("SELECT pagevault.rotate_wal_key()", &[]));
    cluster.stopped_at("wal_switch.in_memory")?;
    cluster.stop_at("keys.in_file")?;
    cluster.stopped_at("keys.in_file")?;
    cluster.kill()?;
    cluster.resume();
    ensure!(rotation.join().is_ok_and(|done| done.is_err()), "the rotation was done");
    cluster.start_server()?;
    ensure!(cluster.text("SELECT pagevault.rotate_wal_key()")? == "5");
    for _ in 0..3 {
        insert(&cluster, "drossel", 30_000)?;
        ensure!(cluster.text(version)? == "5", "key {}", cluster.text(version)?);
        cluster.crash()?;
    }
    assert_hidden(&cluster, "drossel")?;
    cluster.finish()
}

/// The keystore is newer than the point to which a server was restored, so it contains switches of
/// an abandoned timeline.
#[test]
fn switches_after_the_point_of_a_restore_have_no_effect() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default())?;
    let backup = primary.directory().join("backup");
    primary.base_backup_with(&backup, &["-X", "none", "--no-manifest"])?;
    insert(&primary, "amsel", 100)?;
    primary.sql("SELECT pg_create_restore_point('here')")?;
    switch(&primary, false)?;
    insert(&primary, "zeisig", 100)?;
    let restored = Cluster::from_files(|target| {
        let copy = |from: &std::path::Path, to: &std::path::Path| {
            run(std::process::Command::new("cp").arg("-a").arg(from).arg(to))
        };
        copy(&backup, target)?;
        let newer = primary.data_directory().join("pagevault/cluster.keys");
        copy(&newer, &target.join("pagevault"))?;
        for segment in segments(&primary)? {
            copy(&segment.path, &target.join("pg_wal"))?;
        }
        let signal = target.join("recovery.signal");
        std::fs::write(&signal, "")?;
        primary.installation().give(&signal)
    })?;
    restored.append_conf(
        "restore_command = 'false'
         recovery_target_name = 'here'
         recovery_target_action = 'promote'",
    )?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    insert(&restored, "drossel", 5000)?;
    assert_hidden_since_fork(&restored, "drossel")?;
    ensure!(restored.text(STATE)? == "t" && restored.text(PROBLEM)? == "none");
    restored.crash()?;
    insert(&restored, "fink", 5000)?;
    assert_hidden_since_fork(&restored, "fink")?;
    ensure!(count(&restored, "drossel")? == "5000", "rows are missing");
    restored.finish()?;
    primary.finish()
}

/// In segments of timeline 2.
fn assert_hidden_since_fork(cluster: &Cluster, canary: &str) -> Result<()> {
    let mut all = segments(cluster)?;
    all.retain(|segment| segment.path.to_string_lossy().contains("/00000002"));
    ensure!(!all.is_empty() && !leaks(&all, canary), "pg_wal holds {canary}");
    Ok(())
}

/// A standby writes WAL in the same state as its primary, and reports that. Its own setting takes
/// effect when it is promoted.
#[test]
fn the_setting_of_a_standby_takes_effect_at_promotion() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default())?;
    switch(&primary, false)?;
    let standby = standby_of(&primary, &[])?;
    wait_for(&standby, &primary)?;
    set_offline(&standby, "on")?;
    standby.restart()?;
    insert(&primary, "amsel", 100)?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text(STATE)? == "f", "{}", standby.text(STATE)?);
    let problem = standby.text(PROBLEM)?;
    ensure!(
        problem.starts_with(
            "WAL is written in plaintext and pagevault.wal_encryption is on: a standby follows"
        ),
        "{problem}"
    );
    standby.promote()?;
    standby.eventually(STATE, "t")?;
    standby.eventually(PROBLEM, "none")?;
    insert(&standby, "drossel", 1000)?;
    assert_hidden(&standby, "drossel")?;
    standby.crash()?;
    ensure!(count(&standby, "drossel")? == "1000", "rows are missing");
    standby.finish()?;
    primary.finish()
}
