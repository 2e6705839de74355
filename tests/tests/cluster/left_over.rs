//! Files that a crash has left without a relation, and without a key, in servers that are busy: WAL
//! brings rows to `pg_class`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Result, anyhow, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const ROWS: &str = "SELECT repeat('x', 100) AS name FROM generate_series(1, 5000) i";

fn encrypting() -> Result<(Cluster, KeyFile)> {
    let settings =
        Settings::default().conf("allow_in_place_tablespaces = on").conf("autovacuum = off");
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

/// A file that no relation has, with pages under a key that the keystore does not have.
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
    cluster.sql("CHECKPOINT")?;
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
    let (cluster, _keys) = encrypting()?;
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
    let (cluster, _keys) = encrypting()?;
    let left = leave(&cluster)?;
    let backup = Backup::begin(&cluster)?;
    change_catalog(&cluster)?;
    let backup = backup.end()?;
    let line = format!("left over    {}: belongs to no relation", shown(&cluster, &left));
    cluster.expect_verified(&backup.data_directory(), 0, &[&line])?;
    fs::remove_file(&left)?;
    cluster.finish()
}

/// The file and its pages are older than the last checkpoint, and only WAL behind it has the row
/// that names the file.
#[test]
fn files_that_only_rows_in_wal_name_are_needed() -> Result<()> {
    let (cluster, _keys) = encrypting()?;
    let left = leave(&cluster)?;
    cluster.sql("CREATE TABLESPACE space LOCATION ''")?;
    // With an image of the page of `pg_class`, and with the changed part of the row.
    for (table, lock_again) in [("moved", false), ("kept", true)] {
        if table == "moved" {
            cluster.sql(&format!("CREATE TABLE moved AS {ROWS}"))?;
        }
        let lock = |kind: &str| {
            format!("SELECT oid FROM pg_class WHERE oid = '{table}'::regclass FOR {kind}")
        };
        let mut locking = cluster.client()?;
        run_sql(&mut locking, &format!("BEGIN; {}", lock("SHARE")))?;
        let mut moving = cluster.client()?;
        let move_it = format!("ALTER TABLE {table} SET TABLESPACE space");
        let moving = thread::spawn(move || run_sql(&mut moving, &move_it));
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
        let file = path(&cluster, table)?;
        change_catalog(&cluster)?;
        cluster.sql("DROP TABLE one_more, three_more")?;
        cluster.kill()?;
        let whole = fs::read(&file)?;
        ensure!(whole.len() > 8192, "the file was not copied");
        // A version without a key.
        let write = OpenOptions::new().write(true).open(&file)?;
        write.write_all_at(&(77_u16 << 3).to_le_bytes(), 8192 + 10)?;
        let what = format!("{} block 1: the keystore has no data key", shown(&cluster, &file));
        let line = format!("left over    {}", shown(&cluster, &left));
        cluster.expect_verified(
            &cluster.data_directory(),
            2,
            &[&what, &line, "Damage found: 1."],
        )?;
        fs::write(&file, whole)?;
        cluster.start_server()?;
        ensure!(cluster.text(&format!("SELECT count(*) FROM {table}"))? == "5000");
    }
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(&left)?;
    cluster.finish()
}
