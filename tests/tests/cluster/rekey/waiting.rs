//! Processes that changes of encryption wait for, and processes that wait for such changes.

use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::unreading::UnreadingClient;
use pagevault_tests::{Cluster, Settings, StopMode};
use rustix::process::{Pid, Signal, kill_process};

use crate::assert_sealed;

/// A plaintext table that a command encrypts itself, and another one.
fn cluster(conf: &[&str]) -> Result<Cluster> {
    let settings = conf.iter().fold(Settings::default(), |settings, line| settings.conf(line));
    let (cluster, _keys) = Cluster::with_keys(&settings.conf("pagevault.rekey_rate = 0"))?;
    cluster.sql(
        "CREATE TABLE t AS SELECT repeat(md5(i::text), 10) AS name FROM generate_series(1, 1000) i;
         CREATE TABLE u (id int)",
    )?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

/// Encrypts a table within the command; an error after ten seconds.
fn encrypt(cluster: &Cluster, table: &str) -> Result<()> {
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET statement_timeout = '10s'; SET synchronous_commit = local")?;
    run_sql(&mut client, &format!("SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted'"))?;
    assert_sealed(&cluster.files(table)?)
}

fn in_background(cluster: &Cluster, statement: &'static str) -> Result<JoinHandle<Result<()>>> {
    let mut client = cluster.client()?;
    Ok(std::thread::spawn(move || run_sql(&mut client, statement)))
}

fn joined(session: JoinHandle<Result<()>>) -> Result<()> {
    session.join().map_err(|_| anyhow::anyhow!("panic"))?
}

/// A session that has committed and waits for a standby holds off interrupts (`SyncRepWaitForLSN`).
#[test]
fn an_absent_synchronous_standby_delays_nothing() -> Result<()> {
    let cluster = cluster(&[])?;
    cluster.set(&[("synchronous_standby_names", "absent")])?;
    let session = in_background(&cluster, "INSERT INTO u VALUES (1)")?;
    cluster
        .eventually("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", "1")?;
    encrypt(&cluster, "t")?;
    cluster.set(&[("synchronous_standby_names", "")])?;
    joined(session)?;
    cluster.finish()
}

/// Commands lock the indexes of a table by OID (`RelationGetIndexList`, relcache.c). In another
/// order, a job and REINDEX could wait for each other.
#[test]
fn indexes_are_locked_in_the_order_of_the_server() -> Result<()> {
    let cluster = cluster(&["autovacuum = off"])?;
    encrypt(&cluster, "t")?;
    // The row of the second index gets an earlier place in the catalog.
    cluster.sql("CREATE INDEX earlier ON u (id); CREATE INDEX first ON t (name)")?;
    cluster.sql("DROP INDEX earlier")?;
    cluster.sql("VACUUM pg_index")?;
    cluster.sql("CREATE INDEX second ON t (name)")?;
    let place =
        |index| format!("(SELECT ctid FROM pg_index WHERE indexrelid = '{index}'::regclass)");
    let is_later = format!("SELECT {} > {}", place("first"), place("second"));
    ensure!(cluster.text(&is_later)? == "t", "the test does not test anything");
    let mut session = cluster.client()?;
    run_sql(&mut session, "BEGIN")?;
    run_sql(&mut session, "REINDEX INDEX second")?;
    let rotate = "SET pagevault.rekey_threshold = 0; SELECT pagevault.rotate_data_key('t')";
    let rotating = in_background(&cluster, rotate)?;
    let waiting =
        "SELECT min(pid) FROM pg_locks WHERE NOT granted AND relation = 'second'::regclass";
    cluster.eventually(&format!("SELECT ({waiting}) IS NOT NULL"), "t")?;
    let locked = "SELECT count(*) FROM pg_locks WHERE granted AND relation = 'first'::regclass";
    ensure!(cluster.text(&format!("{locked} AND pid = ({waiting})"))? == "1", "another order");
    run_sql(&mut session, "COMMIT")?;
    joined(rotating)?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    cluster.finish()
}

/// A transaction has locked an index and goes on to lock its table, which the job has locked while
/// it waits for the index. The job gives way; it does not fail.
#[test]
fn a_job_survives_a_deadlock() -> Result<()> {
    // The worker is the first to look for a deadlock, and gives up waiting only later.
    let cluster = cluster(&["pagevault.rekey_workers = 0", "deadlock_timeout = 3s"])?;
    cluster.sql(
        "SELECT pagevault.encrypt('t'); CREATE INDEX t_name ON t (name);
         SELECT pagevault.rotate_data_key('t')",
    )?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "SET deadlock_timeout = '1h'; BEGIN; REINDEX INDEX t_name")?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.eventually(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE NOT granted AND backend_type = 'pagevault rekey'",
        "1",
    )?;
    run_sql(&mut session, "ALTER TABLE t SET UNLOGGED; COMMIT")?;
    let done = "SELECT pagevault.wait_for_rekey('t'::regclass, '1min')";
    ensure!(cluster.text(done)? == "t", "the job is not done");
    assert_sealed(&cluster.files("t")?)?;
    cluster.finish()
}

