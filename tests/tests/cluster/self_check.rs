//! The self-check after every start proves that page reads pass through pagevault, and stops the
//! server if that cannot be proven.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Installation, Settings, process};

/// Start of the postmaster's log line for a background worker that has exited.
const DONE: &str = "background worker \"pagevault self-check\"";

fn settings() -> Settings {
    Settings::default().conf("log_min_messages = debug1")
}

/// Waits until the self-check is done.
fn proven(cluster: &Cluster) -> Result<()> {
    cluster.eventually_that("self-check", || {
        let log = cluster.log();
        let ended = log.lines().filter(|line| line.contains(DONE) && line.contains("exited"));
        let ended: Vec<_> = ended.collect();
        ensure!(ended.iter().all(|line| line.ends_with("exited with exit code 0")), "{ended:?}");
        ensure!(!ended.is_empty(), "it has not ended");
        Ok(())
    })
}

#[test]
fn it_runs_at_every_start() -> Result<()> {
    let cluster = Cluster::start(&settings())?;
    proven(&cluster)?;
    cluster.finish()
}

/// With direct I/O, buffers must be aligned, and pagevault writes from buffers of its own.
#[test]
fn it_runs_with_direct_io() -> Result<()> {
    let major = Installation::get()?.major;
    if major < 16 {
        eprintln!("skipped: debug_io_direct is new in PostgreSQL 16");
        return Ok(());
    }
    let settings = settings()
        .conf("debug_io_direct = 'data, wal, wal_init'")
        .conf("pagevault.default_encryption = on")
        .conf("shared_buffers = 2MB");
    let plain = Cluster::create(&settings.clone().without_preload())?;
    if plain.start_server().is_err() {
        eprintln!("skipped: the file system has no direct I/O");
        return Ok(());
    }
    plain.finish()?;
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    proven(&cluster)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(
        "CREATE TABLE t AS SELECT i, repeat(md5(i::text), 8) AS t FROM generate_series(1, 20000) i;
         CREATE INDEX ON t (i); UPDATE t SET t = t || i WHERE i % 7 = 0; CHECKPOINT",
    )?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("UPDATE t SET i = -i WHERE i % 5 = 0; CHECKPOINT")?;
    cluster.crash()?;
    let rows = cluster.text("SELECT count(*) || ' ' || sum(i) FROM t")?;
    ensure!(rows == "20000 119990000", "{rows}");
    cluster.finish()
}

#[test]
fn a_page_that_cannot_be_read_stops_the_server() -> Result<()> {
    let mut cluster = Cluster::create(&settings())?;
    // pg_database: read by every session, but not during start.
    let file = cluster.data_directory().join("global/1262");
    let kept = std::fs::read(&file)?;
    std::fs::write(&file, b"")?;
    cluster.start_server()?;
    cluster.eventually_that("the server", || {
        ensure!(process::postmaster(&cluster.data_directory()).is_none(), "it runs");
        Ok(())
    })?;
    let log = cluster.log();
    for text in [
        "LOG:  pagevault: cannot find out whether this server reads and writes through it",
        "DETAIL:  The first page of pg_database cannot be read: could not read block",
        "HINT:  Fix the cause and start the server again.",
        "received immediate shutdown request",
    ] {
        ensure!(log.contains(text), "{text:?} is not in the log");
    }
    std::fs::write(&file, kept)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) > 2 FROM pg_database")? == "t", "no databases");
    cluster.allow_log("terminating connection because of");
    cluster.finish()
}
