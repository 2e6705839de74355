//! The self-check at every start proves that the server calls pagevault's functions, and stops the
//! server if that cannot be proven.

use std::fs;

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

/// A compiler may produce a server that calls some function directly, not through the pointer.
#[test]
fn a_server_that_bypasses_a_function_admits_no_session() -> Result<()> {
    let major = Installation::get()?.major;
    let mut functions = vec!["mdcreate", "mdextend", "open", "pwrite"];
    functions.extend(if major < 17 { ["mdread", "mdwrite"] } else { ["mdreadv", "mdwritev"] });
    if major >= 16 {
        functions.push("mdzeroextend");
    }
    if major >= 18 {
        functions.extend(["mdstartreadv", "aio_md_readv_cb"]);
    }
    let mut cluster = Cluster::create(&settings())?;
    let leave_out = cluster.data_directory().join("pagevault.leave_out");
    for function in functions {
        fs::write(&leave_out, function)?;
        // pg_ctl fails if the server stops before it accepts connections.
        let _ = cluster.start_server();
        ensure!(cluster.client().is_err(), "{function}: a session is admitted");
        cluster.eventually_that("the server", || {
            ensure!(process::postmaster(&cluster.data_directory()).is_none(), "it runs");
            Ok(())
        })?;
        let log = cluster.log();
        ensure!(log.contains(&format!("without it: {function} is bypassed")), "{function}: {log}");
    }
    fs::remove_file(leave_out)?;
    // It must not begin redo either.
    cluster.start_server()?;
    cluster.sql("CREATE TABLE t (id int)")?;
    cluster.kill()?;
    fs::write(cluster.data_directory().join("pagevault.leave_out"), "mdextend")?;
    let before = cluster.log().len();
    ensure!(cluster.start_server().is_err(), "redo begins");
    let log = cluster.log().split_off(before);
    ensure!(log.contains("extends relation files without it: mdextend is bypassed"), "{log}");
    ensure!(!log.contains("redo done"), "{log}");
    fs::remove_file(cluster.data_directory().join("pagevault.leave_out"))?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "the table");
    for text in ["FATAL", "terminating connection because of", "terminated by signal"] {
        cluster.allow_log(text);
    }
    cluster.finish()
}

#[test]
fn a_server_that_cannot_be_checked_admits_no_session_and_stops() -> Result<()> {
    let mut cluster = Cluster::create(&settings())?;
    let scratch = cluster.data_directory().join("global/9161");
    fs::create_dir(&scratch)?;
    let _ = cluster.start_server();
    ensure!(cluster.client().is_err(), "a session is admitted");
    cluster.eventually_that("the server", || {
        ensure!(process::postmaster(&cluster.data_directory()).is_none(), "it runs");
        Ok(())
    })?;
    let log = cluster.log();
    for text in [
        "LOG:  pagevault: cannot find out whether this server reads and writes through it",
        "FATAL:  pagevault: cannot find out whether this server reads and writes through it",
        "DETAIL:  The scratch file global/9161 cannot be used: Is a directory",
        "HINT:  Fix the cause, and try again.",
        "received immediate shutdown request",
    ] {
        ensure!(log.contains(text), "{text:?} is not in the log: {log}");
    }
    fs::remove_dir(scratch)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) > 2 FROM pg_database")? == "t", "no databases");
    for text in ["FATAL", "could not remove", "terminating connection because of"] {
        cluster.allow_log(text);
    }
    cluster.finish()
}

/// The scratch file of a self-check that a crash interrupted.
#[test]
fn a_left_over_scratch_file_is_removed() -> Result<()> {
    let cluster = Cluster::create(&settings())?;
    let scratch = cluster.data_directory().join("global/9161");
    fs::write(&scratch, [1; 5 * 8192])?;
    cluster.installation().give(&scratch)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT 1")? == "1", "no session");
    ensure!(!scratch.exists(), "the scratch file is left");
    cluster.finish()
}
