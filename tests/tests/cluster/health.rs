//! Health of key providers in the views, check_provider(), and independence of sessions from a slow
//! provider.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::ptrace;
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings, SqlError};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const ROTATE: &str = "SELECT pagevault.rotate_cluster_master_key()";

/// Columns of the provider `local` as one string.
fn local(cluster: &Cluster, columns: &str) -> Result<String> {
    cluster.text(&format!(
        "SELECT concat_ws(' ', {columns}) FROM pagevault.providers WHERE provider = 'local'"
    ))
}

#[test]
fn views_show_the_last_reply_of_a_provider() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let columns = "reachable, last_success_at IS NOT NULL, last_error_at IS NOT NULL,
                   coalesce(last_error_class, '-'), consecutive_failures, latency_ms > 0, master_key_versions";
    let is = |expected: &str| -> Result<()> {
        let got = local(&cluster, columns)?;
        ensure!(got == expected, "{got}, not {expected}");
        Ok(())
    };
    is(r#"t t f - 0 t {"main": 1}"#)?;
    cluster.sql(ROTATE)?;
    is(r#"t t f - 0 t {"main": 2}"#)?;

    keys.take_away()?;
    cluster.error(ROTATE)?;
    cluster.error(ROTATE)?;
    is(r#"f t t unreachable 2 t {"main": 2}"#)?;
    let output = local(&cluster, "last_error")?;
    ensure!(output.contains(&*keys.path().to_string_lossy()), "the file is not named: {output}");
    let unreachable = "SELECT unreachable_providers FROM pagevault.status";
    ensure!(cluster.text(unreachable)? == "{local}", "status");
    let unprivileged = format!(
        "CREATE ROLE ordinary; SET ROLE ordinary; {unreachable} WHERE unreachable_providers IS NULL"
    );
    ensure!(cluster.text(&unprivileged)?.is_empty(), "anyone may see providers");

    keys.bring_back()?;
    // A refusal: the provider is reachable.
    cluster.error("SELECT pagevault.set_cluster_master_key('local', 'typo')")?;
    is(r#"t t t key_missing 3 t {"main": 2}"#)?;
    ensure!(cluster.text(unreachable)? == "{}", "status");
    cluster.sql(ROTATE)?;
    is(r#"t t t key_missing 0 t {"main": 3}"#)?;

    // A provider that was never used has no status, and views do not send requests.
    let other = cluster.key_file("other", "main")?;
    cluster.sql(&other.add_provider("other"))?;
    cluster.set(&[("pagevault.keyring_command", "/nonexistent/helper")])?;
    let query = "SELECT count(*) FROM pagevault.providers
                 WHERE provider = 'other' AND reachable IS NULL AND last_error IS NULL AND master_key_versions = '{}'";
    ensure!(cluster.text(query)? == "1", "a provider that nobody asked");
    cluster.sql("SELECT * FROM pagevault.status, pagevault.database_keys, pagevault.relations")?;
    ensure!(local(&cluster, "reachable")? == "t", "a view asked");
    // Trying options does not change the provider's status.
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.error(r#"SELECT pagevault.alter_provider('local', '{"path": "/nowhere"}')"#)?;
    ensure!(local(&cluster, "reachable")? == "t", "options that were refused count");
    // A name that is used again starts with an empty status.
    cluster.sql("SELECT pagevault.check_provider('other')")?;
    cluster.sql("SELECT pagevault.drop_provider('other')")?;
    cluster.sql(&other.add_provider("other"))?;
    ensure!(cluster.text(query)? == "1", "a provider of the same name");
    cluster.finish()
}

#[test]
fn check_provider_reports_faults_and_raises_no_error() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let count = |arguments: &str, condition: &str| {
        cluster.text(&format!(
            "SELECT count(*) FROM pagevault.check_provider({arguments}) WHERE {condition}"
        ))
    };
    ensure!(count("'local'", "NOT ok OR result = ''")? == "0", "all is well");
    ensure!(
        count("'local'", "master_key = 'main' AND item LIKE '%unwraps%'")? == "1",
        "round trip"
    );
    keys.add_key("second")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'second')")?;
    for key in ["main", "second"] {
        let condition = format!("master_key = '{key}' AND item LIKE '%unwraps%' AND ok");
        ensure!(count("'local'", &condition)? == "1", "{key}");
    }
    ensure!(count("'local', 'second'", "master_key = 'main'")? == "0", "another key");
    let missing = "NOT ok AND master_key = 'typo' AND result LIKE '%typo%' AND hint <> ''";
    ensure!(count("'local', 'typo'", missing)? == "1", "a key that is not there");

    // A stale copy of the key file wraps and unwraps test keys, but not the keys in use.
    let in_use = "item = 'the keys in use can be unwrapped'";
    for key in ["main", "second"] {
        let condition = format!("{in_use} AND ok AND master_key = '{key}' AND result <> ''");
        ensure!(count("'local'", &condition)? == "1", "{key}");
    }
    let copy = std::fs::read(keys.path())?;
    cluster.sql(ROTATE)?;
    let newest = std::fs::read(keys.path())?;
    std::fs::write(keys.path(), copy)?;
    let stale = format!(
        "{in_use} AND NOT ok AND master_key = 'main' AND result LIKE '%the key of the cluster%version 2%'
         AND hint LIKE 'Restore the newest copy%'"
    );
    ensure!(count("'local'", &stale)? == "1", "a stale copy");
    // So does the program, with a data directory.
    let offline = || -> Result<(bool, String)> {
        let options = serde_json::json!({"path": keys.path()}).to_string();
        let mut program = cluster.program("pagevault-keyring");
        program.args(["check", "--provider-kind", "file", "--options", &options, "--key", "main"]);
        let output = program.arg("--data-directory").arg(cluster.data_directory()).output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (well, output) = offline()?;
    ensure!(!well && output.contains("not ok  the keys in use can be unwrapped"), "{output}");
    ensure!(count("'local'", "NOT ok")? == "1", "the other key, and the newest version");
    std::fs::write(keys.path(), newest)?;
    ensure!(count("'local'", "NOT ok")? == "0", "the newest copy");
    let (well, output) = offline()?;
    ensure!(well && output.contains("keys that were unwrapped: 1"), "{output}");
    keys.add_key("unused")?;
    ensure!(count("'local', 'unused'", in_use)? == "0", "a key that wraps nothing");

    // For an unused provider only the provider itself is checked.
    let other = cluster.key_file("other", "main")?;
    cluster.sql(&other.add_provider("other"))?;
    ensure!(count("'other'", "master_key IS NULL AND ok")? != "0", "an unused provider");
    ensure!(count("'other'", "master_key IS NOT NULL")? == "0", "an unused provider");
    other.take_away()?;
    ensure!(count("'other'", "NOT ok AND hint <> ''")? == "1", "a file that is away");
    ensure!(
        cluster.text("SELECT reachable FROM pagevault.providers WHERE provider = 'other'")? == "f",
        "what a check finds is remembered"
    );

    let error = cluster.error("SELECT pagevault.check_provider('nobody')")?;
    ensure!(error.sqlstate == "42704", "{error}");
    let error = cluster.error("SELECT pagevault.check_provider(NULL)")?;
    ensure!(error.sqlstate == "22004", "{error}");
    let error = cluster.error(
        "CREATE ROLE ordinary; SET ROLE ordinary; SELECT pagevault.check_provider('local')",
    )?;
    ensure!(error.sqlstate == "42501", "{error}");
    cluster.finish()
}

/// Starts a rotation in another session, with a helper that never replies. Returns the backend's
/// process id and its thread as soon as it waits.
fn stuck_rotation(
    cluster: &Cluster,
) -> Result<(String, std::thread::JoinHandle<Result<(), postgres::Error>>)> {
    let helper = cluster.script("stuck", "echo $$ > \"$0.pid\"; exec sleep 600")?;
    cluster.set(&[("pagevault.keyring_command", &helper)])?;
    let mut client = cluster.client()?;
    let pid = text(&mut client, "SELECT pg_backend_pid()")?;
    let session = std::thread::spawn(move || client.batch_execute(ROTATE));
    cluster.eventually_that("helper", || helper_of(cluster).map(drop))?;
    Ok((pid, session))
}

/// The helper started by [`stuck_rotation`].
fn helper_of(cluster: &Cluster) -> Result<Pid> {
    let pid = std::fs::read_to_string(cluster.directory().join("stuck.pid"))?;
    Pid::from_raw(pid.trim().parse()?).context("a process id")
}

#[test]
fn a_provider_that_never_answers_delays_no_other_session() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i",
    )?;
    let (pid, session) = stuck_rotation(&cluster)?;
    // All of these would wait for the helper if they waited for the rotation.
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET statement_timeout = '60s'")?;
    for statement in [
        "SET pagevault.default_encryption = on; CREATE TABLE u AS SELECT * FROM t",
        "CREATE TABLE v (id int)",
        "SELECT pagevault.encrypt('v')",
        "INSERT INTO t SELECT * FROM u",
        "TRUNCATE u",
        "CHECKPOINT",
        "SELECT count(*) FROM t",
        "SELECT * FROM pagevault.status, pagevault.providers, pagevault.database_keys",
        "CREATE DATABASE other",
    ] {
        run_sql(&mut client, statement)?;
    }
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'LWLock'"
    );
    ensure!(text(&mut client, &waits)? == "0", "the rotation waits for a lock");
    // A second rotation waits. Both can be cancelled.
    let error = expect_error(&mut client, &format!("SET statement_timeout = '300ms'; {ROTATE}"))?;
    ensure!(error.sqlstate == "57014", "{error}");
    ensure!(text(&mut client, "SELECT pg_stat_get_backend_pid(1) IS NOT NULL").is_ok(), "session");
    run_sql(&mut client, &format!("SET statement_timeout = 0; SELECT pg_cancel_backend({pid})"))?;
    let ended = session.join().map_err(|_| anyhow::anyhow!("the session panicked"))?;
    let error = ended.err().as_ref().and_then(SqlError::of).context("the rotation was done")?;
    ensure!(error.sqlstate == "57014", "{error}");
    drop(client);
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.sql(ROTATE)?;
    cluster.finish()
}

#[test]
fn a_helper_does_not_outlive_the_process_that_asked() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    for signal in [Signal::TERM, Signal::KILL] {
        let (pid, session) = stuck_rotation(&cluster)?;
        let helper = helper_of(&cluster)?;
        let backend = Pid::from_raw(pid.parse()?).context("a process id")?;
        kill_process(backend, signal)?;
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "the rotation was done");
        cluster.allow_log("terminating connection because of crash of another server process");
        let deadline = Instant::now() + Duration::from_secs(60);
        while test_kill_process(helper).is_ok() && !is_zombie(helper) {
            ensure!(Instant::now() < deadline, "the helper survives {signal:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        cluster.eventually("SELECT 1", "1")?;
        std::fs::remove_file(cluster.directory().join("stuck.pid"))?;
    }
    cluster.finish()
}

/// If nothing reaps orphans, a killed process stays a zombie.
fn is_zombie(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

/// Its reply counts without the end of the process; and without a reply nobody waits for that end.
#[test]
fn a_helper_that_goes_on_holds_up_nothing() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let real = cluster.program("pagevault-keyring").get_program().to_string_lossy().into_owned();
    let helper = cluster.script("staying", &format!("'{real}' serve\nexec sleep 600"))?;
    cluster.set(&[("pagevault.keyring_command", &helper)])?;
    cluster.sql(ROTATE)?;
    let helper = cluster.script("closing", "exec 1>&- 2>&-\nexec sleep 600")?;
    cluster.set(&[("pagevault.keyring_command", &helper)])?;
    let error = cluster.error(&format!("SET statement_timeout = '60s'; {ROTATE}"))?;
    ensure!(error.detail.contains("It closed its output without a reply"), "{error}");
    cluster.finish()
}

/// A process that waits for a file system that does not answer cannot be killed. Here a tracer
/// stands for that: the end of a process is hidden from its parent until the tracer takes notice.
#[test]
fn a_helper_that_cannot_be_killed_holds_up_nothing() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let (backend, session) = stuck_rotation(&cluster)?;
    let helper = nix::unistd::Pid::from_raw(helper_of(&cluster)?.as_raw_nonzero().get());
    match ptrace::seize(helper, ptrace::Options::empty()) {
        // Yama permits that to root, and a container perhaps to nobody.
        Err(nix::Error::EPERM) => eprintln!("not tried: {helper} cannot be traced"),
        traced => traced?,
    }
    let mut client = cluster.client()?;
    run_sql(&mut client, &format!("SELECT pg_cancel_backend({backend})"))?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while !session.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    let is_finished = session.is_finished();
    let _ = nix::sys::wait::waitpid(helper, None);
    ensure!(is_finished, "the session waits for its helper");
    drop(client);
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.sql(ROTATE)?;
    cluster.finish()
}

#[test]
fn a_helper_inherits_no_descriptor() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let script = "ls -l /proc/self/fd > \"$0.seen\"; exit 1";
    let helper = cluster.script("curious", script)?;
    cluster.set(&[("pagevault.keyring_command", &helper)])?;
    cluster.error(ROTATE)?;
    let seen = std::fs::read_to_string(cluster.directory().join("curious.seen"))?;
    let data = cluster.data_directory().to_string_lossy().into_owned();
    ensure!(seen.contains("pipe:"), "nothing was seen: {seen}");
    for line in seen.lines() {
        ensure!(!line.contains("socket:") && !line.contains(&data), "inherited: {line}");
        ensure!(!line.contains("anon_inode"), "inherited: {line}");
    }
    cluster.finish()
}
