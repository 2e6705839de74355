//! Plaintext WAL that `pg_basebackup -X stream` has stored is sealed at the first start.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings, Standby};

use super::{assert_hidden, count, insert, leaks, sealing, segments, switch};

/// A cluster with rows in sealed WAL, and what a backup made of it: the server is not started.
fn backed_up() -> Result<(Cluster, Cluster, KeyFile)> {
    let (mut cluster, keys) = sealing(&Settings::default().wal_segment_size(1))?;
    cluster.allow_log("connection to client lost");
    // Rows that are inserted while the backup is made are in its WAL.
    let is_made = AtomicBool::new(false);
    let restored = thread::scope(|scope| {
        let load = scope.spawn(|| -> Result<()> {
            while !is_made.load(Relaxed) {
                insert(&cluster, "drossel", 500)?;
            }
            Ok(())
        });
        let restored =
            Cluster::from_files(|target| cluster.base_backup_with(target, &["-X", "stream"]));
        is_made.store(true, Relaxed);
        load.join().map_err(|_| anyhow!("the load has panicked"))??;
        restored
    })?;
    let plain = segments(&restored)?;
    ensure!(leaks(&plain, "drossel"), "the stream is not plaintext: nothing is tested");
    Ok((cluster, restored, keys))
}

/// All written pages of `pg_wal` are sealed.
fn assert_sealed(cluster: &Cluster) -> Result<()> {
    for segment in segments(cluster)? {
        let plain = segment.pages()?.iter().filter(|page| **page == WalPage::Plain).count();
        ensure!(plain == 0, "{plain} plaintext pages in {}", segment.path.display());
    }
    assert_hidden(cluster, "drossel")
}

/// Files that the work has left.
fn leftovers(cluster: &Cluster) -> Result<Vec<String>> {
    let entries = fs::read_dir(cluster.data_directory().join("pg_wal"))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<Result<Vec<_>>>()?;
    Ok(names.into_iter().filter(|name| name.starts_with("xlogtemp")).collect())
}

#[test]
fn it_is_sealed_before_it_is_replayed() -> Result<()> {
    let (cluster, restored, _keys) = backed_up()?;
    let modes = |cluster: &Cluster| -> Result<Vec<(u32, u32)>> {
        let of = |segment: &Segment| -> Result<_> {
            let metadata = fs::metadata(&segment.path)?;
            Ok((metadata.permissions().mode(), metadata.uid()))
        };
        segments(cluster)?.iter().map(of).collect()
    };
    let before = modes(&restored)?;
    restored.start_server()?;
    ensure!(restored.log().contains("WAL segments of the base backup"), "{}", restored.log());
    ensure!(modes(&restored)?.starts_with(&before), "owner or mode has changed");
    ensure!(leftovers(&restored)?.is_empty(), "{:?}", leftovers(&restored)?);
    assert_sealed(&restored)?;
    let rows = count(&restored, "drossel")?;
    ensure!(rows != "0" && rows.parse::<u64>()? % 500 == 0, "{rows} rows");
    restored.crash()?;
    ensure!(count(&restored, "drossel")? == rows, "rows are lost after a crash");
    // Not again: this is its own WAL.
    ensure!(restored.log().matches("WAL segments of the base backup").count() == 1);
    restored.finish()?;
    cluster.finish()
}

/// A standby, its standby, and the WAL of both in another directory.
#[test]
fn standbys_seal_what_they_were_made_with() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 1000)?;
    let elsewhere = cluster.directory().join("wal of the standby");
    let option = format!("--waldir={}", elsewhere.display());
    let standby = Standby::default().backup(&option).start(&cluster)?;
    insert(&cluster, "meise", 1000)?;
    wait_for(&standby, &cluster)?;
    assert_sealed(&standby)?;
    ensure!(fs::symlink_metadata(standby.data_directory().join("pg_wal"))?.is_symlink());
    let second = standby_of(&standby, &[])?;
    insert(&cluster, "drossel", 1000)?;
    wait_for(&second, &cluster)?;
    assert_sealed(&second)?;
    ensure!(count(&second, "drossel")? == "2000", "rows are missing");
    standby.promote()?;
    insert(&standby, "drossel", 1000)?;
    assert_sealed(&standby)?;
    second.finish()?;
    standby.finish()?;
    cluster.finish()
}

