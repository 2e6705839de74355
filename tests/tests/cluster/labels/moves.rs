//! Enforcement, and relations that come to another place: what was allowed elsewhere is not there.

use std::thread;

use super::places::refused;
use super::*;

fn enforced() -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let settings = Settings::default()
        .conf("pagevault.enforce_encryption = on")
        .conf("allow_in_place_tablespaces = on");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE SCHEMA app; CREATE SCHEMA open; CREATE SCHEMA way")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    Ok((cluster, keys))
}

/// By way of a schema that requires encryption after the table has come; as a partitioned table,
/// whose partitions are made later; with a table, as a sequence of it.
#[test]
fn exceptions_do_not_move_with_what_has_them() -> Result<()> {
    let (cluster, _keys) = enforced()?;
    let because = "would be in plaintext where";
    cluster.sql("CREATE TABLE open.t (id int)")?;
    cluster.sql(&label("TABLE open.t", "'plaintext'"))?;
    cluster.sql("ALTER TABLE open.t SET SCHEMA way")?;
    cluster.sql(&label("SCHEMA way", "'encrypted'"))?;
    refused(&cluster, "ALTER TABLE way.t SET SCHEMA app", &format!("app.t {because}"))?;
    cluster.sql("CREATE TABLE app.above (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE app.above", "'encrypted'"))?;
    let attach = "ALTER TABLE app.above ATTACH PARTITION way.t FOR VALUES IN (7)";
    refused(&cluster, attach, &format!("way.t {because}"))?;
    cluster.sql("ALTER TABLE way.t ADD COLUMN more int; ALTER TABLE way.t SET SCHEMA open")?;

    // A partitioned table has no file, but its partitions and sequences will have some.
    cluster.sql("CREATE TABLE open.p (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE open.p", "'plaintext'"))?;
    refused(&cluster, "ALTER TABLE open.p SET SCHEMA app", &format!("app.p {because}"))?;
    let attach = "ALTER TABLE app.above ATTACH PARTITION open.p FOR VALUES IN (8)";
    refused(&cluster, attach, &format!("open.p {because}"))?;
    cluster.sql("CREATE TABLE open.s (id serial) PARTITION BY LIST (id)")?;
    cluster.sql(&label("SEQUENCE open.s_id_seq", "'plaintext'"))?;
    refused(&cluster, "ALTER TABLE open.s SET SCHEMA app", &format!("app.s_id_seq {because}"))?;

    // A sequence that gets another owner, or whose owner comes below another table.
    cluster.sql("CREATE SEQUENCE open.numbers; CREATE TABLE open.e (id int)")?;
    cluster.sql(&label("SEQUENCE open.numbers", "'plaintext'"))?;
    cluster.sql(&label("TABLE open.e", "'encrypted'"))?;
    let own = "ALTER SEQUENCE open.numbers OWNED BY open.e.id";
    refused(&cluster, own, &format!("open.numbers {because}"))?;
    cluster.sql("CREATE TABLE open.part (id serial)")?;
    cluster.sql(&label("SEQUENCE open.part_id_seq", "'plaintext'"))?;
    let attach = "ALTER TABLE app.above ATTACH PARTITION open.part FOR VALUES IN (9)";
    refused(&cluster, attach, &format!("open.part_id_seq {because}"))?;

    // A table whose sequence keeps its file.
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    cluster.sql(&label("TABLESPACE there", "'encrypted'"))?;
    cluster.sql("CREATE TABLE open.m (id serial)")?;
    cluster.sql(&label("SEQUENCE open.m_id_seq", "'plaintext'"))?;
    refused(
        &cluster,
        "ALTER TABLE open.m SET TABLESPACE there",
        &format!("open.m_id_seq {because}"),
    )?;

    // What requires encryption is the same as before: an exception that an administrator has made.
    cluster.sql(&label("SCHEMA open", "'encrypted'"))?;
    cluster.sql("CREATE TABLESPACE other LOCATION ''")?;
    for statement in [
        "ALTER TABLE open.t SET TABLESPACE other",
        "ALTER TABLE open.p SET TABLESPACE other",
        "ALTER TABLE open.m SET TABLESPACE other",
        "ALTER SEQUENCE open.m_id_seq RESTART",
        "ALTER TABLE open.part ADD COLUMN more serial",
    ] {
        cluster.sql(statement)?;
    }
    cluster.finish()
}

