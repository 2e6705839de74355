//! Placeholders for pages that redo cannot open yet are never written, and do not exist after
//! recovery.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::{Cluster, Settings};

use super::{backup, cluster, rekey};

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(h::text)::bigint) FROM h";

/// A backup in whose WAL every page of `h` is made all-visible before its key is replayed.
fn backup_of_h(cluster: &Cluster) -> Result<(Cluster, DataFile)> {
    cluster.sql(
        "CREATE TABLE h AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 40000) i",
    )?;
    let copy = backup(cluster, || {
        cluster.sql("VACUUM h")?;
        rekey(cluster, "encrypt", "h")?;
        cluster.sql("CHECKPOINT")
    })?;
    let path = cluster.text("SELECT pg_relation_filepath('h')")?;
    let file = DataFile::find(&copy.data_directory().join(path))?.remove(0);
    Ok((copy, file))
}

fn start_and_fail(copy: &Cluster) -> Result<String> {
    match copy.start_server() {
        Ok(()) => anyhow::bail!("the server starts"),
        Err(error) => Ok(error.to_string()),
    }
}

fn signal(copy: &Cluster, name: &str) -> Result<()> {
    let signal = copy.data_directory().join(name);
    std::fs::write(&signal, "")?;
    copy.installation().give(&signal)
}

#[test]
fn pages_on_disk_are_unchanged_until_the_key_is_replayed() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    let (copy, file) = backup_of_h(&cluster)?;
    // Few buffers, so that pages are evicted soon.
    copy.append_conf("shared_buffers = 128kB\nrestore_command = 'false'")?;
    // After a restart the server needs this file to continue the restore.
    signal(&copy, "recovery.signal")?;
    let before = file.bytes()?;
    ensure!(file.states()?.iter().all(|state| *state == PageState::Sealed(1)), "not sealed");
    copy.stop_at("redo.keys")?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| copy.start_server());
        copy.stopped_at("redo.keys")?;
        ensure!(file.bytes()? == before, "pages were written before their key came");
        copy.kill()?;
        let _ = start.join();
        Ok(())
    })?;
    copy.resume();
    copy.start_server()?;
    ensure!(copy.text(SUM)? == cluster.text(SUM)?, "contents differ");
    copy.finish()?;
    cluster.finish()
}

/// `pg_rewind` leaves such a page if the source truncates the file while `pg_rewind` copies it. Its
/// key is that of a timeline that was given up.
#[test]
fn a_page_that_wal_truncates_away_needs_no_key() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    cluster.sql(
        "CREATE TABLE h AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 40000) i",
    )?;
    rekey(&cluster, "encrypt", "h")?;
    let path = cluster.text("SELECT pg_relation_filepath('h')")?;
    let mut last = 0;
    let copy = backup(&cluster, || {
        last = cluster.text("SELECT pg_relation_size('h') / 8192 - 1")?.parse()?;
        cluster.sql("DELETE FROM h WHERE id > 20000")?;
        cluster.sql("VACUUM (TRUNCATE) h")
    })?;
    let file = DataFile::find(&copy.data_directory().join(path))?.remove(0);
    ensure!(file.bytes()?.len() / 8192 < last as usize, "the table was not truncated");
    let mut page = file.read_page(3)?;
    page[10..12].copy_from_slice(&(77_u16 << 3).to_le_bytes());
    file.write_page(last, &page)?;
    copy.append_conf("shared_buffers = 128kB")?;
    copy.start_server()?;
    ensure!(copy.text(SUM)? == cluster.text(SUM)?, "contents differ");
    copy.finish()?;
    cluster.finish()
}

/// As after mixing parts of several backups.
#[test]
fn a_key_missing_in_wal_stops_the_server_at_consistency() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    let (mut copy, file) = backup_of_h(&cluster)?;
    let intact = file.read_page(3)?;
    let mut page = intact.clone();
    page[10..12].copy_from_slice(&(77_u16 << 3).to_le_bytes());
    file.write_page(3, &page)?;
    let name = file.path.file_name().and_then(|name| name.to_str()).context("a name")?;
    let missing =
        format!("WAL has not brought the data key of version 77 of relation file base/5/{name}");
    for output in [
        "WAL has not brought the data key",
        "startup process",
        "specified neither",
        "shutting down",
    ] {
        copy.allow_log(output);
    }
    // At the end of WAL; at the consistency point of a standby; and there with a log level that
    // hides the messages.
    let log = start_and_fail(&copy)?;
    ensure!(log.contains(&missing) && log.contains("FATAL"), "{log}");
    ensure!(
        log.contains("Block 3 is encrypted under it")
            && log.contains("Restore a base backup as a whole"),
        "{log}"
    );
    signal(&copy, "standby.signal")?;
    for least in ["warning", "fatal"] {
        copy.append_conf(&format!("log_min_messages = {least}"))?;
        let log = start_and_fail(&copy)?;
        ensure!(log.contains(&missing), "{least}: {log}");
        ensure!(!log.contains("accept read-only connections"), "{least}: {log}");
        ensure!(log.contains("redo starts at") == (least == "warning"), "{least}: {log}");
    }
    ensure!(file.read_page(3)? == page, "the page was written");
    // Nothing was lost.
    file.write_page(3, &intact)?;
    std::fs::remove_file(copy.data_directory().join("standby.signal"))?;
    copy.append_conf("log_min_messages = warning")?;
    copy.start_server()?;
    ensure!(copy.text(SUM)? == cluster.text(SUM)?, "contents differ");
    copy.finish()?;
    cluster.finish()
}
