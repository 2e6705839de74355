//! Readers of WAL within the server, and segment sizes.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Settings, StopMode};

use super::{assert_hidden, count, insert, lacks, marks, sealing, segments};

#[test]
fn logical_decoding_reads_every_key() -> Result<()> {
    if lacks("test_decoding")? {
        return Ok(());
    }
    let (cluster, _keys) = sealing(&Settings::default().conf("wal_level = logical"))?;
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")?;
    insert(&cluster, "amsel", 500)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "drossel", 500)?;
    super::switch(&cluster, false)?;
    insert(&cluster, "fink", 500)?;
    super::switch(&cluster, true)?;
    insert(&cluster, "gimpel", 500)?;
    // Empties the WAL buffers, so that files are read.
    cluster.restart()?;
    let changes = column(
        &mut cluster.client()?,
        "SELECT data FROM pg_logical_slot_get_changes('slot', NULL, NULL)",
    )?;
    for canary in ["amsel", "drossel", "fink", "gimpel"] {
        let rows = changes.iter().filter(|change| change.contains(&format!("'{canary}-"))).count();
        ensure!(rows == 500, "{canary}: {rows} changes");
    }
    cluster.finish()
}

#[test]
fn pg_walinspect_reads_sealed_wal() -> Result<()> {
    if lacks("pg_walinspect")? {
        return Ok(());
    }
    let (cluster, _keys) = sealing(&Settings::default().conf("wal_keep_size = '1GB'"))?;
    cluster.sql("CREATE EXTENSION pg_walinspect")?;
    let start = cluster.text("SELECT pg_current_wal_lsn()")?;
    insert(&cluster, "amsel", 500)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "amsel", 500)?;
    cluster.restart()?;
    let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
    let records = |which: &str| {
        cluster.text(&format!(
            "SELECT count(*) FROM pg_get_wal_records_info('{start}', '{end}') WHERE {which}"
        ))
    };
    let inserted: u32 =
        records("resource_manager = 'Heap' AND record_type LIKE 'INSERT%'")?.parse()?;
    ensure!(inserted >= 1000, "{inserted} records");
    let keys = records("resource_manager = 'pagevault' AND record_type = 'KEYS'")?;
    ensure!(keys.parse::<u32>()? >= 2, "{keys} records of keys");
    ensure!(records("resource_manager = 'pagevault' AND record_type = 'BARRIER'")? != "0");
    let texts = column(
        &mut cluster.client()?,
        &format!(
            "SELECT description FROM pg_get_wal_records_info('{start}', '{end}')
              WHERE resource_manager = 'pagevault' AND record_type = 'KEYS'"
        ),
    )?;
    ensure!(texts.iter().any(|text| text.contains("WAL from ")), "{texts:?}");
    cluster.finish()
}

fn with_segments_of(megabytes: u32, rows: u32) -> Result<()> {
    let settings = Settings::default().wal_segment_size(megabytes);
    let (cluster, _keys) = sealing(&settings)?;
    insert(&cluster, "drossel", rows)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "drossel", rows)?;
    assert_hidden(&cluster, "drossel")?;
    let all = segments(&cluster)?;
    ensure!(all.iter().all(|s| s.bytes.len() == (megabytes as usize) << 20), "another size");
    ensure!(marks(&all)? == [1, 2], "keys {:?}", marks(&all)?);
    cluster.crash()?;
    ensure!(count(&cluster, "drossel")? == (2 * rows).to_string(), "rows are missing");
    let standby = standby_of(&cluster, &[])?;
    insert(&cluster, "fink", rows)?;
    wait_for(&standby, &cluster)?;
    ensure!(count(&standby, "fink")? == rows.to_string(), "rows are missing");
    standby.stop(StopMode::Fast)?;
    standby.finish()?;
    cluster.finish()
}

#[test]
fn segments_of_one_megabyte() -> Result<()> {
    with_segments_of(1, 20_000)
}

#[test]
fn segments_of_64_megabytes() -> Result<()> {
    with_segments_of(64, 20_000)
}
