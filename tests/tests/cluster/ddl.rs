//! Statements that create a new file for an encrypted table, or for its indexes, TOAST table or
//! sequences, keep it encrypted.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::{Cluster, Settings};

use crate::{assert_plain, assert_sealed};

const ROWS: &str = "INSERT INTO t (name, wide)
    SELECT 'kanarienvogel-' || i, repeat(md5(i::text), 400) FROM generate_series(1, 300) i";

/// Every statement that creates a file for the table, one of its indexes, or its TOAST table.
const STATEMENTS: [&str; 14] = [
    "TRUNCATE t",
    "REINDEX TABLE t",
    "REINDEX INDEX t_name",
    "REINDEX INDEX CONCURRENTLY t_name",
    "VACUUM FULL t",
    "CLUSTER t USING t_name",
    "CREATE INDEX t_wide ON t (md5(wide))",
    "CREATE INDEX CONCURRENTLY t_wide_c ON t (md5(wide), id)",
    "CREATE INDEX t_hash ON t USING hash (name)",
    "ALTER TABLE t ALTER id TYPE bigint",
    "ALTER TABLE t ADD COLUMN later int DEFAULT (random() * 100)::int",
    "ALTER TABLE t SET UNLOGGED",
    "ALTER TABLE t SET LOGGED",
    "ALTER TABLE t ADD CONSTRAINT t_unique UNIQUE (name, id)",
];

fn check(cluster: &Cluster, statement: &str) -> Result<()> {
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?).with_context(|| format!("after {statement}"))
}

#[test]
fn every_new_file_of_an_encrypted_table_is_sealed() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)")?;
    cluster.sql("ALTER TABLE t ALTER wide SET STORAGE EXTERNAL")?;
    cluster.sql("CREATE INDEX t_name ON t (name)")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql(ROWS)?;
    check(&cluster, "INSERT")?;
    for statement in STATEMENTS {
        cluster.sql(statement)?;
        if statement.starts_with("TRUNCATE") {
            cluster.sql(ROWS)?;
        }
        check(&cluster, statement)?;
        ensure!(
            cluster.text("SELECT count(*) FROM t WHERE name LIKE 'kanarienvogel-%'")? == "300",
            "rows are missing after {statement}"
        );
    }
    // The same after a restart, from disk only.
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "300", "rows are missing after restart");
    cluster.finish()
}

#[test]
fn a_new_tablespace_keeps_it_encrypted() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.make_tablespace("space")?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)")?;
    cluster.sql("ALTER TABLE t ALTER wide SET STORAGE EXTERNAL")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql(ROWS)?;
    let sum = "SELECT md5(string_agg(t::text, '' ORDER BY id)) FROM t";
    let before = cluster.text(sum)?;
    for statement in [
        "ALTER TABLE t SET TABLESPACE space",
        "ALTER INDEX t_pkey SET TABLESPACE space",
        "ALTER TABLE t SET TABLESPACE pg_default",
    ] {
        cluster.sql(statement)?;
        check(&cluster, statement)?;
        ensure!(cluster.text(sum)? == before, "rows changed by {statement}");
    }
    cluster.crash()?;
    ensure!(cluster.text(sum)? == before, "rows changed by a crash");
    cluster.finish()
}

#[test]
fn with_default_encryption_everything_new_is_sealed_and_the_old_is_not() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE before (id int)")?;
    cluster.sql("INSERT INTO before SELECT generate_series(1, 100)")?;
    cluster.sql("ALTER SYSTEM SET pagevault.default_encryption = on")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    cluster.sql(
        "CREATE TABLE parts (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (500);
         CREATE TABLE part_2 PARTITION OF parts FOR VALUES FROM (500) TO (1000);
         CREATE INDEX parts_id ON parts (id);
         INSERT INTO parts SELECT i, 'x' || i FROM generate_series(1, 999) i;
         CREATE MATERIALIZED VIEW folded AS SELECT count(*) FROM parts;
         REFRESH MATERIALIZED VIEW folded;
         CREATE SEQUENCE numbers; SELECT nextval('numbers');
         CREATE UNLOGGED TABLE volatile (id int PRIMARY KEY);
         INSERT INTO volatile SELECT generate_series(1, 100);
         CREATE TABLE copied AS SELECT * FROM parts;
         ALTER SEQUENCE numbers RESTART;",
    )?;
    // A checkpoint does not write unlogged relations, a shutdown does.
    cluster.restart()?;
    for relation in [
        "part_1",
        "part_2",
        "part_1_id_idx",
        "folded",
        "numbers",
        "volatile",
        "volatile_pkey",
        "copied",
    ] {
        assert_sealed(&cluster.files(relation)?).with_context(|| relation.to_owned())?;
    }
    assert_plain(&cluster.files("before")?)?;
    assert_plain(&cluster.files("pg_class")?)?;
    cluster.finish()
}

#[test]
fn rolled_back_creations_leave_nothing_behind() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let mut client = cluster.client()?;
    for statements in [
        "SET pagevault.default_encryption = on",
        "BEGIN; CREATE TABLE gone (id int PRIMARY KEY); INSERT INTO gone VALUES (1); ROLLBACK",
        "BEGIN; SAVEPOINT s; CREATE TABLE gone (id int); ROLLBACK TO s;
         CREATE TABLE kept (id int); INSERT INTO kept VALUES (7); COMMIT",
    ] {
        run_sql(&mut client, statements)?;
    }
    drop(client);
    cluster.crash()?;
    ensure!(cluster.text("SELECT id FROM kept")? == "7", "the kept table is wrong");
    ensure!(cluster.text("SELECT to_regclass('gone')")?.is_empty(), "the other is still there");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.files("kept")?)?;
    cluster.finish()
}

