//! Standbys, backups and old directories: who replays WAL from before.

use super::*;

/// A standby keeps keys until it does not replay from before any more: not before its own restart
/// point.
#[test]
fn a_standby_forgets_after_its_own_restart_point() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("could not");
    let before = with_keys(&cluster)?;
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    wait_for(&standby, &cluster)?;
    // It has the record, and the keys. It starts again from before the files were gone.
    for _ in 0..2 {
        ensure!(with_keys(&standby)?.is_superset(&before), "keys are gone too early");
        standby.kill()?;
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
    }
    ensure!(state(&standby)?.former_files().ranges().count() > 0, "nothing is recorded");
    forgets_when_its_primary_has_checkpoints(&standby, &cluster, || {
        ensure!(with_keys(&standby)? == left);
        Ok(())
    })?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    let sum = cluster.text(SUM)?;
    ensure!(standby.text(SUM)? == sum, "rows of the standby differ");
    standby.promote()?;
    standby.sql("UPDATE t SET name = name")?;
    standby.sql("VACUUM FULL t")?;
    ensure!(standby.text(SUM)? == sum, "rows changed");
    forgets(&standby)
}

/// The key file is copied after keys were forgotten that WAL of the backup needs: a restore says
/// so, and changes nothing.
#[test]
fn a_backup_that_took_longer_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'")?;
    let backup = Backup::begin_unseen_with_files(&cluster)?;
    cluster.sql("UPDATE early SET name = name; DROP TABLE early")?;
    forgets(&cluster)?;
    let mut restored = backup.end()?;
    restored.allow_log("is of a later time than the data directory");
    for _ in 0..2 {
        ensure!(restored.start_server().is_err(), "the restore has started");
        ensure!(restored.log().contains("is of a later time than the data directory"));
    }
    cluster.expect_verified(&restored.data_directory(), 2, &["pagevault: of a later time"])?;
    // One that began afterwards is good.
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("UPDATE t SET name = name")?;
    let restored = backup.end()?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

/// Of a backup that the server sees: nothing is forgotten meanwhile.
#[test]
fn a_backup_is_waited_for() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'")?;
    let before = with_keys(&cluster)?;
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("UPDATE early SET name = name; DROP TABLE early; CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(with_keys(&cluster)?.is_superset(&before), "keys are gone");
    let restored = backup.end()?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == cluster.text(SUM)?, "rows differ");
    forgets(&cluster)
}

/// The time that keys are kept runs between the address at which their files are known to be gone
/// and the forgetting: a backup that takes less has them, whenever it begins.
#[test]
fn a_backup_that_is_short_enough_has_all_keys() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    // A look every three seconds.
    cluster.set(&[("pagevault.keep_former_keys", "72s")])?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'")?;
    cluster.sql("DROP TABLE early")?;
    cluster.eventually_that("it is recorded that files are gone", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(state(&cluster)?.former_files().ranges().count() > 0);
        Ok(())
    })?;
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("UPDATE t SET name = name; CHECKPOINT")?;
    // The next look, and those after it.
    thread::sleep(3 * TWO_ROUNDS);
    let restored = backup.end()?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

/// The same after a clean shutdown, when no WAL is replayed: the files exist in an old directory.
#[test]
fn an_old_directory_with_a_newer_keystore_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'")?;
    cluster.stop(StopMode::Fast)?;
    let data = cluster.data_directory();
    let copy = |from: &Path, to: &Path| -> Result<()> {
        let copied = Command::new("cp").arg("-a").arg(from).arg(to).status()?;
        ensure!(copied.success(), "cp failed");
        Ok(())
    };
    let mut old = Cluster::from_files(|target| copy(&data, target))?;
    cluster.start_server()?;
    cluster.sql("DROP TABLE early")?;
    forgets(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let own = old.data_directory().join("pagevault");
    fs::rename(&own, old.directory().join("kept"))?;
    copy(&data.join("pagevault"), &own)?;
    old.allow_log("is of a later time than the data directory");
    for signal in [None, Some("recovery.signal")] {
        if let Some(signal) = signal {
            fs::write(old.data_directory().join(signal), "")?;
            old.append_conf("restore_command = 'false'")?;
        }
        ensure!(old.start_server().is_err(), "it has started");
        ensure!(old.log().contains("is of a later time than the data directory"));
    }
    cluster.expect_verified(&old.data_directory(), 2, &["pagevault: of a later time"])?;
    fs::remove_file(old.data_directory().join("recovery.signal"))?;
    fs::remove_dir_all(&own)?;
    fs::rename(old.directory().join("kept"), &own)?;
    old.start_server()?;
    ensure!(old.text("SELECT count(*) FROM early")? == "3000");
    cluster.start_server()
}

