//! Wrappings of database keys that are not in force any more: later base backups do not have them,
//! so a master key that was replaced or dropped does not open these.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::thread;

use anyhow::{Context, Result, ensure};
use pagevault_keystore::{Record, Scope, log};
use pagevault_tests::datafile::holds;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const SUM: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";

/// A cluster whose only master key is `main` of provider `local`.
fn cluster(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let settings = settings.clone().conf("fsync = on").conf("autovacuum = off");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t (id int PRIMARY KEY, name text);
         INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 1000) i",
    )?;
    Ok((cluster, keys))
}

/// Another provider.
fn provider(cluster: &Cluster, name: &str) -> Result<KeyFile> {
    let file = cluster.key_file(name, "main")?;
    cluster.sql(&file.add_provider(name))?;
    Ok(file)
}

/// All wrappings in the key file of a data directory, in force or not.
fn in_key_file(data: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let bytes = fs::read(data.join("pagevault").join(log::file_name(Scope::CLUSTER)))?;
    let mut found = Vec::new();
    for record in log::replay(&bytes, Scope::CLUSTER)?.records {
        let Record::DatabaseKey { key, .. } = record else { continue };
        for by in key.wrappings() {
            found.push((format!("{} {}", by.provider, by.master_version), by.wrapped.clone()));
        }
    }
    Ok(found)
}

fn master_keys(cluster: &Cluster) -> Result<BTreeSet<String>> {
    Ok(in_key_file(&cluster.data_directory())?.into_iter().map(|(by, _)| by).collect())
}

/// Whether the key file has wrappings by these only: provider and version of the master key.
fn expect(cluster: &Cluster, wanted: &[&str]) -> Result<()> {
    let found = master_keys(cluster)?;
    ensure!(found.iter().eq(wanted), "wrapped by {found:?}, not {wanted:?}");
    Ok(())
}

/// Whether a file below a directory has these bytes.
fn is_below(directory: &Path, bytes: &[u8]) -> Result<bool> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?.file_type();
        let found = if kind.is_dir() {
            is_below(&path, bytes)?
        } else {
            kind.is_file() && holds(&fs::read(&path)?, bytes)
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes a base backup with its WAL, in which there is none of these wrappings, and starts it.
fn later_backup_has_none(cluster: &Cluster, former: &[(String, Vec<u8>)]) -> Result<()> {
    let backup = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", "fetch"])?;
        for (by, wrapped) in former {
            ensure!(!is_below(target, wrapped)?, "a later backup has the wrapping by {by}");
        }
        Ok(())
    })?;
    backup.start_server()?;
    ensure!(backup.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

#[test]
fn later_backups_have_only_wrappings_in_force() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    let _spare = provider(&cluster, "spare")?;
    let mut former = in_key_file(&cluster.data_directory())?;
    let mut change = |sql: &str, left: &[&str]| -> Result<()> {
        former.extend(in_key_file(&cluster.data_directory())?);
        cluster.sql(sql)?;
        expect(&cluster, left).with_context(|| sql.to_owned())?;
        let in_force = in_key_file(&cluster.data_directory())?;
        former.retain(|wrapping| !in_force.contains(wrapping));
        later_backup_has_none(&cluster, &former).with_context(|| sql.to_owned())?;
        wait_for(&standby, &cluster)?;
        expect(&standby, left).with_context(|| format!("standby: {sql}"))
    };
    change("SELECT pagevault.add_cluster_master_key('spare', 'main')", &["local 1", "spare 1"])?;
    change("SELECT pagevault.drop_cluster_master_key('spare', 'main')", &["local 1"])?;
    change("SELECT pagevault.rotate_cluster_master_key()", &["local 2"])?;
    change("SELECT pagevault.set_cluster_master_key('spare', 'main')", &["spare 1"])?;
    change("SELECT pagevault.rotate_database_key()", &["spare 1"])?;
    change("SELECT pagevault.rotate_cluster_master_key()", &["spare 2"])?;
    // WAL has the former ones; a start that replays it unlocks with what is in force.
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    expect(&standby, &["spare 2"])?;
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    for server in [&cluster, &standby] {
        server.kill()?;
        server.start_server()?;
    }
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows differ");
    expect(&cluster, &["spare 2"])
}

/// A crash after the new wrapping is recorded, and before the former one is removed.
#[test]
fn a_crash_before_they_are_removed_removes_them() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let sum = cluster.text(SUM)?;
    cluster.stop_at("keys.compaction")?;
    let mut client = cluster.client()?;
    let session =
        thread::spawn(move || client.batch_execute("SELECT pagevault.rotate_cluster_master_key()"));
    cluster.stopped_at("keys.compaction")?;
    expect(&cluster, &["local 1", "local 2"])?;
    cluster.kill()?;
    cluster.resume();
    ensure!(session.join().is_ok_and(|ended| ended.is_err()), "it ended");
    cluster.start_server()?;
    expect(&cluster, &["local 2"])?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    Ok(())
}

/// A much longer wrapping has no room in the place of a shorter one: a backup by
/// `pg_backup_start()` may be copying the file. It waits for as long as such backups may take, or
/// for a restart.
#[test]
fn a_longer_wrapping_waits() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default().conf("pagevault.keep_former_keys = 1d"))?;
    // Much longer each time.
    let change = |name: &str, length: usize| -> Result<KeyFile> {
        let key = "k".repeat(length);
        let file = cluster.key_file(name, &key)?;
        cluster.sql(&file.add_provider(name))?;
        cluster.sql(&format!("SELECT pagevault.set_cluster_master_key('{name}', '{key}')"))?;
        Ok(file)
    };
    let _file = change("second", 120)?;
    expect(&cluster, &["local 1", "second 1"])?;
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    expect(&cluster, &["second 1"])?;
    let _other = change("third", 240)?;
    expect(&cluster, &["second 1", "third 1"])?;
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    cluster.eventually_that("the former wrapping is removed", || expect(&cluster, &["third 1"]))?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    cluster.kill()?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    Ok(())
}

/// The worker waits for base backups.
#[test]
fn a_base_backup_in_progress_delays_it() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    // It waits for whoever reads its output.
    let mut backup = cluster.program("pg_basebackup");
    backup.args(["--checkpoint=fast", "--format=tar", "-X", "none", "--no-manifest", "-D", "-"]);
    let mut backup = backup.stdout(Stdio::piped()).spawn()?;
    cluster.eventually("SELECT count(*) FROM pg_stat_replication WHERE state = 'backup'", "1")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    expect(&cluster, &["local 1", "local 2"])?;
    let mut all = Vec::new();
    backup.stdout.take().context("no output")?.read_to_end(&mut all)?;
    ensure!(backup.wait()?.success(), "the backup failed");
    cluster.eventually_that("the former wrapping is removed", || expect(&cluster, &["local 2"]))
}
