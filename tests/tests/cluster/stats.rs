//! The counters of `pagevault.stats`, compared with pages on disk and with PostgreSQL's own
//! counters.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings, StopMode};
use postgres::Client;
use rustix::process::Pid;

use crate::assert_sealed;

/// No background work reads or writes pages, and only the test's own relations are encrypted.
fn quiet() -> Settings {
    Settings::default()
        .conf("autovacuum = off")
        .conf("bgwriter_lru_maxpages = 0")
        .conf("checkpoint_timeout = 1h")
        .conf("max_wal_size = 10GB")
        .conf("pagevault.data_catalog_encryption = off")
}

/// A row of the view.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    sealed: i64,
    opened: i64,
    bytes_sealed: i64,
    bytes_opened: i64,
    seal_time: f64,
    open_time: f64,
    failures: i64,
}

fn row(client: &mut Client, kind: &str) -> Result<Row> {
    let row = client.query_one("SELECT * FROM pagevault.stats WHERE kind = $1", &[&kind])?;
    Ok(Row {
        sealed: row.try_get("pages_encrypted")?,
        opened: row.try_get("pages_decrypted")?,
        bytes_sealed: row.try_get("bytes_encrypted")?,
        bytes_opened: row.try_get("bytes_decrypted")?,
        seal_time: row.try_get("encrypt_time_ms")?,
        open_time: row.try_get("decrypt_time_ms")?,
        failures: row.try_get("decrypt_failures")?,
    })
}

/// Counters of `kind`, for the duration of `f`.
fn during(cluster: &Cluster, kind: &str, f: impl FnOnce() -> Result<()>) -> Result<Row> {
    let mut client = cluster.client()?;
    let before = row(&mut client, kind)?;
    f()?;
    let after = row(&mut client, kind)?;
    Ok(Row {
        sealed: after.sealed - before.sealed,
        opened: after.opened - before.opened,
        bytes_sealed: after.bytes_sealed - before.bytes_sealed,
        bytes_opened: after.bytes_opened - before.bytes_opened,
        seal_time: after.seal_time - before.seal_time,
        open_time: after.open_time - before.open_time,
        failures: after.failures - before.failures,
    })
}

/// Number of sealed pages of a table on disk, in matching forks.
fn on_disk(cluster: &Cluster, table: &str, fork: &str) -> Result<i64> {
    let pages = cluster.text(&format!(
        "SELECT coalesce(sum(pages), 0) FROM pagevault.verify('{table}')
          WHERE relation = '{table}'::regclass AND state = 'encrypted' AND fork LIKE '{fork}'"
    ))?;
    pages.parse().context("a number of pages")
}

/// An encrypted table of many pages, all of them only in buffers, without a TOAST table.
fn make(cluster: &Cluster, table: &str, rows: u32) -> Result<()> {
    cluster.sql(&format!(
        "SET pagevault.default_encryption = on;
         CREATE TABLE {table} (id int, a name, b name, c name);
         INSERT INTO {table} SELECT i, 'a', 'b', 'c' FROM generate_series(1, {rows}) i"
    ))
}

/// Pages of its visibility map that the scan of a small table may read: from 19 on one, because the
/// scan may set bits there.
fn maps_read(cluster: &Cluster) -> i64 {
    i64::from(cluster.installation().major >= 19)
}

#[test]
fn every_page_that_is_written_or_read_counts_once() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&quiet().conf("shared_buffers = 64MB"))?;
    // Loads the catalogs into buffers and creates their keys, so that later counts are about pages
    // only.
    make(&cluster, "first", 10)?;
    cluster.sql("CHECKPOINT")?;

    make(&cluster, "t", 20_000)?;
    cluster.sql("CHECKPOINT")?;
    // Every page of the table changes, and no page of its maps. The next reader sets hint bits.
    let written = during(&cluster, "relation", || {
        cluster.sql("DELETE FROM t WHERE id % 5 = 0")?;
        cluster.sql("SELECT count(*) FROM t; CHECKPOINT")
    })?;
    let pages = on_disk(&cluster, "t", "main")?;
    ensure!(pages > 500 && written.sealed == pages, "{written:?}, on disk {pages}");
    ensure!(written.opened == 0 && written.failures == 0, "{written:?}");
    ensure!(written.bytes_sealed == pages * 8192, "{written:?}");
    // Sealing a page takes longer than 50 ns, and less than a millisecond.
    let per_page = written.seal_time / pages as f64;
    ensure!((50e-6..1.0).contains(&per_page), "{per_page} ms for a page");
    assert_sealed(&cluster.files("t")?)?;

    let nothing =
        during(&cluster, "relation", || cluster.sql("SELECT count(*) FROM t; CHECKPOINT"))?;
    ensure!(nothing.sealed + nothing.opened == 0 && nothing.seal_time == 0.0, "{nothing:?}");

    // Two sessions that end before the counters are read.
    make(&cluster, "u", 3_000)?;
    cluster.restart()?;
    let read = during(&cluster, "relation", || {
        cluster.sql("SELECT count(*) FROM t")?;
        cluster.sql("SELECT count(*) FROM u")
    })?;
    let pages = on_disk(&cluster, "t", "main")? + on_disk(&cluster, "u", "main")?;
    let most = pages + 2 * maps_read(&cluster);
    ensure!((pages..=most).contains(&read.opened), "{read:?}, on disk {pages}");
    ensure!(read.sealed == 0 && read.open_time > 0.0, "{read:?}");
    ensure!(read.bytes_opened == read.opened * 8192, "{read:?}");
    cluster.finish()
}

