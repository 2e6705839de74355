//! A label takes effect for all sessions at its commit, also in transactions that have created
//! relations before it.

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{column, run_sql, text};

use crate::labels::{DEFAULT, expect, label};

/// How the label is committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Commit {
    AtOnce,
    Prepared,
}

/// A transaction runs `before`, another one labels `object`, then the first runs `after`. Checks
/// the files of `relation`.
fn check(commit: Commit, object: &str, before: &str, after: &str, relation: &str) -> Result<()> {
    let settings = pagevault_tests::Settings::default().conf("max_prepared_transactions = 5");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE SCHEMA app;
         CREATE TABLE root (id int) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF root FOR VALUES IN (1);
         CREATE TABLE two PARTITION OF root FOR VALUES IN (2)",
    )?;
    let mut maker = cluster.client()?;
    run_sql(&mut maker, &format!("BEGIN; {before}"))?;
    let labels = label(object, "'encrypted'");
    match commit {
        Commit::AtOnce => cluster.sql(&labels)?,
        Commit::Prepared => {
            cluster.sql(&format!("BEGIN; {labels} PREPARE TRANSACTION 'label'"))?;
            run_sql(&mut maker, before.replace("first", "second").as_str())?;
            cluster.sql("COMMIT PREPARED 'label'")?;
        }
    }
    run_sql(&mut maker, &format!("{after}; COMMIT"))?;
    expect(&cluster, relation, DEFAULT)?;
    let drift = column(&mut cluster.client()?, "SELECT relation::text FROM pagevault.drift")?;
    ensure!(!drift.iter().any(|drifting| drifting == relation), "drift: {drift:?}");
    drop(maker);
    cluster.finish()
}

#[test]
fn of_a_schema() -> Result<()> {
    for commit in [Commit::AtOnce, Commit::Prepared] {
        let (before, after) = ("CREATE TABLE app.first (id int)", "CREATE TABLE app.t (id int)");
        check(commit, "SCHEMA app", before, after, "app.t")?;
    }
    Ok(())
}

#[test]
fn of_the_database() -> Result<()> {
    let (before, after) = ("CREATE TABLE first (id int)", "CREATE TABLE t (id int)");
    check(Commit::AtOnce, "DATABASE postgres", before, after, "t")
}

/// A new partition is in plaintext by a label that goes before its transaction ends.
#[test]
fn of_a_partitioned_table_that_said_plaintext() -> Result<()> {
    let settings = pagevault_tests::Settings::default();
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE SCHEMA app")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    cluster.sql("CREATE TABLE app.root (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE app.root", "'plaintext'"))?;
    cluster.sql(
        "CREATE TABLE app.mid PARTITION OF app.root FOR VALUES IN (1, 2) PARTITION BY LIST (id)",
    )?;
    let mut maker = cluster.client()?;
    run_sql(&mut maker, "BEGIN; CREATE TABLE app.t PARTITION OF app.mid FOR VALUES IN (1)")?;
    cluster.sql(&label("TABLE app.root", "NULL"))?;
    run_sql(&mut maker, "COMMIT")?;
    expect(&cluster, "app.t", DEFAULT)?;
    drop(maker);
    cluster.finish()
}

/// A table is older than the first master key.
#[test]
fn of_a_cluster_that_had_no_key() -> Result<()> {
    let cluster = Cluster::start(&pagevault_tests::Settings::default())?;
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql("CREATE EXTENSION pagevault; CREATE SCHEMA app")?;
    let mut maker = cluster.client()?;
    run_sql(&mut maker, "BEGIN; CREATE TABLE app.t (id int)")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    run_sql(&mut maker, "COMMIT")?;
    expect(&cluster, "app.t", DEFAULT)?;
    drop(maker);
    cluster.finish()
}

/// Using a partition does not lock the partitioned table.
#[test]
fn of_a_partitioned_table() -> Result<()> {
    let (before, after) = ("CREATE INDEX ON one (id)", "CREATE INDEX of_two ON two (id)");
    check(Commit::AtOnce, "TABLE root", before, after, "of_two")
}

/// A committed label is visible a moment before other sessions are told so. Until then they read
/// labels with the snapshot of catalogs that they have.
#[test]
fn of_a_schema_that_was_looked_at_in_the_midst_of_the_commit() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&pagevault_tests::Settings::default())?;
    cluster.sql("CREATE SCHEMA app; CREATE SCHEMA other")?;
    cluster.sql(&label("SCHEMA other", "'encrypted'"))?;
    let mut maker = cluster.client()?;
    run_sql(&mut maker, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT to_regclass('nothing')")?;
    cluster.stop_at("labels.committed")?;
    std::thread::scope(|scope| {
        let labels = scope.spawn(|| cluster.sql(&label("SCHEMA app", "'encrypted'")));
        let made = cluster
            .stopped_at("labels.committed")
            .and_then(|_| run_sql(&mut maker, "CREATE TABLE app.early (id int)"));
        cluster.resume();
        let Ok(labelled) = labels.join() else { anyhow::bail!("the labelling session panicked") };
        made.and(labelled)
    })?;
    run_sql(&mut maker, "CREATE TABLE app.late (id int)")?;
    run_sql(&mut maker, "INSERT INTO app.early VALUES (1); INSERT INTO app.late VALUES (1)")?;
    let sealed =
        "SELECT bool_and(encrypted) FROM pagevault.relations WHERE relation = 'app.late'::regclass";
    ensure!(text(&mut maker, sealed)? == "t", "the table made after the label is in plaintext");
    run_sql(&mut maker, "COMMIT")?;
    expect(&cluster, "app.early", DEFAULT)?;
    expect(&cluster, "app.late", DEFAULT)?;
    drop(maker);
    cluster.finish()
}
