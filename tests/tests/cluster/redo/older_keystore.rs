//! A keystore from before a relation was encrypted or rekeyed, restored after a crash, so that WAL
//! does not contain the key. Redo restores full-page images, so it does not read the pages on disk,
//! and would write them as plaintext or under the old key.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, DataFile, Settings, StopMode};

use super::{cluster, copy, rekey};
use crate::assert_sealed;

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(s::text)::bigint) FROM s";

/// Replaces the keystore by another one, and moves it to `aside`.
fn swap(cluster: &Cluster, with: &str, aside: &str) -> Result<()> {
    let keystore = cluster.data_directory().join("pagevault");
    std::fs::rename(&keystore, cluster.directory().join(aside))?;
    std::fs::rename(cluster.directory().join(with), &keystore)?;
    Ok(())
}

fn refused(settings: Settings) -> Result<()> {
    let cluster = cluster(settings.conf("autovacuum = off"))?;
    cluster.sql("CHECKPOINT")?;
    copy(&cluster.data_directory().join("pagevault"), &cluster.directory().join("older"))?;
    cluster.sql(
        "CREATE TABLE s (id int, name text);
         SELECT pagevault.encrypt('s');
         INSERT INTO s SELECT i, 'MARKER-' || i FROM generate_series(1, 6000) i",
    )?;
    cluster.sql("CHECKPOINT")?;
    let files = cluster.files("s")?;
    assert_sealed(&files)?;
    refuses_older(cluster, &files, 1)
}

/// Like [`refused`], with a table that was already encrypted.
fn refused_after_rekey(settings: Settings) -> Result<()> {
    let cluster = cluster(settings.conf("autovacuum = off"))?;
    cluster.sql(
        "CREATE TABLE s (id int, name text);
         SELECT pagevault.encrypt('s');
         INSERT INTO s SELECT i, 'MARKER-' || i FROM generate_series(1, 6000) i",
    )?;
    cluster.sql("CHECKPOINT")?;
    copy(&cluster.data_directory().join("pagevault"), &cluster.directory().join("older"))?;
    rekey(&cluster, "rotate_data_key", "s")?;
    cluster.sql("CHECKPOINT")?;
    let files = cluster.files("s")?;
    refuses_older(cluster, &files, 2)
}

/// Kills the server. With the older keystore it must refuse to start, because the key of `version`
/// is missing.
fn refuses_older(mut cluster: Cluster, files: &[DataFile], version: u16) -> Result<()> {
    // A change on every page, each with a full-page image.
    cluster.sql("UPDATE s SET id = -id WHERE id % 50 = 0")?;
    let sum = cluster.text(SUM)?;
    cluster.kill()?;
    let before = files[0].states()?;
    swap(&cluster, "older", "newer")?;
    for response in [
        "WAL has not brought the data key",
        "startup process",
        "no data key of version",
        "specified neither",
        "shutting down",
    ] {
        cluster.allow_log(response);
    }
    // Neither at the end of WAL nor at the consistency point of a standby.
    let signal = cluster.data_directory().join("standby.signal");
    for is_standby in [false, true] {
        if is_standby {
            std::fs::write(&signal, "")?;
            cluster.installation().give(&signal)?;
        }
        let log = match cluster.start_server() {
            Ok(()) => anyhow::bail!("the server starts"),
            Err(error) => error.to_string(),
        };
        let message = format!(
            "WAL has not brought the data key of version {version} of relation file base/5/"
        );
        ensure!(log.contains(&message) && log.contains("FATAL"), "{log}");
        ensure!(log.contains("is encrypted under it"), "{log}");
        ensure!(!log.contains("ready to accept"), "{log}");
        // Files on disk are unchanged.
        ensure!(files[0].states()? == before, "pages were written over");
    }
    std::fs::remove_file(signal)?;
    swap(&cluster, "newer", "older")?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(files)?;
    for file in files {
        ensure!(!file.contains_text("MARKER")?, "plaintext in {}", file.path.display());
        let right = [PageState::Zero, PageState::Sealed(version)];
        let wrong = |state: &PageState| !right.contains(state);
        ensure!(!file.states()?.iter().any(wrong), "{}", file.path.display());
    }
    cluster.finish()
}

/// Pages stay in shared buffers until redo has ended.
#[test]
fn an_older_keystore_is_refused_before_pages_are_written() -> Result<()> {
    refused(Settings::default())
}

/// Pages would be evicted and written during redo.
#[test]
fn an_older_keystore_is_refused_when_pages_are_to_be_written() -> Result<()> {
    refused(Settings::default().conf("shared_buffers = 128kB"))
}

