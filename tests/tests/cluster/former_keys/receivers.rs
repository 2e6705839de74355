//! WAL that others have written under a former WAL key: receivers go on with the keys that they had
//! when they began.

use super::versions::{database_keys, wal_keys};
use super::*;

/// A copy of the keystore in a directory of its own.
fn copy_of_keystore(cluster: &Cluster) -> Result<String> {
    let copy = cluster.directory().join("copy");
    fs::create_dir(&copy)?;
    cluster.installation().give(&copy)?;
    let keystore = cluster.data_directory().join("pagevault");
    run(Command::new("cp").arg("-a").arg(keystore).arg(&copy))?;
    Ok(copy.to_string_lossy().into_owned())
}

/// PostgreSQL's program, with the keys of a copy of the keystore.
fn with_copy(cluster: &Cluster, copy: &str, program: &str) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["exec", "--keystore", copy, "--", program]);
    command
}

/// Former WAL keys are kept for ever, unless the setting for them says otherwise: an archive that
/// `pg_receivewal` goes on to write under the former key is restored with a backup of later.
#[test]
fn wal_keys_are_kept_for_receivers() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    cluster.allow_log("connection to client lost");
    let defaults = [("pagevault.keep_former_wal_keys", "-1"), ("wal_keep_size", "0")];
    cluster.set(&[("pagevault.wal_encryption", "on"), defaults[0], defaults[1]])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let copy = copy_of_keystore(&cluster)?;
    ensure!(cluster.text("SELECT pagevault.rotate_wal_key()")? == "2");
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT; SELECT pg_switch_wal(); CHECKPOINT")?;
    // When this key is forgotten, a WAL key that nothing needs would be, too.
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.eventually_that("the former database key is forgotten", || {
        cluster.sql("CHECKPOINT; SELECT pg_switch_wal()")?;
        ensure!(database_keys(&cluster)? == [2]);
        Ok(())
    })?;
    ensure!(wal_keys(&cluster)? == [1, 2], "a WAL key is forgotten");
    let needed = "SELECT needed_for FROM pagevault.former_keys WHERE kind = 'wal'";
    let needed = cluster.text(needed)?;
    ensure!(needed.starts_with("WAL outside of this server"), "{needed}");

    // The WAL of this backup is under the former key.
    let streamed = Cluster::from_files(|target| {
        let mut backup = with_copy(&cluster, &copy, "pg_basebackup");
        run(backup.args(["--checkpoint=fast", "-X", "stream", "-D"]).arg(target)).map(drop)
    })?;
    streamed.start_server()?;
    ensure!(streamed.text(SUM)? == cluster.text(SUM)?, "rows differ");

    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    let restored = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", "none", "--no-manifest"])
    })?;
    cluster.sql("UPDATE t SET name = name || 'x'; SELECT pg_switch_wal()")?;
    cluster.sql("INSERT INTO t VALUES (0, 'behind it')")?;
    let sum = cluster.text(SUM)?;
    cluster.sql("SELECT pg_switch_wal()")?;
    let archive = cluster.directory().join("received");
    fs::create_dir(&archive)?;
    cluster.installation().give(&archive)?;
    let mut receive = with_copy(&cluster, &copy, "pg_receivewal");
    let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
    run(receive.args(["--slot=slot", "--no-loop", "--endpos", &end, "-D"]).arg(&archive))?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/%f %p'\nrecovery_target_timeline = current",
        archive.display()
    ))?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    ensure!(restored.text(SUM)? == sum, "rows are lost");
    // Who says that nothing outside needs them has them forgotten.
    cluster.sql("SELECT pg_drop_replication_slot('slot')")?;
    cluster.set(&[("pagevault.keep_former_wal_keys", "0")])?;
    cluster.eventually_that("the former WAL key is forgotten", || {
        cluster.sql("CHECKPOINT; SELECT pg_switch_wal()")?;
        ensure!(wal_keys(&cluster)? == [2]);
        Ok(())
    })
}

/// A rotation that a failover has lost: the new primary makes a key with the same version. What is
/// written with the keystore of the old one is not taken for the end of WAL.
#[test]
fn wal_under_a_key_of_another_history_is_not_the_end_of_wal() -> Result<()> {
    let (mut lost, _keys) = cluster()?;
    lost.set(&[("pagevault.wal_encryption", "on")])?;
    lost.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let mut primary = standby_of(&lost, &[])?;
    wait_for(&primary, &lost)?;
    primary.stop(StopMode::Fast)?;
    lost.sql("SELECT pagevault.rotate_wal_key()")?;
    let copy = copy_of_keystore(&lost)?;
    for server in [&mut lost, &mut primary] {
        server.without_witness("its WAL is lost");
        pagevault_tests::standby::allow_what_failovers_say(server);
    }
    lost.kill()?;
    primary.start_server()?;
    primary.promote()?;
    primary.sql("SELECT pg_switch_wal(); CHECKPOINT; SELECT pg_switch_wal(); CHECKPOINT")?;
    ensure!(primary.text("SELECT pagevault.rotate_wal_key()")? == "2");
    primary.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    let mut restored = Cluster::from_files(|target| {
        primary.base_backup_with(target, &["-X", "none", "--no-manifest"])
    })?;
    primary.sql("UPDATE t SET name = name || 'x'; SELECT pg_switch_wal()")?;
    primary.sql("UPDATE t SET name = name || 'y'; SELECT pg_switch_wal()")?;
    let archive = primary.directory().join("received");
    fs::create_dir(&archive)?;
    primary.installation().give(&archive)?;
    let mut receive = with_copy(&primary, &copy, "pg_receivewal");
    let end = primary.text("SELECT pg_current_wal_flush_lsn()")?;
    run(receive.args(["--slot=slot", "--no-loop", "--endpos", &end, "-D"]).arg(&archive))?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    restored.append_conf(&format!("restore_command = 'cp {}/%f %p'", archive.display()))?;
    let message = "wrong WAL key of version 2 for the WAL page at";
    restored.allow_log(message);
    ensure!(restored.start_server().is_err(), "it has started");
    ensure!(restored.log().contains(message), "{}", restored.log());

    let dump = |keystore: &str| -> Result<String> {
        let segments = pagevault_tests::wal::Segment::all(&archive)?;
        let last = segments.last().context("no segment")?;
        let output = with_copy(&primary, keystore, "pg_waldump").arg(&last.path).output()?;
        Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let own = dump(&primary.data_directory().to_string_lossy())?;
    ensure!(own.contains(message) && !own.contains("UPDATE"), "{own}");
    let with_the_copy = dump(&copy)?;
    ensure!(with_the_copy.contains("UPDATE"), "{with_the_copy}");
    Ok(())
}
