//! Citus: tables whose shards are on several servers. Debian has no package of it.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Cluster, KeyFile, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] =
    &[Test { name: "citus", needs: &["citus", "citus_columnar"], run: distributed }];

/// A server with keys of its own that encrypts everything, and can be found by its directory.
fn node() -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default()
        .conf("shared_preload_libraries = 'citus, pagevault'")
        .conf("wal_level = logical")
        .conf("max_worker_processes = 32")
        .conf("citus.override_table_visibility = off")
        .conf("pagevault.default_encryption = on");
    let (mut node, keys) = Cluster::with_keys(&settings)?;
    // Its connections to nodes that are killed.
    node.allow_log("Citus Maintenance Daemon");
    node.set(&[
        ("pagevault.wal_encryption", "on"),
        ("citus.local_hostname", &node.directory().display().to_string()),
    ])?;
    node.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    node.sql("CREATE EXTENSION citus")?;
    node.sql("CREATE EXTENSION IF NOT EXISTS citus_columnar")?;
    Ok((node, keys))
}

fn address(node: &Cluster) -> String {
    format!("'{}', 5432", node.directory().display())
}

const CONTENT: &str = "SELECT concat_ws(' ', (SELECT count(*) || ' ' || sum(id) FROM events),
    (SELECT count(*) || ' ' || sum(length(note)) FROM readings), (SELECT count(*) FROM places),
    (SELECT count(*) FROM events JOIN places USING (place)))";

/// A coordinator and a worker, then a second worker to which shards move; each is killed.
fn distributed() -> Result<()> {
    let canary = Canary::text("of a distributed table");
    let (coordinator, _keys) = node()?;
    let (first, _its_keys) = node()?;
    let (second, _its_keys) = node()?;
    coordinator.sql(&format!("SELECT citus_set_coordinator_host({})", address(&coordinator)))?;
    coordinator.sql(&format!("SELECT citus_add_node({})", address(&first)))?;
    coordinator.sql(&format!(
        "SET citus.shard_count = 8;
         CREATE TABLE events (id bigint, place int, note text, PRIMARY KEY (place, id));
         CREATE INDEX ON events (note);
         SELECT create_distributed_table('events', 'place');
         CREATE TABLE readings (place int, note text) USING columnar;
         SELECT create_distributed_table('readings', 'place');
         CREATE TABLE places (place int PRIMARY KEY, name text);
         SELECT create_reference_table('places');
         INSERT INTO places SELECT i, '{0}' FROM generate_series(1, 50) i;
         INSERT INTO events SELECT i, i % 60, '{0}' || i FROM generate_series(1, 6000) i;
         INSERT INTO readings SELECT i % 60, '{0}' || i FROM generate_series(1, 6000) i",
        canary.as_str()
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
    for node in [&first, &second, &coordinator] {
        node.kill()?;
        node.start_server()?;
    }
    ensure!(coordinator.text(CONTENT)? == content, "after crashes");

    for (name, node) in [("first", &first), ("second", &second)] {
        node.sql("CHECKPOINT")?;
        let shards = "SELECT oid::regclass FROM pg_class WHERE relkind = 'r'
            AND relname ~ '^(events|readings|places)_[0-9]+$'";
        let shards = column(&mut node.client()?, shards)?;
        let of = |table: &str| shards.iter().filter(|shard| shard.contains(table)).count();
        let found = [of("events_"), of("readings_"), of("places_")];
        ensure!(found.iter().all(|count| *count > 0), "the {name} worker has {found:?} shards");
        for shard in &shards {
            assert_sealed(&node.family_files(shard)?).with_context(|| shard.clone())?;
        }
    }
    for node in [coordinator, first, second] {
        ensure!(node.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
        node.end()?;
        let found = Scanner::new([&canary]).scan_trees(&[node.data_directory().as_path()])?;
        ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
        let mut node = node;
        node.keep_quiet();
    }
    Ok(())
}