/// The owner of a table may lock it indefinitely. There are fewer workers than such tables.
#[test]
fn a_locked_table_delays_no_other_job_and_its_own_can_be_cancelled() -> Result<()> {
    let cluster = cluster(&["pagevault.rekey_workers = 0", "pagevault.rekey_threshold = 0"])?;
    cluster.sql("CREATE TABLE v AS SELECT * FROM t; CREATE TABLE w AS SELECT * FROM t")?;
    cluster.sql(
        "SELECT pagevault.encrypt(name) FROM (VALUES ('t'::regclass), ('v'), ('w')) v(name)",
    )?;
    let mut holder = cluster.client()?;
    run_sql(&mut holder, "BEGIN; LOCK TABLE t, v IN ACCESS EXCLUSIVE MODE")?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.sql("SELECT pagevault.wait_for_rekey('w'::regclass)")?;
    assert_sealed(&cluster.files("w")?)?;
    let states = "SELECT string_agg(CASE WHEN state IN ('done', 'cancelled') THEN state ELSE 'not yet' END, ', ' ORDER BY job)
                    FROM pagevault.rekey_jobs";
    ensure!(cluster.text(states)? == "not yet, not yet, done", "{}", cluster.text(states)?);
    cluster.sql("SELECT pagevault.cancel_rekey(min(job)) FROM pagevault.rekey_jobs")?;
    run_sql(&mut holder, "COMMIT")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('v'::regclass)")?;
    ensure!(cluster.text(states)? == "cancelled, done, done", "{}", cluster.text(states)?);
    cluster.finish()
}

/// The archiver handles no interrupts while its command runs (`pgarch_archiveXlog`).
#[test]
fn a_hanging_archive_command_delays_nothing() -> Result<()> {
    let cluster = cluster(&[
        "archive_mode = on",
        "archive_command = 'while [ ! -e go_on ]; do sleep 0.1; done'",
    ])?;
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ArchiveCommand'",
        "1",
    )?;
    let encrypted = encrypt(&cluster, "t");
    std::fs::write(cluster.data_directory().join("go_on"), "")?;
    encrypted?;
    cluster.finish()
}

/// Stops the checkpointer while it writes a page of a table; returns its process id.
fn writing(cluster: &Cluster, table: &str) -> Result<(Pid, JoinHandle<Result<()>>)> {
    cluster.sql(&format!("UPDATE {table} SET name = 'x'"))?;
    let file = cluster.text(&format!("SELECT pg_relation_filenode('{table}')"))?;
    cluster.stop_at(&format!("page.writing {file}"))?;
    let checkpoint = in_background(cluster, "CHECKPOINT")?;
    Ok((cluster.stopped_at("page.writing")?, checkpoint))
}

/// A page being written under the old key might reach the file after the proof that none is left.
#[test]
fn a_command_names_the_process_it_waits_for_and_times_out() -> Result<()> {
    let mut cluster = cluster(&["pagevault.writers_timeout = 500ms"])?;
    cluster.allow_log("is still writing");
    let (pid, checkpoint) = writing(&cluster, "t")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET statement_timeout = '30s'")?;
    let label = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'";
    let error = expect_error(&mut client, label)?;
    ensure!(error.sqlstate == "55P03", "{error}");
    let number = pid.as_raw_nonzero();
    ensure!(error.message == format!("process {number} is still writing a page"), "{error}");
    ensure!(error.detail.contains("checkpointer"), "{error}");
    ensure!(error.hint.contains("pagevault.writers_timeout"), "{error}");
    // The label is not set, no lock is held, and the table can be used.
    ensure!(cluster.text("SELECT count(*) FROM pg_seclabels WHERE objname = 't'")? == "0");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    cluster.resume();
    joined(checkpoint)?;
    run_sql(&mut client, label)?;
    assert_sealed(&cluster.files("t")?)?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    cluster.finish()
}

