//! Copies of a live data directory, file by file in any order, between `pg_backup_start` and
//! `pg_backup_stop`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::text;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Random, Settings};
use postgres::Client;

use super::{CONTENT, check, each, ends_as_its_original, everything, rotate_all};
use crate::wal::insert;

/// Files are copied in parts smaller than a page, so that pages change during the copy.
const PART: usize = 1536;

/// Paths below a directory, relative to it, directories first.
fn paths(root: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut directories, mut files) = (vec![PathBuf::new()], Vec::new());
    let mut next = 0;
    while let Some(directory) = directories.get(next).cloned() {
        next += 1;
        for entry in fs::read_dir(root.join(&directory))? {
            let entry = entry?;
            let path = directory.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                directories.push(path);
            } else if is_wanted(&path) {
                files.push(path);
            }
        }
    }
    Ok((directories, files))
}

/// Files to copy: without those that PostgreSQL's documentation excludes, and those copied
/// separately.
fn is_wanted(path: &Path) -> bool {
    let name = path.to_string_lossy();
    !name.starts_with("pg_wal/")
        && !name.starts_with("pg_replslot/")
        && !name.starts_with("postmaster.")
        && !name.contains("pgsql_tmp")
        && !name.starts_with("pagevault.stop")
        && name != "global/pg_control"
}

fn copy_file(from: &Path, to: &Path, limit: u64) -> Result<()> {
    // The file may have been removed.
    let Ok(source) = File::open(from) else { return Ok(()) };
    let mut source = source.take(limit);
    let mut target = File::create(to)?;
    let mut part = [0; PART];
    loop {
        match source.read(&mut part)? {
            0 => return Ok(()),
            got => target.write_all(&part[..got])?,
        }
    }
}

/// The key file with the keys that wrap the keys of the others.
fn is_cluster(path: &Path) -> bool {
    path == Path::new("pagevault/cluster.keys")
}

/// Order of copying.
#[derive(Clone, Copy)]
enum Keystore {
    First,
    Last,
    Anywhere,
    /// Last, and of each file only its length at the time of listing.
    AsListed,
}

/// Copies the data directory; calls `meanwhile` several times.
fn snapshot(
    cluster: &Cluster,
    target: &Path,
    keystore: Keystore,
    seed: u64,
    meanwhile: impl Fn(u32) -> Result<()>,
) -> Result<()> {
    let source = cluster.data_directory();
    let mut session: Client = cluster.client()?;
    text(&mut session, "SELECT pg_backup_start('snapshot', true)")?;
    let (directories, mut files) = paths(&source)?;
    for directory in &directories {
        fs::create_dir(target.join(directory))?;
    }
    let listed = |file: &Path| -> Result<u64> {
        let cut = matches!(keystore, Keystore::AsListed) && file.starts_with("pagevault");
        Ok(if cut { fs::metadata(source.join(file))?.len() } else { u64::MAX })
    };
    let mut random = Random::new(seed);
    for at in (1..files.len()).rev() {
        files.swap(at, random.below(at as u64 + 1) as usize);
    }
    match keystore {
        Keystore::First => {
            files.sort_by_key(|path| (!path.starts_with("pagevault"), !is_cluster(path)))
        }
        Keystore::Last | Keystore::AsListed => {
            files.sort_by_key(|path| (path.starts_with("pagevault"), is_cluster(path)))
        }
        Keystore::Anywhere => {}
    }
    let limits = files.iter().map(|file| listed(file)).collect::<Result<Vec<_>>>()?;
    let steps = 4;
    let every = files.len() / steps + 1;
    for (at, file) in files.iter().enumerate() {
        let beside_cluster =
            is_cluster(file) || at.checked_sub(1).is_some_and(|before| is_cluster(&files[before]));
        if at % every == every - 1 || beside_cluster {
            meanwhile((at / every) as u32)?;
        }
        copy_file(&source.join(file), &target.join(file), limits[at])?;
    }
    copy_file(&source.join("global/pg_control"), &target.join("global/pg_control"), u64::MAX)?;
    let stop = "SELECT labelfile FROM pg_backup_stop(false)";
    fs::write(target.join("backup_label"), text(&mut session, stop)?)?;
    for entry in fs::read_dir(source.join("pg_wal"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            copy_file(&entry.path(), &target.join("pg_wal").join(entry.file_name()), u64::MAX)?;
        }
    }
    run(std::process::Command::new("chmod").args(["-R", "u=rwX,go="]).arg(target))?;
    run(std::process::Command::new("chown").arg("-R").arg(owner(cluster)?).arg(target))?;
    Ok(())
}

