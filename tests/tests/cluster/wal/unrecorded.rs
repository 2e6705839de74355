//! Switches in effect that cannot be recorded because the key file cannot grow. A file size limit
//! of one process simulates a full disk (PostgreSQL ignores SIGXFSZ, so writes fail;
//! `PostmasterMain`, postmaster.c).

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, text};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings};
use rustix::process::Pid;

use super::{STATE, assert_hidden, count, insert, leaks, sealing, segments};

const PROBLEM: &str = "SELECT coalesce(wal_error, 'none') FROM pagevault.status";
const IS_UNRECORDED: &str =
    "SELECT wal_error LIKE 'a switch of WAL encryption is not recorded%could not write key file%'
    FROM pagevault.status";
const IN_FORCE: &str = "wal_switch.in_memory";

/// Prevents a process from extending the key file.
fn fill_disk(cluster: &Cluster, process: Pid) -> Result<()> {
    let length = cluster.data_directory().join("pagevault/cluster.keys").metadata()?.len();
    limit_files(cluster, process, &length.to_string())
}

fn empty_disk(cluster: &Cluster, process: Pid) -> Result<()> {
    limit_files(cluster, process, "unlimited")
}

/// Runs as the server's user, which has permission; root in a container may not.
fn limit_files(cluster: &Cluster, process: Pid, limit: &str) -> Result<()> {
    let mut prlimit = cluster.installation().command("/usr/bin/prlimit");
    let process = process.as_raw_nonzero().to_string();
    run(prlimit.args(["--pid", &process]).arg(format!("--fsize={limit}:")))?;
    Ok(())
}

/// Lets the worker switch and fail to record it; returns its process id.
fn leave_unrecorded(cluster: &Cluster, to: &str) -> Result<Pid> {
    cluster.stop_at(IN_FORCE)?;
    cluster.set(&[("pagevault.wal_encryption", to)])?;
    let worker = cluster.stopped_at(IN_FORCE)?;
    fill_disk(cluster, worker)?;
    cluster.resume();
    Ok(worker)
}

/// The problem is reported while it lasts; afterwards standbys follow.
#[test]
fn a_switch_that_could_not_be_recorded_is_recorded_later() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("could not write key file");
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    let standby = standby_of(&cluster, &[])?;
    let worker = leave_unrecorded(&cluster, "on")?;
    cluster.eventually(IS_UNRECORDED, "t")?;
    // At most one page precedes the switch.
    insert(&cluster, "zeisig", 1000)?;
    insert(&cluster, "amsel", 1000)?;
    assert_hidden(&cluster, "amsel")?;

    // No further switch is decided before this one is recorded.
    let mut client = cluster.client()?;
    let own = Pid::from_raw(text(&mut client, "SELECT pg_backend_pid()")?.parse()?);
    fill_disk(&cluster, own.context("a process")?)?;
    let error = expect_error(&mut client, "SELECT pagevault.rotate_wal_key()")?;
    ensure!(error.sqlstate == "58030", "{error:?}");
    ensure!(error.text().contains("standbys do not follow it"), "{error:?}");
    ensure!(cluster.text(IS_UNRECORDED)? == "t", "{}", cluster.text(PROBLEM)?);

    empty_disk(&cluster, worker)?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.eventually(PROBLEM, "none")?;
    ensure!(cluster.log().contains("is recorded now"));
    wait_for(&standby, &cluster)?;
    // The standby continues in plaintext in the page that it had begun when it received the switch.
    insert(&cluster, "zeisig", 1000)?;
    insert(&cluster, "drossel", 1000)?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        assert_hidden(server, "drossel")?;
        ensure!(server.text(STATE)? == "t" && server.text(PROBLEM)? == "none");
    }
    cluster.crash()?;
    insert(&cluster, "fink", 1000)?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        assert_hidden(server, "fink")?;
        for canary in ["amsel", "drossel", "fink"] {
            ensure!(count(server, canary)? == "1000", "{canary}: {}", count(server, canary)?);
        }
    }
    ensure!(cluster.text("SELECT wal_key_version FROM pagevault.status")? == "1", "another key");
    standby.finish()?;
    cluster.finish()
}

/// The worker records a switch that another process could not. Switches that a stop makes the
/// server forget are decided again.
#[test]
fn the_worker_records_a_rotation_and_a_start_decides_again() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("could not write key file");
    cluster.stop_at(IN_FORCE)?;
    let mut client = cluster.client()?;
    let rotation =
        std::thread::spawn(move || expect_error(&mut client, "SELECT pagevault.rotate_wal_key()"));
    fill_disk(&cluster, cluster.stopped_at(IN_FORCE)?)?;
    cluster.resume();
    let error = rotation.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    ensure!(error.sqlstate == "58030", "{error:?}");
    cluster.eventually(PROBLEM, "none")?;
    cluster.eventually_logs("is recorded now")?;
    insert(&cluster, "amsel", 1000)?;
    cluster.crash()?;
    let version = "SELECT wal_key_version FROM pagevault.status";
    ensure!(cluster.text(version)? == "2", "key {}", cluster.text(version)?);

    leave_unrecorded(&cluster, "off")?;
    cluster.eventually(IS_UNRECORDED, "t")?;
    insert(&cluster, "fink", 1000)?;
    ensure!(leaks(&segments(&cluster)?, "fink"), "WAL is encrypted");
    cluster.crash()?;
    cluster.eventually(STATE, "f")?;
    cluster.eventually(PROBLEM, "none")?;

    // So does a start whose checkpoint record is in a page that is sealed without a recorded
    // switch.
    leave_unrecorded(&cluster, "on")?;
    cluster.eventually(IS_UNRECORDED, "t")?;
    insert(&cluster, "zeisig", 1000)?;
    insert(&cluster, "meise", 1000)?;
    assert_hidden(&cluster, "meise")?;
    cluster.restart()?;
    cluster.eventually(STATE, "t")?;
    cluster.eventually(PROBLEM, "none")?;
    for canary in ["amsel", "fink", "meise"] {
        ensure!(count(&cluster, canary)? == "1000", "{canary}: {}", count(&cluster, canary)?);
    }
    cluster.finish()
}
