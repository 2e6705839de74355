//! `pagevault.drift` lists differences from labels and settings, and the command that removes each.
//! `pagevault.enforce_encryption` prevents such differences.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::labels::{DEFAULT, cluster, drift, expect, expect_no_drift, heal, label};

#[test]
fn drift_names_the_reason_and_the_remedy() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA \"My App\"")?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "SET search_path = \"My App\";
         CREATE TABLE \"T\" (id serial PRIMARY KEY, name text);
         INSERT INTO \"T\" (name) SELECT repeat(md5(i::text), 10) FROM generate_series(1, 100) i;
         CREATE INDEX \"i\" ON \"T\" (name);
         CREATE MATERIALIZED VIEW m AS SELECT * FROM \"T\";
         CREATE SEQUENCE \"it's\"; SELECT nextval('\"it''s\"')",
    )?;
    let before = text(&mut client, "SELECT md5(string_agg(t::text, '' ORDER BY id)) FROM \"T\" t")?;
    expect_no_drift(&cluster)?;
    cluster.sql(&label("SCHEMA \"My App\"", "'encrypted aes-128-xts'"))?;
    let rows = column(
        &mut client,
        "SELECT relation || '|' || expected || '|' || reason || '|' || actual || '|' || fix
         FROM pagevault.drift WHERE relation::text !~ 'pg_toast' ORDER BY relation::text COLLATE \"C\"",
    )?;
    let why = "encrypted aes-128-xts|schema \"My App\"|plaintext";
    let why = why.replace("schema \"My App\"", "schema My App");
    let heal = |name: &str| format!("SELECT pagevault.reconcile('\"My App\".{name}')");
    let expected = [
        format!("\"T\"|{why}|{}", heal("\"T\"")),
        format!("\"T_id_seq\"|{why}|{}", heal("\"T_id_seq\"")),
        format!("\"T_pkey\"|{why}|{}", heal("\"T\"")),
        format!("\"it's\"|{why}|{}", heal("\"it''s\"")),
        format!("i|{why}|{}", heal("\"T\"")),
        format!("m|{why}|{}", heal("m")),
    ];
    ensure!(rows == expected, "{rows:#?}");
    // Waits for no lock that queries would then wait for.
    let file = text(&mut client, "SELECT pg_relation_filenode('\"T\"')")?;
    run_sql(&mut client, "BEGIN; SELECT count(*) FROM \"T\"")?;
    crate::labels::heal(&cluster)?;
    run_sql(&mut client, "COMMIT")?;
    ensure!(
        text(&mut client, "SELECT pg_relation_filenode('\"T\"')")? == file,
        "it has a new file"
    );
    expect_no_drift(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    crate::assert_sealed(&cluster.family_files("\"My App\".\"T\"")?)?;
    let after = text(&mut client, "SELECT md5(string_agg(t::text, '' ORDER BY id)) FROM \"T\" t")?;
    ensure!(after == before, "rows changed");
    ensure!(text(&mut client, "SELECT nextval('\"it''s\"')")? == "2", "the sequence");
    drop(client);
    cluster.finish()
}

