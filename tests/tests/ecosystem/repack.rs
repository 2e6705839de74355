//! pg_repack: copies a table in use, and finally exchanges the files.

use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::datafile::{assert_plain, assert_sealed};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use crate::Test;
use crate::inspection::twins;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "pg_repack", needs: &["pg_repack"], run: of_tables },
    Test { name: "pg_repack_under_way", needs: &["pg_repack"], run: under_way },
    Test { name: "pg_repack_of_plaintext", needs: &["pg_repack"], run: of_plaintext },
    Test { name: "pg_repack_schema_of_others", needs: &["pg_repack"], run: schema_of_others },
];

const DIGEST: &str =
    "SELECT count(*) || ' ' || md5(string_agg(s::text, '' ORDER BY id)) FROM sealed s";

/// pg_repack of a table in the background.
fn start(cluster: &Cluster, table: &str) -> Result<Child> {
    let mut command = cluster.program("pg_repack");
    command
        .args([&format!("--table={table}"), "postgres"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Ok(command.spawn()?)
}

fn check(cluster: &Cluster, what: &str) -> Result<()> {
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?).context(what.to_owned())?;
    assert_plain(&cluster.family_files("open")?).context(what.to_owned())?;
    let drift = column(&mut cluster.client()?, "SELECT r::text FROM pagevault.drift(true) r")?;
    ensure!(drift.is_empty(), "{what}: {drift:?}");
    Ok(())
}

fn of_tables() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    cluster.make_tablespace("space")?;
    let rows = cluster.text(DIGEST)?;
    for arguments in [
        &["--table=sealed", "--table=open"][..],
        &["--table=sealed", "--order-by=name", "--jobs=2"],
        &["--table=sealed", "--only-indexes"],
        &["--index=sealed_pkey"],
        &["--table=sealed", "--tablespace=space", "--moveidx"],
        &["--all"],
    ] {
        let before = cluster.text("SELECT pg_relation_filepath('sealed_pkey')")?;
        run(cluster.program("pg_repack").args(arguments).env("PGDATABASE", "postgres"))?;
        check(&cluster, &format!("{arguments:?}"))?;
        let after = cluster.text("SELECT pg_relation_filepath('sealed_pkey')")?;
        ensure!(before != after, "{arguments:?} did nothing");
        ensure!(cluster.text(DIGEST)? == rows, "{arguments:?}: rows");
    }
    cluster.crash()?;
    ensure!(cluster.text(DIGEST)? == rows, "rows after a crash");
    cluster.finish()
}