#[test]
fn a_job_names_the_process_it_waits_for_and_continues() -> Result<()> {
    let mut cluster =
        cluster(&["pagevault.writers_timeout = 200ms", "pagevault.rekey_threshold = 0"])?;
    cluster.allow_log("is still writing");
    let (pid, checkpoint) = writing(&cluster, "t")?;
    let job = "SELECT max(job) FROM pagevault.rekey_jobs";
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'")?;
    cluster
        .eventually_logs(&format!("process {} is still writing a page", pid.as_raw_nonzero()))?;
    // Pausing or cancelling ends the job although that process is still stopped.
    let job = cluster.text(job)?;
    cluster.sql(&format!("SELECT pagevault.pause_rekey({job})"))?;
    cluster.eventually(
        "SELECT count(*)::text FROM pg_locks WHERE classid = 'pg_extension'::regclass AND locktype = 'object'",
        "0",
    )?;
    cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
    cluster.resume();
    joined(checkpoint)?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    assert_sealed(&cluster.files("t")?)?;
    cluster.finish()
}

/// Changes of a file between two scans by the job.
const CHANGES: [&str; 5] = [
    "INSERT INTO t SELECT repeat(md5(i::text), 10) FROM generate_series(1, 1000) i",
    "DELETE FROM t WHERE ctid >= '(20,1)'; VACUUM t",
    "VACUUM FULL t",
    "ALTER TABLE t SET UNLOGGED",
    "TRUNCATE t; INSERT INTO t VALUES ('one')",
];

/// A session that requests an exclusive lock waits for one batch, not for a scan of the whole file.
#[test]
fn ddl_does_not_wait_for_scans_of_the_whole_file() -> Result<()> {
    let cluster = cluster(&[])?;
    encrypt(&cluster, "t")?;
    let looks = ["rekey.looked", "rekey.flushed", "rekey.synced"];
    for change in CHANGES {
        for step in looks {
            // The second time the file keeps its state.
            let change = if step == looks[0] { change } else { "VACUUM FULL t" };
            cluster.stop_at(step)?;
            let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
            cluster.stopped_at(step)?;
            let mut client = cluster.client()?;
            run_sql(&mut client, "SET lock_timeout = '5s'")?;
            for statement in change.split(';') {
                run_sql(&mut client, statement)?;
            }
            let rows = cluster.text("SELECT count(*) FROM t")?;
            cluster.resume();
            let done = cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
            ensure!(done == "t", "{change} at {step}: the job did not end");
            cluster.sql("CHECKPOINT")?;
            assert_sealed(&cluster.files("t")?)?;
            for file in cluster.files("t")? {
                let versions = super::versions_of(&file)?;
                let one = versions.windows(2).all(|pair| pair[0] == pair[1]);
                ensure!(one, "{change} at {step}: {versions:?}");
            }
            ensure!(cluster.text("SELECT count(*) FROM t")? == rows, "{change} at {step}");
        }
    }
    cluster.finish()
}

/// All operations that change or destroy keys of `t`, with idle sessions.
fn nothing_is_delayed(cluster: &Cluster) -> Result<()> {
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET statement_timeout = '30s'; SET synchronous_commit = local")?;
    // A label within its command, a job, former files.
    run_sql(&mut client, "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'")?;
    assert_sealed(&cluster.files("t")?)?;
    let job = text(&mut client, "SELECT pagevault.rotate_data_key('t')")?;
    let done = text(&mut client, &format!("SELECT pagevault.wait_for_rekey({job}, '20s')"))?;
    ensure!(done == "t", "the job did not end");
    run_sql(&mut client, "CREATE TABLE w AS SELECT 1 AS id; SELECT pagevault.encrypt('w')")?;
    run_sql(&mut client, "DROP TABLE w")?;
    run_sql(&mut client, "SELECT * FROM pagevault.shred_former_files('postgres')")
}

/// A session that waits for its client.
fn unread(cluster: &Cluster) -> Result<UnreadingClient> {
    let query = "SELECT t.name FROM t, generate_series(1, 1000)";
    UnreadingClient::new(cluster, "postgres", query)
}

#[test]
fn a_client_that_does_not_read_delays_nothing() -> Result<()> {
    let mut cluster = cluster(&[])?;
    cluster.allow_log("connection to client lost");
    let unreading = unread(&cluster)?;
    nothing_is_delayed(&cluster)?;
    drop(unreading);
    cluster.finish()
}

#[test]
fn a_stopped_client_delays_nothing() -> Result<()> {
    let mut cluster = cluster(&[])?;
    cluster.allow_log("connection to client lost");
    let unreading = unread(&cluster)?;
    let pid = Pid::from_raw(unreading.pid() as i32).context("no process id")?;
    kill_process(pid, Signal::STOP)?;
    nothing_is_delayed(&cluster)?;
    drop(unreading);
    cluster.finish()
}