#[test]
fn a_serial_column_added_later_has_a_sealed_sequence() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql("ALTER TABLE t ADD COLUMN later serial")?;
    cluster.sql("INSERT INTO t (name) SELECT 'x' FROM generate_series(1, 10)")?;
    cluster.sql("CHECKPOINT")?;
    for sequence in ["t_id_seq", "t_later_seq"] {
        assert_sealed(&cluster.files(sequence)?).with_context(|| sequence.to_owned())?;
    }
    cluster.finish()
}

/// In the order of pg_dump: the label is set before the sequence has an owner.
#[test]
fn a_sequence_follows_the_table_that_comes_to_own_it() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id int); SELECT pagevault.encrypt('t')")?;
    // In a separate transaction: while the encrypted table is locked, new storage is sealed.
    cluster.sql("CREATE SEQUENCE s; SELECT nextval('s'); CHECKPOINT")?;
    assert_plain(&cluster.files("s")?)?;
    cluster.sql("ALTER SEQUENCE s OWNED BY t.id; CHECKPOINT")?;
    assert_sealed(&cluster.files("s")?)?;
    ensure!(cluster.text("SELECT nextval('s')")? == "2", "the sequence goes on");
    cluster.finish()
}

/// A command that rewrites a relation calls functions of its owner when the new storage exists
/// already, and is not yet that of the relation.
#[test]
fn a_label_is_refused_while_a_command_rewrites_its_relation() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "CREATE FUNCTION mark(object text, label text DEFAULT 'encrypted') RETURNS int
             LANGUAGE plpgsql AS $$ BEGIN
                 EXECUTE format('SECURITY LABEL FOR pagevault ON %s IS %L', object, label);
                 RETURN 1;
             END $$;
         CREATE FUNCTION try_to_mark(object text) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
                 RETURN mark(object);
             EXCEPTION WHEN object_in_use THEN
                 RETURN 0;
             END $$;
         CREATE TABLE t AS SELECT i AS id, repeat('w', 3000) AS wide FROM generate_series(1, 9) i;
         CREATE TABLE go (id int);
         CREATE MATERIALIZED VIEW v AS SELECT
             CASE WHEN to_regclass('public.gone') IS NOT NULL
             THEN mark('MATERIALIZED VIEW public.v') END AS id;
         ALTER TABLE go RENAME TO gone;
         CREATE TABLE sealed AS SELECT 1 AS id; SELECT pagevault.encrypt('sealed')",
    )?;
    for (relation, statement) in [
        ("t", "ALTER TABLE t ADD COLUMN c int DEFAULT mark('TABLE t')"),
        ("t", "ALTER TABLE t ALTER id TYPE text USING mark('TABLE t')::text"),
        ("t", "ALTER TABLE t ADD COLUMN c bigint DEFAULT pagevault.encrypt('t')"),
        ("v", "REFRESH MATERIALIZED VIEW v"),
        (
            "sealed",
            "ALTER TABLE sealed ADD COLUMN c int DEFAULT mark('TABLE sealed', 'encrypted aes-128-xts')",
        ),
    ] {
        let error = expect_error(&mut client, statement)?;
        ensure!(error.sqlstate == "55006", "{statement}: {error}");
        ensure!(error.message == format!("public.{relation} is being rewritten"), "{error}");
        ensure!(
            error.detail == "A command of this session fills new storage of it.",
            "{statement}: {error}"
        );
        ensure!(error.hint == "Set the label before or after that command.", "{error}");
    }
    // The function may go on without the label.
    run_sql(&mut client, "ALTER TABLE t ADD COLUMN c int DEFAULT try_to_mark('TABLE t')")?;
    run_sql(&mut client, "CHECKPOINT")?;
    for relation in ["t", "v"] {
        assert_plain(&cluster.family_files(relation)?).with_context(|| relation.to_owned())?;
    }
    let labels = "SELECT count(*) FROM pagevault.relations WHERE label IS NOT NULL";
    ensure!(cluster.text(labels)? == "1", "a label that was refused");
    // Other relations, and the same one when the command has ended.
    run_sql(
        &mut client,
        "CREATE TABLE other AS SELECT 1 AS id;
         BEGIN;
         ALTER TABLE t ADD COLUMN d int DEFAULT mark('TABLE other');
         SAVEPOINT s;
         SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted';
         COMMIT",
    )?;
    // An event trigger runs before there is new storage.
    run_sql(
        &mut client,
        "CREATE FUNCTION before_rewriting() RETURNS event_trigger LANGUAGE plpgsql
             AS $$ BEGIN PERFORM mark('TABLE gone'); END $$;
         CREATE EVENT TRIGGER early ON table_rewrite EXECUTE FUNCTION before_rewriting();
         ALTER TABLE gone ADD COLUMN c float DEFAULT random();
         INSERT INTO gone VALUES (1); CHECKPOINT",
    )?;
    for relation in ["t", "other", "gone"] {
        assert_sealed(&cluster.family_files(relation)?).with_context(|| relation.to_owned())?;
    }
    drop(client);
    cluster.finish()
}
