//! What redo is given in the place of a page that it cannot open yet is never written, and never
//! outlives recovery.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::{Cluster, Settings};

use super::{backup, cluster, rekey};

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(h::text)::bigint) FROM h";

/// A backup in whose WAL every page of `h` is made all-visible before its key comes.
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

fn start_in_vain(copy: &Cluster) -> Result<String> {
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
fn pages_on_disk_stay_what_they_are_until_the_key_comes() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    let (copy, file) = backup_of_h(&cluster)?;
    // Few buffers: nothing stays there for long.
    copy.append_conf("shared_buffers = 128kB\nrestore_command = 'false'")?;
    // Begun anew, it is a restore only with this.
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
    copy.go_on();
    copy.start_server()?;
    ensure!(copy.text(SUM)? == cluster.text(SUM)?, "contents differ");
    copy.finish()?;
    cluster.finish()
}

/// As after mixing parts of several backups.
#[test]
fn a_key_that_wal_does_not_bring_stops_the_server_when_it_is_consistent() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    let (mut copy, file) = backup_of_h(&cluster)?;
    let intact = file.read_page(3)?;
    let mut page = intact.clone();
    page[10..12].copy_from_slice(&(77_u16 << 3).to_le_bytes());
    file.write_page(3, &page)?;
    let name = file.path.file_name().and_then(|name| name.to_str()).context("a name")?;
    let missing =
        format!("WAL has not brought the data key of version 77 of relation file base/5/{name}");
    for said in [
        "WAL has not brought the data key",
        "startup process",
        "specified neither",
        "shutting down",
    ] {
        copy.allow_log(said);
    }
    // At the end of WAL; where a standby would let users in; there, with a log that is told
    // nothing.
    let log = start_in_vain(&copy)?;
    ensure!(log.contains(&missing) && log.contains("FATAL"), "{log}");
    ensure!(
        log.contains("Block 3 is encrypted under it")
            && log.contains("Restore a base backup as a whole"),
        "{log}"
    );
    signal(&copy, "standby.signal")?;
    for least in ["warning", "fatal"] {
        copy.append_conf(&format!("log_min_messages = {least}"))?;
        let log = start_in_vain(&copy)?;
        ensure!(log.contains(&missing), "{least}: {log}");
        ensure!(!log.contains("accept read-only connections"), "{least}: {log}");
        ensure!(log.contains("redo starts at") == (least == "warning"), "{least}: {log}");
    }
    ensure!(file.read_page(3)? == page, "the page was written");
    // Nothing was lost by it.
    file.write_page(3, &intact)?;
    std::fs::remove_file(copy.data_directory().join("standby.signal"))?;
    copy.append_conf("log_min_messages = warning")?;
    copy.start_server()?;
    ensure!(copy.text(SUM)? == cluster.text(SUM)?, "contents differ");
    copy.finish()?;
    cluster.finish()
}