/// While it waits for an old transaction: the copy, the log table, and their indexes and TOAST
/// tables.
fn under_way() -> Result<()> {
    let (mut cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    cluster.allow_log("terminating connection");
    let mut old = cluster.client()?;
    run_sql(&mut old, "BEGIN; SELECT count(*) FROM open")?;
    let mut child = start(&cluster, "sealed")?;
    let table = cluster.text("SELECT 'sealed'::regclass::oid")?;
    // The copy is complete when its index exists.
    cluster.eventually(
        &format!("SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('repack.table_{table}') AND indisvalid"),
        "1",
    )?;
    cluster.sql("UPDATE sealed SET name = repeat('changed', 100) WHERE id % 3 = 0")?;
    cluster.sql("CHECKPOINT")?;
    for relation in [format!("repack.table_{table}"), format!("repack.log_{table}")] {
        assert_sealed(&cluster.family_files(&relation)?).context(relation)?;
    }
    assert_sealed(&cluster.files(&format!("repack.log_{table}_id_seq"))?)?;
    let rows = cluster.text(DIGEST)?;
    run_sql(&mut old, "COMMIT")?;
    ensure!(child.wait()?.success(), "pg_repack failed");
    ensure!(cluster.text(DIGEST)? == rows, "rows");
    drop(old);
    check(&cluster, "under way")?;

    // If killed now, it leaves its tables. They are sealed, and DROP EXTENSION removes them.
    let mut old = cluster.client()?;
    run_sql(&mut old, "BEGIN; SELECT count(*) FROM open")?;
    let mut child = start(&cluster, "sealed")?;
    cluster.eventually(
        &format!("SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('repack.table_{table}') AND indisvalid"),
        "1",
    )?;
    child.kill()?;
    child.wait()?;
    drop(old);
    cluster.crash()?;
    check(&cluster, "killed")?;
    cluster.sql("DROP EXTENSION pg_repack CASCADE")?;
    ensure!(cluster.text(DIGEST)? == rows, "rows after the crash");
    cluster.finish()
}

/// Its plaintext copy would become the file of a table that was encrypted meanwhile.
fn of_plaintext() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    let mut old = cluster.client()?;
    run_sql(&mut old, "BEGIN; SELECT count(*) FROM sealed")?;
    let mut child = start(&cluster, "open")?;
    let table = cluster.text("SELECT 'open'::regclass::oid")?;
    cluster.eventually(
        &format!("SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('repack.table_{table}') AND indisvalid"),
        "1",
    )?;
    let error = cluster.error(
        "SET lock_timeout = '10s'; SECURITY LABEL FOR pagevault ON TABLE open IS 'encrypted'",
    )?;
    // From 1.5.3 on it holds a lock meanwhile, for which the command waits.
    let answers = ["public.open is being repacked", "canceling statement due to lock timeout"];
    ensure!(answers.contains(&error.message.as_str()), "{error}");
    run_sql(&mut old, "COMMIT")?;
    ensure!(child.wait()?.success(), "pg_repack failed");
    drop(old);
    check(&cluster, "refused")?;
    cluster.sql("SELECT pagevault.encrypt('open')")?;
    run(cluster.program("pg_repack").args(["--table=open", "postgres"]))?;
    cluster.restart()?;
    assert_sealed(&cluster.family_files("open")?)?;
    cluster.finish()
}

/// Users who may run it without being superuser have CREATE on its schema, and can create tables
/// with the names of copies.
fn schema_of_others() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    cluster.sql(
        "CREATE ROLE stranger; GRANT USAGE, CREATE ON SCHEMA repack TO stranger;
         ALTER SCHEMA repack RENAME TO packed;
         SECURITY LABEL FOR pagevault ON TABLE open IS 'plaintext'",
    )?;
    cluster.sql("SELECT pagevault.encrypt_database()")?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    let open = cluster.text("SELECT 'open'::regclass::oid")?;
    let make = |role: &str, name: &str| -> Result<String> {
        cluster.sql(&format!(
            "SET SESSION AUTHORIZATION {role}; CREATE TABLE packed.{name} AS SELECT 1 AS id"
        ))?;
        cluster.sql("CHECKPOINT")?;
        Ok(format!("packed.{name}"))
    };
    // A copy of a plaintext table by another user is treated like any other table; that of a
    // superuser follows the original.
    for name in [format!("table_{open}"), format!("log_{open}"), "table_4000000000".to_owned()] {
        let made = make("stranger", &name)?;
        assert_sealed(&cluster.family_files(&made)?).context(name)?;
        cluster.sql(&format!("DROP TABLE {made}"))?;
    }
    let made = make("postgres", &format!("table_{open}"))?;
    assert_plain(&cluster.family_files(&made)?).context("a superuser's")?;
    cluster.sql(&format!("DROP TABLE {made}; ALTER TABLE open OWNER TO stranger"))?;
    let made = make("stranger", &format!("table_{open}"))?;
    assert_plain(&cluster.family_files(&made)?).context("the owner's")?;
    cluster.sql(&format!(
        "DROP TABLE {made}; ALTER TABLE open OWNER TO postgres; ALTER SCHEMA packed RENAME TO repack"
    ))?;
    for table in ["--table=open", "--table=sealed"] {
        run(cluster.program("pg_repack").args([table, "postgres"]))?;
    }
    check(&cluster, "in a labelled database")?;
    cluster.finish()
}
