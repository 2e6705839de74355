//! Damaged pages of plaintext tables that look sealed.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::{DataFile, PAGE_SIZE, PageState};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::cluster;

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(p::text)::bigint) FROM p";

/// A flipped bit in `pd_flags`, a page of text, and a page of one repeated byte.
fn garbage(page: &[u8]) -> Vec<Vec<u8>> {
    let mut flipped = page.to_vec();
    flipped[10] ^= 1 << 6;
    let text: Vec<u8> = b"the quick brown fox ".iter().copied().cycle().take(PAGE_SIZE).collect();
    vec![flipped, text, vec![0xA5; PAGE_SIZE]]
}

/// A cluster with keys, and the file of a plaintext table.
fn with_plain_table(settings: Settings) -> Result<(Cluster, DataFile)> {
    let mut cluster = cluster(settings.conf("autovacuum = off"))?;
    for output in ["invalid page in block", "page verification failed", "zeroing"] {
        cluster.allow_log(output);
    }
    cluster.sql(
        "CREATE TABLE p AS SELECT i AS id, 'row ' || i AS name FROM generate_series(1, 2000) i; CHECKPOINT",
    )?;
    let file = cluster.files("p")?.remove(0);
    Ok((cluster, file))
}

fn does_not_stop_recovery(settings: Settings) -> Result<()> {
    let (cluster, file) = with_plain_table(settings)?;
    for (round, page) in garbage(&file.read_page(1)?).into_iter().enumerate() {
        ensure!(matches!(PageState::of(&page), PageState::Sealed(_)), "it does not look sealed");
        // Rows of that page.
        cluster.sql(&format!(
            "UPDATE p SET id = -id WHERE ctid >= '(1,0)' AND ctid < '(2,0)' AND id % 7 = {round}"
        ))?;
        let sum = cluster.text(SUM)?;
        cluster.kill()?;
        file.write_page(1, &page)?;
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == sum, "contents differ");
        cluster.sql("CHECKPOINT")?;
        ensure!(!file.states()?.iter().any(|state| matches!(state, PageState::Sealed(_))), "left");
    }
    cluster.finish()
}

/// A full-page image in WAL restores the page.
#[test]
fn a_damaged_page_that_looks_sealed_does_not_stop_recovery() -> Result<()> {
    does_not_stop_recovery(Settings::default())
}

#[test]
fn a_damaged_page_that_looks_sealed_does_not_stop_recovery_without_checksums() -> Result<()> {
    does_not_stop_recovery(Settings::default().without_checksums())
}

/// No full-page image restores it. It is an ordinary damaged page, with PostgreSQL's message and
/// remedies.
fn is_a_damaged_page(settings: Settings) -> Result<()> {
    let (cluster, file) = with_plain_table(settings)?;
    let whole = file.read_page(1)?;
    for page in garbage(&whole) {
        cluster.stop(StopMode::Fast)?;
        file.write_page(1, &page)?;
        cluster.start_server()?;
        let error = cluster.error("SELECT count(*) FROM p")?;
        ensure!(error.sqlstate == "XX001", "{error}");
        ensure!(error.message.contains("invalid page in block 1 of relation"), "{error}");
        let left = "SELECT count(*) FILTER (WHERE id > 0) > 1000 FROM p";
        let mut client = cluster.client()?;
        client.batch_execute("SET zero_damaged_pages = on")?;
        ensure!(pagevault_tests::cluster::text(&mut client, left)? == "t", "the other pages");
        drop(client);
    }
    cluster.finish()
}

#[test]
fn a_damaged_page_that_looks_sealed_is_a_damaged_page() -> Result<()> {
    is_a_damaged_page(Settings::default())
}

#[test]
fn a_damaged_page_that_looks_sealed_is_a_damaged_page_without_checksums() -> Result<()> {
    is_a_damaged_page(Settings::default().without_checksums())
}
