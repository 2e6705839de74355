//! What redo reads: pages whose keys it has not replayed yet, because a base backup copied the keystore before them.

mod backups;
mod garbage;
mod older_keystore;
mod stand_ins;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

fn settings(settings: Settings) -> Settings {
    settings.conf("pagevault.rekey_threshold = 0").conf("wal_keep_size = 1GB")
}

/// A cluster in which the catalogs are sealed that go along with the first relation, and nothing else.
fn cluster(settings: Settings) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(&self::settings(settings))?;
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    ensure!(cluster.text("SELECT pagevault.rekey_wait('first'::regclass, '1min')")? == "t");
    Ok(cluster)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").args(["-a", "--"]).arg(from).arg(to).status()?;
    ensure!(status.success(), "cp {}", from.display());
    Ok(())
}

/// A base backup that has the keystore from its beginning and all else from after `meanwhile`: files are copied in any
/// order. Its server is not started.
fn backup(cluster: &Cluster, meanwhile: impl FnOnce() -> Result<()>) -> Result<Cluster> {
    let mut session = cluster.client()?;
    run_sql(&mut session, "SELECT pg_backup_start('a backup', true)")?;
    let data = cluster.data_directory();
    let keystore = cluster.directory().join("keystore");
    copy(&data.join("pagevault"), &keystore)?;
    meanwhile()?;
    let restored = Cluster::from_files(|target| {
        copy(&data, target)?;
        std::fs::remove_file(target.join("postmaster.pid"))?;
        std::fs::remove_dir_all(target.join("pagevault"))?;
        std::fs::rename(&keystore, target.join("pagevault"))?;
        let label = text(&mut session, "SELECT labelfile FROM pg_backup_stop(false)")?;
        std::fs::write(target.join("backup_label"), label)?;
        cluster.installation().give(&target.join("backup_label"))?;
        std::fs::remove_dir_all(target.join("pg_wal"))?;
        copy(&data.join("pg_wal"), &target.join("pg_wal"))
    })?;
    restored.append_conf("primary_conninfo = ''")?;
    Ok(restored)
}

/// Has the new keys in use for all pages of a table and its indexes.
fn rekey(cluster: &Cluster, function: &str, table: &str) -> Result<()> {
    cluster.sql(&format!("SELECT pagevault.{function}('{table}')"))?;
    let done =
        cluster.text(&format!("SELECT pagevault.rekey_wait('{table}'::regclass, '1min')"))?;
    ensure!(done == "t", "the job does not end");
    Ok(())
}
