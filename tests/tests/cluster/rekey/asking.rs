//! A job takes effect when the requesting transaction has committed. The policy is checked again
//! before anything becomes plaintext.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings};

use crate::labels::{DEFAULT, expect};
use crate::{assert_plain, assert_sealed};

const ENCRYPT: &str = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'";
const JOBS: &str =
    "SELECT coalesce(string_agg(concat_ws(' ', relation, kind, state), ', ' ORDER BY job), 'none')
    FROM pagevault.rekey_jobs";
const WAIT: &str = "SELECT pagevault.wait_for_rekey('t')";

/// A plaintext table large enough for a job, and a sealed one.
fn cluster() -> Result<Cluster> {
    let settings = Settings::default()
        .conf("pagevault.rekey_threshold = 64kB")
        .conf("max_prepared_transactions = 5");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE TABLE t AS SELECT repeat('x', 500) AS text FROM generate_series(1, 2000);
         SET pagevault.default_encryption = on; CREATE TABLE s AS SELECT 1 AS id",
    )?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

#[test]
fn a_job_exists_only_if_its_transaction_commits() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(&format!("BEGIN; {ENCRYPT}; ROLLBACK"))?;
    cluster.sql(&format!(
        "BEGIN; SAVEPOINT a; {ENCRYPT}; ROLLBACK TO a; CREATE TABLE kept (); COMMIT"
    ))?;
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    // Its own session sees the job, others do not. A session that requests another job waits for
    // the first.
    let mut first = cluster.client()?;
    run_sql(&mut first, "BEGIN; SAVEPOINT a")?;
    run_sql(&mut first, "SELECT pagevault.rotate_data_key('s')")?;
    ensure!(text(&mut first, JOBS)? == "s rotate waiting");
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    let error = expect_error(&mut first, "SELECT pagevault.wait_for_rekey('s'::regclass)")?;
    ensure!(error.sqlstate == "25001", "{error}");
    run_sql(&mut first, "ROLLBACK TO a")?;
    ensure!(text(&mut first, JOBS)? == "none");
    run_sql(&mut first, "SELECT pagevault.rotate_data_key('s'); SAVEPOINT b")?;
    let pause = "SELECT pagevault.pause_rekey(job) FROM pagevault.rekey_jobs";
    let error = expect_error(&mut first, pause)?;
    ensure!(
        error.sqlstate == "25001" && error.message.contains("begins when this transaction commits"),
        "{error}"
    );
    run_sql(&mut first, "ROLLBACK TO b")?;
    // No other session has seen it: cancelling removes it.
    run_sql(&mut first, "SELECT pagevault.cancel_rekey(job) FROM pagevault.rekey_jobs")?;
    ensure!(text(&mut first, JOBS)? == "none");
    let job = text(&mut first, "SELECT pagevault.rotate_data_key('s')")?;
    let second = std::thread::scope(|scope| -> Result<String> {
        let second = scope.spawn(|| cluster.text("SELECT pagevault.rotate_data_key('s')"));
        cluster.eventually(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted",
            "1",
        )?;
        run_sql(&mut first, "ROLLBACK")?;
        second.join().map_err(|_| anyhow::anyhow!("panic"))?
    })?;
    ensure!(second != job, "a number was used again");
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('s'::regclass)")? == "t");
    cluster.sql(ENCRYPT)?;
    ensure!(cluster.text(WAIT)? == "t");
    assert_sealed(&cluster.files("t")?)?;
    cluster.crash()?;
    // The end of a job need not be durable: after a crash it ends once more.
    cluster.eventually(JOBS, "s rotate done, t encrypt done")?;
    cluster.finish()
}

#[test]
fn commit_prepared_begins_the_job() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(&format!("BEGIN; SAVEPOINT a; {ENCRYPT}; PREPARE TRANSACTION 'one'"))?;
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    cluster.crash()?;
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    cluster.sql("COMMIT PREPARED 'one'")?;
    ensure!(cluster.text(WAIT)? == "t");
    assert_sealed(&cluster.files("t")?)?;
    cluster.sql("BEGIN; SELECT pagevault.decrypt('t'); PREPARE TRANSACTION 'two'")?;
    cluster.restart()?;
    cluster.sql("ROLLBACK PREPARED 'two'")?;
    ensure!(cluster.text(JOBS)? == "t encrypt done", "{}", cluster.text(JOBS)?);
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(cluster.text(WAIT)? == "t");
    assert_sealed(&cluster.files("t")?)?;
    cluster.finish()
}

