//! Labels on shared objects affect other databases than the session's.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings};

use crate::labels::{DEFAULT, cluster, label};
use crate::{assert_plain, assert_sealed};

/// The cipher for new pages of a relation in a database.
fn cipher(cluster: &Cluster, database: &str, relation: &str) -> Result<String> {
    let query = format!(
        "SELECT coalesce(cipher, 'plain') FROM pagevault.relations WHERE relation = '{relation}'::regclass"
    );
    text(&mut cluster.client_to(database)?, &query)
}

/// A cluster with the databases `sealed`, which has a label, and `open`, both with the extension.
fn databases() -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (cluster, keys) = cluster()?;
    for name in ["sealed", "open"] {
        cluster.sql(&format!("CREATE DATABASE {name}"))?;
        run_sql(&mut cluster.client_to(name)?, "CREATE EXTENSION pagevault")?;
    }
    cluster.sql(&label("DATABASE sealed", "'encrypted'"))?;
    Ok((cluster, keys))
}

/// Nor does a database take anything from a tablespace: `encrypted` on one of the two outranks
/// plaintext on the other, in whatever database the labels were set.
#[test]
fn a_tablespace_takes_nothing_from_a_database() -> Result<()> {
    let (cluster, _keys) = databases()?;
    cluster.sql(&label("TABLESPACE pg_default", "'plaintext'"))?;
    cluster.sql(&label("TABLESPACE space", "'plaintext'"))?;
    for (database, wanted) in [("sealed", DEFAULT), ("open", "plain")] {
        run_sql(
            &mut cluster.client_to(database)?,
            "CREATE TABLE t AS SELECT 1 AS id; CREATE TABLE far (id int) TABLESPACE space;
             CREATE TABLE moved AS SELECT 1 AS id; ALTER TABLE moved SET TABLESPACE space",
        )?;
        for relation in ["t", "far", "moved"] {
            let found = cipher(&cluster, database, relation)?;
            ensure!(found == wanted, "{database}.{relation} is {found}");
        }
    }
    // Plaintext from before is drift.
    let mut open = cluster.client_to("open")?;
    run_sql(&mut open, &label("DATABASE open", "'encrypted'"))?;
    let mut drift = column(
        &mut open,
        "SELECT relation || ' ' || reason FROM pagevault.drift WHERE relation > 16383 ORDER BY 1",
    )?;
    drift.retain(|row| !row.contains("pagevault."));
    let expected = ["far", "moved", "t"].map(|table| format!("{table} database open"));
    ensure!(drift == expected, "{drift:?}");
    drop(open);
    cluster.finish()
}

/// They keep their files, whatever tablespace their table moves to.
#[test]
fn indexes_and_sequences_follow_a_table_into_an_encrypted_tablespace() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    let mut client = cluster.client()?;
    for (kind, statement) in [
        ("TABLE", "ALTER TABLE t SET TABLESPACE space"),
        ("TABLE", "ALTER TABLE t ALTER v TYPE varchar(30), SET TABLESPACE space"),
        ("TABLE", "ALTER TABLE ALL IN TABLESPACE pg_default SET TABLESPACE space"),
        ("MATERIALIZED VIEW", "ALTER MATERIALIZED VIEW t SET TABLESPACE space"),
    ] {
        let name = if kind == "TABLE" { "t" } else { "s" };
        run_sql(
            &mut client,
            &format!(
                "CREATE TABLE {name} (id serial, v text);
                 INSERT INTO {name} (v) SELECT 'kanarienvogel' || i FROM generate_series(1, 99) i"
            ),
        )?;
        if kind != "TABLE" {
            run_sql(&mut client, "CREATE MATERIALIZED VIEW t AS SELECT * FROM s")?;
        }
        run_sql(&mut client, "CREATE INDEX t_v ON t (v)")?;
        run_sql(&mut client, statement)?;
        run_sql(&mut client, "CHECKPOINT")?;
        assert_sealed(&cluster.family_files("t")?).with_context(|| statement.to_owned())?;
        if kind == "TABLE" {
            assert_sealed(&cluster.files("t_id_seq")?).with_context(|| statement.to_owned())?;
        }
        run_sql(&mut client, &format!("DROP {kind} t; DROP TABLE IF EXISTS s"))?;
    }
    // By a job if they are large.
    let table = "CREATE TABLE t AS SELECT md5(i::text) AS v FROM generate_series(1, 999) i;
         CREATE INDEX t_v ON t (v);";
    let moved = "ALTER TABLE t SET TABLESPACE space";
    run_sql(&mut client, &format!("{table} SET pagevault.rekey_threshold = 0; {moved}"))?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('t'::regclass); CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)?;
    // Where encryption is enforced, nothing that the policy covers waits for a job.
    run_sql(&mut client, &format!("DROP TABLE t; SET pagevault.enforce_encryption = on; {table}"))?;
    let error = expect_error(&mut client, moved)?;
    ensure!(error.sqlstate == "42501", "{error}");
    ensure!(
        error.message == "public.t_v would be in plaintext where encryption is enforced",
        "{error}"
    );
    ensure!(error.detail == "The label of tablespace space says encrypted.", "{error}");
    let hint = "Encrypt it first: SECURITY LABEL FOR pagevault ON TABLE public.t IS 'encrypted'.";
    ensure!(error.hint == hint, "{error}");
    run_sql(&mut client, &format!("RESET pagevault.rekey_threshold; {moved}; CHECKPOINT"))?;
    assert_sealed(&cluster.family_files("t")?)?;
    // An index that is still in plaintext is encrypted with its table, where that is.
    run_sql(&mut client, "CREATE SCHEMA app; CREATE TABLE w AS SELECT 1 AS v")?;
    run_sql(&mut client, "CREATE INDEX w_v ON w (v)")?;
    run_sql(&mut client, &label("SCHEMA app", "'encrypted'"))?;
    let error = expect_error(
        &mut client,
        "SET LOCAL pagevault.enforce_encryption = off; SET LOCAL pagevault.rekey_threshold = 0;
         ALTER TABLE w SET TABLESPACE space;
         SET LOCAL pagevault.enforce_encryption = on; ALTER TABLE w SET SCHEMA app",
    )?;
    ensure!(error.message.starts_with("app.w_v would be in plaintext"), "{error}");
    ensure!(error.hint == hint.replace("public.t", "public.w"), "{error}");
    // An index that moves alone decides nothing.
    run_sql(&mut client, "CREATE TABLE u AS SELECT 1 AS v; CREATE INDEX u_v ON u (v)")?;
    run_sql(&mut client, "ALTER INDEX u_v SET TABLESPACE space")?;
    run_sql(&mut client, "CHECKPOINT")?;
    assert_plain(&cluster.family_files("u")?)?;
    drop(client);
    cluster.finish()
}

