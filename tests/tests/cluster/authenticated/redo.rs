//! What redo reads of torn, changed and forged pages before it has restored them, and what is on
//! disk when the server is stopped meanwhile. The first page of a bucket of a hash index is read
//! without an image (`REGBUF_NO_IMAGE`).

use std::os::unix::fs::DirBuilderExt;

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::datafile::DataFile;
use pagevault_tests::installation::run;
use pagevault_tests::standby::{allow_what_failovers_say, fail_over, standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::{ensure_refused, main_fork};

/// A hash index with a bucket of several pages. Returns the block of the first one.
fn hash_index(cluster: &Cluster) -> Result<u32> {
    cluster.sql(
        "CREATE EXTENSION pageinspect;
         CREATE TABLE h (k int, n int);
         CREATE INDEX hk ON h USING hash (k);
         INSERT INTO h SELECT 1, i FROM generate_series(1, 1500) i;
         CREATE TABLE filler AS SELECT i AS id, repeat('z', 500) AS z FROM generate_series(1, 8000) i;
         CREATE INDEX filler_id ON filler (id)",
    )?;
    let bucket = cluster.text(
        "SELECT b FROM generate_series(1, (pg_relation_size('hk') / 8192 - 1)::int) b
         WHERE hash_page_type(get_raw_page('hk', b)) = 'bucket'
           AND (hash_page_stats(get_raw_page('hk', b))).live_items > 100",
    )?;
    // Only entries in overflow pages are dead.
    cluster.sql("DELETE FROM h WHERE n > 1450")?;
    cluster.sql("CHECKPOINT")?;
    Ok(bucket.parse()?)
}

const BY_INDEX: &str =
    "SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT count(*) FROM h WHERE k = 1";

fn rows_by_index(cluster: &Cluster) -> Result<i64> {
    let mut client = cluster.client()?;
    let (settings, query) = BY_INDEX.rsplit_once("; ").context("settings")?;
    client.batch_execute(settings)?;
    Ok(client.query_one(query, &[])?.get(0))
}

fn hash_settings() -> Settings {
    Settings::default()
        .conf("full_page_writes = on")
        .conf("shared_buffers = 1MB")
        .conf("autovacuum = off")
        .conf("bgwriter_lru_maxpages = 0")
        .conf("checkpoint_timeout = 1d")
        .conf("pagevault.default_encryption = on")
        .conf("pagevault.cipher = 'aes-256-xts-auth'")
}

/// Redo of a hash index reads the first page of a bucket for its lock, without an image
/// (`REGBUF_NO_IMAGE`). If a crash has torn the page, an image restores it later.
#[test]
fn a_torn_page_that_redo_reads_before_its_image() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&hash_settings())?;
    let bucket = hash_index(&cluster)?;
    let file = main_fork(&cluster, "hk")?;
    let old = file.read_page(bucket)?;
    cluster.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    cluster.sql("DELETE FROM h WHERE n < 3")?;
    // The first scan notes in the page which entries are dead.
    rows_by_index(&cluster)?;
    let rows = rows_by_index(&cluster)?;
    cluster.sql(
        "SET enable_seqscan = off; SET enable_bitmapscan = off;
         SELECT sum(length((SELECT z FROM filler WHERE id = i))) FROM generate_series(1, 8000) i",
    )?;
    let mut torn = file.read_page(bucket)?;
    ensure!(torn != old, "the page was not written");
    cluster.kill()?;
    torn[..4096].copy_from_slice(&old[..4096]);
    file.write_page(bucket, &torn)?;
    cluster.start_server()?;
    ensure!(rows_by_index(&cluster)? == rows);
    let failures = "SELECT decrypt_failures FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(cluster.text(failures)? == "0");
    cluster.finish()
}