/// Errors that end the transaction after the command.
#[test]
fn a_decryption_that_is_rolled_back_never_begins() -> Result<()> {
    let cluster = cluster()?;
    let mut client = cluster.client()?;
    // Two commands in one message are one transaction, without a transaction block.
    let plain = "SECURITY LABEL FOR pagevault ON TABLE s IS 'plaintext'";
    let error = expect_error(&mut client, &format!("{plain}; SELECT 1 / 0"))?;
    ensure!(error.sqlstate == "22012", "{error}");
    cluster.sql(
        "CREATE FUNCTION forbid() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$;
         CREATE EVENT TRIGGER forbids ON ddl_command_end WHEN TAG IN ('SECURITY LABEL')
             EXECUTE FUNCTION forbid()",
    )?;
    ensure!(cluster.sql(plain).is_err());
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    cluster.sql("DROP EVENT TRIGGER forbids; INSERT INTO s VALUES (2)")?;
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.files("s")?)?;
    cluster.sql(plain)?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('s'::regclass)")? == "t");
    assert_plain(&cluster.files("s")?)?;
    cluster.finish()
}

/// A job waits in the queue while another session requests the opposite.
#[test]
fn encrypting_stops_a_waiting_decryption() -> Result<()> {
    let cluster = cluster()?;
    cluster.stop_at("rekey.claimed")?;
    cluster.sql("SELECT pagevault.decrypt('s')")?;
    cluster.stopped_at("rekey.claimed")?;
    cluster.sql("SELECT pagevault.encrypt('s')")?;
    cluster.resume();
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'",
        "0",
    )?;
    // The job has ended.
    ensure!(cluster.text(JOBS)? == "none", "{}", cluster.text(JOBS)?);
    cluster.sql("INSERT INTO s VALUES (2); CHECKPOINT")?;
    assert_sealed(&cluster.files("s")?)?;
    cluster.finish()
}

/// The label is removed after the worker was started; then that of the schema applies.
#[test]
fn policy_is_checked_again_before_files_become_plaintext() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(
        "CREATE SCHEMA app; SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted';
         CREATE TABLE app.s AS SELECT 1 AS id",
    )?;
    cluster.stop_at("rekey.claimed")?;
    cluster.sql("SELECT pagevault.decrypt('app.s')")?;
    cluster.stopped_at("rekey.claimed")?;
    let mut labels = cluster.client()?;
    run_sql(&mut labels, "BEGIN; SECURITY LABEL FOR pagevault ON TABLE app.s IS NULL")?;
    cluster.resume();
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'pagevault: decrypt%waits for who may label it%'",
        "1",
    )?;
    run_sql(&mut labels, "COMMIT")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('app.s'::regclass)")? == "f");
    let why = cluster.text("SELECT concat_ws(': ', state, error) FROM pagevault.rekey_jobs")?;
    ensure!(why == "cancelled: app.s is to be encrypted: schema app", "{why}");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0", "drift");
    cluster.sql("INSERT INTO app.s VALUES (2); CHECKPOINT")?;
    assert_sealed(&cluster.files("app.s")?)?;
    cluster.finish()
}

/// Resuming a decryption requires the same rights as requesting it.
#[test]
fn resuming_a_decryption_needs_the_right_to_request_it() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(
        "CREATE ROLE owner; CREATE ROLE admin IN ROLE pagevault_admin; ALTER TABLE s OWNER TO owner;
         GRANT EXECUTE ON FUNCTION pagevault.resume_rekey(bigint) TO owner;
         CREATE SCHEMA app AUTHORIZATION owner; ALTER TABLE s SET SCHEMA app",
    )?;
    cluster.stop_at("rekey.claimed")?;
    let _ = cluster.sql("SELECT pagevault.decrypt('app.s')");
    cluster.stopped_at("rekey.claimed")?;
    let job = cluster.text("SELECT max(job) FROM pagevault.rekey_jobs")?;
    cluster.sql(&format!("SELECT pagevault.cancel_rekey({job})"))?;
    cluster.resume();
    let resume = |role: &str| format!("SET ROLE {role}; SELECT pagevault.resume_rekey({job})");
    for (role, message) in [
        ("owner", "permission denied to remove the encryption of app.s"),
        ("admin", "must be owner of relation app.s"),
    ] {
        let error = cluster.error(&resume(role))?;
        ensure!(error.sqlstate == "42501" && error.message == message, "{role}: {error}");
    }
    cluster.sql(
        "SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted';
         SECURITY LABEL FOR pagevault ON TABLE app.s IS NULL",
    )?;
    let error = cluster.error(&resume("postgres"))?;
    ensure!(
        error.sqlstate == "55000"
            && error.message == "app.s is to be encrypted"
            && error.detail == "Decided by: schema app."
            && error.hint == "Change the policy first, or leave the job as it is.",
        "{error}"
    );
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA app IS NULL")?;
    let enforced = "SET pagevault.enforce_encryption = on; SET pagevault.default_encryption = on";
    let error = cluster.error(&format!("{enforced}; {}", resume("postgres")))?;
    ensure!(error.sqlstate == "55000", "{error}");
    // Of two jobs for one relation only one runs.
    cluster.sql("SELECT pagevault.rotate_data_key('app.s')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('app.s'::regclass)")? == "t");
    cluster.sql(&resume("postgres"))?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('app.s'::regclass)")? == "t");
    assert_plain(&cluster.files("app.s")?)?;
    // Nor does a job encrypt what was decrypted later.
    cluster.set(&[("pagevault.rekey_threshold", "0")])?;
    cluster.stop_at("rekey.claimed")?;
    let _ = cluster.sql("SELECT pagevault.encrypt('app.s')");
    cluster.stopped_at("rekey.claimed")?;
    let job = cluster.text("SELECT max(job) FROM pagevault.rekey_jobs")?;
    cluster.sql(&format!("SELECT pagevault.cancel_rekey({job})"))?;
    cluster.resume();
    cluster.sql("SELECT pagevault.decrypt('app.s')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('app.s'::regclass)")? == "t");
    let error = cluster.error(&format!("SELECT pagevault.resume_rekey({job})"))?;
    ensure!(error.sqlstate == "55000" && error.message.contains("decrypted later"), "{error}");
    assert_plain(&cluster.files("app.s")?)?;
    cluster.finish()
}