#[test]
fn an_idle_transaction_delays_nothing() -> Result<()> {
    let cluster = cluster(&[])?;
    let mut session = cluster.client()?;
    run_sql(
        &mut session,
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM t; DECLARE c CURSOR FOR SELECT * FROM t; FETCH 1 FROM c",
    )?;
    nothing_is_delayed(&cluster)?;
    run_sql(&mut session, "FETCH ALL FROM c; INSERT INTO u VALUES (1); COMMIT")?;
    cluster.finish()
}

#[test]
fn an_absent_synchronous_standby_delays_no_job() -> Result<()> {
    let cluster = cluster(&[])?;
    cluster.set(&[("synchronous_standby_names", "absent")])?;
    let session = in_background(&cluster, "INSERT INTO u VALUES (1)")?;
    cluster
        .eventually("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", "1")?;
    nothing_is_delayed(&cluster)?;
    cluster.set(&[("synchronous_standby_names", "")])?;
    joined(session)?;
    cluster.finish()
}

/// The keys of its database are locked: tried again every few seconds, which is not logged.
#[test]
fn a_job_that_waits_for_keys_says_so_once() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_workers = 0")
        .conf("pagevault.unlock_timeout = 1s")
        .conf("log_min_messages = debug1");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("pagevault");
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id;
         SELECT pagevault.rotate_data_key('t')",
    )?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    let said = |text| cluster.log().matches(text).count();
    cluster.eventually_that("the job", || {
        ensure!(said(" waits: ") > 0, "not tried, or not logged");
        Ok(())
    })?;
    // The second worker from now on starts after the first has tried.
    let workers = || said("starting background worker process \"pagevault rekey\"");
    let before = workers();
    cluster.eventually_that("other attempts", || {
        ensure!(workers() > before + 1, "not tried again");
        Ok(())
    })?;
    let why = cluster.text("SELECT error FROM pagevault.rekey_jobs")?;
    ensure!(why.contains("is locked"), "{why}");
    keys.bring_back()?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    let why = cluster.text("SELECT coalesce(error, 'none') FROM pagevault.rekey_jobs")?;
    ensure!(why == "none", "{why}");
    let log = cluster.log();
    ensure!(said("rekey job 1 waits: ") == 1, "{log}");
    ensure!(said("rekey job 1 waits no longer") == 1, "{log}");
    cluster.finish()
}

/// Whoever looks for the cause of a job that does not go on finds it in the view.
#[test]
fn a_job_says_whom_it_waits_for() -> Result<()> {
    let settings = Settings::default().conf("max_prepared_transactions = 2");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE TABLE held AS SELECT 1 AS id; CREATE TABLE prepared AS SELECT 1 AS id;
         CREATE TABLE free AS SELECT 1 AS id",
    )?;
    cluster.set(&[("pagevault.rekey_threshold", "0"), ("pagevault.rekey_workers", "0")])?;
    for table in ["held", "prepared", "free"] {
        cluster.sql(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    let waits = |table: &str| {
        format!(
            "SELECT concat(waits_for, ' ', waits_since < now()) FROM pagevault.rekey_jobs
              WHERE relation = '{table}'::regclass"
        )
    };
    ensure!(cluster.text(&waits("held"))? == " ");
    let mut holder = cluster.client()?;
    run_sql(&mut holder, "BEGIN; LOCK TABLE held")?;
    let pid = text(&mut holder, "SELECT pg_backend_pid()")?;
    let mut other = cluster.client()?;
    run_sql(&mut other, "BEGIN; LOCK TABLE prepared; PREPARE TRANSACTION 'p'")?;
    ensure!(cluster.text(&waits("held"))? == format!("{{{pid}}} t"));
    ensure!(cluster.text(&waits("prepared"))? == "{0} t");
    // With workers that try again and again.
    cluster.set(&[("pagevault.rekey_workers", "2")])?;
    let done = |table: &str| {
        format!("SELECT state FROM pagevault.rekey_jobs WHERE relation = '{table}'::regclass")
    };
    cluster.eventually(&done("free"), "done")?;
    ensure!(cluster.text(&waits("free"))? == " ");
    cluster.eventually(&waits("held"), &format!("{{{pid}}} t"))?;
    cluster.eventually(&waits("prepared"), "{0} t")?;
    run_sql(&mut holder, "COMMIT")?;
    run_sql(&mut other, "ROLLBACK PREPARED 'p'")?;
    cluster.eventually(&done("held"), "done")?;
    cluster.eventually(&done("prepared"), "done")?;
    ensure!(cluster.text(&waits("held"))? == " ");
    Ok(())
}
