//! Concurrent changes: nothing is destroyed that no longer belongs to the named object.

use super::*;

/// Runs a statement while another session holds locks that it has to wait for, and then commits
/// that session.
fn meanwhile(cluster: &Cluster, other: &str, statement: &str) -> Result<Result<()>> {
    let mut holder = cluster.client()?;
    run_sql(&mut holder, &format!("BEGIN; {other}"))?;
    let mut shredder = cluster.client()?;
    let mine = statement.to_owned();
    let shredder = std::thread::spawn(move || run_sql(&mut shredder, &mine));
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%pagevault.shred%'
            AND pid <> pg_backend_pid()",
        "1",
    )?;
    run_sql(&mut holder, "COMMIT")?;
    shredder.join().map_err(|_| anyhow::anyhow!("panic"))
}

#[test]
fn relations_removed_from_the_object_meanwhile_are_not_destroyed() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE SCHEMA s; CREATE SCHEMA other;
         CREATE TABLE top (id int) PARTITION BY RANGE (id);
         CREATE TABLE middle PARTITION OF top FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id);
         CREATE TABLE first PARTITION OF middle FOR VALUES FROM (0) TO (10);
         CREATE TABLE kept PARTITION OF middle FOR VALUES FROM (10) TO (20);
         INSERT INTO top SELECT generate_series(0, 19);
         CREATE TABLE s.a AS SELECT 1 AS id; CREATE TABLE s.moved AS SELECT 7 AS id;
         CREATE TABLE owner (id serial);
         SELECT nextval('owner_id_seq')",
    )?;
    for (other, statement, kept, holds) in [
        (
            "ALTER TABLE middle DETACH PARTITION kept",
            "SELECT * FROM pagevault.shred('top', 'public.top')",
            "SELECT count(*) FROM kept",
            "10",
        ),
        (
            "ALTER TABLE s.moved SET SCHEMA other",
            "SELECT * FROM pagevault.shred_schema('s', 's')",
            "SELECT id FROM other.moved",
            "7",
        ),
        (
            "ALTER SEQUENCE owner_id_seq OWNED BY NONE",
            "SELECT * FROM pagevault.shred('owner', 'public.owner')",
            "SELECT last_value FROM owner_id_seq",
            "1",
        ),
    ] {
        let outcome = meanwhile(&cluster, other, statement)?;
        let error = outcome.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(cluster.text(kept)? == holds, "{other}: destroyed");
        ensure!(error.contains("was changed meanwhile"), "{other}: {error:?}");
        // Once more, for its current contents.
        cluster.sql(statement)?;
        ensure!(cluster.text(kept)? == holds, "{other}: destroyed");
    }
    cluster.finish()
}

/// Interrupted DROP INDEX and REINDEX CONCURRENTLY leave an index that is neither used nor updated,
/// with all its contents.
#[test]
fn dead_indexes_are_shredded_with_their_table() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("canceling statement due to user request");
    dead_index(&cluster, "t", "t_name")?;
    let keys = wrapped_keys(&cluster, "postgres", "t_name")?;
    ensure!(!keys.is_empty(), "the index has no key");
    cluster.sql(SHRED)?;
    ensure_gone(&cluster, &keys)?;
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.finish()
}

/// Such indexes are encrypted with their table.
#[test]
fn dead_indexes_are_encrypted_with_their_table() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("canceling statement due to user request");
    cluster.sql(
        "CREATE TABLE plain AS SELECT 'kanarienvogel ' || i AS name FROM generate_series(1, 1000) i;
         CREATE INDEX plain_name ON plain (name)",
    )?;
    dead_index(&cluster, "plain", "plain_name")?;
    cluster.sql("SELECT pagevault.encrypt('plain')")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('plain')")? == "t", "not encrypted");
    assert_sealed(&cluster.files("plain_name")?)?;
    cluster.finish()
}

/// Interrupts DROP INDEX CONCURRENTLY at the point where new queries do not use the index, and
/// older ones still might.
fn dead_index(cluster: &Cluster, table: &str, index: &str) -> Result<()> {
    let hold = || -> Result<postgres::Client> {
        let mut client = cluster.client()?;
        run_sql(&mut client, &format!("BEGIN; SELECT count(*) FROM {table}"))?;
        Ok(client)
    };
    let waiting = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
          WHERE a.query LIKE 'DROP INDEX CONCURRENTLY%' AND l.locktype = 'virtualxid' AND NOT l.granted
            AND l.virtualxid = ";
    let xid = |client: &mut postgres::Client| {
        text(
            client,
            "SELECT virtualxid FROM pg_locks WHERE locktype = 'virtualxid' AND pid = pg_backend_pid()",
        )
    };
    let mut first = hold()?;
    let mut dropper = cluster.client()?;
    let drop = format!("DROP INDEX CONCURRENTLY {index}");
    let dropper = std::thread::spawn(move || run_sql(&mut dropper, &drop));
    let id = xid(&mut first)?;
    cluster.eventually(&format!("{waiting}'{id}'"), "1")?;
    let mut second = hold()?;
    let id = xid(&mut second)?;
    run_sql(&mut first, "COMMIT")?;
    cluster.eventually(&format!("{waiting}'{id}'"), "1")?;
    cluster.sql(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE 'DROP INDEX CONCURRENTLY%' AND pid <> pg_backend_pid()",
    )?;
    ensure!(dropper.join().map_err(|_| anyhow::anyhow!("panic"))?.is_err(), "not interrupted");
    run_sql(&mut second, "COMMIT")?;
    let live = cluster
        .text(&format!("SELECT indislive FROM pg_index WHERE indexrelid = '{index}'::regclass"))?;
    ensure!(live == "f", "the index is alive");
    Ok(())
}
