//! What waits for a key provider ends with its server.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::process::{postmaster, processes_in};
use pagevault_tests::{Cluster, Settings};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Much less than a provider may take here.
const SOON: Duration = Duration::from_secs(15);

/// Servers that wait long for providers.
fn patient() -> Settings {
    Settings::default()
        .conf("pagevault.keyring_timeout = 90s")
        .conf("pagevault.unlock_timeout = 90s")
}

/// A helper that never replies, until there is the file `stuck.over`.
fn stuck(cluster: &Cluster) -> Result<String> {
    let real = cluster.program("pagevault-keyring").get_program().to_string_lossy().into_owned();
    let over = format!("[ -e \"$0.over\" ] && exec '{real}' serve");
    cluster.script("stuck", &format!("{over}\necho $$ > \"$0.pid\"; exec sleep 600"))
}

/// The number of that helper, if it was started.
fn stuck_helper(cluster: &Cluster) -> Result<Pid> {
    let pid = std::fs::read_to_string(cluster.directory().join("stuck.pid"))?;
    Pid::from_raw(pid.trim().parse()?).context("a process id")
}

fn has_ended(process: Pid) -> Result<()> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    let is_zombie = stat.map_or(true, |stat| stat.contains(") Z "));
    ensure!(test_kill_process(process).is_err() || is_zombie, "{process:?} goes on");
    Ok(())
}

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE secret AS SELECT i AS id FROM generate_series(1, 1000) i";

/// Otherwise no other server could start in the data directory.
#[test]
fn a_session_that_waits_for_a_provider_ends_with_the_postmaster() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&patient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLE)?;
    cluster.set(&[("pagevault.keyring_command", &stuck(&cluster)?)])?;
    let mut client = cluster.client()?;
    let session =
        thread::spawn(move || client.batch_execute("SELECT pagevault.rotate_cluster_master_key()"));
    cluster.eventually_that("a helper", || stuck_helper(&cluster).map(drop))?;
    let helper = stuck_helper(&cluster)?;
    kill_process(postmaster(&cluster.data_directory()).context("no postmaster")?, Signal::KILL)?;
    let killed = Instant::now();
    while !processes_in(&cluster.data_directory()).is_empty() {
        ensure!(killed.elapsed() < SOON, "a process goes on without its postmaster");
        thread::sleep(Duration::from_millis(50));
    }
    cluster.eventually_that("the end of the helper", || has_ended(helper))?;
    ensure!(session.join().is_ok_and(|ended| ended.is_err()), "the rotation was done");
    std::fs::write(cluster.directory().join("stuck.over"), "")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}