#[test]
fn enforcement_protects_relations_of_another_database() -> Result<()> {
    let (cluster, _keys) = databases()?;
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    cluster.sql("ALTER DATABASE open SET pagevault.enforce_encryption = on")?;
    let hint = "pagevault.enforce_encryption is set for database \"open\", where a superuser may turn it off with ALTER DATABASE.";
    // From a database with its own label, and from one without; neither of them is affected.
    for database in ["sealed", "postgres"] {
        let mut client = cluster.client_to(database)?;
        for word in ["'plaintext'", "NULL"] {
            let error = expect_error(&mut client, &label("TABLESPACE space", word))?;
            ensure!(error.sqlstate == "42501", "{database}, {word}: {error}");
            ensure!(error.message == "the encryption of tablespace space is enforced", "{error}");
            ensure!(
                error.detail
                    == "The label of tablespace space says encrypted. Relations of database \"open\" would lose it.",
                "{error}"
            );
            ensure!(error.hint == hint, "{error}");
        }
    }
    // Nobody can connect to it now.
    cluster.sql("ALTER DATABASE open IS_TEMPLATE true ALLOW_CONNECTIONS false")?;
    let error = cluster.error(&label("TABLESPACE space", "NULL"))?;
    ensure!(error.hint == hint, "{error}");
    cluster.sql("ALTER DATABASE open IS_TEMPLATE false ALLOW_CONNECTIONS true")?;
    // A change of cipher is no loss, nor are relations that their own label keeps encrypted.
    cluster.sql(&label("TABLESPACE space", "'encrypted aes-128-xts'"))?;
    cluster.sql(&label("DATABASE open", "'encrypted'"))?;
    cluster.sql(&label("TABLESPACE space", "'plaintext'"))?;
    cluster.sql(&label("TABLESPACE space", "NULL"))?;
    for word in ["'plaintext'", "NULL"] {
        let error = expect_error(&mut cluster.client()?, &label("DATABASE open", word))?;
        ensure!(error.message == "the encryption of database open is enforced", "{error}");
        ensure!(error.detail == "The label of database open says encrypted.", "{error}");
        ensure!(error.hint == hint, "{error}");
    }
    // A setting of the other database demands encryption too.
    cluster.sql(
        "ALTER DATABASE open RESET pagevault.enforce_encryption;
         ALTER DATABASE sealed SET pagevault.default_encryption = on",
    )?;
    cluster.sql(&format!(
        "{}{}",
        label("DATABASE open", "NULL"),
        label("DATABASE sealed", "NULL")
    ))?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    let error = cluster.error(&label("TABLESPACE space", "'plaintext'"))?;
    ensure!(
        error.detail
            == "pagevault.default_encryption is on. \
                Relations of database \"sealed\" would lose it.",
        "{error}"
    );
    ensure!(error.hint == "A superuser may SET pagevault.enforce_encryption = off.", "{error}");
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET pagevault.enforce_encryption = off")?;
    run_sql(&mut client, &label("TABLESPACE space", "'plaintext'"))?;
    drop(client);
    cluster.finish()
}