#[test]
fn plaintext_does_not_count() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&quiet().conf("pagevault.temp_encryption = off"))?;
    cluster.sql("CHECKPOINT")?;
    for kind in ["relation", "wal", "temporary"] {
        let counted = during(&cluster, kind, || {
            cluster.sql(
                "CREATE TABLE p AS SELECT i FROM generate_series(1, 100000) i; CHECKPOINT;
                 SET work_mem = '64kB'; SELECT max(i) FROM (SELECT i FROM p ORDER BY -i) s; DROP TABLE p",
            )
        })?;
        ensure!(counted.bytes_sealed + counted.bytes_opened == 0, "{kind}: {counted:?}");
    }
    cluster.finish()
}

/// Slots are not reset, neither when their process ends nor when the server restarts after a crash.
#[test]
fn counters_continue_after_a_backend_crash() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&quiet())?;
    cluster.allow_log("terminated by signal 9");
    cluster.allow_log("terminating any other active server processes");
    cluster.allow_log("terminating connection because of crash");
    make(&cluster, "t", 5_000)?;
    cluster.sql("CHECKPOINT")?;
    let before = row(&mut cluster.client()?, "relation")?;
    ensure!(before.sealed > 100, "{before:?}");

    let backend = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'";
    let pid = Pid::from_raw(cluster.text(backend)?.parse()?).context("a process")?;
    cluster.crash_process(pid)?;

    let after = row(&mut cluster.client()?, "relation")?;
    ensure!(after.sealed >= before.sealed && after.seal_time >= before.seal_time, "{after:?}");
    // Counting continues exactly: recovery had nothing to read, and all buffers were lost.
    let read = during(&cluster, "relation", || cluster.sql("SELECT count(*) FROM t"))?;
    let pages = on_disk(&cluster, "t", "main")?;
    let most = pages + maps_read(&cluster);
    ensure!(after.opened == before.opened, "{after:?}");
    ensure!((pages..=most).contains(&read.opened), "{read:?}, on disk {pages}");
    cluster.finish()
}

#[test]
fn temporary_data_is_counted_like_postgresql_does() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&quiet())?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "SET temp_buffers = '800kB'; SET work_mem = '64kB'; SET max_parallel_workers_per_gather = 0;
         CREATE TEMPORARY TABLE t (id int, t text);
         INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, 10000) i",
    )?;
    for (statement, written, read) in [
        ("DELETE FROM t", "Local Written Blocks", "Local Read Blocks"),
        (
            "WITH s AS MATERIALIZED (SELECT i, repeat('y', 90) FROM generate_series(1, 20000) i)
             SELECT count(*) FROM s WHERE i > (SELECT min(i) FROM s)",
            "Temp Written Blocks",
            "Temp Read Blocks",
        ),
    ] {
        let before = row(&mut client, "temporary")?;
        let plan =
            text(&mut client, &format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"))?;
        let after = row(&mut client, "temporary")?;
        let plan: serde_json::Value = serde_json::from_str(&plan)?;
        let blocks = |name: &str| plan[0]["Plan"][name].as_i64().context("blocks in the plan");
        let (sealed, opened) = (after.sealed - before.sealed, after.opened - before.opened);
        ensure!(blocks(written)? > 100 && blocks(read)? > 100, "{statement}: {plan}");
        // PostgreSQL counts a new page of a map as written; it is zeros.
        let least = blocks(written)? - maps_read(&cluster);
        ensure!(
            (least..=blocks(written)?).contains(&sealed) && opened == blocks(read)?,
            "{statement}: sealed {sealed}, opened {opened}: {plan}"
        );
        ensure!(after.bytes_sealed - before.bytes_sealed <= sealed * 8192, "{after:?}");
        ensure!(after.seal_time > before.seal_time && after.open_time > before.open_time);
    }
    drop(client);
    cluster.finish()
}

#[test]
fn wal_is_counted_when_written_and_when_replayed() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&quiet())?;
    cluster.sql("CREATE TABLE t (id int, t text)")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT")?;
    let mut pages: i64 = 0;
    let written = during(&cluster, "wal", || {
        // Connecting may write WAL (page images when hint bits are set): that counts before.
        let start = cluster.text("SELECT pg_current_wal_lsn()")?;
        cluster.sql("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(1, 20000) i")?;
        let written = format!("pg_current_wal_flush_lsn() - '{start}'");
        pages = cluster.text(&format!("SELECT floor(({written}) / 8192)::bigint"))?.parse()?;
        Ok(())
    })?;
    ensure!(pages > 1000 && written.sealed >= pages, "{written:?}, {pages} pages of WAL");
    // A page that was not full is written again, but that is never the case for all pages.
    ensure!(written.sealed < pages * 3 / 2, "{written:?}, {pages} pages of WAL");

    cluster.crash()?;
    let replayed = row(&mut cluster.client()?, "wal")?;
    ensure!(replayed.opened >= pages && replayed.failures == 0, "{replayed:?}, {pages} pages");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "20000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_page_that_cannot_be_opened_counts_as_a_failure() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&quiet().conf("pagevault.unlock_timeout = 0"))?;
    cluster.allow_log("pagevault");
    make(&cluster, "t", 100)?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    let refused =
        during(&cluster, "relation", || cluster.error("SELECT count(*) FROM t").map(drop))?;
    ensure!(refused.opened == 0 && refused.failures >= 1, "{refused:?}");
    cluster.finish()
}
