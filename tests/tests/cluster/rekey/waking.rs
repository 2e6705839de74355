//! Waking another process sets its latch. No signal is sent to a process id that may meanwhile
//! belong to another process.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::process::postmaster;
use pagevault_tests::{Cluster, Settings};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const LAUNCHER: &str = "FROM pg_stat_activity WHERE backend_type = 'pagevault rekey launcher'";

/// A table to rekey, and an idle launcher.
fn cluster() -> Result<(Cluster, Pid)> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id")?;
    cluster.eventually(&format!("SELECT wait_event {LAUNCHER}"), "Extension")?;
    let launcher = Pid::from_raw(cluster.text(&format!("SELECT pid {LAUNCHER}"))?.parse()?);
    Ok((cluster, launcher.context("a process")?))
}

/// A line of a process's /proc/PID/status.
fn said_of(process: Pid, name: &str) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero()))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.context("no such line")?.trim().to_owned())
}

/// Stops a process with SIGSTOP, so that signals stay pending.
fn stop(process: Pid) -> Result<()> {
    kill_process(process, Signal::STOP)?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while !said_of(process, "State:")?.starts_with('T') {
        ensure!(Instant::now() < deadline, "{process:?} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The pending signals of a process.
fn pending(process: Pid) -> Result<Vec<i32>> {
    let bits = u64::from_str_radix(&said_of(process, "ShdPnd:")?, 16)?;
    Ok((1..=64).filter(|signal| bits >> (signal - 1) & 1 == 1).collect())
}

/// `SetLatch` (latch.c) sends SIGURG to the owner of a latch that waits on it.
#[test]
fn the_launcher_is_woken_by_its_latch() -> Result<()> {
    let (cluster, launcher) = cluster()?;
    stop(launcher)?;
    let asked = cluster.text("SELECT pagevault.rotate_data_key('t')");
    let signals = pending(launcher)?;
    kill_process(launcher, Signal::CONT)?;
    asked?;
    ensure!(signals == [Signal::URG.as_raw()], "the launcher was sent signals {signals:?}");
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    cluster.finish()
}

/// Whether this user may set the next process id (/proc/sys/kernel/ns_last_pid).
fn can_choose_process_ids() -> bool {
    let file = std::fs::OpenOptions::new().write(true).open(NUMBER_BEFORE);
    if file.is_err() {
        eprintln!("skipped: {NUMBER_BEFORE} cannot be written");
    }
    file.is_ok()
}

const NUMBER_BEFORE: &str = "/proc/sys/kernel/ns_last_pid";

/// Starts another process with this process id, which the server may send signals to.
fn process_with_id(cluster: &Cluster, number: Pid) -> Result<Child> {
    let number = number.as_raw_nonzero().get();
    for _ in 0..1000 {
        std::fs::write(NUMBER_BEFORE, (number - 1).to_string())?;
        let mut child = cluster.installation().command("/bin/sleep").arg("600").spawn()?;
        if child.id() == number.unsigned_abs() {
            return Ok(child);
        }
        // Some other process was started in between.
        child.kill()?;
        child.wait()?;
    }
    anyhow::bail!("other processes get the number {number}")
}

#[test]
fn a_process_with_the_launchers_former_id_gets_no_signal() -> Result<()> {
    if !can_choose_process_ids() {
        return Ok(());
    }
    let (mut cluster, launcher) = cluster()?;
    cluster.allow_log("terminating background worker");
    let mut session = cluster.client()?;
    let postmaster = postmaster(&cluster.data_directory()).context("no postmaster")?;
    cluster.sql(&format!("SELECT pg_terminate_backend(pid) {LAUNCHER}"))?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while test_kill_process(launcher).is_ok() {
        ensure!(Instant::now() < deadline, "the launcher lives on");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Otherwise it would start another launcher within seconds.
    kill_process(postmaster, Signal::STOP)?;
    let mut other = process_with_id(&cluster, launcher)?;
    stop(launcher)?;
    let asked = session.batch_execute(&format!(
        "DO $$BEGIN ASSERT (SELECT count(*) = 0 {LAUNCHER}); END$$;
         SELECT pagevault.rotate_data_key('t')"
    ));
    let signals = pending(launcher)?;
    other.kill()?;
    other.wait()?;
    kill_process(postmaster, Signal::CONT)?;
    asked?;
    ensure!(signals.is_empty(), "another process was sent signals {signals:?}");
    // Another launcher starts and finds the job.
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    cluster.finish()
}
