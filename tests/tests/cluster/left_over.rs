//! Files that a crash has left without a relation, and without a key, in servers that are busy: WAL
//! brings rows to `pg_class`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const ROWS: &str = "SELECT repeat('x', 100) AS name FROM generate_series(1, 5000) i";

fn encrypting(settings: Settings) -> Result<(Cluster, KeyFile)> {
    let settings = settings.conf("allow_in_place_tablespaces = on").conf("autovacuum = off");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("SELECT pagevault.encrypt_database()")?;
    cluster.sql(&format!("CREATE TABLE kept AS {ROWS}; CREATE TABLE busy (id int)"))?;
    Ok((cluster, keys))
}

fn path(cluster: &Cluster, table: &str) -> Result<PathBuf> {
    let path = cluster.text(&format!("SELECT pg_relation_filepath('{table}')"))?;
    Ok(cluster.data_directory().join(path))
}

fn shown(cluster: &Cluster, path: &Path) -> String {
    path.strip_prefix(cluster.data_directory()).unwrap_or(path).display().to_string()
}

/// Makes a checkpoint, and a file that no relation has, with pages under a key that the keystore
/// does not have.
fn leave(cluster: &Cluster) -> Result<PathBuf> {
    cluster.sql("CHECKPOINT")?;
    let kept = path(cluster, "kept")?;
    let left = kept.with_file_name("3000000");
    fs::copy(&kept, &left)?;
    cluster.installation().give(&left)?;
    Ok(left)
}

/// Rows of `pg_class` of all kinds.
fn change_catalog(cluster: &Cluster) -> Result<()> {
    for name in ["one", "two", "three"] {
        cluster.sql(&format!(
            "CREATE TABLE {name} (id int PRIMARY KEY, body text);
             ALTER TABLE {name} RENAME TO {name}_more; ALTER TABLE {name}_more SET (fillfactor = 90);
             GRANT SELECT ON {name}_more TO public; TRUNCATE {name}_more; TRUNCATE busy"
        ))?;
        cluster.sql(&format!("VACUUM FULL {name}_more"))?;
        cluster.sql(&format!("ANALYZE {name}_more; REINDEX TABLE {name}_more"))?;
    }
    cluster.sql("DROP TABLE two_more")
}

#[test]
fn they_are_told_from_damage_in_a_killed_server() -> Result<()> {
    let (cluster, _keys) = encrypting(Settings::default())?;
    let left = leave(&cluster)?;
    change_catalog(&cluster)?;
    cluster.kill()?;
    let line = format!("left over    {}: belongs to no relation", shown(&cluster, &left));
    cluster.expect_verified(&cluster.data_directory(), 0, &[&line])?;

    // The transaction is open, prepared or committed, and its rows are in WAL.
    cluster.start_server()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN; SAVEPOINT one; CREATE TABLE open (body text)")?;
    let open = text(&mut client, "SELECT pg_relation_filepath('open')")?;
    let open = cluster.data_directory().join(open);
    cluster.sql("CREATE TABLE done (body text)")?;
    let done = path(&cluster, "done")?;
    cluster.kill()?;
    for file in [&open, &done] {
        fs::copy(&left, file)?;
        let what = format!("{} block 0: the page is not as it was sealed", shown(&cluster, file));
        cluster.expect_verified(&cluster.data_directory(), 2, &[&line, &what])?;
        fs::write(file, "")?;
    }
    fs::remove_file(&left)?;
    cluster.start_server()?;
    cluster.finish()
}

#[test]
fn they_are_told_from_damage_in_a_base_backup() -> Result<()> {
    let (cluster, _keys) = encrypting(Settings::default())?;
    let left = leave(&cluster)?;
    let backup = Backup::begin(&cluster)?;
    change_catalog(&cluster)?;
    let backup = backup.end()?;
    let line = format!("left over    {}: belongs to no relation", shown(&cluster, &left));
    cluster.expect_verified(&backup.data_directory(), 0, &[&line])?;
    fs::remove_file(&left)?;
    cluster.finish()
}