/// While redo has a torn page to judge, checkpoint records are not used as restart points.
/// pg_rewind does not know that, and relies on it that pages changed before the last one are on
/// disk.
#[test]
fn a_standby_that_had_a_torn_page_is_rewound() -> Result<()> {
    let (mut a, _keys) = Cluster::with_keys(&hash_settings().conf("wal_keep_size = 1GB"))?;
    let bucket = hash_index(&a)?;
    a.sql("CREATE TABLE t AS SELECT i AS id, 0 AS v FROM generate_series(1, 1000) i")?;
    a.sql("VACUUM t")?;
    let mut b = standby_of(&a, &[])?;
    let backup = Backup::begin_with_files(&a)?;
    a.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    a.sql("DELETE FROM h WHERE n < 3")?;
    // The first scan notes in the page which entries are dead.
    rows_by_index(&a)?;
    a.sql("UPDATE t SET v = 1; CHECKPOINT; SELECT pg_logical_emit_message(true, '', '')")?;
    wait_for(&b, &a)?;
    b.stop(StopMode::Fast)?;
    a.sql("SELECT pg_logical_emit_message(true, '', '')")?;
    let path = a.text("SELECT pg_relation_filepath('hk')")?;
    let mut ahead = backup.end()?;
    allow_what_failovers_say(&mut b);
    let files = DataFile::find(&ahead.data_directory().join(path))?;
    files.first().context("a file")?.flip_bit(bucket, 5000, 1)?;
    ahead.append_conf("shared_buffers = 128MB\nlog_min_messages = debug2")?;
    Standby::default().follow(&ahead, &a)?;
    ahead.start_server()?;
    wait_for(&ahead, &a)?;
    ensure!(ahead.log().contains("could not record restart point"));
    fail_over(&mut a, &mut ahead, &b)?;
    wait_for(&ahead, &b)?;
    let sum = "SELECT count(*) || ' ' || sum(v) FROM t";
    ensure!(ahead.text(sum)? == "1000 1000", "{}", ahead.text(sum)?);
    ensure!(rows_by_index(&ahead)? == rows_by_index(&b)?);
    ahead.finish()?;
    b.finish()
}

/// Such a server is stopped before it is consistent. pg_rewind refuses it then: redo has skipped
/// records about the torn page.
#[test]
fn a_standby_with_a_torn_page_does_not_stop_cleanly_before_it_is_consistent() -> Result<()> {
    let (a, _keys) = Cluster::with_keys(&hash_settings().conf("wal_keep_size = 1GB"))?;
    let bucket = hash_index(&a)?;
    let backup = Backup::begin_with_files(&a)?;
    a.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    a.sql("CHECKPOINT; SELECT pg_logical_emit_message(true, '', '')")?;
    let path = a.text("SELECT pg_relation_filepath('hk')")?;
    let mut restored = backup.end()?;
    restored.without_witness("it follows another server");
    allow_what_failovers_say(&mut restored);
    Standby::default().follow(&restored, &a)?;
    let files = DataFile::find(&restored.data_directory().join(path))?;
    let right = files.first().context("a file")?.read_page(bucket)?;
    files.first().context("a file")?.flip_bit(bucket, 5000, 1)?;
    stopped_before_consistency(&mut restored)?;
    ensure!(control_state(&restored)? == "in archive recovery");
    // The same if it refuses the page, which it does not know any more then.
    restored.allow_log("WAL has not restored block");
    let ended = "recovery ends as in a crash";
    let ends = restored.log().matches(ended).count();
    ensure!(restored.start_server().is_err(), "it accepts the page");
    ensure!(restored.log().contains("WAL has not restored block"));
    ensure!(restored.log().matches(ended).count() == ends + 1, "it ends as if nothing was missing");
    ensure!(control_state(&restored)? == "in archive recovery");
    // Nothing is lost.
    files.first().context("a file")?.write_page(bucket, &right)?;
    restored.start_server()?;
    wait_for(&restored, &a)?;
    ensure!(rows_by_index(&restored)? == rows_by_index(&a)?);
    restored.finish()?;
    a.finish()
}

/// If no page is missing, a server that is stopped before it is consistent has on disk what it has
/// replayed: pg_rewind relies on it.
#[test]
fn a_restart_point_that_was_left_out_is_made_up_for_at_a_stop() -> Result<()> {
    let (a, _keys) = Cluster::with_keys(&hash_settings())?;
    a.sql("CREATE TABLE t AS SELECT i AS id, 0 AS v FROM generate_series(1, 1000) i")?;
    a.sql("VACUUM t")?;
    a.sql("CHECKPOINT")?;
    // On a file system of its own a tablespace has such a directory, which only root may read.
    let not_ours = a.make_tablespace("far")?.join("lost+found");
    std::fs::DirBuilder::new().mode(0o700).create(&not_ours)?;
    let backup = Backup::begin_with_files(&a)?;
    a.sql("UPDATE t SET v = 1; CHECKPOINT; SELECT pg_logical_emit_message(true, '', '')")?;
    let written = main_fork(&a, "t")?.read_page(0)?;
    let path = a.text("SELECT pg_relation_filepath('t')")?;
    let mut restored = backup.end()?;
    restored.without_witness("it follows another server");
    allow_what_failovers_say(&mut restored);
    Standby::default().follow(&restored, &a)?;
    restored.append_conf("shared_buffers = 128MB")?;
    std::fs::write(restored.data_directory().join("pagevault.leave_out"), "comparison")?;
    stopped_before_consistency(&mut restored)?;
    ensure!(control_state(&restored)? == "shut down in recovery");
    let file = DataFile::find(&restored.data_directory().join(path))?;
    // The page's LSN. Hint bits may differ.
    let found = file.first().context("a file")?.read_page(0)?;
    ensure!(found[..8] == written[..8], "{:?} instead of {:?}", &found[..8], &written[..8]);
    std::fs::remove_file(restored.data_directory().join("pagevault.leave_out"))?;
    restored.start_server()?;
    wait_for(&restored, &a)?;
    ensure!(restored.text("SELECT count(*) || ' ' || sum(v) FROM t")? == "1000 1000");
    restored.finish()?;
    a.finish()
}

