//! Citus: tables whose shards are on several servers. Debian has no package of it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Cluster, KeyFile, Settings};
use rustix::process::Pid;

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "citus", needs: &["citus", "citus_columnar"], run: distributed },
    Test { name: "citus_labels", needs: &["citus"], run: labels },
];

fn settings() -> Settings {
    Settings::default()
        .conf("shared_preload_libraries = 'citus, pagevault'")
        .conf("wal_level = logical")
        .conf("max_worker_processes = 32")
        .conf("citus.override_table_visibility = off")
        // Otherwise it drops shards that have moved away while they are looked at.
        .conf("citus.defer_shard_delete_interval = -1")
}

/// A server with keys of its own that can be found by its directory.
fn node(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (mut node, keys) = Cluster::with_keys(settings)?;
    // Its connections to nodes that are killed.
    node.allow_log("Citus Maintenance Daemon");
    // It drops subscriptions after shards have moved by them.
    node.allow_log("terminating logical replication worker due to administrator command");
    node.set(&[("citus.local_hostname", &node.directory().display().to_string())])?;
    node.sql("CREATE EXTENSION citus")?;
    Ok((node, keys))
}

/// One that encrypts everything.
fn sealed_node() -> Result<(Cluster, KeyFile)> {
    let settings = settings()
        .conf("pagevault.default_encryption = on")
        .conf("citus.stat_statements_track = all")
        .conf("citus.stat_statements_purge_interval = -1")
        .conf("compute_query_id = on");
    let (node, keys) = node(&settings)?;
    node.set(&[("pagevault.wal_encryption", "on")])?;
    node.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    node.sql("CREATE EXTENSION IF NOT EXISTS citus_columnar")?;
    Ok((node, keys))
}

fn address(node: &Cluster) -> String {
    format!("'{}', 5432", node.directory().display())
}

const CONTENT: &str = "SELECT concat_ws(' ', (SELECT count(*) || ' ' || sum(id) FROM events),
    (SELECT count(*) || ' ' || sum(length(note)) FROM readings), (SELECT count(*) FROM places),
    (SELECT count(*) FROM events JOIN places USING (place)))";

/// Workers exchange rows; results of subqueries are read by workers, and by the coordinator.
const SUBQUERIES: &str = "
    INSERT INTO holders SELECT note FROM events;
    WITH firsts AS MATERIALIZED (SELECT place, note FROM events ORDER BY note LIMIT 100)
    SELECT count(*) FROM readings JOIN firsts USING (place);
    WITH firsts AS MATERIALIZED (SELECT place, note FROM events ORDER BY note LIMIT 100)
    SELECT count(*) FROM firsts";

/// How many results of subqueries and the like are in plaintext in this directory. They are files
/// of Citus's own until the end of the transaction, so pagevault does not encrypt them. Nothing
/// else is there.
fn results(directory: &Path, canary: &Canary) -> Result<usize> {
    let mut found = Scanner::new([canary]).scan_trees(&[directory])?;
    let all = found.len();
    found.retain(|path, _| !path.iter().any(|part| part == "pgsql_job_cache"));
    ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
    Ok(all)
}

