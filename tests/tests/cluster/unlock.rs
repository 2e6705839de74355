//! Unlocking at start, the locked state and the ways out of it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::authenticated::pid_of;

const TABLES: &str = "CREATE TABLE open (id int);
    INSERT INTO open VALUES (1);
    SET pagevault.default_encryption = on;
    CREATE TABLE secret (id int PRIMARY KEY, name text);
    INSERT INTO secret SELECT i, md5(i::text) FROM generate_series(1, 1000) i";

/// A cluster that soon starts locked if its provider is unavailable.
fn impatient() -> Settings {
    Settings::default().conf("pagevault.unlock_timeout = 1s")
}

#[test]
fn an_unavailable_provider_leaves_the_server_locked_until_it_returns() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLES)?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    let started = Instant::now();
    cluster.start_server()?;
    ensure!(started.elapsed() < Duration::from_secs(30), "the start took too long");

    ensure!(cluster.text("SELECT id FROM open")? == "1", "the plain table is not usable");
    cluster.sql("CREATE TABLE open_later (id int); INSERT INTO open_later VALUES (1)")?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(error.text().contains("locked"), "{error}");
    ensure!(!error.hint.is_empty(), "no hint: {error}");
    let error = cluster.error("INSERT INTO secret VALUES (1001, 'x')")?;
    ensure!(error.text().contains("locked"), "{error}");
    let error =
        cluster.error("SET pagevault.default_encryption = on; CREATE TABLE more (id int)")?;
    ensure!(error.text().contains("locked"), "{error}");
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "locked", "status");

    // It unlocks by itself.
    keys.bring_back()?;
    cluster.eventually("SELECT count(*) FROM secret", "1000")?;
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "unlocked", "status");
    cluster.sql("INSERT INTO secret VALUES (1001, 'x')")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1001", "a row is lost");
    cluster.finish()
}

/// A worker cannot go on without the key; the job is not lost for that.
#[test]
fn a_job_waits_until_keys_are_back() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLES)?;
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    cluster.sql("SELECT pagevault.rotate_data_key('secret')")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.stop_at("rekey.claimed")?;
    cluster.start_server()?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    let worker = cluster.stopped_at("rekey.claimed")?.as_raw_nonzero();
    cluster.resume();
    let running = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {worker}");
    cluster.eventually(&running, "0")?;
    let state = "SELECT state FROM pagevault.rekey_jobs";
    let left = cluster.text(state)?;
    ensure!(left == "waiting" || left == "running", "the job is {left}");
    keys.bring_back()?;
    cluster.eventually(state, "done")?;
    cluster.finish()
}

#[test]
fn unlock_tries_again_at_once() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLES)?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    // A failed attempt is an error and does not end the session.
    let mut client = cluster.client()?;
    let unlock = "SELECT pagevault.unlock()";
    let failed = pagevault_tests::cluster::run_sql(&mut client, unlock).is_err();
    ensure!(failed, "unlocked without a key file");
    keys.bring_back()?;
    pagevault_tests::cluster::run_sql(&mut client, unlock)?;
    ensure!(
        pagevault_tests::cluster::text(&mut client, "SELECT count(*) FROM secret")? == "1000",
        "rows are missing"
    );
    drop(client);
    cluster.finish()
}

#[test]
fn recovery_without_the_provider_does_not_start_and_loses_nothing() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("startup process");
    cluster.sql(TABLES)?;
    cluster.kill()?;
    keys.take_away()?;
    let Err(error) = cluster.start_server() else {
        anyhow::bail!("the server recovered sealed pages without keys");
    };
    let output = format!("{error:#}");
    ensure!(output.contains("FATAL"), "{output}");
    ensure!(output.contains("local"), "the provider is not named: {output}");
    ensure!(output.contains("keys"), "the key file is not named: {output}");
    keys.bring_back()?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_wrong_master_key_is_refused_and_nothing_is_damaged() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLES)?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    // Another file at the same path, with a key of the same name.
    let impostor = cluster.key_file("keys", "main")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.text().contains("locked"), "{error}");
    ensure!(cluster.text("SELECT id FROM open")? == "1", "the plain table is not usable");
    ensure!(
        cluster.log().contains("could not unwrap the key of the cluster"),
        "the log does not say why"
    );
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    std::fs::remove_file(impostor.path())?;
    keys.bring_back()?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_provider_outage_while_running_affects_only_rotation() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLES)?;
    keys.take_away()?;
    cluster.sql("INSERT INTO secret VALUES (1001, 'x')")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE more (id int)")?;
    cluster.sql("CREATE DATABASE other")?;
    let error = cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(error.text().contains("local"), "the provider is not named: {error}");
    ensure!(error.text().contains("keys"), "the file is not named: {error}");
    cluster.sql("SELECT count(*) FROM secret")?;
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1001", "rows are missing");
    cluster.finish()
}

/// Read through an index, or with no access at all; in a view, a partition, a subquery; by commands
/// that read pages themselves.
const NAMED: &[(&str, &str)] = &[
    ("SELECT count(*) FROM secret", "secret"),
    ("SELECT name FROM secret WHERE id = 7", "secret"),
    ("SELECT 1 WHERE EXISTS (SELECT FROM open WHERE id IN (SELECT id FROM secret))", "secret"),
    ("WITH s AS (SELECT * FROM secret) SELECT count(*) FROM s", "secret"),
    ("SELECT count(*) FROM seen", "secret"),
    ("PREPARE p AS SELECT count(*) FROM secret; EXECUTE p", "secret"),
    ("COPY secret TO '/dev/null'", "secret"),
    ("SELECT count(*) FROM parts", "part"),
    ("SELECT count(*) FROM parts WHERE id = 1", "part"),
    ("SELECT count(*) FROM parent", "child"),
    ("SELECT last_value FROM numbers", "numbers"),
    ("SELECT nextval('numbers')", "numbers"),
    ("ALTER TABLE secret ADD CHECK (id > 0)", "secret"),
    ("VACUUM secret", "secret"),
    ("ANALYZE secret", "secret"),
    ("ALTER TABLE open ALTER id TYPE bigint", "pg_statistic"),
];

