//! Commands that replace the files of many relations at once, encrypted and plaintext ones.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};

use super::driver;
use crate::{assert_plain, assert_sealed};

/// Each of these uses one transaction for each relation, or locks one relation at a time.
const ONE_BY_ONE: [&str; 6] = [
    "REINDEX DATABASE postgres",
    "REINDEX SYSTEM postgres",
    "REINDEX DATABASE CONCURRENTLY postgres",
    "VACUUM FULL",
    "VACUUM FULL pg_catalog.pg_class, pg_catalog.pg_attribute, secret, open",
    "CLUSTER",
];

/// Each of these locks all relations before it creates the first file.
const AT_ONCE: [&str; 5] = [
    "ALTER TABLE ALL IN TABLESPACE pg_default SET TABLESPACE space",
    "ALTER INDEX ALL IN TABLESPACE pg_default SET TABLESPACE space",
    "ALTER MATERIALIZED VIEW ALL IN TABLESPACE pg_default SET TABLESPACE space",
    "ALTER TABLE ALL IN TABLESPACE space SET TABLESPACE pg_default",
    "TRUNCATE secret, open; INSERT INTO secret SELECT * FROM kept; INSERT INTO open SELECT * FROM kept",
];

fn make(cluster: &Cluster) -> Result<()> {
    cluster.sql(
        "CREATE TABLE kept AS SELECT i AS id, 'name ' || i AS name FROM generate_series(1, 100) i;
         CREATE TABLE secret (id int PRIMARY KEY, name text);
         CREATE INDEX ON secret USING hash (name);
         CLUSTER secret USING secret_pkey;
         CREATE MATERIALIZED VIEW secret_view AS SELECT * FROM secret;
         CREATE TABLE open (LIKE secret INCLUDING ALL);",
    )?;
    cluster.sql("SELECT pagevault.encrypt('secret'), pagevault.encrypt('secret_view')")?;
    for table in ["open", "kept"] {
        cluster.sql(&format!("SECURITY LABEL FOR pagevault ON TABLE {table} IS 'plaintext'"))?;
    }
    cluster.sql("INSERT INTO secret SELECT * FROM kept; INSERT INTO open SELECT * FROM kept")?;
    cluster.sql("REFRESH MATERIALIZED VIEW secret_view")
}

fn check_secret(cluster: &Cluster) -> Result<()> {
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("secret")?)?;
    assert_sealed(&cluster.files("secret_view")?)?;
    let differences = "SELECT count(*) FROM (TABLE secret EXCEPT TABLE kept) d";
    ensure!(cluster.text(differences)? == "0", "rows differ");
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "100", "rows are missing");
    Ok(())
}

#[test]
fn each_relation_keeps_its_state() -> Result<()> {
    let (mut cluster, _keys) = driver::start(&Settings::default())?;
    cluster.allow_log("cannot reindex system catalogs concurrently");
    make(&cluster)?;
    for default in ["off", "on"] {
        for statement in ONE_BY_ONE {
            let mut client = cluster.client()?;
            run_sql(&mut client, &format!("SET pagevault.default_encryption = {default}"))?;
            run_sql(&mut client, statement)?;
            let when = || format!("after {statement}, by default {default}");
            check_secret(&cluster).with_context(when)?;
            for plain in ["open", "kept", "pg_class", "pg_attribute", "pg_proc"] {
                assert_plain(&cluster.family_files(plain)?).with_context(when)?;
            }
        }
    }
    cluster.crash()?;
    check_secret(&cluster)?;
    cluster.finish()
}

#[test]
fn with_default_encryption_a_rewritten_plaintext_table_is_sealed() -> Result<()> {
    for statement in [
        "VACUUM FULL open",
        "TRUNCATE open; INSERT INTO open SELECT * FROM kept",
        "ALTER TABLE open ALTER id TYPE bigint",
        "ALTER TABLE open SET TABLESPACE space",
    ] {
        let (cluster, _keys) = driver::start(&Settings::default())?;
        make(&cluster)?;
        cluster.sql("SECURITY LABEL FOR pagevault ON TABLE open IS NULL")?;
        cluster.set(&[("pagevault.default_encryption", "on")])?;
        cluster.sql(statement)?;
        cluster.sql("CHECKPOINT")?;
        assert_sealed(&cluster.files("open")?).with_context(|| format!("after {statement}"))?;
        cluster.finish()?;
    }
    Ok(())
}

#[test]
fn with_default_encryption_a_table_labelled_plaintext_stays_plaintext() -> Result<()> {
    let (cluster, _keys) = driver::start(&Settings::default())?;
    make(&cluster)?;
    cluster.set(&[("pagevault.default_encryption", "on")])?;
    for statement in [
        "REINDEX TABLE open",
        "REINDEX (TABLESPACE space) TABLE open",
        "REINDEX TABLE CONCURRENTLY open",
        "VACUUM FULL open",
        "TRUNCATE open; INSERT INTO open SELECT * FROM kept",
        "ALTER TABLE open ALTER id TYPE bigint",
        "ALTER TABLE open SET UNLOGGED",
        "ALTER TABLE open SET LOGGED",
        "ALTER TABLE open SET TABLESPACE space",
        "CREATE INDEX ON open (name)",
    ] {
        cluster.sql(statement)?;
        cluster.sql("CHECKPOINT")?;
        assert_plain(&cluster.family_files("open")?)
            .with_context(|| format!("after {statement}"))?;
    }
    cluster.finish()
}

/// The plaintext relations may become sealed: while all are locked, the relation of a new file is
/// unknown.
#[test]
fn encrypted_relations_stay_encrypted_among_others() -> Result<()> {
    let (cluster, _keys) = driver::start(&Settings::default())?;
    make(&cluster)?;
    for statement in AT_ONCE {
        cluster.sql(statement)?;
        check_secret(&cluster).with_context(|| format!("after {statement}"))?;
    }
    cluster.crash()?;
    check_secret(&cluster)?;
    cluster.finish()
}
