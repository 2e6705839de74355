//! Key groups in crash recovery, on standbys and in backups.

use std::fs;
use std::path::Path;

use pagevault_keystore::{Scope, log};
use pagevault_tests::backup::Backup;
use pagevault_tests::datafile::holds;

use super::*;

mod given_up;
mod locked;

/// A standby follows new groups, their rotation and their end; and is promoted.
#[test]
fn a_standby_follows() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    tables(&cluster)?;
    let third = cluster.key_file("third", "main")?;
    cluster.sql(&third.add_provider("third"))?;
    cluster.sql(
        "SELECT pagevault.create_key_group('third');
         SELECT pagevault.set_key_group_master_key('third', 'third', 'main');
         CREATE TABLE public.moving AS SELECT generate_series(1, 100) AS id;
         SECURITY LABEL FOR pagevault ON TABLE moving IS 'encrypted key_group=third';
         SELECT pagevault.rotate_key_group_key('third'), pagevault.rotate_key_group_master_key('acme')",
    )?;
    wait_for(&standby, &cluster)?;
    let state = "SELECT string_agg(key_group || ' ' || state || ' ' || key_version || ' ' || relation_files, ', ' ORDER BY 1)
        FROM pagevault.key_groups";
    ensure!(standby.text(state)? == cluster.text(state)?, "{}", standby.text(state)?);
    ensure!(standby.text("SELECT sum(id) FROM moving")? == "5050");
    let all = count(&cluster, "acme.t")?;
    cluster.kill()?;
    standby.promote()?;
    ensure!(count(&standby, "acme.t")? == all);
    standby.sql("SELECT * FROM pagevault.shred_key_group('third', 'third')")?;
    standby.sql("SELECT pagevault.create_key_group('fourth')")?;
    let numbers =
        "SELECT string_agg(number::text, ',' ORDER BY number) FROM pagevault.key_group_names()";
    ensure!(standby.text(numbers)? == "100,101,103", "{}", standby.text(numbers)?);
    standby.finish()
}

/// Redo of two rotations wraps data keys by a version that is neither the one of the last
/// checkpoint nor the newest, and reads pages meanwhile.
#[test]
fn versions_between_two_checkpoints_are_there_in_recovery() -> Result<()> {
    let settings = Settings::default()
        .conf("shared_buffers = 1MB\nmax_connections = 20\nautovacuum = off")
        .conf("checkpoint_timeout = 1h\nmax_wal_size = 2GB");
    let (cluster, _keys) = with_groups(&settings)?;
    cluster.sql(
        "CREATE TABLE big AS SELECT i, repeat('b', 200) AS x FROM generate_series(1, 20000) i",
    )?;
    let standby = standby_of(&cluster, &[])?;
    // More than a process has expanded keys for.
    let each = |statement: &str| {
        cluster.sql(&format!(
            "DO $$ BEGIN FOR n IN 1..200 LOOP EXECUTE format('{statement}', n); END LOOP; END $$"
        ))
    };
    each("CREATE TABLE acme.t%s (i int)")?;
    each("INSERT INTO acme.t%s VALUES (1)")?;
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    each("INSERT INTO acme.t%s VALUES (2)")?;
    cluster.sql("UPDATE big SET x = repeat('c', 200)")?;
    cluster.sql("SELECT pagevault.rotate_key_group_key('acme')")?;
    each("INSERT INTO acme.t%s VALUES (3)")?;
    cluster.sql("SELECT pagevault.rotate_key_group_key('acme')")?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        server.kill()?;
        server.start_server()?;
    }
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        ensure!(server.text("SELECT sum(i) FROM acme.t7")? == "6", "rows are lost");
    }
    standby.finish()?;
    cluster.finish()
}

/// The provider of a group does not answer a standby, which goes on and is promoted.
#[test]
fn a_promotion_does_not_wait_for_the_key_of_a_group() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    let late = cluster.key_file("late", "main")?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("key group");
    standby.stop(StopMode::Fast)?;
    cluster.sql(&late.add_provider("late"))?;
    cluster.sql("SELECT pagevault.create_key_group('late')")?;
    cluster.sql("SELECT pagevault.set_key_group_master_key('late', 'late', 'main')")?;
    cluster.sql(
        "CREATE SCHEMA late;
         SECURITY LABEL FOR pagevault ON SCHEMA late IS 'encrypted key_group=late';
         CREATE TABLE late.t AS SELECT 7 AS id, 'x' AS name",
    )?;
    late.take_away()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    is_locked(&standby, "late.t", "late")?;
    cluster.kill()?;
    standby.promote()?;
    is_locked(&standby, "late.t", "late")?;
    late.bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    ensure!(standby.text("SELECT id FROM late.t")? == "7");
    standby.finish()
}

