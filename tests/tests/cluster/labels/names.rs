//! Names with a meaning for pagevault: of transient tables, of its own schema, and of copies by
//! pg_repack. Users may choose them too.

use super::*;

/// Any user may give a table the name of a transient one.
#[test]
fn names_of_transient_tables_do_not_avoid_encryption() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE TABLE a (id int); CREATE TABLE b (id int)")?;
    let a = text(&mut client, "SELECT 'a'::regclass::oid")?;
    let b = text(&mut client, "SELECT 'b'::regclass::oid")?;
    run_sql(
        &mut client,
        &format!("ALTER TABLE a RENAME TO pg_temp_{b}; ALTER TABLE b RENAME TO pg_temp_{a}"),
    )?;
    run_sql(&mut client, &label("SCHEMA public", "'encrypted'"))?;
    run_sql(&mut client, &format!("TRUNCATE pg_temp_{a}, pg_temp_{b}"))?;
    expect(&cluster, &format!("pg_temp_{a}"), DEFAULT)?;
    expect(&cluster, &format!("pg_temp_{b}"), DEFAULT)?;
    drop(client);
    cluster.finish()
}

/// Two tables with the names of each other's copy by pg_squeeze. Following them had no end.
#[test]
fn tables_may_be_named_after_each_other() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE TABLE a (id serial); CREATE TABLE b (id serial)")?;
    let a = text(&mut client, "SELECT 'a'::regclass::oid")?;
    let b = text(&mut client, "SELECT 'b'::regclass::oid")?;
    run_sql(
        &mut client,
        &format!("ALTER TABLE a RENAME TO tmp_{b}; ALTER TABLE b RENAME TO tmp_{a}"),
    )?;
    run_sql(&mut client, &label(&format!("TABLE tmp_{a}"), "'encrypted'"))?;
    run_sql(&mut client, &label("SCHEMA public", "'encrypted'"))?;
    run_sql(&mut client, "SELECT count(*) FROM pagevault.drift")?;
    run_sql(&mut client, &format!("TRUNCATE tmp_{a}, tmp_{b}"))?;
    expect(&cluster, &format!("tmp_{a}"), DEFAULT)?;
    expect(&cluster, &format!("tmp_{b}"), DEFAULT)?;
    drop(client);
    cluster.finish()
}

/// "$user" is first in the search path, so this role's objects would be created in the extension's
/// schema.
#[test]
fn a_role_named_pagevault_creates_nothing_in_the_extensions_schema() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE ROLE pagevault SUPERUSER LOGIN; CREATE SCHEMA app")?;
    for statement in [
        "CREATE TABLE mine (id int)",
        "CREATE TABLE mine AS SELECT 1 AS id",
        "CREATE TABLE mine (id int) PARTITION BY LIST (id)",
        "CREATE SEQUENCE mine",
        "CREATE MATERIALIZED VIEW mine AS SELECT 1 AS id",
    ] {
        let error = cluster.error(&format!("SET ROLE pagevault; {statement}"))?;
        ensure!(error.sqlstate == "42501", "{statement}: {error}");
        ensure!(error.message == "permission denied to create pagevault.mine", "{error}");
        ensure!(error.detail == "The schema pagevault is the extension's.", "{error}");
        ensure!(error.hint.starts_with("Name another schema."), "{error}");
    }
    cluster
        .sql("SET ROLE pagevault; CREATE TABLE app.mine (id int); CREATE TEMP TABLE t (id int)")?;
    cluster.finish()
}

/// Without the extension, a schema of its name has no special meaning.
#[test]
fn without_the_extension_a_schema_named_pagevault_is_ordinary() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE DATABASE elsewhere")?;
    let mut client = cluster.client_to("elsewhere")?;
    run_sql(
        &mut client,
        "CREATE SCHEMA pagevault; CREATE TABLE pagevault.before (id int); INSERT INTO pagevault.before VALUES (1)",
    )?;
    run_sql(&mut client, &label("SCHEMA pagevault", "'encrypted'"))?;
    run_sql(&mut client, "CREATE TABLE pagevault.mine AS SELECT 1 AS id")?;
    run_sql(&mut client, &label("TABLE pagevault.before", "'encrypted'"))?;
    run_sql(&mut client, "CHECKPOINT")?;
    for table in ["before", "mine"] {
        let path = format!("SELECT pg_relation_filepath('pagevault.{table}')");
        let path = cluster.data_directory().join(text(&mut client, &path)?);
        crate::assert_sealed(&pagevault_tests::DataFile::find(&path)?).context(table)?;
    }
    drop(client);
    cluster.finish()
}

