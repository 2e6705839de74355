//! Between a look at a file's key and the write, and between the records that say that it has
//! another key: a page with the LSN that it has on disk must not be written under the new key
//! there. Without checksums nothing in WAL would repair it, were it torn.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, DataFile, Settings};

/// Has pages written in the window, and none of them rewritten.
type Window = fn(&Cluster, &DataFile, rewrite: &str) -> Result<()>;

const SUM: &str = "SELECT concat_ws(' ', count(*), sum(id), sum(n)) FROM h";

/// How the table is made, what is done with it.
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

/// The power fails when pages were written in the window that have only got hint bits: each is
/// torn.
fn torn_in(window: Window) -> Result<()> {
    let settings = Settings::default().without_checksums().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    // The catalogs that go along with the first encrypted relation.
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
        cluster.go_on();
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

/// Takes all but the first sector back of each page that was written with the LSN that it had.
/// Returns which these are.
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

/// The checkpointer has looked, the key changes, it writes.
fn after_the_look(cluster: &Cluster, file: &DataFile, rewrite: &str) -> Result<()> {
    let number = file.path.file_name().and_then(|name| name.to_str()).context("a file name")?;
    cluster.stop_at(&format!("page.looked_up {number}"))?;
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| cluster.sql("CHECKPOINT"));
        let stands = cluster.stopped_at("page.looked_up")?;
        cluster.sql(rewrite)?;
        // That is behind the change.
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

/// Whoever writes then sees all that is said of the change but the last.
fn before_the_last_record(cluster: &Cluster, _: &DataFile, rewrite: &str) -> Result<()> {
    cluster.stop_at("rekey.claimed")?;
    cluster.sql(rewrite)?;
    let worker = cluster.stopped_at("rekey.claimed")?;
    cluster.stop_at("keys.left_to_take_in 1")?;
    ensure!(cluster.stopped_at("keys.left_to_take_in")? == worker, "another process makes a key");
    cluster.sql("CHECKPOINT")
}

#[test]
fn a_page_is_torn_whose_writer_has_looked_before_the_key_changed() -> Result<()> {
    torn_in(after_the_look)
}

#[test]
fn a_page_is_torn_that_is_written_while_the_key_changes() -> Result<()> {
    torn_in(before_the_last_record)
}