#[test]
fn timeouts_below_one_second_are_honoured() -> Result<()> {
    let cluster = cluster()?;
    cluster.stop_at("rekey.claimed")?;
    cluster.sql(ENCRYPT)?;
    cluster.stopped_at("rekey.claimed")?;
    let waited = "SELECT pagevault.wait_for_rekey('t'::regclass, '500 ms')";
    let mut client = cluster.client()?;
    let start = std::time::Instant::now();
    ensure!(text(&mut client, waited)? == "f");
    ensure!(start.elapsed().as_millis() >= 500, "it waited {:?}", start.elapsed());
    cluster.resume();
    ensure!(cluster.text(WAIT)? == "t");
    cluster.finish()
}

/// The worker waits for a lock of the session that waits for the worker.
#[test]
fn a_transaction_does_not_wait_for_a_job_that_waits_for_it() -> Result<()> {
    let cluster = cluster()?;
    for (request, lock) in [
        ("SELECT pagevault.rotate_data_key('s')", "ACCESS EXCLUSIVE"),
        (ENCRYPT, "SHARE"),
        (ENCRYPT, "ACCESS EXCLUSIVE"),
    ] {
        let table = if request == ENCRYPT { "t" } else { "s" };
        cluster.sql("SELECT pagevault.decrypt('t')")?;
        ensure!(cluster.text(WAIT)? == "t");
        cluster.stop_at("rekey.claimed")?;
        cluster.sql(request)?;
        cluster.stopped_at("rekey.claimed")?;
        let mut client = cluster.client()?;
        run_sql(&mut client, &format!("BEGIN; LOCK {table} IN {lock} MODE"))?;
        cluster.resume();
        let wait = format!("SELECT pagevault.wait_for_rekey('{table}'::regclass)");
        let error = expect_error(&mut client, &wait)?;
        ensure!(error.sqlstate == "25001", "{error}");
        ensure!(error.detail == format!("The transaction has locked public.{table}."), "{error}");
        run_sql(&mut client, "ROLLBACK")?;
        ensure!(text(&mut client, &wait)? == "t");
    }
    cluster.finish()
}

/// Some jobs need a lock that ANALYZE excludes: one that decrypts, relation by relation, and one
/// that finds an index which nobody has completed.
#[test]
fn a_transaction_does_not_wait_for_a_job_that_waits_for_its_analyze() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql("INSERT INTO s VALUES (1)")?;
    let error = cluster.error("CREATE UNIQUE INDEX CONCURRENTLY half_built ON s (id)")?;
    ensure!(error.sqlstate == "23505", "{error}");
    for request in ["rotate_data_key", "decrypt"] {
        cluster.stop_at("rekey.claimed")?;
        cluster.sql(&format!("SELECT pagevault.{request}('s')"))?;
        cluster.stopped_at("rekey.claimed")?;
        let mut client = cluster.client()?;
        run_sql(&mut client, "BEGIN; ANALYZE s")?;
        cluster.resume();
        let wait = "SELECT pagevault.wait_for_rekey('s'::regclass, '60 s')";
        let error = expect_error(&mut client, wait)?;
        ensure!(error.sqlstate == "25001", "{request}: {error}");
        ensure!(error.detail == "The transaction has locked public.s.", "{request}: {error}");
        run_sql(&mut client, "ROLLBACK")?;
        ensure!(text(&mut client, wait)? == "t", "{request}");
        cluster.sql("DROP INDEX IF EXISTS half_built")?;
    }
    cluster.finish()
}