/// Starts a server and stops it as soon as it has left out a restart point.
fn stopped_before_consistency(server: &mut Cluster) -> Result<()> {
    server.allow_log("startup process");
    server.allow_log("terminating any other active server processes");
    server.stop_at("restart_point.suppressed")?;
    std::thread::scope(|scope| {
        let start = scope.spawn(|| server.start_server());
        server.stopped_at("restart_point.suppressed")?;
        let stop = scope.spawn(|| server.stop(StopMode::Fast));
        server.eventually_that("the request to stop", || {
            ensure!(server.log().contains("received fast shutdown request"));
            Ok(())
        })?;
        server.resume();
        ensure!(start.join().is_ok_and(|start| start.is_err()), "it becomes consistent");
        stop.join().map_err(|_| anyhow::anyhow!("a panic"))?
    })?;
    ensure!(!server.log().contains("consistent recovery state reached"));
    Ok(())
}

/// The state of the cluster in the control file.
fn control_state(server: &Cluster) -> Result<String> {
    let control = run(server.program("pg_controldata").arg(server.data_directory()))?;
    let state = control.lines().find_map(|line| line.strip_prefix("Database cluster state:"));
    Ok(state.context("a state")?.trim().to_owned())
}

/// A page that nothing restores ends recovery, and nothing is lost when the right one is there.
#[test]
fn a_changed_page_that_no_image_restores_ends_recovery() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&hash_settings())?;
    cluster.without_witness("somebody changes the files of this server only");
    let bucket = hash_index(&cluster)?;
    let file = main_fork(&cluster, "hk")?;
    cluster.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    // VACUUM need not have flushed its WAL.
    cluster.sql("SELECT pg_logical_emit_message(true, '', '')")?;
    let rows = rows_by_index(&cluster)?;
    cluster.kill()?;
    let right = file.read_page(bucket)?;
    file.flip_bit(bucket, 5000, 1)?;
    let message = format!("WAL has not restored block {bucket} of relation file ");
    let Err(error) = cluster.start_server() else { anyhow::bail!("the server starts") };
    let error = format!("{error:#}");
    ensure!(error.contains(&message) && error.contains("ignore_invalid_pages"), "{error}");
    cluster.allow_log(&message);
    cluster.allow_log("startup process");
    let changed = file.read_page(bucket)?;
    file.write_page(bucket, &right)?;
    cluster.start_server()?;
    ensure!(rows_by_index(&cluster)? == rows);

    // Whoever has no such page can go on without it.
    cluster.sql("DELETE FROM h WHERE n > 1440; CHECKPOINT")?;
    cluster.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    cluster.kill()?;
    file.write_page(bucket, &changed)?;
    cluster.start_server_with(&["-c", "ignore_invalid_pages=on"])?;
    ensure_refused(&cluster.error(BY_INDEX)?, "by index")?;
    cluster.sql("REINDEX INDEX hk")?;
    ensure!(rows_by_index(&cluster)? == 1440);
    cluster.finish()
}

/// Redo of a restored backup accepts a page in plaintext, which may be an older one. It must not
/// stay in shared buffers, where nobody would refuse it, and with the next change it would be
/// encrypted.
#[test]
fn a_forged_page_that_redo_has_read_is_refused() -> Result<()> {
    let settings = hash_settings().without_checksums().conf("wal_log_hints = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let bucket = hash_index(&cluster)?;
    // The same page without entries.
    let page = format!("SELECT get_raw_page('hk', {bucket})");
    let mut forged: Vec<u8> = cluster.client()?.query_one(&page, &[])?.get(0);
    forged[12..14].copy_from_slice(&24_u16.to_le_bytes());
    let backup = Backup::begin(&cluster)?;
    cluster.sql("VACUUM (INDEX_CLEANUP on, TRUNCATE off) h")?;
    let restored = backup.end()?;
    restored.append_conf("shared_buffers = 64MB")?;
    let path = main_fork(&cluster, "hk")?.path;
    let path = restored.data_directory().join(path.strip_prefix(cluster.data_directory())?);
    DataFile { path }.write_page(bucket, &forged)?;
    restored.start_server()?;
    for _ in 0..2 {
        let error = restored.error(BY_INDEX)?;
        let says = error.message.ends_with("is in plaintext, which is not accepted there");
        ensure!(error.sqlstate == "XX001" && says, "{error}");
    }
    restored.finish()?;
    cluster.finish()
}
