//! Labels on schemas, tablespaces, databases and partitioned tables decide for new storage; the
//! nearest one wins.

mod kept;
mod moves;
mod names;
mod places;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

/// A cluster with keys and the tablespace `space`.
pub(crate) fn cluster() -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.make_tablespace("space")?;
    Ok((cluster, keys))
}

pub(crate) fn label(object: &str, label: &str) -> String {
    format!("SECURITY LABEL FOR pagevault ON {object} IS {label};")
}

/// State of the pages of the relation and its indexes, TOAST table and sequences: `plain`, a
/// cipher, or both.
pub(crate) fn state(cluster: &Cluster, relation: &str) -> Result<String> {
    state_in(&mut cluster.client()?, relation)
}

fn state_in(client: &mut Client, relation: &str) -> Result<String> {
    text(
        client,
        &format!(
            "WITH tables AS (
                 SELECT oid, reltoastrelid FROM pg_class WHERE oid = '{relation}'::regclass),
             heaps AS (SELECT oid FROM tables UNION ALL SELECT reltoastrelid FROM tables),
             family AS (SELECT oid FROM heaps UNION ALL
                 SELECT indexrelid FROM pg_index JOIN heaps ON indrelid = heaps.oid)
             SELECT string_agg(DISTINCT coalesce(r.cipher, 'plain'), ' ')
             FROM family JOIN pagevault.relations r ON r.relation = family.oid"
        ),
    )
}

pub(crate) fn expect(cluster: &Cluster, relation: &str, wanted: &str) -> Result<()> {
    let found = state(cluster, relation)?;
    ensure!(found == wanted, "{relation} is {found}, not {wanted}");
    Ok(())
}

/// `relation: wanted (reason)` for every row of the view.
pub(crate) fn drift(cluster: &Cluster) -> Result<Vec<String>> {
    column(
        &mut cluster.client()?,
        "SELECT relation || ': ' || expected || ' (' || reason || ')' FROM pagevault.drift
         ORDER BY relation::text COLLATE \"C\"",
    )
}

pub(crate) fn expect_no_drift(cluster: &Cluster) -> Result<()> {
    let rows = column(
        &mut cluster.client()?,
        "SELECT relation || ': ' || expected || ', ' || reason || ', ' || actual FROM pagevault.drift(true)",
    )?;
    ensure!(rows.is_empty(), "drift: {rows:?}");
    Ok(())
}

/// Runs the commands in the view until it is empty.
pub(crate) fn heal(cluster: &Cluster) -> Result<()> {
    let mut client = cluster.client()?;
    for _ in 0..20 {
        let Some(command) =
            column(&mut client, "SELECT fix FROM pagevault.drift(true)")?.into_iter().next()
        else {
            return Ok(());
        };
        run_sql(&mut client, &command).with_context(|| command.clone())?;
        run_sql(&mut client, "CHECKPOINT")?;
    }
    expect_no_drift(cluster)
}

/// The cipher where nobody names one, in a cluster with data checksums.
pub(crate) const DEFAULT: &str = "aes-256-xts-auth";
const XTS_128: &str = "aes-128-xts";

#[test]
fn the_nearest_label_wins() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let table = "(id int PRIMARY KEY, name text)";
    cluster.sql("CREATE SCHEMA app")?;
    let make = |name: &str, rest: &str, wanted: &str| -> Result<()> {
        cluster
            .sql(&format!("CREATE TABLE {name} {table} {rest}; INSERT INTO {name} VALUES (1)"))?;
        expect(&cluster, name, wanted)
    };
    make("before", "", "plain")?;
    cluster.sql(&label("DATABASE postgres", "'encrypted'"))?;
    make("of_database", "", DEFAULT)?;
    // A tablespace and a database are shared: neither removes what the other demands.
    cluster.sql(&label("TABLESPACE pg_default", "'plaintext'"))?;
    make("of_default_tablespace", "", DEFAULT)?;
    cluster.sql(&label("TABLESPACE space", "'encrypted aes-128-xts'"))?;
    make("of_tablespace", "TABLESPACE space", "aes-128-xts")?;
    cluster.sql(&label("SCHEMA app", "'plaintext'"))?;
    make("app.of_schema", "TABLESPACE space", "plain")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    make("app.of_schema_2", "", DEFAULT)?;
    cluster.sql(&label("TABLE app.of_schema_2", "'plaintext'"))?;
    cluster.sql("SELECT pagevault.wait_for_rekey('app.of_schema_2'::regclass)")?;
    expect(&cluster, "app.of_schema_2", "plain")?;
    cluster.sql("TRUNCATE app.of_schema_2")?;
    expect(&cluster, "app.of_schema_2", "plain")?;
    // The setting is consulted last.
    cluster.sql(&label("DATABASE postgres", "NULL"))?;
    let on = "SET pagevault.default_encryption = on;";
    cluster.sql(&format!("{on} CREATE TABLE plain_by_tablespace {table}"))?;
    expect(&cluster, "plain_by_tablespace", "plain")?;
    cluster.sql(&label("TABLESPACE pg_default", "NULL"))?;
    cluster.sql(&format!("{on} CREATE TABLE of_setting {table}"))?;
    expect(&cluster, "of_setting", DEFAULT)?;
    make("of_nothing", "", "plain")?;
    cluster.finish()
}

