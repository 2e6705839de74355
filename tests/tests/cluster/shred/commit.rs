//! Deletions by shredding are not undone by a rollback of the statement that shredded.

use super::*;

const SAMPLED: &str = "SELECT count(*) FROM pg_statistic s JOIN pg_class c ON c.oid = starelid
     WHERE relname IN ('t', 't_name')";
const EXTENDED: &str = "SELECT count(*) FROM pg_statistic_ext_data";

fn analyzed() -> Result<Cluster> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.sql("CREATE STATISTICS both_columns (mcv) ON id, name FROM t; ANALYZE")?;
    ensure!(cluster.text(SAMPLED)? != "0" && cluster.text(EXTENDED)? != "0", "no statistics");
    Ok(cluster)
}

/// Checks that the keys are destroyed and statistics contain no value, now and after a crash.
fn ensure_forgotten(cluster: &Cluster) -> Result<()> {
    for _ in 0..2 {
        let error = cluster.error("SELECT count(*) FROM t")?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        ensure!(cluster.text(SAMPLED)? == "0", "statistics are there");
        ensure!(cluster.text(EXTENDED)? == "0", "extended statistics are there");
        cluster.crash()?;
    }
    Ok(())
}

#[test]
fn statements_that_fail_afterwards() -> Result<()> {
    let cluster = analyzed()?;
    let error = cluster
        .error("SELECT 1 / (count(*) * 0) FROM pagevault.shred('t', confirm => 'public.t')")?;
    ensure!(error.sqlstate == "22012", "{error}");
    ensure_forgotten(&cluster)?;
    cluster.finish()
}

/// The session's snapshots do not show concurrent deletions.
#[test]
fn transactions_with_older_snapshots() -> Result<()> {
    let cluster = analyzed()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET default_transaction_isolation = serializable")?;
    let items = column(&mut client, SHRED)?;
    ensure!(items.iter().any(|item| item == "statistics"), "{items:?}");
    ensure_forgotten(&cluster)?;
    cluster.finish()
}

/// Sends statements by the extended protocol with one Sync after them; returns the server's
/// messages.
fn pipeline(cluster: &Cluster, statements: &[&str]) -> Result<String> {
    let script = cluster.directory().join("pipeline");
    let statements: String = statements.iter().map(|one| format!("{one};\n")).collect();
    std::fs::write(&script, format!("\\startpipeline\n{statements}\\endpipeline\n"))?;
    cluster.installation().give(&script)?;
    let mut pgbench = cluster.program("pgbench");
    let output = pgbench.args(["-n", "-t1", "-Mextended", "-f"]).arg(&script).output()?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn pipelines_that_fail_afterwards() -> Result<()> {
    let mut cluster = analyzed()?;
    cluster.allow_log("division by zero");
    let response = pipeline(&cluster, &[SHRED, "SELECT 1 / 0"])?;
    ensure!(response.contains("division by zero"), "{response}");
    ensure_forgotten(&cluster)?;
    cluster.finish()
}

/// Earlier statements in the pipeline may or may not be possible to roll back.
#[test]
fn pipelines_with_earlier_statements() -> Result<()> {
    let mut cluster = analyzed()?;
    cluster.allow_log("cannot run in a transaction block");
    for before in ["SELECT 1", "CREATE TABLE made (id int)"] {
        let response = pipeline(&cluster, &[before, SHRED])?;
        ensure!(response.contains("shred() cannot run in a transaction block"), "{response}");
    }
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    ensure!(cluster.text(SAMPLED)? != "0", "statistics are gone");
    ensure!(cluster.text("SELECT to_regclass('made') IS NULL")? == "t", "half a pipeline");
    // Nor other work in the same statement.
    let error = cluster.error(
        "CREATE TABLE made (id int);
         WITH made AS (INSERT INTO made VALUES (1) RETURNING id)
         SELECT item FROM made, pagevault.shred('t', 'public.t')",
    )?;
    ensure!(error.sqlstate == "25001", "{error}");
    cluster.finish()
}

/// No worker is available to do it, and nothing is done.
#[test]
fn without_a_free_worker_nothing_is_done() -> Result<()> {
    // Slots for the server's own worker, three of pagevault, and two that rekey.
    let (mut cluster, _keys) = cluster("max_worker_processes = 6\npagevault.rekey_workers = 8")?;
    cluster.allow_log("were destroyed");
    cluster.sql("CREATE STATISTICS both_columns (mcv) ON id, name FROM t; ANALYZE")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE w AS SELECT 1 AS id")?;
    cluster.stop_at("rekey.claimed")?;
    for table in ["u", "w"] {
        cluster.sql(&format!("SELECT pagevault.rotate_data_key('{table}')"))?;
        let workers = if table == "u" { "1" } else { "2" };
        cluster.eventually(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'",
            workers,
        )?;
    }
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "53400", "{error}");
    ensure!(error.message == "no background worker is free to delete statistics", "{error}");
    ensure!(error.detail == "Nothing was destroyed.", "{error}");
    ensure!(error.hint.contains("max_worker_processes"), "{error}");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    cluster.resume();
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state = 'done'", "2")?;
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'",
        "0",
    )?;
    cluster.sql(SHRED)?;
    ensure_forgotten(&cluster)?;
    cluster.finish()
}

/// ANALYZE of a parent table samples the rows of its children.
#[test]
fn statistics_of_parents_are_cleared() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE above (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE low PARTITION OF above FOR VALUES FROM (0) TO (100);
         CREATE TABLE high PARTITION OF above FOR VALUES FROM (100) TO (200);
         INSERT INTO above SELECT i, 'specht ' || i FROM generate_series(0, 199) i;
         CREATE STATISTICS of_above (mcv) ON id, name FROM above; ANALYZE above",
    )?;
    let sampled = |table: &str| {
        cluster.text(&format!(
            "SELECT count(*) FROM pg_statistic WHERE starelid = '{table}'::regclass"
        ))
    };
    ensure!(sampled("above")? == "2" && sampled("low")? == "2" && sampled("high")? == "2");
    ensure!(cluster.text(EXTENDED)? == "1");
    cluster.sql("SELECT * FROM pagevault.shred('low', 'public.low')")?;
    ensure!(sampled("above")? == "0" && sampled("low")? == "0" && sampled("high")? == "2");
    ensure!(cluster.text(EXTENDED)? == "0");
    cluster.finish()
}

/// A table may inherit from several parents. Not only the first is cleared, and samples of other
/// tables stay.
#[test]
fn statistics_of_all_parents_are_cleared() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE one (name text); CREATE TABLE other (name text);
         CREATE TABLE low () INHERITS (one, other);
         INSERT INTO low SELECT 'specht ' || i FROM generate_series(0, 199) i; ANALYZE other",
    )?;
    let sampled = "SELECT count(*) FROM pg_statistic
         WHERE starelid IN ('one'::regclass, 'other'::regclass, 'low'::regclass) AND stainherit";
    ensure!(cluster.text(sampled)? == "1", "no statistics");
    let items =
        column(&mut cluster.client()?, "SELECT * FROM pagevault.shred('low', 'public.low')")?;
    ensure!(cluster.text(sampled)? == "0", "statistics are left");
    ensure!(items.iter().any(|item| item == "statistics"), "{items:?}");
    cluster.finish()
}
