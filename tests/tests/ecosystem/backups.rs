//! Common parts of the tests of backup programs: a cluster in which everything is encrypted, key
//! changes during its backup, and checks of restored copies.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::{DataFile, assert_sealed};
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::programs;

/// A digest of the tables.
const CONTENT: &str = "SELECT concat_ws(' ',
    (SELECT count(*) || ':' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t),
    (SELECT count(*) || ':' || coalesce(sum(hashtext(l::text)::bigint), 0) FROM large l))";

/// A cluster with a few MB in which catalogs, tables and WAL are encrypted. One table is in a
/// tablespace, and the cluster can archive.
pub(crate) fn everything(settings: Settings) -> Result<(Cluster, KeyFile)> {
    let settings = settings
        .conf("archive_mode = on")
        .conf("archive_command = '/bin/true'")
        .conf("wal_keep_size = 1GB")
        .conf("wal_retrieve_retry_interval = 200ms");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.set(&[
        ("pagevault.default_encryption", "on"),
        ("pagevault.shared_catalog_encryption", "on"),
        ("pagevault.wal_encryption", "on"),
    ])?;
    cluster.sql("SELECT pagevault.encrypt_database(); SELECT pagevault.encrypt_catalogs()")?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.eventually("SELECT count(*) FROM pagevault.drift(true)", "0")?;
    let space = folder(&cluster, "space")?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    cluster.sql(
        "CREATE TABLE t (id serial PRIMARY KEY, name text);
         CREATE INDEX ON t (name);
         CREATE TABLE large (id int PRIMARY KEY, name text) TABLESPACE space;
         INSERT INTO large SELECT i, repeat(md5(i::text), 6) FROM generate_series(1, 20000) i",
    )?;
    insert(&cluster, "first", 5000)?;
    cluster.sql("ANALYZE")?;
    Ok((cluster, keys))
}

/// An empty directory of the server user next to the data directory.
pub(crate) fn folder(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let path = cluster.directory().join(name);
    std::fs::create_dir(&path)?;
    cluster.installation().give(&path)?;
    Ok(path)
}

/// A program installed by tools/extensions, run as the server user.
pub(crate) fn program(cluster: &Cluster, name: &str) -> Result<Command> {
    let path = programs::program(name).with_context(|| format!("there is no {name}"))?;
    let mut command = cluster.program(&path.to_string_lossy());
    command.env("HOME", cluster.directory());
    Ok(command)
}

/// Inserts rows with a value that must not occur in a backup.
pub(crate) fn insert(cluster: &Cluster, canary: &str, rows: u32) -> Result<()> {
    let canary = Canary::text(canary);
    cluster.sql(&format!(
        "INSERT INTO t (name) SELECT '{} ' || i FROM generate_series(1, {rows}) i",
        canary.as_str()
    ))
}

/// Creates new keys of every kind, for WAL, and for the pages of both tables, which are rewritten.
pub(crate) fn rotate_all(cluster: &Cluster) -> Result<()> {
    rotate(cluster)?;
    rekeyed(cluster)
}

/// Creates new keys without waiting until pages are rewritten.
pub(crate) fn rotate(cluster: &Cluster) -> Result<()> {
    for statement in [
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_wal_key()",
        "SELECT pagevault.rotate_data_key('t')",
        "SELECT pagevault.rotate_data_key('large')",
    ] {
        cluster.sql(statement)?;
    }
    Ok(())
}

/// Waits until all pages of both tables are rewritten.
pub(crate) fn rekeyed(cluster: &Cluster) -> Result<()> {
    for table in ["t", "large"] {
        let wait = format!("SELECT pagevault.wait_for_rekey('{table}'::regclass, '1min')");
        ensure!(cluster.text(&wait)? == "t", "the pages of {table} are not written in time");
    }
    Ok(())
}