/// Whatever is created in an encrypted schema, by any statement, even against the setting.
#[test]
fn everything_created_in_an_encrypted_schema_is_encrypted() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE SCHEMA app")?;
    cluster.sql(&label("SCHEMA app", "'encrypted'"))?;
    cluster.restart()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET pagevault.default_encryption = off; SET search_path = app")?;
    for statement in [
        "CREATE TABLE a (id serial PRIMARY KEY, name text)",
        "CREATE TABLE b AS SELECT generate_series(1, 100) AS id",
        "SELECT * INTO c FROM b",
        "CREATE MATERIALIZED VIEW d AS SELECT * FROM b",
        "CREATE UNLOGGED TABLE e (id int PRIMARY KEY)",
        "CREATE SEQUENCE f",
        "CREATE TABLE g (LIKE a INCLUDING ALL)",
        "REFRESH MATERIALIZED VIEW d",
        "TRUNCATE a RESTART IDENTITY",
        "ALTER TABLE c ALTER id TYPE bigint",
        "BEGIN; SAVEPOINT s; CREATE TABLE x (id int); ROLLBACK TO s; CREATE TABLE h (id int); COMMIT",
    ] {
        run_sql(&mut client, statement)?;
    }
    for relation in ["a", "b", "c", "d", "e", "f", "g", "h", "a_id_seq"] {
        expect(&cluster, &format!("app.{relation}"), DEFAULT)?;
    }
    run_sql(&mut client, "CHECKPOINT")?;
    crate::assert_sealed(&cluster.family_files("app.b")?)?;
    run_sql(&mut client, "CREATE TEMP TABLE t (id int); CREATE TABLE public.open (id int)")?;
    expect(&cluster, "public.open", "plain")?;
    drop(client);
    expect_no_drift(&cluster)?;
    cluster.finish()
}

#[test]
fn partitions_follow_their_own_label_else_their_parents() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE SCHEMA plain_schema;
         CREATE TABLE p (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (10);
         CREATE TABLE sub PARTITION OF p FOR VALUES FROM (100) TO (200) PARTITION BY LIST (id);
         CREATE INDEX ON p (name)",
    )?;
    cluster.sql(&label("TABLE p", "'encrypted aes-128-xts'"))?;
    cluster.sql(&label("SCHEMA plain_schema", "'plaintext'"))?;
    cluster.sql("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20)")?;
    cluster.sql("CREATE TABLE plain_schema.p2 PARTITION OF p FOR VALUES FROM (20) TO (30)")?;
    cluster.sql("CREATE TABLE sub1 PARTITION OF sub FOR VALUES IN (101)")?;
    cluster.sql("INSERT INTO p VALUES (1, 'a'), (11, 'b'), (21, 'c'), (101, 'd')")?;
    expect(&cluster, "p0", "plain")?;
    expect(&cluster, "p1", XTS_128)?;
    expect(&cluster, "plain_schema.p2", XTS_128)?;
    expect(&cluster, "sub1", XTS_128)?;

    cluster.sql(&label("TABLE sub", "'plaintext'"))?;
    cluster.sql("CREATE TABLE sub2 PARTITION OF sub FOR VALUES IN (102)")?;
    expect(&cluster, "sub2", "plain")?;
    cluster.sql(&label("TABLE sub", "NULL"))?;
    cluster.sql(&label("TABLE sub1", "'plaintext'"))?;
    cluster.sql("SELECT pagevault.wait_for_rekey('sub1'::regclass)")?;
    expect(&cluster, "sub1", "plain")?;

    // Attached: an empty table follows, one with rows keeps its state.
    cluster.sql("CREATE TABLE empty (id int, name text); CREATE INDEX ON empty (name)")?;
    cluster
        .sql("CREATE TABLE full_one (id int, name text); INSERT INTO full_one VALUES (41, 'x')")?;
    cluster.sql("ALTER TABLE p ATTACH PARTITION empty FOR VALUES FROM (30) TO (40)")?;
    cluster.sql("ALTER TABLE p ATTACH PARTITION full_one FOR VALUES FROM (40) TO (50)")?;
    expect(&cluster, "empty", XTS_128)?;
    let found = state(&cluster, "full_one")?;
    ensure!(found == "aes-128-xts plain", "full_one is {found}: its new index should be sealed");
    let rows = drift(&cluster)?;
    let wanted = "encrypted aes-128-xts (table p)";
    for relation in ["full_one", "p0", "p0_name_idx", "sub2"] {
        ensure!(rows.contains(&format!("{relation}: {wanted}")), "{relation} is not in {rows:?}");
    }
    ensure!(
        !rows.iter().any(|row| row.starts_with("sub1:")),
        "sub1 is plain by its label: {rows:?}"
    );

    // Detached: nothing demands encryption any more, and it stays encrypted.
    cluster.sql("ALTER TABLE p DETACH PARTITION p1")?;
    cluster.sql("VACUUM FULL p1")?;
    expect(&cluster, "p1", XTS_128)?;
    heal(&cluster)?;
    expect(&cluster, "p0", XTS_128)?;
    expect(&cluster, "full_one", XTS_128)?;
    expect_no_drift(&cluster)?;
    ensure!(cluster.text("SELECT count(*) FROM p")? == "4", "rows");
    cluster.finish()
}