/// While a WAL sender copies the data directory, nothing is forgotten.
#[test]
fn a_base_backup_is_waited_for() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'; CHECKPOINT")?;
    let installation = cluster.installation();
    // Nobody reads what it writes.
    let mut program: Command = installation.command("pg_basebackup");
    program.args(["--pgdata=-", "--format=tar", "--wal-method=none", "--checkpoint=fast"]);
    program.arg("--no-manifest").arg("--host").arg(cluster.directory());
    program.args(["--username=postgres"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut program = program.spawn()?;
    cluster.eventually_that("a base backup has begun", || {
        let found = cluster.text(
            "SELECT count(*) FROM pg_stat_progress_basebackup WHERE phase LIKE 'streaming%'",
        )?;
        ensure!(found == "1", "{found}");
        Ok(())
    })?;
    cluster.sql("DROP TABLE early; CHECKPOINT")?;
    let before = with_keys(&cluster)?;
    thread::sleep(TWO_ROUNDS);
    ensure!(with_keys(&cluster)? == before, "keys were forgotten");
    program.kill()?;
    program.wait()?;
    forgets(&cluster)
}

/// A standby that has not forgotten the key of a former file does not take another file with its
/// number for it.
#[test]
fn a_standby_with_a_key_of_a_former_file_knows_that_the_next_one_is_another() -> Result<()> {
    // A server in binary-upgrade mode must not have encrypted files.
    let settings = settings().conf("pagevault.data_catalog_encryption = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("CREATE TABLE first AS SELECT 1 AS id")?;
    let number: u32 = cluster.text("SELECT pg_relation_filenode('first')")?.parse()?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE first IS 'encrypted'")?;
    cluster.sql("DROP TABLE first")?;
    forgets(&cluster)?;
    wait_for(&standby, &cluster)?;
    ensure!(with_keys(&standby)?.contains(&number), "the standby has forgotten it");
    cluster.without_witness("OIDs are chosen");
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&["-b"])?;
    let mut client = cluster.client()?;
    const STAMP: &str = "pg_catalog.binary_upgrade_set_next_attribute_versions";
    if !text(&mut client, &format!("SELECT to_regproc('{STAMP}')"))?.is_empty() {
        run_sql(&mut client, &format!("SELECT {STAMP}('{{0/1}}')"))?;
    }
    let set = "SELECT pg_catalog.binary_upgrade_set_next";
    run_sql(
        &mut client,
        &format!(
            "{set}_pg_type_oid('70001'::oid); {set}_array_pg_type_oid('70002'::oid);
             {set}_heap_pg_class_oid('70003'::oid); {set}_heap_relfilenode('{number}'::oid);
             CREATE TABLE again (id int);
             INSERT INTO again SELECT i FROM generate_series(1, 1000) i"
        ),
    )?;
    drop(client);
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    assert_plain(&standby.files("again")?)?;
    ensure!(standby.text("SELECT sum(id) FROM again")? == "500500");
    standby.kill()?;
    standby.start_server()?;
    standby.sql("CHECKPOINT")?;
    ensure!(standby.text("SELECT sum(id) FROM again")? == "500500");
    assert_plain(&standby.files("again")?)
}