/// The redo location for the next start, from the control file.
fn redo_begins(cluster: &Cluster) -> Result<String> {
    let response =
        cluster.program("pg_controldata").arg("-D").arg(cluster.data_directory()).output()?;
    let response = String::from_utf8(response.stdout)?;
    let line =
        response.lines().find_map(|line| line.strip_prefix("Latest checkpoint's REDO location:"));
    Ok(line.context("pg_controldata says no REDO location")?.trim().to_owned())
}

/// A server that is stopped during recovery writes its buffers, and starts next at its last restart
/// point. That must not be after full-page images of pages that need a missing key.
#[test]
fn an_older_keystore_is_refused_after_a_restart_point() -> Result<()> {
    let cluster = cluster(Settings::default().conf("autovacuum = off"))?;
    copy(&cluster.data_directory().join("pagevault"), &cluster.directory().join("older"))?;
    cluster.sql(
        "CREATE TABLE s (id int, name text);
         SELECT pagevault.encrypt('s');
         INSERT INTO s SELECT i, 'MARKER-' || i FROM generate_series(1, 6000) i",
    )?;
    let mut last_segment = String::new();
    let restored = super::backup(&cluster, || {
        cluster.sql("UPDATE s SET id = -id WHERE id % 50 = 0")?;
        cluster.sql("CHECKPOINT; CREATE TABLE other (); SELECT pagevault.encrypt('other')")?;
        last_segment = cluster.text("SELECT pg_walfile_name(pg_current_wal_lsn())")?;
        cluster.sql("SELECT pg_switch_wal(); CREATE TABLE more ()")
    })?;
    let mut restored = restored;
    for response in [
        "WAL has not brought the data key",
        "startup process",
        "specified neither",
        "shutting down",
    ] {
        restored.allow_log(response);
    }
    let data = restored.data_directory();
    std::fs::rename(data.join("pagevault"), restored.directory().join("newer"))?;
    copy(&cluster.directory().join("older"), &data.join("pagevault"))?;
    let signal = data.join("standby.signal");
    std::fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    // WAL ends after the checkpoint, and the data directory is not consistent there.
    let (wal, rest) = (data.join("pg_wal"), restored.directory().join("rest"));
    std::fs::create_dir(&rest)?;
    for segment in pagevault_tests::wal::Segment::all(&wal)? {
        let name = segment.path.file_name().context("a name")?.to_owned();
        if *name.to_string_lossy() > *last_segment {
            std::fs::rename(&segment.path, rest.join(name))?;
        }
    }
    restored.stop_at("redo.keys")?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| restored.start_server());
        restored.stopped_at("redo.keys")?;
        restored.resume();
        restored.stop(StopMode::Fast)?;
        // pg_ctl of 18 reports success for a server that was stopped in recovery.
        let _ = start.join();
        ensure!(!restored.log().contains("ready to accept"), "the server lets users in");
        Ok(())
    })?;
    let path = data.join(cluster.text("SELECT pg_relation_filepath('s')")?);
    let file = pagevault_tests::DataFile { path };
    ensure!(!file.states()?.contains(&PageState::Plaintext), "plaintext over sealed pages");
    let label = std::fs::read_to_string(data.join("backup_label.old"))?;
    let began = redo_begins(&restored)?;
    ensure!(label.contains(&format!("START WAL LOCATION: {began} ")), "{began}: {label}");
    for segment in pagevault_tests::wal::Segment::all(&rest)? {
        std::fs::rename(&segment.path, wal.join(segment.path.file_name().context("a name")?))?;
    }
    let log = match restored.start_server() {
        Ok(()) => anyhow::bail!("the server starts"),
        Err(error) => error.to_string(),
    };
    ensure!(
        log.contains("WAL has not brought the data key of version 1 of relation file"),
        "{log}"
    );
    swap(&restored, "newer", "older-again")?;
    std::fs::remove_file(&signal)?;
    std::fs::write(data.join("recovery.signal"), "")?;
    restored.installation().give(&data.join("recovery.signal"))?;
    restored.append_conf("restore_command = 'false'")?;
    restored.start_server()?;
    ensure!(restored.text(SUM)? == cluster.text(SUM)?, "contents differ");
    restored.sql("CHECKPOINT")?;
    assert_sealed(&restored.files("s")?)?;
    restored.finish()?;
    cluster.finish()
}

#[test]
fn a_keystore_older_than_a_rekey_is_refused_before_pages_are_written() -> Result<()> {
    refused_after_rekey(Settings::default())
}

#[test]
fn a_keystore_older_than_a_rekey_is_refused_when_pages_are_to_be_written() -> Result<()> {
    refused_after_rekey(Settings::default().conf("shared_buffers = 128kB"))
}