/// Each of these statements gives a plaintext table new storage after its schema was labelled.
#[test]
fn replaced_storage_follows_the_present_policy() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let statements = [
        "TRUNCATE t",
        "VACUUM FULL t",
        "CLUSTER t USING t_pkey",
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t SET UNLOGGED",
    ];
    for statement in statements {
        cluster.sql(
            "CREATE TABLE t (id int PRIMARY KEY, name text);
             INSERT INTO t SELECT i, 'kanarienvogel' FROM generate_series(1, 1000) i",
        )?;
        cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
        expect(&cluster, "t", "plain")?;
        ensure!(drift(&cluster)?.contains(&"t: encrypted (schema public)".to_owned()), "drift");
        cluster.sql(statement)?;
        expect(&cluster, "t", DEFAULT).context(statement)?;
        cluster.sql("DROP TABLE t")?;
        cluster.sql(&label("SCHEMA public", "NULL"))?;
    }
    // Within one transaction, in which the policy changes.
    for turn in [
        label("SCHEMA public", "'encrypted'"),
        "SET LOCAL pagevault.default_encryption = on;".to_owned(),
        "ALTER TABLE t SET SCHEMA app;".to_owned(),
        "ALTER TABLE p ATTACH PARTITION t FOR VALUES IN (1);".to_owned(),
    ] {
        cluster.sql("CREATE SCHEMA app; CREATE TABLE p (id int) PARTITION BY LIST (id)")?;
        cluster.sql(&format!(
            "{}{}",
            label("SCHEMA app", "'encrypted'"),
            label("TABLE p", "'encrypted'")
        ))?;
        cluster.sql("CREATE TABLE t (id int); CREATE INDEX ON t (id); INSERT INTO t VALUES (1)")?;
        cluster.sql(&format!(
            "LOCK TABLE t; CREATE TABLE other (id int); {turn}
             SET search_path = public, app; TRUNCATE t; INSERT INTO t VALUES (1); DROP TABLE other"
        ))?;
        let name = if turn.contains("SET SCHEMA") { "app.t" } else { "public.t" };
        expect(&cluster, name, DEFAULT).context(turn.clone())?;
        cluster.sql(&format!("DROP TABLE {name}; DROP TABLE p; DROP SCHEMA app"))?;
        cluster.sql(&label("SCHEMA public", "NULL"))?;
    }
    // Into an encrypted tablespace, and out of it again.
    cluster.sql(&label("TABLESPACE space", "'encrypted'"))?;
    for moved in [
        "ALTER TABLE t SET TABLESPACE space",
        "ALTER TABLE t SET TABLESPACE space, ALTER id TYPE bigint",
    ] {
        cluster.sql("CREATE TABLE t (id int, name text); INSERT INTO t VALUES (1, 'x')")?;
        cluster.sql(moved)?;
        expect(&cluster, "t", DEFAULT).context(moved)?;
        cluster.sql("ALTER TABLE t SET TABLESPACE pg_default")?;
        expect(&cluster, "t", DEFAULT)?;
        cluster.sql("CHECKPOINT")?;
        crate::assert_sealed(&cluster.files("t")?)?;
        ensure!(cluster.text("SELECT name FROM t")? == "x", "the row");
        cluster.sql("DROP TABLE t")?;
    }
    cluster.finish()
}