/// WAL of the time in which it was not to be encrypted stays plaintext, and pages of two keys are
/// side by side.
#[test]
fn only_what_is_due_is_sealed() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default().conf("wal_keep_size = 1GB"))?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    let plain = Cluster::from_files(|target| cluster.base_backup_with(target, &["-X", "stream"]))?;
    let before = segments(&plain)?;
    plain.start_server()?;
    ensure!(segments(&plain)?[0].bytes == before[0].bytes, "it has no WAL key");
    plain.finish()?;
    switch(&cluster, true)?;
    insert(&cluster, "drossel", 100)?;
    switch(&cluster, false)?;
    insert(&cluster, "meise", 100)?;
    let off = Cluster::from_files(|target| cluster.base_backup_with(target, &["-X", "stream"]))?;
    off.start_server()?;
    ensure!(!off.log().contains("of the base backup"), "{}", off.log());
    ensure!(count(&off, "meise")? == "100" && count(&off, "drossel")? == "100");
    off.finish()?;
    drop(keys);
    cluster.finish()
}

/// Killed at each step, the next start finishes the work.
#[test]
fn it_can_be_interrupted_anywhere() -> Result<()> {
    for point in ["received.written", "received.renamed", "received.replaced"] {
        let (cluster, restored, _keys) = backed_up()?;
        restored.stop_at(&format!("{point} 0"))?;
        let mut server = restored.installation().command("postgres");
        server.arg("-D").arg(restored.data_directory());
        let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        restored.stopped_at(&format!("{point} 0"))?;
        server.kill()?;
        server.wait()?;
        restored.resume();
        let done = segments(&restored)?;
        let is_new = done.iter().any(|segment| {
            segment.pages().is_ok_and(|pages| pages.iter().any(|p| matches!(p, WalPage::Sealed(_))))
        });
        ensure!(is_new == (point != "received.written"), "{point}: {is_new}");
        restored.start_server().with_context(|| point.to_owned())?;
        assert_sealed(&restored).with_context(|| point.to_owned())?;
        ensure!(leftovers(&restored)?.is_empty(), "{point}: {:?}", leftovers(&restored)?);
        ensure!(count(&restored, "drossel")? != "0", "{point}: rows are missing");
        restored.finish()?;
        cluster.finish()?;
    }
    Ok(())
}

/// What cannot be sealed is told, and the server works with it.
#[test]
fn a_segment_that_cannot_be_replaced_is_named() -> Result<()> {
    let (cluster, mut restored, _keys) = backed_up()?;
    // In the way: the server does not remove directories.
    let pg_wal = restored.data_directory().join("pg_wal");
    fs::create_dir(pg_wal.join("xlogtemp.pagevault"))?;
    restored.installation().give(&pg_wal.join("xlogtemp.pagevault"))?;
    for text in ["of the base backup", "xlogtemp.pagevault"] {
        restored.allow_log(text);
    }
    restored.start_server()?;
    let log = restored.log();
    ensure!(log.contains("could not encrypt WAL segment"), "{log}");
    ensure!(count(&restored, "drossel")? != "0", "rows are missing");
    fs::remove_dir(pg_wal.join("xlogtemp.pagevault"))?;
    restored.finish()?;
    cluster.finish()
}

/// Segments are files of the server, whoever could write to the backup: a link is not followed.
#[test]
fn links_in_the_place_of_segments_are_not_followed() -> Result<()> {
    let (cluster, mut restored, _keys) = backed_up()?;
    let all = segments(&restored)?;
    let last = all.last().context("no segment")?;
    let outside = restored.directory().join("outside");
    fs::rename(&last.path, &outside)?;
    symlink(&outside, &last.path)?;
    restored.allow_log("of the base backup");
    restored.start_server()?;
    ensure!(fs::read(&outside)?.len() == last.bytes.len(), "the file has another size");
    ensure!(fs::symlink_metadata(&last.path)?.is_symlink(), "the link was replaced");
    ensure!(restored.log().contains("could not encrypt WAL segment"), "{}", restored.log());
    restored.finish()?;
    cluster.finish()
}

/// What is behind the end of a segment, or behind its last whole page, is not kept: no server reads
/// it.
#[test]
fn segments_of_other_lengths() -> Result<()> {
    let (cluster, restored, _keys) = backed_up()?;
    let all = segments(&restored)?;
    let size = all[0].bytes.len();
    for segment in &all {
        let mut bytes = segment.bytes.clone();
        bytes.extend_from_slice(b"drossel");
        fs::write(&segment.path, bytes)?;
    }
    // Of a later part of WAL, cut anywhere.
    let later = restored.data_directory().join("pg_wal/0000000100000000000000F0");
    fs::write(&later, "drossel".repeat(1157))?;
    restored.installation().give(&later)?;
    restored.start_server()?;
    let rows = count(&restored, "drossel")?;
    ensure!(rows != "0", "rows are missing");
    assert_sealed(&restored)?;
    for segment in segments(&restored)? {
        let length = segment.bytes.len();
        ensure!(length == size || segment.path == later && length == 0, "{length} bytes");
    }
    restored.finish()?;
    cluster.finish()
}