/// A coordinator and a worker, then a second worker to which shards move; each is killed.
fn distributed() -> Result<()> {
    let canary = Canary::text("of a distributed table");
    let key = Canary::text("of a distribution column");
    let (coordinator, _keys) = sealed_node()?;
    let (first, _its_keys) = sealed_node()?;
    let (second, _its_keys) = sealed_node()?;
    coordinator.sql(&format!("SELECT citus_set_coordinator_host({})", address(&coordinator)))?;
    coordinator.sql(&format!("SELECT citus_add_node({})", address(&first)))?;
    // The search for the canary would not find it in compressed columns.
    coordinator.sql(&format!(
        "SET citus.shard_count = 8;
         CREATE TABLE events (id bigint, place int, note text, PRIMARY KEY (place, id));
         CREATE INDEX ON events (note);
         SELECT create_distributed_table('events', 'place');
         CREATE TABLE readings (place int, note text) USING columnar;
         ALTER TABLE readings SET (columnar.compression = none);
         SELECT create_distributed_table('readings', 'place');
         CREATE TABLE holders (name text);
         SELECT create_distributed_table('holders', 'name');
         CREATE TABLE places (place int PRIMARY KEY, name text);
         SELECT create_reference_table('places');
         INSERT INTO places SELECT i, '{0}' FROM generate_series(1, 50) i;
         INSERT INTO events SELECT i, i % 60, '{0}' || i FROM generate_series(1, 6000) i;
         INSERT INTO readings SELECT i % 60, '{0}' || i FROM generate_series(1, 6000) i;
         INSERT INTO holders VALUES ('{1}')",
        canary.as_str(),
        key.as_str()
    ))?;
    let content = coordinator.text(CONTENT)?;

    coordinator.sql(&format!("SELECT citus_add_node({})", address(&second)))?;
    coordinator
        .sql("SELECT rebalance_table_shards('events', shard_transfer_mode => 'force_logical')")?;
    coordinator.sql("SELECT rebalance_table_shards(shard_transfer_mode => 'block_writes')")?;
    ensure!(coordinator.text(CONTENT)? == content, "after moving shards");
    coordinator.sql("UPDATE events SET note = note || '.' WHERE id % 3 = 0")?;
    coordinator.sql(&format!(
        "INSERT INTO readings SELECT i, '{}' FROM generate_series(1, 60) i",
        canary.as_str()
    ))?;
    let content = coordinator.text(CONTENT)?;

    let mut session = coordinator.client()?;
    run_sql(&mut session, "BEGIN")?;
    run_sql(&mut session, SUBQUERIES)?;
    for node in [&first, &second, &coordinator] {
        let data = node.data_directory();
        ensure!(results(&data, &canary)? > 0, "results of subqueries are encrypted, or elsewhere");
        let copy = node.directory().join("copy");
        node.base_backup(&copy)?;
        ensure!(results(&copy.join("base"), &canary)? > 0, "base backups do not contain them");
        let process = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'";
        let process = Pid::from_raw(node.text(process)?.parse()?).context("no process")?;
        node.crash_process(process)?;
        ensure!(results(&data, &canary)? > 0, "the recovery of a running server removes them");
        node.kill()?;
        ensure!(results(&data, &canary)? > 0, "a crash removes them");
        node.start_server()?;
        ensure!(results(&data, &canary)? == 0, "a start does not remove them");
    }
    ensure!(coordinator.text(CONTENT)? == content, "after crashes");

    for (name, node) in [("first", &first), ("second", &second)] {
        node.sql("CHECKPOINT")?;
        let shards = "SELECT oid::regclass FROM pg_class WHERE relkind = 'r'
            AND relname ~ '^(events|readings|holders|places)_[0-9]+$'";
        let shards = column(&mut node.client()?, shards)?;
        let of = |table: &str| shards.iter().filter(|shard| shard.contains(table)).count();
        let found = [of("events_"), of("readings_"), of("holders_"), of("places_")];
        ensure!(found.iter().all(|count| *count > 0), "the {name} worker has {found:?} shards");
        for shard in &shards {
            assert_sealed(&node.family_files(shard)?).with_context(|| shard.clone())?;
        }
    }
    coordinator.sql("CALL citus_cleanup_orphaned_resources()")?;
    run_sql(&mut coordinator.client()?, SUBQUERIES)?;
    ensure!(coordinator.text(CONTENT)? == content, "after cleaning up");
    coordinator.sql(&format!("SELECT FROM holders WHERE name = '{}'", key.as_str()))?;

    // Its statistics of queries name values of distribution columns, in a file from stop to start.
    let statistics = [coordinator.data_directory().join("pg_stat/citus_query_stats.stat")];
    for node in [coordinator, first, second] {
        ensure!(node.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
        node.end()?;
        let data = node.data_directory();
        let found = Scanner::new([&canary]).scan_trees(&[&data])?;
        ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
        let found = Scanner::new([&key]).scan_trees(&[&data])?;
        let expected = statistics.iter().filter(|file| file.starts_with(&data));
        ensure!(found.keys().eq(expected), "in plaintext on disk:\n{}", report(&found));
        let mut node = node;
        node.keep_quiet();
    }
    Ok(())
}

/// Citus hands the label of a table to its shards when it makes them, and no other label. What is
/// encrypted later on the coordinator does not affect them.
fn labels() -> Result<()> {
    let settings = settings();
    let (coordinator, _keys) = node(&settings)?;
    let (first, _its_keys) = node(&settings)?;
    let (second, _its_keys) = node(&settings)?;
    coordinator.sql(&format!("SELECT citus_set_coordinator_host({})", address(&coordinator)))?;
    coordinator.sql(&format!("SELECT citus_add_node({})", address(&first)))?;
    // A schema cannot be handed to the workers in one transaction with tables before it.
    for statements in [
        "CREATE SCHEMA labelled;
         SECURITY LABEL FOR pagevault ON SCHEMA labelled IS 'encrypted';
         CREATE TABLE labelled.inside (id int);
         SELECT create_distributed_table('labelled.inside', 'id');
         INSERT INTO labelled.inside SELECT generate_series(1, 100)",
        "CREATE TABLE early (id int);
         SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted';
         SELECT create_distributed_table('early', 'id');
         INSERT INTO early SELECT generate_series(1, 100)",
        "CREATE TABLE late (id int);
         SELECT create_distributed_table('late', 'id');
         INSERT INTO late SELECT generate_series(1, 100)",
    ] {
        coordinator.sql(&format!("SET citus.shard_count = 4; {statements}"))?;
    }
    coordinator.sql("SELECT pagevault.encrypt('late')")?;
    // Each table, and how its shards on this node are encrypted.
    let shards = |node: &Cluster| -> Result<String> {
        node.text(
            "SELECT coalesce(string_agg(DISTINCT substring(relname, '^[a-z]+') || ' ' ||
                 pagevault.is_encrypted(oid::regclass), ', '), '')
             FROM pg_class WHERE relkind = 'r' AND relname ~ '^(early|late|inside)_[0-9]+$'",
        )
    };
    let encrypted = "SELECT bool_and(pagevault.is_encrypted(name))
        FROM unnest('{early,late,labelled.inside}'::regclass[]) name";
    ensure!(coordinator.text(encrypted)? == "t", "tables on the coordinator");
    let found = shards(&first)?;
    ensure!(found == "early true, inside false, late false", "{found}");

    // A shard gets the table's label where it moves to.
    coordinator.sql(&format!("SELECT citus_add_node({})", address(&second)))?;
    coordinator.sql("SELECT rebalance_table_shards(shard_transfer_mode => 'block_writes')")?;
    let found = shards(&second)?;
    ensure!(found == "early true, inside false, late true", "{found}");
    coordinator.sql("CALL citus_cleanup_orphaned_resources()")?;

    let failed =
        "SELECT count(*) FROM run_command_on_shards('late', 'SELECT pagevault.encrypt(''%s'')')
        WHERE NOT success";
    ensure!(coordinator.text(failed)? == "0", "encrypting shards");
    first.eventually(
        "SELECT bool_and(pagevault.is_encrypted(oid::regclass))
         FROM pg_class WHERE relname ~ '^late_[0-9]+$'",
        "t",
    )?;
    let failed = "SELECT count(*) FROM
        run_command_on_all_nodes('SELECT count(*) FROM pagevault.encrypt_database()')
        WHERE NOT success";
    ensure!(coordinator.text(failed)? == "0", "encrypting databases");
    for node in [&first, &second] {
        node.eventually("SELECT count(*) FROM pagevault.drift(true)", "0")?;
        let found = shards(node)?;
        ensure!(found == "early true, inside true, late true", "{found}");
    }
    ensure!(
        coordinator.text("SELECT count(*) FROM labelled.inside JOIN late USING (id)")? == "100"
    );
    for node in [coordinator, first, second] {
        node.finish()?;
    }
    Ok(())
}
