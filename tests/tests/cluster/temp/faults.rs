//! A backend that is killed while it has temporary files, and a full disk.

use anyhow::{Context, Result, ensure};
use pagevault_tests::Settings;
use pagevault_tests::cluster::{expect_error, run_sql, text};
use rustix::process::{Pid, Signal, kill_process};

use super::{LITTLE_MEMORY, check, cluster, held, spilled};

const SORT: &str =
    "SELECT md5(string_agg(hold(t), ',')) FROM (SELECT t FROM data ORDER BY t DESC) s";

fn pid(client: &mut postgres::Client) -> Result<Pid> {
    let pid = text(client, "SELECT pg_backend_pid()")?.parse()?;
    Pid::from_raw(pid).context("a process id")
}

#[test]
fn files_of_a_killed_backend_disturb_no_session() -> Result<()> {
    let settings = Settings::default()
        .conf("restart_after_crash = on")
        .conf("remove_temp_files_after_crash = off");
    let mut cluster = cluster(&settings)?;
    cluster.allow_log("terminating connection because of crash of another server process");
    cluster.allow_log("was terminated by signal 9");
    let expected = cluster.text(SORT)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    let victim = pid(&mut client)?;
    let held = held(&cluster, &mut client, SORT, || {
        check(&spilled(&cluster), true)?;
        Ok(kill_process(victim, Signal::KILL)?)
    });
    ensure!(held.is_err(), "the query survived");
    drop(client);
    // Until the postmaster notices the crash, it accepts connections.
    cluster.eventually_logs("all server processes terminated")?;
    cluster.eventually("SELECT 1", "1")?;
    check(&spilled(&cluster), true).context("what the crash left")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    ensure!(text(&mut client, SORT)? == expected, "another order after the crash");
    drop(client);
    cluster.restart()?;
    ensure!(spilled(&cluster).is_empty(), "the next start does not remove what is left");
    cluster.finish()
}

/// A limit for the size of files simulates a full disk: writes are cut short at any byte, then
/// fail.
#[test]
fn a_full_disk_is_reported_and_does_no_harm() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    // Afterwards the backend has only temporary files to write.
    cluster.sql("VACUUM data")?;
    cluster.sql("CHECKPOINT")?;
    let expected = cluster.text(SORT)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    let backend = pid(&mut client)?;
    // The server sets the limit, because it may do so for its own processes.
    let limit_files = |limit: &str| {
        let pid = backend.as_raw_nonzero();
        let program = format!("prlimit --pid {pid} --fsize={limit}:");
        // No row, because the program reads none.
        cluster.sql(&format!("COPY (SELECT WHERE false) TO PROGRAM '{program}'"))
    };
    for limit in ["100003", "24576", "8191", "7"] {
        limit_files(limit)?;
        let error = expect_error(&mut client, SORT)?.to_string();
        ensure!(error.contains("could not write"), "with {limit} bytes: {error}");
        limit_files("unlimited")?;
        ensure!(text(&mut client, SORT)? == expected, "another order after {limit}");
    }
    cluster.finish()
}

/// Names recur with process ids: PostgreSQL truncates an existing file and uses it.
#[test]
fn plain_leftovers_are_sealed_when_they_are_used_again() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    let expected = cluster.text(SORT)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    let directory = cluster.data_directory().join("base/pgsql_tmp");
    std::fs::create_dir_all(&directory)?;
    cluster.installation().give(&directory)?;
    let backend = pid(&mut client)?.as_raw_nonzero();
    for number in 0..20 {
        let path = directory.join(format!("pgsql_tmp{backend}.{number}"));
        std::fs::write(&path, "left over")?;
        cluster.installation().give(&path)?;
    }
    let answer = held(&cluster, &mut client, SORT, || {
        let mut files = spilled(&cluster);
        files.retain(|file| file.bytes != b"left over");
        check(&files, true)
    })?;
    ensure!(answer == expected, "another order");
    ensure!(text(&mut client, SORT)? == expected, "another order the next time");
    ensure!(spilled(&cluster).len() < 20, "none was used again");
    cluster.finish()
}