/// A job of the table encrypts its indexes as well.
#[test]
fn a_table_can_be_moved_while_a_job_encrypts_it() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.rekey_threshold", "0")])?;
    cluster.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")?;
    cluster.stop_at("rekey.claimed")?;
    cluster.sql(&label("TABLE t", "'encrypted'"))?;
    cluster.stopped_at("rekey.claimed")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE space")?;
    cluster.resume();
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    cluster.sql("CHECKPOINT")?;
    crate::assert_sealed(&cluster.files("t")?)?;
    crate::assert_sealed(&cluster.files("t_pkey")?)?;
    ensure!(drift(&cluster)?.is_empty(), "{:?}", drift(&cluster)?);
    cluster.finish()
}

#[test]
fn encryption_stays_until_the_own_label_says_plaintext() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
    cluster.sql("CREATE TABLE t (id int PRIMARY KEY, name text); INSERT INTO t VALUES (1, 'x')")?;
    cluster.sql(&label("SCHEMA public", "'plaintext'"))?;
    cluster.sql("VACUUM FULL t")?;
    expect(&cluster, "t", DEFAULT)?;
    cluster.sql("CREATE INDEX ON t (name)")?;
    expect(&cluster, "t", DEFAULT)?;
    ensure!(drift(&cluster)? == ["t: plaintext (schema public)"], "{:?}", drift(&cluster)?);
    heal(&cluster)?;
    expect(&cluster, "t", "plain")?;
    ensure!(drift(&cluster)?.is_empty(), "{:?}", drift(&cluster)?);
    cluster.finish()
}

#[test]
fn labels_and_views_need_the_right_role() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE ROLE owner")?;
    cluster.sql("CREATE DATABASE theirs OWNER owner")?;
    cluster.sql(
        "CREATE ROLE keeper; CREATE ROLE watcher;
         GRANT pagevault_admin TO keeper; GRANT pg_monitor TO watcher; CREATE SCHEMA app AUTHORIZATION owner;
         CREATE SCHEMA kept AUTHORIZATION keeper",
    )?;
    let as_role = |role: &str, statement: &str| -> Result<Option<String>> {
        let mut client = cluster.client()?;
        run_sql(&mut client, &format!("SET SESSION AUTHORIZATION {role}"))?;
        Ok(match client.batch_execute(statement) {
            Ok(()) => None,
            Err(error) => error.code().map(|code| code.code().to_owned()),
        })
    };
    let denied = Some("42501".to_owned());
    for (role, object, word, outcome) in [
        ("owner", "SCHEMA app", "'encrypted'", None),
        ("owner", "SCHEMA app", "'encrypted aes-128-xts'", None),
        ("owner", "SCHEMA app", "'plaintext'", denied.clone()),
        ("owner", "SCHEMA app", "NULL", denied.clone()),
        ("owner", "DATABASE theirs", "'encrypted'", None),
        ("owner", "DATABASE postgres", "'encrypted'", denied.clone()),
        ("owner", "TABLESPACE space", "'encrypted'", denied.clone()),
        ("owner", "SCHEMA kept", "'encrypted'", denied.clone()),
        // The administrator may change encryption, not other users' objects.
        ("keeper", "SCHEMA app", "'plaintext'", denied.clone()),
        ("keeper", "SCHEMA kept", "'encrypted'", None),
        ("keeper", "SCHEMA kept", "'plaintext'", None),
        ("keeper", "SCHEMA kept", "NULL", None),
        ("postgres", "SCHEMA app", "NULL", None),
        ("postgres", "DATABASE theirs", "NULL", None),
    ] {
        let response = as_role(role, &label(object, word))?;
        ensure!(response == outcome, "{role}, {object} {word}: {response:?}");
    }
    for (role, outcome) in
        [("owner", denied), ("keeper", None), ("watcher", None), ("postgres", None)]
    {
        for query in ["SELECT * FROM pagevault.drift", "SELECT * FROM pagevault.drift(true)"] {
            let response = as_role(role, query)?;
            ensure!(response == outcome, "{role}, {query}: {response:?}");
        }
    }
    cluster.finish()
}

