//! `pagevault-keyring verify`: what recovery repairs is no damage, and what it does not is.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::segments::SEGMENT_BLOCKS;

fn overwrite(path: &Path, at: u64, bytes: &[u8]) -> Result<()> {
    Ok(OpenOptions::new().write(true).open(path)?.write_all_at(bytes, at)?)
}

/// Without data checksums the server notices by the header only (`PageIsVerified`, bufpage.c).
#[test]
fn a_page_without_its_first_sector_is_damage() -> Result<()> {
    let settings = Settings::default().without_checksums().conf("autovacuum = off");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("not properly shut down");
    cluster.allow_log("invalid page in block");
    cluster.sql("CREATE TABLE plain AS SELECT i AS id, 0 AS n FROM generate_series(1, 1000) i")?;
    cluster.sql("CREATE TABLE sealed AS SELECT * FROM plain")?;
    cluster.sql("SELECT pagevault.encrypt('sealed')")?;
    let data = cluster.data_directory();
    for table in ["plain", "sealed"] {
        let relation = cluster.relation_path(table)?;
        let path = data.join(&relation);
        cluster.stop(StopMode::Fast)?;
        let whole = fs::read(&path)?;
        overwrite(&path, 0, &[0; 512])?;
        let damage = format!("{} block 0: the page's header is wrong", relation.display());
        cluster.expect_verified(&data, 2, &[&damage, "Damage found: 1."])?;
        cluster.start_server()?;
        let error = cluster.error(&format!("SELECT count(*) FROM {table}"))?;
        ensure!(error.message.contains("invalid page in block 0"), "{error:?}");
        cluster.stop(StopMode::Fast)?;
        fs::write(&path, &whole)?;
        cluster.start_server()?;

        // It was being written, and an image of it is in WAL.
        cluster.sql(&format!("CHECKPOINT; UPDATE {table} SET n = 1 WHERE ctid = '(0,1)'"))?;
        cluster.kill()?;
        overwrite(&path, 0, &[0; 512])?;
        cluster.expect_verified(&data, 0, &["torn         1 pages", "No damage found."])?;
        cluster.start_server()?;
        ensure!(cluster.text(&format!("SELECT sum(n) FROM {table}"))? == "1", "lost");
    }
    cluster.finish()
}

/// A standby that is shut down before it has replayed a checkpoint writes no pages
/// (`CreateRestartPoint`, xlog.c).
#[test]
fn torn_pages_of_a_stopped_standby_are_no_damage() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql("CREATE TABLE t AS SELECT i AS id, 0 AS n FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let standby = standby_of(&cluster, &[])?;
    // Of block 0 an image is in WAL then, and not of the others.
    cluster.sql("UPDATE t SET n = 1 WHERE ctid = '(0,1)'")?;
    wait_for(&standby, &cluster)?;
    standby.stop(StopMode::Fast)?;
    let data = standby.data_directory();
    let path = data.join(cluster.relation_path("t")?);
    let whole = fs::read(&path)?;
    overwrite(&path, 4096, &[7; 4096])?;
    standby.expect_verified(&data, 0, &["torn         1 pages", "No damage found."])?;
    overwrite(&path, 8192 + 4096, &[7; 4096])?;
    standby.expect_verified(
        &data,
        2,
        &["torn         1 pages", "block 1: ", "Damage found: 1."],
    )?;
    overwrite(&path, 8192, &whole[8192..16384])?;
    standby.start_server()?;
    ensure!(standby.text("SELECT sum(n) FROM t")? == "1", "the update is lost");
    standby.finish()?;
    cluster.finish()
}

