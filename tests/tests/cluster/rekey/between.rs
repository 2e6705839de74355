//! Between reading a file's key and writing a page, and between the records of a key change, a page
//! whose LSN equals that on disk must not be written under the new key. Without checksums nothing
//! in WAL would repair such a page if it were torn.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, DataFile, Settings};

/// Causes pages to be written in the window, without rewriting any of them.
type Window = fn(&Cluster, &DataFile, rewrite: &str) -> Result<()>;

const SUM: &str = "SELECT concat_ws(' ', count(*), sum(id), sum(n)) FROM h";

/// The statements that create the table, and those that rewrite it.
const REWRITINGS: [(&str, &str); 3] = [
    ("CREATE TABLE h (id int, n bigint)", "SELECT pagevault.encrypt('h')"),
    (
        "SET pagevault.default_encryption = on; CREATE TABLE h (id int, n bigint)",
        "SELECT pagevault.rotate_data_key('h')",
    ),
    (
        "SET pagevault.default_encryption = on; CREATE TABLE h (id int, n bigint)",
        "SELECT pagevault.decrypt('h')",
    ),
];

const SECTOR: usize = 512;

/// Power fails after pages were written in the window that changed only in hint bits; each is torn.
fn torn_in(window: Window) -> Result<()> {
    let settings = Settings::default().without_checksums().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    // Encrypts the catalogs that are encrypted together with the first relation.
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('first'::regclass, '1min')")? == "t");
    for (make, rewrite) in REWRITINGS {
        cluster.sql(&format!("DROP TABLE IF EXISTS h; {make}"))?;
        cluster.sql("INSERT INTO h SELECT i, i * 7919 FROM generate_series(1, 5000) i")?;
        cluster.sql("CHECKPOINT")?;
        let file = cluster.files("h")?.remove(0);
        let before = file.bytes()?;
        // Sets the hint bits.
        let wanted = cluster.text(SUM)?;
        window(&cluster, &file, rewrite)?;
        let after = file.bytes()?;
        cluster.kill()?;
        cluster.resume();
        let torn = tear(&file, &before, &after)?;
        ensure!(torn.contains(&0), "{rewrite}: the first page was not written, but {torn:?}");
        cluster.start_server()?;
        let found = cluster.text(SUM)?;
        ensure!(found == wanted, "{rewrite}: {found} instead of {wanted}");
        ensure!(
            cluster.text("SELECT pagevault.wait_for_rekey('h'::regclass, '1min')")? == "t",
            "{rewrite}: the job was not done"
        );
        ensure!(cluster.text(SUM)? == wanted, "{rewrite}: rows after the job");
    }
    cluster.finish()
}

/// Restores all sectors but the first of each page that was written with an unchanged LSN. Returns
/// the numbers of these pages.
fn tear(file: &DataFile, before: &[u8], after: &[u8]) -> Result<BTreeSet<u32>> {
    let mut torn = BTreeSet::new();
    for (block, (old, new)) in (0..).zip(before.chunks_exact(8192).zip(after.chunks_exact(8192))) {
        if old != new && old[..8] == new[..8] {
            let mut page = old.to_vec();
            page[..SECTOR].copy_from_slice(&new[..SECTOR]);
            file.write_page(block, &page)?;
            torn.insert(block);
        }
    }
    Ok(torn)
}

/// The checkpointer has read the key, then the key changes, then it writes.
fn after_the_look(cluster: &Cluster, file: &DataFile, rewrite: &str) -> Result<()> {
    let number = file.path.file_name().and_then(|name| name.to_str()).context("a file name")?;
    cluster.stop_at(&format!("page.looked_up {number}"))?;
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| cluster.sql("CHECKPOINT"));
        let stands = cluster.stopped_at("page.looked_up")?;
        cluster.sql(rewrite)?;
        // After the change.
        cluster.eventually(
            &format!(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'
                 AND query LIKE 'pagevault:%waits for process {}'",
                stands.as_raw_nonzero()
            ),
            "1",
        )?;
        cluster.stop_at("rekey.barrier_passed")?;
        cluster.stopped_at("rekey.barrier_passed")?;
        checkpoint.join().map_err(|_| anyhow::anyhow!("panic"))?
    })
}

/// A writer at this moment sees all records of the change except the last.
fn before_the_last_record(cluster: &Cluster, _: &DataFile, rewrite: &str) -> Result<()> {
    cluster.stop_at("rekey.claimed")?;
    cluster.sql(rewrite)?;
    let worker = cluster.stopped_at("rekey.claimed")?;
    cluster.stop_at("keys.remaining 1")?;
    ensure!(cluster.stopped_at("keys.remaining")? == worker, "another process makes a key");
    cluster.sql("CHECKPOINT")
}

#[test]
fn a_page_whose_writer_read_the_key_before_the_change_is_torn() -> Result<()> {
    torn_in(after_the_look)
}

#[test]
fn a_page_written_during_the_key_change_is_torn() -> Result<()> {
    torn_in(before_the_last_record)
}