/// A schema with pg_repack's name, and tables with the names of its copies.
#[test]
fn names_of_pg_repack_copies_do_not_avoid_encryption() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE ROLE stranger; GRANT CREATE ON DATABASE postgres TO stranger;
         CREATE TABLE open (id int)",
    )?;
    cluster.sql(&label("TABLE open", "'plaintext'"))?;
    cluster.sql(&label("DATABASE postgres", "'encrypted'"))?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    let open = cluster.text("SELECT 'open'::regclass::oid")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION stranger; CREATE SCHEMA repack")?;
    for name in [format!("table_{open}"), format!("log_{open}"), "table_4000000000".to_owned()] {
        let name = format!("repack.{name}");
        run_sql(&mut client, &format!("CREATE TABLE {name} AS SELECT 1 AS id"))?;
        expect(&cluster, &name, DEFAULT)?;
        run_sql(&mut client, &format!("TRUNCATE {name}"))?;
        expect(&cluster, &name, DEFAULT)?;
    }
    drop(client);
    cluster.finish()
}

/// The copy finally becomes the table's file, without any further event.
#[test]
fn a_table_that_pg_repack_has_copied_in_plaintext_is_not_encrypted() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    // The extension has another schema; what counts is membership in the extension.
    cluster.sql(
        "UPDATE pg_extension SET extname = 'pg_repack' WHERE extname = 'plpgsql';
         CREATE SCHEMA packed; ALTER EXTENSION pg_repack ADD SCHEMA packed;
         CREATE SCHEMA repack",
    )?;
    cluster.sql(
        "CREATE TABLE t AS SELECT 1 AS id; CREATE MATERIALIZED VIEW v AS SELECT 1 AS id;
         CREATE TABLE parts (id int) PARTITION BY LIST (id);
         CREATE TABLE part PARTITION OF parts FOR VALUES IN (1)",
    )?;
    for (kind, name) in [("TABLE", "t"), ("MATERIALIZED VIEW", "v"), ("TABLE", "part")] {
        let oid = cluster.text(&format!("SELECT '{name}'::regclass::oid"))?;
        let set = label(&format!("{kind} {name}"), "'encrypted'");
        for copy in [format!("log_{oid}"), format!("table_{oid}")] {
            cluster.sql(&format!("CREATE TABLE packed.{copy} AS SELECT 1 AS id"))?;
            for statement in [set.clone(), format!("SELECT pagevault.encrypt('{name}')")] {
                let error = cluster.error(&statement)?;
                ensure!(error.sqlstate == "55006", "{error}");
                ensure!(error.message == format!("public.{name} is being repacked"), "{error}");
                ensure!(
                    error.detail
                        == format!("pg_repack has rows of it in packed.{copy}, in plaintext."),
                    "{error}"
                );
                ensure!(error.hint.starts_with("Wait until pg_repack is done"), "{error}");
            }
            expect(&cluster, name, "plain")?;
            cluster.sql(&format!("DROP TABLE packed.{copy}"))?;
        }
        // Also by the comment around it.
        cluster.sql(&format!("CREATE TABLE packed.log_{oid} AS SELECT 1 AS id"))?;
        cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
        for relation in [name, if name == "part" { "parts" } else { name }] {
            let error = cluster.error(&format!("SELECT pagevault.reconcile('{relation}')"))?;
            ensure!(error.message == format!("public.{name} is being repacked"), "{error}");
        }
        cluster.sql(&label("SCHEMA public", "NULL"))?;
        cluster.sql(&format!("DROP TABLE packed.log_{oid}"))?;
        // Other tables of that name do not matter, nor does an encrypted copy.
        cluster.sql(&format!("CREATE TABLE repack.log_{oid} AS SELECT 1 AS id"))?;
        cluster.sql(&set)?;
        expect(&cluster, name, DEFAULT)?;
        let copy = format!("packed.table_{oid}");
        cluster.sql(&format!("CREATE TABLE {copy} AS SELECT 1 AS id"))?;
        expect(&cluster, &copy, DEFAULT)?;
        cluster.sql(&set)?;
    }
    cluster.finish()
}