/// The directory and the files disagree: only reading the files shows that.
#[test]
fn drift_reads_the_files_if_told_to() -> Result<()> {
    // With data checksums it would be proven that no page is in plaintext, and such a page refused.
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default().without_checksums())?;
    cluster.allow_log("CONTEXT");
    cluster.sql("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    let plain = cluster.files("t")?.into_iter().next().context("a file")?;
    cluster.sql("CHECKPOINT")?;
    let page = std::fs::read(&plain.path)?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    expect_no_drift(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    // One page in its former state, as after an interrupted encrypt().
    let mut bytes = std::fs::read(&plain.path)?;
    bytes[..8192].copy_from_slice(&page[..8192]);
    std::fs::write(&plain.path, bytes)?;
    cluster.start_server()?;
    ensure!(drift(&cluster)?.is_empty(), "without reading: {:?}", drift(&cluster)?);
    let actual = cluster.text("SELECT actual FROM pagevault.drift(true)")?;
    ensure!(actual == "encrypted aes-256-xts, 1 plaintext pages", "{actual}");
    heal(&cluster)?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000", "rows");
    cluster.finish()
}

#[test]
fn enforcement_permits_changes_that_keep_encryption() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA app; CREATE TABLE old (id int); INSERT INTO old VALUES (1)")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    cluster.sql("CREATE TABLE app.t (id serial PRIMARY KEY); INSERT INTO app.t DEFAULT VALUES")?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    // Out of the schema it stays encrypted; back in the schema it must be.
    cluster.sql("ALTER TABLE app.t SET SCHEMA public")?;
    cluster.sql("VACUUM FULL t")?;
    cluster.sql("ALTER TABLE t SET SCHEMA app")?;
    expect(&cluster, "app.t", DEFAULT)?;
    // Existing relations are drift, and can be used.
    cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
    cluster.sql("ALTER TABLE old ADD COLUMN name text; ALTER TABLE old RENAME TO older")?;
    ensure!(!drift(&cluster)?.is_empty(), "no drift");
    cluster.sql("CREATE TABLE new (id int)")?;
    expect(&cluster, "new", DEFAULT)?;
    // A command that fails after it has altered something; then ROLLBACK, during which no catalog
    // may be read.
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    let alter = "ALTER TABLE older ADD COLUMN c int, ADD CHECK (id > 1)";
    expect_error(&mut client, alter)?;
    run_sql(&mut client, "ROLLBACK; ALTER TABLE older ADD COLUMN c int")?;
    drop(client);
    // In a superuser's session that switches the setting off, only labels decide.
    cluster.sql(&format!(
        "SET pagevault.enforce_encryption = off; {}",
        label("TABLE app.t", "'encrypted aes-128-xts'")
    ))?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET pagevault.enforce_encryption = off")?;
    run_sql(&mut client, &label("TABLE app.t", "'plaintext'"))?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('app.t'::regclass, '60 s')")?;
    drop(client);
    expect(&cluster, "app.t", "plain")?;
    cluster.finish()
}

/// A file system that is not mounted is not a table without pages.
#[test]
fn drift_says_that_a_file_is_missing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let space = cluster.make_tablespace("mount")?;
    cluster.sql("CREATE TABLE t TABLESPACE mount AS SELECT 1 AS id; CHECKPOINT")?;
    cluster.sql(&label("TABLE t", "'encrypted'"))?;
    expect_no_drift(&cluster)?;
    let version = std::fs::read_dir(&space)?.next().context("it is empty")??.path();
    let away = cluster.directory().join("away");
    std::fs::rename(&version, &away)?;
    for query in ["SELECT * FROM pagevault.drift(true)", "SELECT pagevault.is_encrypted('t')"] {
        let error = cluster.error(query)?;
        ensure!(
            error.sqlstate == "58030" && error.message.contains("No such file"),
            "{query}: {error}"
        );
    }
    std::fs::rename(&away, &version)?;
    expect_no_drift(&cluster)?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "t");
    cluster.finish()
}

/// Nothing that `fix` could name brings it to another state.
#[test]
fn what_was_shredded_is_no_drift() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'local', 'main');
         CREATE SCHEMA acme",
    )?;
    cluster.sql(&label("SCHEMA acme", "'encrypted key_group=acme'"))?;
    cluster.sql("CREATE TABLE acme.t (id int PRIMARY KEY); INSERT INTO acme.t VALUES (1)")?;
    cluster.sql("CREATE SCHEMA two")?;
    cluster.sql(&label("SCHEMA two", "'encrypted'"))?;
    cluster.sql("CREATE TABLE two.t AS SELECT 1 AS id")?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    cluster.sql("SELECT * FROM pagevault.shred('two.t', 'two.t')")?;
    cluster.sql(&label("SCHEMA two", "'plaintext'"))?;
    expect_no_drift(&cluster)?;
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0");
    // New storage is not decrypted implicitly, but it can be.
    cluster.sql("TRUNCATE two.t; INSERT INTO two.t VALUES (1)")?;
    heal(&cluster)?;
    expect_no_drift(&cluster)?;
    ensure!(cluster.text("SELECT count(*) FROM two.t")? == "1");
    cluster.finish()
}

