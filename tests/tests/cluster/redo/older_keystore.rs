//! A keystore from before a relation was encrypted, or got a new key, put back after a crash: WAL does not bring the key again.
//! Redo restores pages as wholes, so it never reads what lies on disk, and would write them in plaintext, or under the old key.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, DataFile, Settings};

use super::{cluster, copy, rekey};
use crate::assert_sealed;

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(s::text)::bigint) FROM s";

/// Puts one keystore in the place of another one, which goes to `aside`.
fn swap(cluster: &Cluster, with: &str, aside: &str) -> Result<()> {
    let keystore = cluster.data_directory().join("pagevault");
    std::fs::rename(&keystore, cluster.directory().join(aside))?;
    std::fs::rename(cluster.directory().join(with), &keystore)?;
    Ok(())
}

/// `written`: has recovery written pages before it ends?
fn refused(settings: Settings, written: bool) -> Result<()> {
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
    refuses_older(cluster, &files, 1, written.then_some(PageState::Plain))
}

/// As [`refused`], of a table that was encrypted already.
fn refused_after_rekey(settings: Settings, written: bool) -> Result<()> {
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
    refuses_older(cluster, &files, 2, written.then_some(PageState::Sealed(1)))
}

/// Kills the server; with the older keystore it refuses to start, for want of the key of `epoch`. `written`: as which
/// pages are found on disk then.
fn refuses_older(
    mut cluster: Cluster,
    files: &[DataFile],
    epoch: u16,
    written: Option<PageState>,
) -> Result<()> {
    // On every page: each is restored as a whole.
    cluster.sql("UPDATE s SET id = -id WHERE id % 50 = 0")?;
    let sum = cluster.text(SUM)?;
    cluster.kill()?;
    swap(&cluster, "older", "newer")?;
    for said in [
        "WAL has not brought the data key",
        "startup process",
        "no data key of epoch",
        "specified neither",
        "shutting down",
    ] {
        cluster.allow_log(said);
    }
    // Not at the end of WAL, and not where a standby would let users in.
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
        let message =
            format!("WAL has not brought the data key of epoch {epoch} of relation file 1663/5/");
        ensure!(log.contains(&message) && log.contains("FATAL"), "{log}");
        ensure!(log.contains("is sealed under it"), "{log}");
        ensure!(!log.contains("ready to accept"), "{log}");
        if let Some(state) = written {
            ensure!(files[0].states()?.contains(&state), "nothing was written");
        }
    }
    std::fs::remove_file(signal)?;
    swap(&cluster, "newer", "older")?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(files)?;
    for file in files {
        ensure!(!file.contains_text("MARKER")?, "plaintext in {}", file.path.display());
        let right = [PageState::Zero, PageState::Sealed(epoch)];
        let wrong = |state: &PageState| !right.contains(state);
        ensure!(!file.states()?.iter().any(wrong), "{}", file.path.display());
    }
    cluster.finish()
}

/// Pages are in shared buffers until redo is over.
#[test]
fn an_older_keystore_is_refused_before_pages_are_written() -> Result<()> {
    refused(Settings::default(), false)
}

/// Pages are written in the midst of redo.
#[test]
fn an_older_keystore_is_refused_after_pages_were_written() -> Result<()> {
    refused(Settings::default().conf("shared_buffers = 128kB"), true)
}

#[test]
fn a_keystore_older_than_a_rekey_is_refused_before_pages_are_written() -> Result<()> {
    refused_after_rekey(Settings::default(), false)
}

#[test]
fn a_keystore_older_than_a_rekey_is_refused_after_pages_were_written() -> Result<()> {
    refused_after_rekey(Settings::default().conf("shared_buffers = 128kB"), true)
}