/// User and group for `chown`.
fn owner(cluster: &Cluster) -> Result<String> {
    Ok(format!("--reference={}", cluster.data_directory().display()))
}

fn a_snapshot_opens(keystore: Keystore, seed: u64) -> Result<()> {
    let settings = Settings::default().conf("wal_keep_size = 1GB");
    let (mut cluster, _keys) = everything(settings)?;
    cluster.allow_log("connection to client lost");
    cluster.pgbench(&["-i", "-q", "-s", "1"])?;
    let mut load = cluster.pgbench_in_background(&["-n", "-c", "2", "-T", "600"])?;
    let copy = Cluster::from_files(|target| {
        snapshot(&cluster, target, keystore, seed, |step| {
            insert(&cluster, "drossel", 100)?;
            rotate_all(&cluster)?;
            let _ = step;
            each(
                &cluster,
                &[
                    "CREATE TABLE during AS SELECT * FROM t",
                    "VACUUM FULL t",
                    "CHECKPOINT",
                    "DROP TABLE during",
                    "CREATE DATABASE other",
                    "DROP DATABASE other",
                ],
            )
        })
    })?;
    let _ = load.kill();
    load.wait()?;
    copy.start_server()?;
    ends_as_its_original(copy, cluster)
}

#[test]
fn the_keystore_is_copied_first() -> Result<()> {
    a_snapshot_opens(Keystore::First, 1)
}

#[test]
fn the_keystore_is_copied_last() -> Result<()> {
    a_snapshot_opens(Keystore::Last, 2)
}

#[test]
fn files_are_copied_in_any_order() -> Result<()> {
    a_snapshot_opens(Keystore::Anywhere, 3)
}

/// The first key is created, and WAL encrypted, when half of the files are copied.
#[test]
fn the_first_key_is_created_during_the_copy() -> Result<()> {
    for early in [true, false] {
        let cluster = Cluster::start(&Settings::default().conf("wal_keep_size = 1GB"))?;
        super::fill(&cluster)?;
        cluster.sql("CREATE EXTENSION pagevault")?;
        let made = std::cell::Cell::new(false);
        let copy = Cluster::from_files(|target| {
            snapshot(&cluster, target, Keystore::Anywhere, 4, |step| {
                if made.get() || (step < 2) != early {
                    return Ok(());
                }
                made.set(true);
                let keys = cluster.key_file("keys", "main")?;
                cluster.sql(&keys.add_provider("local"))?;
                cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
                super::encrypt_everything(&cluster)?;
                rotate_all(&cluster)
            })
        })?;
        ensure!(made.get(), "no key was made");
        copy.start_server()?;
        check(&copy, &cluster.text(CONTENT)?)?;
        copy.finish().context("the copy")?;
        cluster.finish()?;
    }
    Ok(())
}

/// Destroying keys rewrites the key file, longer than it was when the files were listed. The first
/// part of the new file, up to the old length, must contain everything that the old one contained.
#[test]
fn the_keystore_is_rewritten_and_copied_to_its_listed_length() -> Result<()> {
    let (cluster, _keys) = everything(Settings::default().conf("wal_keep_size = 1GB"))?;
    let shred = |name: &str| -> Result<()> {
        cluster.sql(&format!("CREATE TABLE {name} AS SELECT 1 AS id"))?;
        cluster.sql(&format!("SELECT pagevault.shred('public.{name}', confirm => 'public.{name}')"))
    };
    shred("before")?;
    let copy = Cluster::from_files(|target| {
        snapshot(&cluster, target, Keystore::AsListed, 5, |step| {
            for number in 0..20 {
                cluster.sql(&format!(
                    "CREATE TABLE IF NOT EXISTS n{step}_{number} (id int PRIMARY KEY)"
                ))?;
            }
            shred(&format!("during{step}")).or(Ok(()))
        })
    })?;
    copy.start_server()?;
    let dropped = "SELECT string_agg(format('DROP TABLE %s', oid::regclass), ';') FROM pg_class
        WHERE relname ~ '^(before|during)'";
    copy.sql(&copy.text(dropped)?)?;
    check(&copy, &cluster.text(CONTENT)?)?;
    copy.finish()?;
    cluster.finish()
}
