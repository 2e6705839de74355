//! Operation of a cluster in which everything is encrypted: replicas, failover, backups, restores.

mod backups;
mod failover;
mod gone;
mod logical;
mod pitr;
mod replication;
mod routes;
mod snapshots;

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::wal::{count, insert, switch};

/// A digest of the tables.
pub(crate) const CONTENT: &str = "SELECT concat_ws(' ',
    (SELECT count(*) || ':' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t),
    (SELECT count(*) || ':' || coalesce(sum(hashtext(l::text)::bigint), 0) FROM large l))";

/// Whether pgbench's transactions are all complete.
const BALANCED: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
    = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";

/// A cluster with a few MB in which catalogs, tables, WAL and temporary files are encrypted.
pub(crate) fn everything(settings: Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    encrypt_everything(&cluster)?;
    fill(&cluster)?;
    Ok((cluster, keys))
}

/// Encrypts everything in a cluster with a master key.
fn encrypt_everything(cluster: &Cluster) -> Result<()> {
    cluster.set(&[
        ("pagevault.default_encryption", "on"),
        ("pagevault.shared_catalog_encryption", "on"),
    ])?;
    cluster.sql("SELECT pagevault.encrypt_database(); SELECT pagevault.encrypt_catalogs()")?;
    switch(cluster, true)?;
    cluster.eventually("SELECT count(*) FROM pagevault.drift(true)", "0")
}

/// Runs each statement in its own transaction.
pub(crate) fn each(cluster: &Cluster, statements: &[&str]) -> Result<()> {
    statements.iter().try_for_each(|statement| cluster.sql(statement))
}

fn fill(cluster: &Cluster) -> Result<()> {
    cluster.sql(
        "CREATE TABLE t (id serial PRIMARY KEY, name text);
         CREATE TABLE large (id int PRIMARY KEY, name text);
         INSERT INTO large SELECT i, repeat(md5(i::text), 6) FROM generate_series(1, 20000) i",
    )?;
    insert(cluster, "amsel", 5000)
}

/// Creates new keys of the kinds that need no page rewritten.
fn rotate_wrapping(cluster: &Cluster) -> Result<()> {
    each(
        cluster,
        &[
            "SELECT pagevault.rotate_cluster_master_key()",
            "SELECT pagevault.rotate_database_key()",
            "SELECT pagevault.rotate_wal_key()",
        ],
    )
}

/// Creates new keys of every kind, for WAL, and for the pages of `t`.
fn rotate_all(cluster: &Cluster) -> Result<()> {
    rotate_wrapping(cluster)?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
    ensure!(done == "t", "new pages are not written in time");
    Ok(())
}

/// A copy taken under load, after replaying all WAL, has the same contents as its original.
fn ends_as_its_original(copy: Cluster, original: Cluster) -> Result<()> {
    ensure!(copy.text(BALANCED)? == "t", "balances differ");
    check(&copy, &original.text(CONTENT)?)?;
    copy.stop(StopMode::Fast)?;
    copy.pg_checksums()?;
    copy.finish()?;
    original.finish()
}

/// Checks that a copy of a cluster is complete, sealed and writable.
fn check(copy: &Cluster, content: &str) -> Result<()> {
    let found = copy.text(CONTENT)?;
    ensure!(found == content, "{found} instead of {content}");
    let plain = "SELECT string_agg(relation::text, ' ') FROM pagevault.drift(true)";
    let plain = copy.text(plain)?;
    ensure!(plain.is_empty(), "not as wanted: {plain}");
    insert(copy, "meise", 500)?;
    copy.sql("CREATE TABLE later AS SELECT * FROM t")?;
    copy.sql("CHECKPOINT")?;
    for table in ["t", "large", "later"] {
        crate::assert_sealed(&copy.family_files(table)?)?;
    }
    crate::wal::assert_hidden(copy, "meise")?;
    copy.crash()?;
    ensure!(count(copy, "meise")? == "500", "rows are missing after a crash");
    copy.sql("DROP TABLE later; DELETE FROM t WHERE name LIKE 'meise-%'")?;
    let found = copy.text(CONTENT)?;
    ensure!(found == content, "{found} instead of {content} after a crash");
    Ok(())
}