/// The owner of a tablespace cannot block work in a database without keys.
#[test]
fn a_tablespace_label_needs_a_key_in_every_database() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    let keys = cluster.key_file("keys", "main")?;
    let space = cluster.directory().join("space");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql("CREATE EXTENSION pagevault; CREATE ROLE owner")?;
    let place = space.display();
    cluster.sql(&format!("CREATE TABLESPACE space OWNER owner LOCATION '{place}'"))?;
    cluster.sql("CREATE DATABASE other")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE TABLE t TABLESPACE space AS SELECT 1 AS id")?;
    let mut owner = cluster.client()?;
    run_sql(&mut owner, "SET ROLE owner")?;
    let error = expect_error(&mut owner, &label("TABLESPACE space", "'encrypted'"))?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(error.message == "cannot encrypt: no master key is set", "{error}");
    ensure!(
        error.detail
            == "Neither database \"template1\" nor the cluster has a master key. Databases share the tablespace.",
        "{error}"
    );
    run_sql(&mut other, "CREATE TABLE after (id int) TABLESPACE space; TRUNCATE t")?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    run_sql(&mut owner, &label("TABLESPACE space", "'encrypted'"))?;
    run_sql(&mut other, "CREATE TABLE later (id int) TABLESPACE space; TRUNCATE t")?;
    drop((owner, other));
    cluster.finish()
}

/// Labels that outrank others: a schema's outranks a tablespace's, and a partitioned table's
/// outranks those of its partitions' schemas.
#[test]
fn enforcement_covers_labels_that_are_outranked() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA app; CREATE SCHEMA kept")?;
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    cluster.sql(&label("SCHEMA kept", "'encrypted'"))?;
    cluster.sql(
        "CREATE TABLE p (id int) PARTITION BY LIST (id);
         CREATE TABLE kept.p1 PARTITION OF p FOR VALUES IN (1)",
    )?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    let error = cluster.error(&label("SCHEMA app", "'plaintext'"))?;
    ensure!(error.message == "the encryption of schema app is enforced", "{error}");
    ensure!(error.detail == "The label of tablespace space says encrypted.", "{error}");
    let error = cluster.error(&label("TABLE p", "'plaintext'"))?;
    ensure!(error.message == "the encryption of public.p is enforced", "{error}");
    ensure!(error.detail == "The label of schema kept says encrypted.", "{error}");
    cluster.finish()
}

/// Files that are copied unchanged.
#[test]
fn copied_databases_bring_no_plaintext_into_an_enforced_tablespace() -> Result<()> {
    let (cluster, _keys) = databases()?;
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    let mut open = cluster.client_to("open")?;
    run_sql(&mut open, "CREATE TABLE t AS SELECT 7 AS id")?;
    drop(open);
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    for (statement, database) in [
        ("ALTER DATABASE open SET TABLESPACE space", "open"),
        ("CREATE DATABASE copy TEMPLATE open TABLESPACE space", "copy"),
        ("CREATE DATABASE copy TEMPLATE open TABLESPACE space STRATEGY file_copy", "copy"),
    ] {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == "42501", "{statement}: {error}");
        ensure!(
            error.message
                == format!(
                    "relations of database \"{database}\" would be in plaintext in tablespace space, where encryption is enforced"
                ),
            "{statement}: {error}"
        );
        ensure!(
            error.detail.starts_with("Their files are copied as they are. In plaintext: "),
            "{error}"
        );
        ensure!(error.hint.contains("SELECT * FROM pagevault.encrypt_database()"), "{error}");
    }
    ensure!(text(&mut cluster.client_to("open")?, "SELECT id FROM t")? == "7", "the row");
    // These contain no user data.
    cluster.sql("CREATE DATABASE fresh TABLESPACE space")?;
    cluster.sql("DROP DATABASE fresh")?;
    run_sql(&mut cluster.client_to("open")?, "SELECT pagevault.encrypt_database()")?;
    cluster.sql("ALTER DATABASE open SET TABLESPACE space")?;
    cluster.sql("CREATE DATABASE copy TEMPLATE open")?;
    for database in ["open", "copy"] {
        let mut client = cluster.client_to(database)?;
        ensure!(text(&mut client, "SELECT id FROM t")? == "7", "the row in {database}");
        ensure!(text(&mut client, "SELECT pagevault.is_encrypted('t')")? == "t", "{database}");
    }
    cluster.finish()
}
