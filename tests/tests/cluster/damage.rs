//! Pages with flipped bits are refused, as PostgreSQL refuses such plaintext pages; they are never
//! read as data. Here by data checksums; `authenticated` has the same for tags.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, Settings, StopMode};

/// Offsets of flipped bits, with their meaning in the page layout.
const PLACES: [(usize, &str); 6] = [
    (0, "pd_lsn"),
    (8, "pd_checksum"),
    (12, "pd_lower"),
    (16, "the first sealed byte"),
    (4096, "the middle"),
    (8191, "the last sealed byte"),
];

fn settings() -> Settings {
    Settings::default().conf("pagevault.cipher = 'aes-256-xts'")
}

#[test]
fn a_flipped_bit_is_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&settings())?;
    cluster.allow_log("page verification failed");
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 1000) i",
    )?;
    cluster.stop(StopMode::Fast)?;
    // Computed once, because pg_relation_filepath needs a running server.
    cluster.start_server()?;
    let files = cluster.files("t")?;
    let file = files.first().ok_or_else(|| anyhow::anyhow!("no file"))?;
    cluster.stop(StopMode::Fast)?;
    let whole = file.read_page(1)?;
    ensure!(matches!(PageState::of(&whole), PageState::Sealed(_)), "page 1 is not sealed");

    for (offset, what) in PLACES {
        file.flip_bit(1, offset, 3)?;
        cluster.start_server()?;
        let error = cluster.error("SELECT count(*) FROM t")?;
        ensure!(error.sqlstate == "XX001", "{what}: {error}");
        ensure!(error.message.contains("invalid page in block 1 of relation"), "{what}: {error}");
        // The rest of the table can be read by queries that avoid the page.
        let ranges = cluster.text("SELECT count(*) > 0 FROM t WHERE ctid < '(1,0)'")?;
        ensure!(ranges == "t", "{what}: page 0 is not readable");
        cluster.stop(StopMode::Fast)?;
        ensure!(cluster.pg_checksums().is_err(), "{what}: pg_checksums sees nothing");
        file.write_page(1, &whole)?;
    }
    // A bit of the version: the page then refers to a key that does not exist.
    for bit in [3, 7] {
        file.flip_bit(1, 10, bit)?;
        cluster.start_server()?;
        let error = cluster.error("SELECT count(*) FROM t")?;
        ensure!(
            error.sqlstate.starts_with("XX") || error.sqlstate == "22000",
            "version bit {bit}: {error}"
        );
        cluster.stop(StopMode::Fast)?;
        file.write_page(1, &whole)?;
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000", "the restored page is not read");
    cluster.finish()
}

#[test]
fn a_page_moved_to_another_place_is_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&settings())?;
    cluster.allow_log("page verification failed");
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 1000) i",
    )?;
    let files = cluster.files("t")?;
    cluster.stop(StopMode::Fast)?;
    let file = files.first().ok_or_else(|| anyhow::anyhow!("no file"))?;
    let (first, second) = (file.read_page(1)?, file.read_page(2)?);
    file.write_page(1, &second)?;
    file.write_page(2, &first)?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM t")?;
    // 18 reads both pages at once and reports their number.
    ensure!(error.message.contains("invalid page"), "{error}");
    cluster.finish()
}

#[test]
fn without_checksums_plaintext_structure_is_still_checked() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().without_checksums())?;
    // One short row: pd_upper is then near the end of the page, so almost no value of pd_special is
    // valid.
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id")?;
    let files = cluster.files("t")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1", "the row is missing");
    cluster.stop(StopMode::Fast)?;
    let file = files.first().ok_or_else(|| anyhow::anyhow!("no file"))?;
    // The first sealed block of 16 bytes contains pd_special.
    file.flip_bit(0, 17, 3)?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM t")?;
    ensure!(error.message.contains("invalid page in block 0"), "{error}");
    cluster.finish()
}