/// A power cut may bring names of a dropped database's files back, without their contents.
#[test]
fn files_of_dropped_databases_are_no_damage() -> Result<()> {
    let (cluster, _keys) = encrypting(Settings::default())?;
    cluster.sql("CREATE DATABASE app")?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, &format!("CREATE TABLE t AS {ROWS}"))?;
    let file = text(&mut client, "SELECT pg_relation_filepath('t')")?;
    drop(client);
    let file = cluster.data_directory().join(file);
    cluster.stop(StopMode::Fast)?;
    let directory = file.parent().context("a directory")?;
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        files.push((path.clone(), fs::read(path)?));
    }
    let spoil = || -> Result<()> {
        let write = OpenOptions::new().write(true).open(&file)?;
        Ok(write.write_all_at(&[1; 512], 8192 + 5000)?)
    };
    spoil()?;
    let what = format!("{} block 1: ", shown(&cluster, &file));
    cluster.expect_verified(&cluster.data_directory(), 2, &[&what, "Damage found: 1."])?;
    cluster.start_server()?;
    cluster.sql("DROP DATABASE app")?;
    // The row is read once more, and then has a hint.
    ensure!(cluster.text("SELECT count(*) FROM pg_database WHERE datname = 'app'")? == "0");
    cluster.stop(StopMode::Fast)?;
    fs::create_dir(directory)?;
    files.iter().try_for_each(|(path, content)| fs::write(path, content))?;
    spoil()?;
    let line = format!("left over    {}: belongs to no relation", shown(&cluster, &file));
    cluster.expect_verified(&cluster.data_directory(), 0, &[&line])?;
    fs::remove_dir_all(directory)?;
    cluster.finish()
}

/// Its page of `pg_class` was changed since the checkpoint, so the record has a part of the row.
#[test]
fn files_that_only_rows_in_wal_name_are_needed() -> Result<()> {
    files_that_wal_names(Settings::default(), true)
}

/// The record has an image. With checksums, a hint would have put one into WAL before.
#[test]
fn files_that_only_images_in_wal_name_are_needed() -> Result<()> {
    files_that_wal_names(Settings::default().without_checksums(), false)
}

/// The file and its pages are older than the last checkpoint, and only WAL behind it has the row
/// that names the file.
fn files_that_wal_names(settings: Settings, lock_again: bool) -> Result<()> {
    let (cluster, _keys) = encrypting(settings)?;
    let left = leave(&cluster)?;
    cluster.sql("CREATE TABLESPACE space LOCATION ''")?;
    let lock =
        |kind: &str| format!("SELECT oid FROM pg_class WHERE oid = 'kept'::regclass FOR {kind}");
    let mut locking = cluster.client()?;
    run_sql(&mut locking, &format!("BEGIN; {}", lock("SHARE")))?;
    let mut moving = cluster.client()?;
    let move_it = "ALTER TABLE kept SET TABLESPACE space";
    let moving = thread::spawn(move || run_sql(&mut moving, move_it));
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'ALTER TABLE%' AND wait_event_type = 'Lock'",
        "1",
    )?;
    cluster.sql("CHECKPOINT")?;
    if lock_again {
        run_sql(&mut locking, &lock("UPDATE"))?;
    }
    run_sql(&mut locking, "COMMIT")?;
    moving.join().map_err(|_| anyhow!("the move has failed"))??;
    let file = path(&cluster, "kept")?;
    cluster.kill()?;
    let whole = fs::read(&file)?;
    ensure!(whole.len() > 8192, "the file was not copied");
    // A version without a key.
    let write = OpenOptions::new().write(true).open(&file)?;
    write.write_all_at(&(77_u16 << 3).to_le_bytes(), 8192 + 10)?;
    let what = format!("{} block 1: the keystore has no data key", shown(&cluster, &file));
    let line = format!("left over    {}", shown(&cluster, &left));
    let words = [&*what, &line, "Damage found: 1."];
    cluster.expect_verified(&cluster.data_directory(), 2, &words)?;
    fs::write(&file, whole)?;
    fs::remove_file(&left)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM kept")? == "5000");
    cluster.finish()
}