/// A base backup that began before a group was made, or ends after it was shredded.
#[test]
fn backups_around_a_group() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    let all = count(&cluster, "umbrella.t")?;
    let backup = Backup::begin_with_files(&cluster)?;
    let late = cluster.key_file("late", "main")?;
    cluster.sql(&late.add_provider("late"))?;
    cluster.sql(
        "SELECT pagevault.create_key_group('late');
         SELECT pagevault.set_key_group_master_key('late', 'late', 'main');
         CREATE TABLE l AS SELECT 7 AS id; SECURITY LABEL FOR pagevault ON TABLE l IS 'encrypted key_group=late'",
    )?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    let mut restored = backup.end()?;
    restored.allow_log("were destroyed");
    restored.start_server()?;
    ensure!(restored.text("SELECT id FROM l")? == "7");
    ensure!(count(&restored, "umbrella.t")? == all);
    let error = restored.error(&format!("{COUNT} acme.t"))?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    restored.finish()?;
    cluster.finish()
}

/// A backup whose copy of the database's log is from before the end of a group, and that of the
/// cluster's log from after it. Files of the group are changed and made in between.
#[test]
fn a_backup_that_copies_the_end_of_a_group_before_its_files() -> Result<()> {
    const MARK: &str = "secret-of-a-tenant";
    for files_first in [true, false] {
        let (cluster, _keys) = with_groups(&Settings::default())?;
        tables(&cluster)?;
        let all = count(&cluster, "umbrella.t")?;
        let database: u32 =
            cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?.parse()?;
        let name = log::file_name(Scope::database(database));
        let of_database = fs::read(cluster.data_directory().join("pagevault").join(&name))?;
        let backup = match files_first {
            true => Backup::begin_with_files(&cluster)?,
            false => Backup::begin(&cluster)?,
        };
        cluster.sql(&format!(
            "UPDATE acme.t SET name = '{MARK}' || name; INSERT INTO acme.t (name) SELECT '{MARK}' || i FROM generate_series(1, 5000) i;
             CREATE TABLE acme.coming AS SELECT '{MARK}' AS name FROM generate_series(1, 1000);
             CREATE INDEX ON acme.coming (name)"
        ))?;
        cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
        let of_cluster = fs::read(
            cluster.data_directory().join("pagevault").join(log::file_name(Scope::CLUSTER)),
        )?;
        let mut restored = backup.end()?;
        restored.allow_log("were destroyed");
        let keystore = restored.data_directory().join("pagevault");
        fs::write(keystore.join(&name), &of_database)?;
        fs::write(keystore.join(log::file_name(Scope::CLUSTER)), &of_cluster)?;
        // Programs read the keystore as the server does.
        cluster.expect_verified(&restored.data_directory(), 0, &["No damage found."])?;
        restored.start_server()?;
        for table in ["acme.t", "acme.coming"] {
            let error = restored.error(&format!("{COUNT} {table}"))?;
            ensure!(error.text().contains("were destroyed"), "{table}: {error}");
        }
        ensure!(count(&restored, "umbrella.t")? == all);
        restored.sql("CHECKPOINT")?;
        ensure!(!is_below(&restored.data_directory().join("base"), MARK)?, "{MARK} is on disk");
        restored.crash()?;
        ensure!(count(&restored, "umbrella.t")? == all);
        restored.sql("DROP TABLE acme.t, acme.coming")?;
        restored.finish()?;
        cluster.finish()?;
    }
    Ok(())
}

/// Whether a file in a directory, or below, has this text.
fn is_below(directory: &Path, text: &str) -> Result<bool> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let found = match path.is_dir() {
            true => is_below(&path, text)?,
            false => holds(&fs::read(&path)?, text.as_bytes()),
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}
