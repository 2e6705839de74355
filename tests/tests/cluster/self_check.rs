//! The self-check at every start proves that the server calls pagevault's functions, and stops the
//! server if that cannot be proven.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use anyhow::{Context, Result, anyhow, ensure};
use pagevault_tests::{Cluster, Installation, Settings, StopMode, process};

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
        cluster.admits_nobody_and_ends().with_context(|| function.to_owned())?;
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
    cluster.admits_nobody_and_ends()?;
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

/// Sessions that wait while another process runs the check do not run it again one after the other.
#[test]
fn waiting_sessions_do_not_repeat_it() -> Result<()> {
    const SESSIONS: usize = 3;
    let cluster = Cluster::create(&settings())?;
    cluster.stop_at("page.extend 9161")?;
    cluster.start_server()?;
    cluster.stopped_at("page.extend 9161")?;
    let somebody_began = || cluster.data_directory().join("pagevault.stopped").exists();
    std::thread::scope(|scope| {
        let sessions: Vec<_> = (0..SESSIONS).map(|_| scope.spawn(|| cluster.client())).collect();
        cluster.eventually_that("sessions", || {
            let processes = process::processes_in(&cluster.data_directory()).into_iter();
            let waiting = processes.filter(|pid| sleeps_in_authentication(*pid)).count();
            ensure!(waiting == SESSIONS, "{waiting} wait");
            Ok(())
        })?;
        // The check that has begun is past this point.
        cluster.stop_at("storage.decided 0")?;
        cluster.eventually_that("sessions", || {
            let admitted = sessions.iter().all(std::thread::ScopedJoinHandle::is_finished);
            ensure!(admitted || somebody_began(), "they wait");
            Ok(())
        })?;
        let repeated = somebody_began();
        cluster.resume();
        for session in sessions {
            session.join().map_err(|_| anyhow!("panic"))??;
        }
        ensure!(!repeated, "another process began the check");
        anyhow::Ok(())
    })?;
    cluster.finish()
}

fn sleeps_in_authentication(pid: rustix::process::Pid) -> bool {
    let read = |file| fs::read_to_string(format!("/proc/{}/{file}", pid.as_raw_nonzero()));
    let title = read("cmdline").unwrap_or_default();
    let state = read("stat").unwrap_or_default();
    title.contains("authentication") && state.contains(") S ")
}

/// `postgres --single`, which has neither sessions nor workers: with WAL to replay, and without.
#[test]
fn a_single_user_server_that_bypasses_a_function_carries_nothing_out() -> Result<()> {
    let mut cluster = Cluster::start(&settings())?;
    cluster.sql("CREATE TABLE t (id int)")?;
    let leave_out = cluster.data_directory().join("pagevault.leave_out");
    for is_clean in [false, true] {
        if is_clean {
            cluster.start_server()?;
            cluster.stop(StopMode::Fast)?;
        } else {
            cluster.kill()?;
        }
        fs::write(&leave_out, "mdextend")?;
        let response = single_user(&cluster, "INSERT INTO t VALUES (7)\n")?;
        ensure!(response.contains("FATAL:  pagevault: this server extends"), "{response}");
        ensure!(response.contains("The caller goes on."), "{response}");
        fs::remove_file(&leave_out)?;
    }
    let response = single_user(&cluster, "INSERT INTO t VALUES (8)\n")?;
    ensure!(!response.contains("FATAL"), "{response}");
    cluster.start_server()?;
    ensure!(cluster.text("SELECT string_agg(id::text, ' ') FROM t")? == "8", "rows");
    cluster.allow_log("FATAL");
    cluster.finish()
}

/// Runs commands in single-user mode, from a shell with a process group of its own.
fn single_user(cluster: &Cluster, commands: &str) -> Result<String> {
    let mut shell = cluster.installation().command("/bin/sh");
    shell.args(["-c", "\"$0\" --single -D \"$1\" postgres; echo The caller goes on."]);
    shell.arg(cluster.installation().program("postgres")).arg(cluster.data_directory());
    shell.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut shell = shell.spawn()?;
    // The server may have ended before it reads.
    let _ = shell.stdin.take().context("its input")?.write_all(commands.as_bytes());
    let output = shell.wait_with_output()?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}
