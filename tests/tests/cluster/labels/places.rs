//! What labels around a relation must not do to what is in it, and indexes and sequences that
//! differ from their table.

use super::*;

const RELATION: &str = "SELECT encrypted FROM pagevault.relations WHERE relation =";

fn is_encrypted(cluster: &Cluster, relation: &str) -> Result<bool> {
    Ok(cluster.text(&format!("{RELATION} '{relation}'::regclass"))? == "t")
}

/// A table that stays encrypted in a schema that says `plaintext`.
fn keep_in_plaintext_schema(cluster: &Cluster) -> Result<()> {
    cluster.sql("CREATE SCHEMA secret; CREATE SCHEMA open")?;
    cluster.sql(&label("SCHEMA secret", "'encrypted'"))?;
    cluster.sql(&label("SCHEMA open", "'plaintext'"))?;
    cluster.sql(
        "CREATE TABLE secret.t (id serial, name varchar(20)); CREATE INDEX names ON secret.t (name);
         INSERT INTO secret.t (name) SELECT g FROM generate_series(1, 1000) g;
         ALTER TABLE secret.t SET SCHEMA open",
    )
}

/// ALTER TABLE keeps the file of an index if nothing in it changes (`TryReuseIndex`, tablecmds.c).
#[test]
fn an_index_that_keeps_its_file_keeps_its_state() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE t (name varchar(20)); CREATE INDEX i ON t (name)")?;
    cluster.sql(&label("TABLE t", "'encrypted'"))?;
    cluster.sql("INSERT INTO t SELECT g FROM generate_series(1, 1000) g")?;
    // Also if this session has created the file.
    for before in ["", "REINDEX INDEX i"] {
        let mut client = cluster.client()?;
        run_sql(&mut client, before)?;
        run_sql(&mut client, "BEGIN")?;
        run_sql(&mut client, &label("TABLE t", "'plaintext'"))?;
        run_sql(&mut client, "ALTER TABLE t ALTER name TYPE varchar(40); ROLLBACK")?;
        drop(client);
        expect(&cluster, "t", DEFAULT)?;
    }
    ensure!(
        cluster
            .text("SELECT sealed_only FROM pagevault.relations WHERE relation = 'i'::regclass")?
            == "t",
        "the index may contain plaintext",
    );
    // Older than the label that requires encryption.
    cluster.sql("CREATE SCHEMA app; CREATE TABLE app.u (name varchar(20))")?;
    cluster.sql("CREATE INDEX j ON app.u (name); INSERT INTO app.u VALUES ('x')")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    for end in ["ROLLBACK", "COMMIT"] {
        cluster.sql(&format!("BEGIN; ALTER TABLE app.u ALTER name TYPE varchar(40); {end}"))?;
        expect(&cluster, "app.u", "plain").context(end)?;
        let expected = ["app.j: encrypted (schema app)", "app.u: encrypted (schema app)"];
        ensure!(drift(&cluster)? == expected, "{end}: {:?}", drift(&cluster)?);
    }
    heal(&cluster)?;
    expect(&cluster, "app.u", DEFAULT)?;
    cluster.finish()
}

/// A sequence that does not meet its label made SET TABLESPACE decrypt the table.
#[test]
fn a_move_decrypts_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    keep_in_plaintext_schema(&cluster)?;
    cluster.sql(&label("SEQUENCE open.t_id_seq", "'encrypted aes-256-xts'"))?;
    let other = label("SEQUENCE open.t_id_seq", "'encrypted aes-128-xts'");
    cluster.sql(&format!("BEGIN; {other} ROLLBACK"))?;
    cluster.sql("ALTER TABLE open.t SET TABLESPACE space")?;
    let jobs = "SELECT count(*) FROM pagevault.rekey_jobs WHERE kind = 'decrypt'";
    ensure!(cluster.text(jobs)? == "0", "a job decrypts the table");
    ensure!(is_encrypted(&cluster, "open.t")?, "the table is in plaintext");
    cluster.finish()
}