/// Only a job that does what the row asks for takes its place.
#[test]
fn a_waiting_rotation_hides_no_partition_in_plaintext() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    cluster.sql("CREATE TABLE p (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE p", "'encrypted'"))?;
    cluster.sql(
        "CREATE TABLE one PARTITION OF p FOR VALUES IN (1); INSERT INTO p VALUES (1);
         CREATE TABLE two AS SELECT 2 AS id",
    )?;
    cluster.sql("SELECT pagevault.rotate_data_key('p')")?;
    cluster.sql("ALTER TABLE p ATTACH PARTITION two FOR VALUES IN (2)")?;
    let two = "SELECT string_agg(fix, ' ') FROM pagevault.drift WHERE relation = 'two'::regclass";
    ensure!(cluster.text(two)? == "SELECT pagevault.reconcile('public.two')", "no row of drift");
    // A job that encrypts it does.
    cluster.sql("SET pagevault.rekey_threshold = 0; SELECT pagevault.reconcile('two')")?;
    let row = "SELECT expected || ' ' || fix FROM pagevault.drift WHERE relation = 'two'::regclass";
    let job = cluster.text("SELECT job FROM pagevault.rekey_jobs WHERE kind = 'encrypt'")?;
    let found = column(&mut cluster.client()?, row)?;
    ensure!(found == [format!("encrypted SELECT pagevault.wait_for_rekey({job})")], "{found:?}");
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    expect(&cluster, "two", DEFAULT)?;
    expect_no_drift(&cluster)?;
    cluster.finish()
}

/// A copy of a database has no jobs.
#[test]
fn a_copy_of_a_table_that_a_job_was_encrypting_is_drift() -> Result<()> {
    const DRIFT: &str =
        "SELECT coalesce(string_agg(concat_ws('|', relation, expected, actual, fix), ', '), 'none')
        FROM pagevault.drift";
    let (cluster, _keys) = cluster()?;
    let workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(&mut model, "CREATE EXTENSION pagevault")?;
    run_sql(&mut model, "CREATE TABLE t AS SELECT generate_series(1, 50000) AS id")?;
    cluster.stop_at("rekey.batch_done")?;
    run_sql(&mut model, "SET pagevault.rekey_threshold = 0; SELECT pagevault.encrypt('t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    run_sql(&mut model, "SELECT pagevault.cancel_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.resume();
    cluster.eventually(workers, "0")?;
    // The job has a row, and its table no second one.
    let found = text(&mut model, DRIFT)?;
    ensure!(found.starts_with("t|encrypted|cancelled, ") && !found.contains(", t|"), "{found}");
    drop(model);
    cluster.sql("CREATE DATABASE copy TEMPLATE model STRATEGY file_copy")?;
    let mut copy = cluster.client_to("copy")?;
    ensure!(text(&mut copy, "SELECT count(*) FROM pagevault.rekey_jobs")? == "0", "jobs");
    let fix = "SELECT pagevault.reconcile('public.t')";
    let found = text(&mut copy, DRIFT)?;
    let expected = format!("t|encrypted|encrypted {DEFAULT}, not all pages rewritten|{fix}");
    ensure!(found == expected, "{found}");
    run_sql(&mut copy, fix)?;
    run_sql(&mut copy, "SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    ensure!(text(&mut copy, "SELECT pagevault.is_encrypted('t')")? == "t", "it is not encrypted");
    ensure!(text(&mut copy, DRIFT)? == "none", "{}", text(&mut copy, DRIFT)?);
    // A rotation leaves encrypted pages only.
    cluster.stop_at("rekey.batch_done")?;
    run_sql(&mut copy, "SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    run_sql(&mut copy, "SELECT pagevault.cancel_rekey(max(job)) FROM pagevault.rekey_jobs")?;
    cluster.resume();
    cluster.eventually(workers, "0")?;
    drop(copy);
    cluster.sql("CREATE DATABASE second TEMPLATE copy STRATEGY file_copy")?;
    let mut second = cluster.client_to("second")?;
    ensure!(text(&mut second, DRIFT)? == "none", "{}", text(&mut second, DRIFT)?);
    drop(second);
    // Nor is a cancelled job the last word about the original.
    let mut model = cluster.client_to("model")?;
    let made = "SELECT count(*) FROM pagevault.encrypt_database()
        WHERE relation = 't'::regclass";
    ensure!(text(&mut model, made)? == "1", "the table is left out");
    run_sql(&mut model, "SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    ensure!(text(&mut model, DRIFT)? == "none", "{}", text(&mut model, DRIFT)?);
    drop(model);
    cluster.finish()
}