/// As if a backup had copied the files of a relation at different moments, while it grew beyond a
/// segment, or was truncated.
#[test]
fn segments_that_recovery_joins_are_no_damage() -> Result<()> {
    const END: u64 = (SEGMENT_BLOCKS - 3) * 8192;
    let settings = Settings::default().conf("autovacuum = off").conf("wal_keep_size = 1GB");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("not properly shut down");
    cluster.sql("CREATE TABLE t (id int, name text)")?;
    cluster.sql("ALTER TABLE t ALTER name SET STORAGE PLAIN; SELECT pagevault.encrypt('t')")?;
    cluster.sql("INSERT INTO t VALUES (0, 'first')")?;
    let data = cluster.data_directory();
    let relation = cluster.relation_path("t")?;
    let first = data.join(&relation);
    let second = data.join(format!("{}.1", relation.display()));
    let cut = |length| -> Result<()> {
        Ok(OpenOptions::new().write(true).open(&first)?.set_len(length)?)
    };
    cluster.stop(StopMode::Fast)?;
    // Empty pages, sparse.
    cut(END)?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let control = data.join("global/pg_control");
    let begin = fs::read(&control)?;
    cluster.sql("INSERT INTO t SELECT i, repeat('x', 7000) FROM generate_series(1, 20) i")?;
    cluster.sql("CHECKPOINT")?;
    cluster.kill()?;
    let gap = format!("{}.1: the segment before it is not full", relation.display());
    cut(END)?;
    // WAL after the last checkpoint does not write these pages.
    cluster.expect_verified(&data, 2, &[&format!("damaged      {gap}"), "Damage found: 1."])?;
    fs::write(&control, &begin)?;
    cluster.expect_verified(&data, 0, &[&format!("undecided    {gap}"), "No damage found."])?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "21", "rows are lost");
    cluster.stop(StopMode::Fast)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;

    let whole = fs::read(&second)?;
    cluster.start_server()?;
    cluster.sql("TRUNCATE t")?;
    cluster.kill()?;
    fs::write(&second, &whole)?;
    cluster.installation().give(&second)?;
    ensure!(fs::metadata(&first)?.len() == 0, "the file is not truncated");
    cluster.expect_verified(&data, 0, &[&format!("undecided    {gap}"), "No damage found."])?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "rows are back");
    cluster.stop(StopMode::Fast)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    ensure!(!second.exists(), "the segment is still there");
    cluster.finish()
}

/// The manifest of a backup stays in the data directory of the server that is made from it.
#[test]
fn a_manifest_from_before_a_server_start_is_not_compared() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql("CREATE TABLE t AS SELECT i FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let server = standby_of(&cluster, &[])?;
    server.promote()?;
    server.sql("INSERT INTO t SELECT i FROM generate_series(1, 1000) i; CHECKPOINT")?;
    // A backup program copies everything but `postmaster.opts`.
    let copy = Backup::begin(&server)?.end()?;
    let data = copy.data_directory();
    ensure!(data.join("backup_manifest").exists() && !data.join("postmaster.opts").exists());
    let not_compared = "manifest     not compared: a server was started here";
    copy.expect_verified(&data, 0, &[not_compared, "No damage found."])?;
    let strict = |code: i32, line: &[&str], word: &str| -> Result<()> {
        let output = copy.program("pagevault-keyring").args(line).arg(&data).output()?;
        let said = String::from_utf8([output.stdout, output.stderr].concat())?;
        ensure!(output.status.code() == Some(code) && said.contains(word), "{said}");
        Ok(())
    };
    strict(2, &["verify", "--require-seal"], "there is no manifest with a valid seal")?;
    strict(1, &["seal-manifest"], "a server was started in this directory")?;

    // Of an earlier start, as it is in backups of such a server.
    let old = data.join("backup_label.old");
    let label = fs::read_to_string(&old)?;
    let (_, rest) = label.split_once(" (file").context("a label")?;
    fs::write(&old, format!("START WAL LOCATION: 0/1000028 (file{rest}"))?;
    copy.expect_verified(&data, 2, &["manifest     compared", "backup_label: another"])?;
    fs::remove_file(&old)?;
    copy.expect_verified(&data, 2, &["manifest     compared", "backup_label: another"])?;
    fs::write(&old, label)?;
    copy.expect_verified(&data, 0, &[not_compared, "No damage found."])?;
    server.finish()?;
    cluster.finish()
}