/// A partition whose detaching was interrupted is judged as one that is detached: nothing else can
/// follow.
#[test]
fn a_partition_that_is_half_detached_comes_to_no_place_that_requires_encryption() -> Result<()> {
    let (cluster, _keys) = enforced()?;
    cluster.sql("CREATE TABLE open.p (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE open.p", "'plaintext'"))?;
    cluster.sql(
        "CREATE TABLE open.a PARTITION OF open.p FOR VALUES IN (1) PARTITION BY LIST (id);
         CREATE TABLE open.b PARTITION OF open.a FOR VALUES IN (1);
         INSERT INTO open.p VALUES (1)",
    )?;
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    cluster.sql(&label("TABLESPACE there", "'encrypted'"))?;
    let mut reader = cluster.client()?;
    run_sql(&mut reader, "BEGIN; SELECT count(*) FROM open.p")?;
    let mut breaking = cluster.client()?;
    run_sql(&mut breaking, "SET statement_timeout = '500ms'")?;
    let detach = "ALTER TABLE open.p DETACH PARTITION open.a";
    let interrupted = run_sql(&mut breaking, &format!("{detach} CONCURRENTLY"));
    ensure!(interrupted.is_err(), "nobody had to be waited for");
    run_sql(&mut reader, "COMMIT")?;
    let because = "b would be in plaintext where";
    refused(&cluster, "ALTER TABLE open.b SET SCHEMA app", because)?;
    refused(&cluster, "ALTER TABLE open.b SET TABLESPACE there", because)?;
    cluster.sql("ALTER TABLE open.b ALTER id SET NOT NULL; ALTER TABLE open.b SET SCHEMA way")?;
    cluster.sql(&format!("{detach} FINALIZE"))?;
    refused(&cluster, "ALTER TABLE way.b SET SCHEMA app", because)?;
    cluster.finish()
}

/// While the statement waits for its lock, the names in it come to mean other partitions.
#[test]
fn a_partition_is_not_detached_by_a_name_that_was_another_ones() -> Result<()> {
    let (cluster, _keys) = enforced()?;
    cluster.sql("CREATE TABLE open.p (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE open.p", "'plaintext'"))?;
    cluster.sql(
        "CREATE TABLE app.x PARTITION OF open.p FOR VALUES IN (1);
         CREATE TABLE app.y PARTITION OF open.p FOR VALUES IN (2);
         INSERT INTO open.p VALUES (2)",
    )?;
    cluster.sql(&label("TABLE app.x", "'encrypted'"))?;
    let because = "would be in plaintext where";
    let by_name = |name: &str| format!("ALTER TABLE open.p DETACH PARTITION {name} CONCURRENTLY");
    refused(&cluster, &by_name("app.y"), because)?;
    let mut other = cluster.client()?;
    // The name of another partition, and then one that did not exist.
    for (name, names) in [
        ("app.x", "ALTER TABLE app.x RENAME TO x2; ALTER TABLE app.y RENAME TO x"),
        ("app.z", "ALTER TABLE app.x RENAME TO z"),
    ] {
        run_sql(&mut other, "BEGIN; LOCK TABLE open.p IN ACCESS EXCLUSIVE MODE")?;
        thread::scope(|scope| -> Result<()> {
            let detaching = scope.spawn(|| refused(&cluster, &by_name(name), because));
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
            cluster.eventually(waits, "1")?;
            run_sql(&mut other, &format!("{names}; COMMIT"))?;
            detaching.join().map_err(|_| anyhow::anyhow!("the thread has ended"))?
        })?;
        ensure!(cluster.text("SELECT count(*) FROM open.p")? == "1", "the partition is away");
    }
    // One that is encrypted can be detached.
    cluster.sql(&by_name("app.x2"))?;
    cluster.finish()
}