#[test]
fn errors_name_the_locked_relations_that_are_read() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient().conf("autovacuum = off"))?;
    cluster.allow_log("locked");
    cluster.allow_log("pagevault");
    cluster.sql(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE clear PARTITION OF parts FOR VALUES FROM (100) TO (200);
        INSERT INTO parts VALUES (100);
        CREATE TABLE parent (id int);",
    )?;
    cluster.sql(&format!(
        "{TABLES};
        CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (100);
        INSERT INTO parts VALUES (1);
        CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
        INSERT INTO child VALUES (1);
        CREATE TABLE empty (id int);
        CREATE SEQUENCE numbers;
        SECURITY LABEL FOR pagevault ON SEQUENCE numbers IS 'encrypted';
        CREATE VIEW seen AS SELECT * FROM secret;
        ANALYZE"
    ))?;
    let path = |name: &str| cluster.text(&format!("SELECT pg_relation_filepath('{name}')"));
    let (table, index, sequence) = (path("secret")?, path("secret_pkey")?, path("numbers")?);
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    let mut others = Vec::new();
    for (statement, relation) in NAMED {
        let error = cluster.error(statement)?;
        let is_it = error.sqlstate == "55000"
            && error.message == format!("relation \"{relation}\" is locked")
            && error.detail.contains("has not been unwrapped")
            && error.detail.contains("ile is base/");
        others.extend((!is_it).then(|| format!("{statement}: {error}")));
    }
    ensure!(others.is_empty(), "{others:#?}");
    let error = cluster.error("SELECT FROM ONLY secret")?;
    ensure!(
        error.detail.contains(&format!("The file is {index}, of its index \"secret_pkey\".")),
        "{error}"
    );
    let error = cluster.error("VACUUM secret")?;
    ensure!(error.detail.contains(&table), "{error}");

    // Relations that are looked up during execution are unknown before it; the error says how to
    // find them.
    let error = cluster.error("SELECT nextval(concat('num', 'bers')::regclass)")?;
    ensure!(error.message == format!("relation file {sequence} is locked"), "{error}");
    let query = error.hint.split('"').nth(1).unwrap_or_default();
    ensure!(cluster.text(query)? == "numbers", "{error}");

    // Relations that are not read are not refused.
    ensure!(cluster.text("SELECT count(*) FROM parts WHERE id = 100")? == "1", "another partition");
    ensure!(cluster.text("SELECT count(*) FROM empty")? == "0", "an empty table");
    ensure!(cluster.text("SELECT count(*) FROM ONLY parent")? == "0", "a parent without its child");
    cluster.sql("DO $$ BEGIN PERFORM FROM secret; EXCEPTION WHEN OTHERS THEN NULL; END $$")?;
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(cluster.text("SELECT count(*) FROM seen")? == "1000", "rows are missing");
    cluster.finish()
}

/// A locked catalog affects only statements that read it. One may be encrypted and others not, for
/// example after a label was cancelled while it sealed one after the other.
#[test]
fn a_locked_catalog_stops_only_statements_that_read_it() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql(TABLES)?;
    cluster.sql("SELECT pagevault.encrypt('pg_depend')")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM open")? == "1", "the plain table is not usable");
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "locked", "status");
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

/// Replay brings a key while its provider is away, and goes on without it. Nothing was locked
/// before, and nothing else asks providers.
#[test]
fn a_standby_unlocks_by_itself_what_it_has_replayed() -> Result<()> {
    let settings = Settings::default().conf("pagevault.revalidate_interval = 0");
    let (primary, _keys) = Cluster::with_keys(&settings)?;
    let tenant = primary.key_file("tenant", "main")?;
    primary.sql(&tenant.add_provider("tenant"))?;
    primary.sql("SELECT pagevault.create_key_group('tenant')")?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("key group");
    wait_for(&standby, &primary)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    primary.sql(
        "SELECT pagevault.set_key_group_master_key('tenant', 'tenant', 'main');
         CREATE SCHEMA s; SECURITY LABEL FOR pagevault ON SCHEMA s IS 'encrypted key_group=tenant';
         CREATE TABLE s.t AS SELECT 1 AS id",
    )?;
    tenant.take_away()?;
    standby.sql("SELECT pg_wal_replay_resume()")?;
    wait_for(&standby, &primary)?;
    let state = "SELECT state FROM pagevault.key_groups";
    ensure!(standby.text(state)? == "locked", "the test shows nothing");
    tenant.bring_back()?;
    standby.eventually(state, "unlocked")?;
    ensure!(standby.text("SELECT id FROM s.t")? == "1", "a row is missing");
    // When nothing more can come, its worker ends.
    standby.promote()?;
    standby.eventually_that("the worker has ended", || {
        ensure!(pid_of(&standby, "pagevault unlock").is_err(), "it runs");
        Ok(())
    })?;
    standby.finish()?;
    primary.finish()
}