/// An index that lacks encryption, of a table that is encrypted although its schema says
/// `plaintext`.
#[test]
fn encrypt_database_decrypts_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA open; CREATE SCHEMA secret; CREATE TABLE secret.t (name text)")?;
    cluster.sql("CREATE INDEX names ON secret.t (name); INSERT INTO secret.t VALUES ('x')")?;
    cluster.sql(&label("SCHEMA secret", "'encrypted'"))?;
    cluster.sql(&label("SCHEMA open", "'plaintext'"))?;
    // A job is to encrypt the index, and is cancelled.
    cluster.sql(
        "SET pagevault.rekey_threshold = 0; BEGIN; ALTER TABLE secret.t SET TABLESPACE space;
         SELECT pagevault.cancel_rekey(job) FROM pagevault.rekey_jobs; COMMIT",
    )?;
    cluster.sql("ALTER TABLE secret.t SET SCHEMA open")?;
    ensure!(!is_encrypted(&cluster, "open.names")?, "the index is encrypted already");
    cluster.sql("SELECT * FROM pagevault.encrypt_database()")?;
    expect(&cluster, "open.t", DEFAULT)?;
    cluster.finish()
}

/// The owner of a sequence may give it to a table in plaintext, but not decrypt it.
#[test]
fn a_sequence_stays_encrypted_whatever_table_owns_it() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA app")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    cluster.sql("CREATE TABLE app.open (id int); CREATE SEQUENCE app.s")?;
    cluster.sql(&label("TABLE app.open", "'plaintext'"))?;
    cluster.sql("SELECT pagevault.wait_for_rekey('app.open'::regclass)")?;
    cluster.sql("ALTER SEQUENCE app.s OWNED BY app.open.id; ALTER SEQUENCE app.s RESTART")?;
    ensure!(is_encrypted(&cluster, "app.s")?, "the sequence is in plaintext");
    cluster.finish()
}

/// What event triggers rewrite while CREATE EXTENSION pagevault runs stays encrypted.
#[test]
fn create_extension_decrypts_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE DATABASE app")?;
    let mut client = cluster.client_to("app")?;
    run_sql(
        &mut client,
        "SET pagevault.default_encryption = on; CREATE TABLE kept (id int);
         RESET pagevault.default_encryption; CREATE TABLE open (id int);
         CREATE FUNCTION tidy() RETURNS event_trigger LANGUAGE plpgsql AS $$
             BEGIN TRUNCATE public.kept; TRUNCATE public.open; END $$;
         CREATE EVENT TRIGGER tidy ON ddl_command_end WHEN TAG IN ('CREATE FUNCTION')
             EXECUTE FUNCTION tidy()",
    )?;
    run_sql(&mut client, "CREATE EXTENSION pagevault; DROP EVENT TRIGGER tidy")?;
    let kept = text(&mut client, &format!("{RELATION} 'kept'::regclass"))?;
    ensure!(kept == "t", "the table is in plaintext");
    drop(client);
    cluster.finish()
}

/// A partitioned table has no file, but may own sequences.
#[test]
fn sequences_of_partitioned_tables_follow_them() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE top (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE top", "'encrypted'"))?;
    cluster.sql("CREATE TABLE mid (id serial) PARTITION BY LIST (id)")?;
    cluster.sql("ALTER TABLE top ATTACH PARTITION mid FOR VALUES IN (1, 2)")?;
    ensure!(is_encrypted(&cluster, "mid_id_seq")?, "attached with its table");
    cluster.sql("CREATE TABLE moved (id serial) PARTITION BY LIST (id)")?;
    cluster.sql("CREATE TABLE stays PARTITION OF moved FOR VALUES IN (1)")?;
    cluster.sql("INSERT INTO stays VALUES (1)")?;
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    cluster.sql("ALTER TABLE moved SET TABLESPACE space")?;
    ensure!(is_encrypted(&cluster, "moved_id_seq")?, "moved with its table");
    ensure!(!is_encrypted(&cluster, "stays")?, "the partition has not moved");
    cluster.finish()
}

