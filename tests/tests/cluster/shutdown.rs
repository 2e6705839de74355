//! What waits for a key provider ends with its server.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::process::{postmaster, processes_in};
use pagevault_tests::standby::standby_of;
use pagevault_tests::{Cluster, Settings, StopMode};
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

/// Starts a server that must wait until `waits`, and ends it by a signal.
pub(crate) fn starts_and_ends(
    cluster: &Cluster,
    arguments: &[&str],
    signal: Signal,
    waits: impl Fn() -> Result<()>,
) -> Result<()> {
    let data = cluster.data_directory();
    thread::scope(|scope| {
        let start = scope.spawn(|| cluster.start_server_with(arguments));
        cluster.eventually_that("a start that waits", &waits)?;
        let told = Instant::now();
        kill_process(postmaster(&data).context("there is no postmaster")?, signal)?;
        let started = start.join().map_err(|_| anyhow::anyhow!("the start panicked"))?;
        let error = started.err().context("the server has started")?;
        ensure!(told.elapsed() < SOON, "{signal:?}: {:?}", told.elapsed());
        let text = format!("{error:#}");
        ensure!(text.contains("server start ends because of a shutdown request"), "{text}");
        ensure!(text.contains("exit status: 0"), "{text}");
        ensure!(postmaster(&data).is_none(), "the lock file is left");
        ensure!(processes_in(&data).is_empty(), "processes are left");
        Ok(())
    })
}

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE secret AS SELECT i AS id FROM generate_series(1, 1000) i";

#[test]
fn a_start_that_waits_for_a_provider_ends_when_it_is_told_to() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&patient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLE)?;
    cluster.stop(StopMode::Fast)?;
    let helper = format!("pagevault.keyring_command={}", stuck(&cluster)?);
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        // A helper that does not reply.
        let waits = || stuck_helper(&cluster).map(drop);
        starts_and_ends(&cluster, &["-c", &helper], signal, waits)?;
        let helper = stuck_helper(&cluster)?;
        cluster.eventually_that("the end of the helper", || has_ended(helper))?;
        std::fs::remove_file(cluster.directory().join("stuck.pid"))?;
        // Pauses between requests; before recovery, too.
        keys.take_away()?;
        let waits = || {
            thread::sleep(Duration::from_secs(2));
            postmaster(&cluster.data_directory()).map(drop).context("no postmaster")
        };
        starts_and_ends(&cluster, &[], signal, waits)?;
        keys.bring_back()?;
        cluster.start_server()?;
        ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
        cluster.kill()?;
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

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

/// The startup process asks for a key that it has replayed.
#[test]
fn recovery_that_waits_for_a_provider_ends_with_the_server() -> Result<()> {
    for signal in [Signal::INT, Signal::QUIT, Signal::KILL] {
        let (cluster, _keys) = Cluster::with_keys(&patient())?;
        cluster.sql(TABLE)?;
        let mut standby = standby_of(&cluster, &[])?;
        standby.allow_log("pagevault");
        standby.set(&[("pagevault.keyring_command", &stuck(&standby)?)])?;
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        standby.eventually_that("a helper", || stuck_helper(&standby).map(drop))?;
        let data = standby.data_directory();
        let told = Instant::now();
        kill_process(postmaster(&data).context("no postmaster")?, signal)?;
        while !processes_in(&data).is_empty() {
            ensure!(told.elapsed() < SOON, "{signal:?}: a process goes on");
            thread::sleep(Duration::from_millis(50));
        }
        let helper = stuck_helper(&standby)?;
        standby.eventually_that("the end of the helper", || has_ended(helper))?;
        standby.start_server_with(&["-c", "pagevault.keyring_command="])?;
        ensure!(standby.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
        standby.finish()?;
        cluster.finish()?;
    }
    Ok(())
}
