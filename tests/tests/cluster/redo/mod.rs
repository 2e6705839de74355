//! Pages that redo reads before it has replayed their keys, because a base backup copied the
//! keystore before them.

mod backups;
mod file_copies;
mod garbage;
mod misnamed;
mod older_keystore;
mod placeholders;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::{Cluster, Settings};

fn settings(settings: Settings) -> Settings {
    settings.conf("pagevault.rekey_threshold = 0").conf("wal_keep_size = 1GB")
}

/// A cluster in which only the catalogs are sealed that are encrypted together with the first
/// relation.
fn cluster(settings: Settings) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(&self::settings(settings))?;
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('first'::regclass, '1min')")? == "t");
    Ok(cluster)
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").args(["-a", "--"]).arg(from).arg(to).status()?;
    ensure!(status.success(), "cp {}", from.display());
    Ok(())
}

/// A base backup with the keystore from before `meanwhile` and everything else from after it. Its
/// server is not started.
fn backup(cluster: &Cluster, meanwhile: impl FnOnce() -> Result<()>) -> Result<Cluster> {
    let backup = Backup::begin(cluster)?;
    meanwhile()?;
    backup.end()
}

/// Rekeys all pages of a table and its indexes.
fn rekey(cluster: &Cluster, function: &str, table: &str) -> Result<()> {
    cluster.sql(&format!("SELECT pagevault.{function}('{table}')"))?;
    let done =
        cluster.text(&format!("SELECT pagevault.wait_for_rekey('{table}'::regclass, '1min')"))?;
    ensure!(done == "t", "the job does not end");
    Ok(())
}