/// Runs a backup, and stops all its processes for `meanwhile` as soon as it is `under_way`.
pub(crate) fn interrupted(
    cluster: &Cluster,
    mut command: Command,
    under_way: impl Fn() -> Result<()>,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut backup = command.process_group(0).stdout(Stdio::null()).spawn()?;
    let group = i32::try_from(backup.id()).ok().and_then(Pid::from_raw).context("a process")?;
    let stopped = cluster.eventually_that("backup", under_way).and_then(|()| {
        kill_process_group(group, Signal::STOP)?;
        ensure!(backup.try_wait()?.is_none(), "the backup has ended");
        let done = meanwhile();
        kill_process_group(group, Signal::CONT)?;
        done
    });
    if stopped.is_err() {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let ended = backup.wait()?;
    stopped?;
    ensure!(ended.success(), "{command:?}: {ended}");
    Ok(())
}

pub(crate) fn content(cluster: &Cluster) -> Result<String> {
    cluster.text(CONTENT)
}

/// A time after all commits so far, in the format of `recovery_target_time`.
pub(crate) fn now(cluster: &Cluster) -> Result<String> {
    cluster.text("SET timezone = 'UTC'; SELECT clock_timestamp()")
}

/// Archives all WAL so far.
pub(crate) fn archive_all(cluster: &Cluster) -> Result<()> {
    let last = cluster.text("SELECT pg_walfile_name(pg_switch_wal())")?;
    let archived = format!("SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver");
    cluster.eventually(&archived, "t")
}

/// Checks that a running copy of a cluster is complete, sealed and writable.
pub(crate) fn check(copy: &Cluster, expected: &str) -> Result<()> {
    copy.eventually("SELECT pg_is_in_recovery()", "f")?;
    let found = content(copy)?;
    ensure!(found == expected, "{found} instead of {expected}");
    let plain = column(&mut copy.client()?, "SELECT r::text FROM pagevault.drift(true) r")?;
    ensure!(plain.is_empty(), "not as wanted: {plain:?}");
    insert(copy, "later", 500)?;
    copy.sql("CHECKPOINT")?;
    for table in ["t", "large"] {
        assert_sealed(&copy.family_files(table)?)?;
    }
    copy.crash()?;
    assert_hidden(copy, &copy.data_directory())?;
    let later = Canary::text("later");
    copy.sql(&format!("DELETE FROM t WHERE name LIKE '{}%'", later.as_str()))?;
    let found = content(copy)?;
    ensure!(found == expected, "{found} instead of {expected} after a crash");
    Ok(())
}

/// Fails if a file below `folder` contains values of the tables. Decompresses compressed files
/// permanently.
pub(crate) fn assert_hidden(cluster: &Cluster, folder: &Path) -> Result<()> {
    let mut zipped = cluster.program("/usr/bin/find");
    let zipped = run(zipped.arg(folder).args(["-name", "*.gz"]))?;
    if !zipped.is_empty() {
        run(cluster.program("/bin/gzip").arg("--decompress").args(zipped.lines()))?;
    }
    let canaries = ["first", "second", "third", "fourth", "later"].map(Canary::text);
    let found = Scanner::new(&canaries).scan_trees(&[folder])?;
    ensure!(found.is_empty(), "not sealed:\n{}", report(&found));
    Ok(())
}

/// WAL segments below `archive`; their names may have any suffix.
pub(crate) fn archived(archive: &Path) -> Result<Vec<Segment>> {
    let mut segments = Vec::new();
    let mut folders = vec![archive.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                folders.push(path);
            } else if let Some((name, rest)) = name.split_at_checked(24)
                && name.bytes().all(|byte| byte.is_ascii_hexdigit())
                && !rest.ends_with(".backup")
                && !rest.ends_with(".gz")
            {
                segments.push(Segment { bytes: std::fs::read(&path)?, path: folder.join(name) });
            }
        }
    }
    segments.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(segments)
}

/// Fails unless these segments are sealed except at the beginning, under several keys.
pub(crate) fn assert_sealed_wal(segments: &[Segment]) -> Result<()> {
    let pages = segments.iter().map(Segment::pages).collect::<Result<Vec<_>>>()?.concat();
    let first = pages.iter().position(|page| matches!(page, WalPage::Sealed(_)));
    let pages = &pages[first.context("nothing is sealed")?..];
    ensure!(!pages.contains(&WalPage::Plain), "plaintext WAL after sealed WAL");
    ensure!(pages.contains(&WalPage::Sealed(2)), "one key for all: {} pages", pages.len());
    Ok(())
}

/// The files of `t` and its indexes, with the same paths below another root.
pub(crate) fn files_of_t(cluster: &Cluster, root: &Path) -> Result<Vec<DataFile>> {
    let mut files = Vec::new();
    for relation in ["t", "t_pkey", "t_name_idx"] {
        let path = cluster.text(&format!("SELECT pg_relation_filepath('{relation}')"))?;
        files.extend(DataFile::find(&root.join(path))?);
    }
    Ok(files)
}