/// With enforcement, no relation is in plaintext where a label requires encryption, however it came
/// there.
#[test]
fn enforcement_has_no_way_around() -> Result<()> {
    let settings = Settings::default().conf("pagevault.enforce_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE SCHEMA app; CREATE SCHEMA open")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    // The label goes after the table has come.
    cluster.sql("CREATE TABLE open.t (id int); INSERT INTO open.t VALUES (1)")?;
    cluster.sql(&label("TABLE open.t", "'plaintext'"))?;
    cluster.sql("SET pagevault.enforce_encryption = off; ALTER TABLE open.t SET SCHEMA app")?;
    refused(&cluster, &label("TABLE app.t", "NULL"), "app.t would be in plaintext where")?;
    cluster.sql(&label("TABLE app.t", "'encrypted'"))?;
    cluster.sql(&label("TABLE app.t", "NULL"))?;
    // A table that is plaintext by its own label does not come where that would be refused.
    cluster.sql("CREATE TABLE open.exception (id int); INSERT INTO open.exception VALUES (1)")?;
    cluster.sql(&label("TABLE open.exception", "'plaintext'"))?;
    cluster.sql("CREATE TABLE open.all (id int) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE open.all", "'encrypted'"))?;
    for statement in [
        "ALTER TABLE open.exception SET SCHEMA app",
        "ALTER TABLE open.all ATTACH PARTITION open.exception FOR VALUES IN (1)",
    ] {
        refused(&cluster, statement, "exception would be in plaintext where")?;
    }
    // Nor in one transaction, before the job that the label makes.
    cluster.sql("CREATE TABLE app.held (id int); INSERT INTO app.held VALUES (1)")?;
    let held = label("TABLE open.held", "'plaintext'");
    refused(
        &cluster,
        &format!(
            "BEGIN; ALTER TABLE app.held SET SCHEMA open; {held} ALTER TABLE open.held SET SCHEMA app"
        ),
        "held would be in plaintext where",
    )?;
    // So of a sequence whose table has no file.
    cluster.sql("CREATE TABLE open.s (id serial) PARTITION BY LIST (id)")?;
    cluster.sql(&label("TABLE open.s", "'plaintext'"))?;
    cluster.sql("SET pagevault.enforce_encryption = off; ALTER TABLE open.s SET SCHEMA app")?;
    refused(&cluster, &label("TABLE app.s", "NULL"), "app.s_id_seq would be in plaintext where")?;
    // A new partition has the name of a copy.
    cluster.sql("SET pagevault.enforce_encryption = off; CREATE TABLE app.p (id int) PARTITION BY LIST (id);
         SECURITY LABEL FOR pagevault ON TABLE app.p IS 'plaintext'")?;
    let oid = cluster.text("SELECT 'app.t'::regclass::oid")?;
    cluster.sql(&format!("CREATE TABLE app.tmp_{oid} PARTITION OF app.p DEFAULT"))?;
    ensure!(is_encrypted(&cluster, &format!("app.tmp_{oid}"))?, "the partition is in plaintext");
    cluster.sql(&format!("DROP TABLE app.tmp_{oid}"))?;
    // Detaching in several transactions is refused before the first, and its end is not.
    cluster.sql("CREATE TABLE app.one PARTITION OF app.p FOR VALUES IN (1)")?;
    cluster.sql("INSERT INTO app.p VALUES (1)")?;
    let detach = "ALTER TABLE app.p DETACH PARTITION app.one";
    for how in ["", "CONCURRENTLY"] {
        refused(&cluster, &format!("{detach} {how}"), "app.one would be in plaintext where")?;
        ensure!(cluster.text("SELECT count(*) FROM app.p")? == "1", "the partition is away");
    }
    let mut reader = cluster.client()?;
    run_sql(&mut reader, "BEGIN; SELECT count(*) FROM app.p")?;
    let mut breaking = cluster.client()?;
    run_sql(&mut breaking, "SET pagevault.enforce_encryption = off")?;
    run_sql(&mut breaking, "SET statement_timeout = '500ms'")?;
    let interrupted = run_sql(&mut breaking, &format!("{detach} CONCURRENTLY"));
    ensure!(interrupted.is_err(), "nobody had to be waited for");
    run_sql(&mut reader, "COMMIT")?;
    cluster.sql(&format!("{detach} FINALIZE"))?;
    drop((reader, breaking));
    // Within ATTACH, a function names the same partition in such a statement.
    cluster.sql(
        "CREATE FUNCTION open.inner() RETURNS void LANGUAGE plpgsql AS $$ BEGIN
             EXECUTE 'ALTER TABLE open.top DETACH PARTITION open.low FINALIZE';
         EXCEPTION WHEN others THEN NULL; END $$;
         CREATE FUNCTION open.key(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
             PERFORM open.inner(); RETURN id; END $$;
         CREATE TABLE open.top (id int) PARTITION BY RANGE (open.key(id));
         CREATE TABLE open.low AS SELECT 1 AS id;
         SECURITY LABEL FOR pagevault ON TABLE open.top IS 'encrypted'",
    )?;
    let attach = "ALTER TABLE open.top ATTACH PARTITION open.low FOR VALUES FROM (0) TO (9)";
    refused(&cluster, attach, "open.low would be in plaintext where")?;
    cluster.finish()
}

pub(super) fn refused(cluster: &Cluster, statement: &str, because: &str) -> Result<()> {
    let error = cluster.error(statement)?;
    ensure!(error.message.contains(because), "{statement}: {error:?}");
    Ok(())
}
