//! TimescaleDB (Apache edition): hypertables, whose chunks it creates while rows are inserted.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::{Cluster, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "timescaledb", needs: &["timescaledb"], run: after_us },
    Test { name: "timescaledb_first", needs: &["timescaledb"], run: before_us },
];

fn after_us() -> Result<()> {
    hypertable("pagevault, timescaledb")
}

fn before_us() -> Result<()> {
    hypertable("timescaledb, pagevault")
}

const CHUNKS: &str = "SELECT show_chunks('readings')";
const CONTENT: &str = "SELECT count(*) || ' ' || sum(value) FROM readings";

/// A hypertable with rows is encrypted by jobs, chunks that come later by the setting. Chunks are
/// dropped, and read after a crash.
fn hypertable(libraries: &str) -> Result<()> {
    let settings = Settings::default()
        .conf(&format!("shared_preload_libraries = '{libraries}'"))
        .conf("timescaledb.telemetry_level = off")
        .conf("max_worker_processes = 32")
        .conf("pagevault.rekey_threshold = 0");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    for text in ["timescaledb", "TimescaleDB", "Timescale"] {
        cluster.allow_log(text);
    }
    cluster.sql("CREATE EXTENSION timescaledb")?;
    cluster.sql(
        "CREATE TABLE readings (at timestamptz NOT NULL, name text, value bigint);
         SELECT create_hypertable('readings', by_range('at', interval '1 day'));
         CREATE INDEX ON readings (name, at DESC);
         INSERT INTO readings SELECT '2026-01-01'::timestamptz + i * interval '1 hour', 'name ' || i, i
         FROM generate_series(0, 239) i",
    )?;
    cluster.sql("ALTER DATABASE postgres SET pagevault.default_encryption = on")?;
    cluster.sql("SELECT * FROM pagevault.encrypt_database()")?;
    cluster.sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.sql(
        "INSERT INTO readings SELECT '2026-02-01'::timestamptz + i * interval '1 hour', 'name ' || i, i
         FROM generate_series(0, 239) i",
    )?;
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    cluster.sql("SELECT drop_chunks('readings', '2026-01-03'::timestamptz)")?;
    cluster.sql("UPDATE readings SET value = value + 1 WHERE name LIKE '%7'")?;
    let content = cluster.text(CONTENT)?;
    cluster.crash()?;
    ensure!(cluster.text(CONTENT)? == content, "after a crash");
    let weeks = "SELECT count(DISTINCT time_bucket('1 week', at)) FROM readings";
    ensure!(cluster.text(weeks)? == "5", "{}", cluster.text(weeks)?);
    cluster.sql("CHECKPOINT")?;
    let chunks = column(&mut cluster.client()?, CHUNKS)?;
    ensure!(chunks.len() > 10, "{chunks:?}");
    for chunk in chunks {
        assert_sealed(&cluster.family_files(&chunk)?)?;
    }
    cluster.finish()
}