/// The job of a partitioned table includes its partitions, and what belongs to these.
#[test]
fn who_waits_for_a_partition_waits_for_the_job_of_its_table() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(
        "CREATE TABLE p (id int) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1); CREATE INDEX of_one ON one (id);
         CREATE TABLE two PARTITION OF p FOR VALUES IN (2); INSERT INTO p VALUES (1), (2)",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE two IS 'plaintext'")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted'")?;
    cluster.stop_at("rekey.claimed")?;
    let job = "SET pagevault.rekey_threshold = 0; SELECT pagevault.reconcile('p')";
    cluster.sql(job)?;
    cluster.stopped_at("rekey.claimed")?;
    for relation in ["one", "of_one"] {
        let waited = format!("SELECT pagevault.wait_for_rekey('{relation}'::regclass, '100 ms')");
        ensure!(cluster.text(&waited)? == "f", "{relation} is taken for done");
    }
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('of_one'::regclass)")? == "t");
    expect(&cluster, "one", DEFAULT)?;
    // Its own label counts.
    expect(&cluster, "two", "plain")?;
    cluster.finish()
}

/// The job of its table may have been stopped before it came to the partition.
#[test]
fn who_waits_for_a_partition_learns_that_the_job_of_its_table_was_stopped() -> Result<()> {
    let cluster = cluster()?;
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    cluster.sql(
        "CREATE TABLE p (id int) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1); CREATE INDEX of_one ON one (id);
         CREATE TABLE two PARTITION OF p FOR VALUES IN (2); INSERT INTO p VALUES (1), (2)",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE two IS 'plaintext'")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted'")?;
    cluster.sql("SET pagevault.rekey_threshold = 0; SELECT pagevault.reconcile('p')")?;
    let expect = |relation: &str, wanted: &str| {
        let wait = format!("SELECT pagevault.wait_for_rekey('{relation}'::regclass)");
        let found = cluster.text(&wait)?;
        ensure!(found == wanted, "{relation}: {found}");
        Ok(())
    };
    for order in ["pause", "cancel"] {
        cluster
            .sql(&format!("SELECT pagevault.{order}_rekey(max(job)) FROM pagevault.rekey_jobs"))?;
        for relation in ["p", "one", "of_one"] {
            expect(relation, "f")?;
        }
        // Its own label counts.
        expect("two", "t")?;
    }
    // It has been encrypted since.
    cluster.sql("SELECT pagevault.encrypt('one')")?;
    expect("one", "t")?;
    expect("of_one", "t")?;
    cluster.finish()
}

/// There is no job for small partitions.
#[test]
fn small_partitions_are_reconciled_at_once() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(
        "CREATE TABLE p (id serial) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1);
         CREATE TABLE two PARTITION OF p FOR VALUES IN (2); INSERT INTO p VALUES (1), (2)",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE two IS 'plaintext'")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE p IS 'encrypted'")?;
    ensure!(cluster.text("SELECT pagevault.reconcile('p') IS NULL")? == "t", "a job was made");
    expect(&cluster, "one", DEFAULT)?;
    expect(&cluster, "two", "plain")?;
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0", "there is drift");
    cluster.finish()
}

/// Who may not decrypt a table has it decrypted by no job that was requested for others.
#[test]
fn what_comes_below_a_table_that_is_being_decrypted_is_not_decrypted() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql(
        "CREATE TABLE p (id int) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1); INSERT INTO p VALUES (1);
         SET pagevault.default_encryption = on; CREATE TABLE own AS SELECT 2 AS id",
    )?;
    cluster.sql("SELECT pagevault.encrypt('one')")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE one IS NULL")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE p IS 'plaintext'")?;
    cluster.stop_at("rekey.claimed")?;
    cluster.sql("SELECT pagevault.reconcile('p')")?;
    cluster.stopped_at("rekey.claimed")?;
    let attach = "ALTER TABLE p ATTACH PARTITION own FOR VALUES IN (2)";
    let error = cluster.error(attach)?;
    ensure!(error.sqlstate == "55006", "{error}");
    ensure!(error.detail.contains("public.p"), "{error}");
    ensure!(error.message.ends_with("would decrypt public.own"), "{error}");
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('p')")? == "t");
    expect(&cluster, "one", "plain")?;
    cluster.sql(attach)?;
    expect(&cluster, "own", DEFAULT)?;
    cluster.finish()
}