#[test]
fn dropped_objects_leave_no_label() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE DATABASE d")?;
    cluster.sql("CREATE SCHEMA app; CREATE TABLE app.t (id int); CREATE SEQUENCE app.s")?;
    for object in ["SCHEMA app", "TABLE app.t", "SEQUENCE app.s", "DATABASE d", "TABLESPACE space"]
    {
        cluster.sql(&label(object, "'encrypted'"))?;
    }
    let count = "SELECT (SELECT count(*) FROM pg_seclabel) + (SELECT count(*) FROM pg_shseclabel)";
    ensure!(cluster.text(count)? == "5", "labels are missing");
    cluster.sql("DROP SCHEMA app CASCADE")?;
    cluster.sql("DROP DATABASE d")?;
    cluster.sql("DROP TABLESPACE space")?;
    ensure!(cluster.text(count)? == "0", "labels are left");
    cluster.finish()
}

#[test]
fn the_default_leaves_system_catalogs_alone() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
    cluster.set(&[("pagevault.default_encryption", "on")])?;
    let shared = ["pg_database", "pg_authid", "pg_shseclabel"];
    let own = ["pg_class", "pg_proc", "pg_seclabel", "pg_inherits", "pg_index"];
    for catalog in shared.iter().chain(&own) {
        for command in ["VACUUM FULL", "REINDEX TABLE"] {
            let statement = format!("{command} {catalog}");
            cluster.sql(&statement).with_context(|| statement.clone())?;
        }
    }
    cluster.sql("REINDEX SYSTEM postgres")?;
    cluster.sql("CHECKPOINT")?;
    for catalog in shared.iter().chain(&own) {
        let files: Vec<_> = cluster.family_files(catalog)?;
        crate::assert_plain(&files).with_context(|| (*catalog).to_owned())?;
    }
    expect_no_drift(&cluster)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM pg_seclabel")? == "1", "the label");
    cluster.finish()
}

fn finish(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn a_dump_carries_every_label() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault; CREATE SCHEMA sealed; CREATE SCHEMA open;
         CREATE TABLE parts (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE lone (id serial PRIMARY KEY); CREATE SEQUENCE numbers; CREATE TABLE free (id int);
         CREATE MATERIALIZED VIEW folded AS SELECT 1 AS id",
    )?;
    for (object, word) in [
        ("SCHEMA sealed", "'encrypted aes-128-xts'"),
        ("SCHEMA open", "'plaintext'"),
        ("DATABASE app", "'encrypted'"),
        ("TABLESPACE space", "'plaintext'"),
        ("TABLE parts", "'encrypted aes-128-xts'"),
        ("TABLE lone", "'encrypted aes-128-xts'"),
        ("TABLE free", "'plaintext'"),
        ("SEQUENCE numbers", "'encrypted'"),
        ("MATERIALIZED VIEW folded", "'encrypted'"),
    ] {
        run_sql(&mut app, &label(object, word))?;
    }
    run_sql(
        &mut app,
        "CREATE TABLE sealed.t (id int PRIMARY KEY, name text);
         INSERT INTO sealed.t SELECT i, repeat('x', 100) FROM generate_series(1, 100) i;
         CREATE TABLE open.t AS SELECT 1 AS id; CREATE TABLE other (id int);
         CREATE TABLE far (id int) TABLESPACE space;
         CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (100);
         INSERT INTO parts SELECT i, 'x' FROM generate_series(1, 99) i",
    )?;
    const LABELS: &str = "SELECT objtype || ' ' || objname || ' ' || label FROM pg_seclabels
        WHERE provider = 'pagevault' ORDER BY 1";
    let relations =
        ["sealed.t", "open.t", "other", "far", "part", "lone", "free", "numbers", "folded"];
    let states = |client: &mut Client| -> Result<Vec<String>> {
        relations.iter().map(|relation| state_in(client, relation)).collect()
    };
    let (labels, before) = (column(&mut app, LABELS)?, states(&mut app)?);
    ensure!(labels.len() == 9, "{labels:?}");
    drop(app);
    let drift = "SELECT count(*) FROM pagevault.drift(true)";
    ensure!(text(&mut cluster.client_to("app")?, drift)? == "0", "drift before the dump");

    let file = cluster.directory().join("dump");
    finish(cluster.program("pg_dump").args(["-Fc", "-C", "-d", "app", "-f"]).arg(&file))?;
    cluster.sql("DROP DATABASE app")?;
    finish(cluster.program("pg_restore").args(["-C", "-d", "postgres"]).arg(&file))?;
    let mut app = cluster.client_to("app")?;
    ensure!(column(&mut app, LABELS)? == labels, "{:?}", column(&mut app, LABELS)?);
    let after = states(&mut app)?;
    ensure!(after == before, "{relations:?}:\n{before:?}\n{after:?}");
    ensure!(text(&mut app, drift)? == "0", "drift after the restore");
    ensure!(before[0] == XTS_128 && before[1] == "plain" && before[2] == DEFAULT, "{before:?}");
    drop(app);
    cluster.finish()
}
