//! Names that are not UTF-8, in databases with the encodings LATIN1 and SQL_ASCII. A decoy object
//! has the name that results if such a name is converted to UTF-8 with replacement characters.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::{Cluster, DataFile, Settings};
use postgres::Client;

use crate::{assert_plain, assert_sealed};

/// As SQL: `s\xe9cret`, and the decoy with the bytes of U+FFFD.
const NAME: &str = "('s' || chr(233) || 'cret')";
const DECOY: &str = "('s' || chr(239) || chr(191) || chr(189) || 'cret')";

/// A database for each encoding, with the extension installed.
fn databases(cluster: &Cluster) -> Result<Vec<(&'static str, Client)>> {
    ["LATIN1", "SQL_ASCII"]
        .into_iter()
        .map(|encoding| {
            cluster.sql(&format!(
                "CREATE DATABASE {encoding} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
            ))?;
            let mut client = cluster.client_to(&encoding.to_lowercase())?;
            // Notices contain statements, in bytes that this client would reject.
            run_sql(&mut client, "SET client_min_messages = warning; CREATE EXTENSION pagevault")?;
            Ok((encoding, client))
        })
        .collect()
}

/// Runs `statement` in the server, with each `%I` replaced by the name.
fn execute(client: &mut Client, statement: &str, name: &str) -> Result<()> {
    let names = vec![name; statement.matches('%').count()].join(", ");
    run_sql(
        client,
        &format!("DO $do$ BEGIN EXECUTE format($st${statement}$st$, {names}); END $do$"),
    )
}

/// The OID of the relation with this name.
fn oid(client: &mut Client, name: &str) -> Result<String> {
    text(client, &format!("SELECT oid FROM pg_class WHERE relname = {name}::name"))
}

fn files(cluster: &Cluster, client: &mut Client, oid: &str) -> Result<Vec<DataFile>> {
    run_sql(client, "CHECKPOINT")?;
    let path = text(client, &format!("SELECT pg_relation_filepath({oid}::regclass)"))?;
    DataFile::find(&cluster.data_directory().join(path))
}

const WAIT: &str = "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs
    WHERE state IN ('waiting', 'running')";

#[test]
fn exactly_the_named_relation_is_encrypted() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    for (encoding, mut client) in databases(&cluster)? {
        for name in [NAME, DECOY] {
            execute(&mut client, "CREATE TABLE public.%I AS SELECT 1 AS id", name)?;
        }
        let (real, decoy) = (oid(&mut client, NAME)?, oid(&mut client, DECOY)?);
        ensure!(real != decoy, "{encoding}: the decoy");
        let expect = |client: &mut Client, sealed: bool| -> Result<()> {
            let found = files(&cluster, client, &real)?;
            if sealed { assert_sealed(&found) } else { assert_plain(&found) }
                .with_context(|| format!("{encoding}: the table"))?;
            assert_plain(&files(&cluster, client, &decoy)?)
                .with_context(|| format!("{encoding}: the decoy"))?;
            let labels = "SELECT count(*) FROM pg_seclabel WHERE objoid = ";
            ensure!(text(client, &format!("{labels}{decoy}"))? == "0", "{encoding}: a label");
            Ok(())
        };
        run_sql(&mut client, &format!("SELECT pagevault.encrypt({real}::regclass)"))?;
        expect(&mut client, true)?;
        run_sql(&mut client, &format!("SELECT pagevault.decrypt({real}::regclass)"))?;
        run_sql(&mut client, WAIT)?;
        expect(&mut client, false)?;
        let label = "SECURITY LABEL FOR pagevault ON TABLE public.%I IS 'encrypted aes-128-xts'";
        execute(&mut client, label, NAME)?;
        expect(&mut client, true)?;
        // A message shows the bytes that are not UTF-8.
        let error = expect_error(
            &mut client,
            &format!("SELECT pagevault.encrypt({real}::regclass, 'rot' || chr(233))"),
        )?;
        ensure!(
            error.message == "unknown cipher \"rot\\xe9\" in pagevault label",
            "{encoding}: {error}"
        );
        // In SQL_ASCII the context of this error is not UTF-8, so this client would reject it.
        if encoding == "LATIN1" {
            let label = "SECURITY LABEL FOR pagevault ON TABLE public.%I IS ' || quote_literal('secr' || chr(233)) || '";
            let statement = format!("DO $do$ BEGIN EXECUTE format('{label}', {NAME}); END $do$");
            let error = expect_error(&mut client, &statement)?;
            ensure!(
                error.message == "invalid pagevault label \"secr\\xe9\"",
                "{encoding}: {error}"
            );
        }
        let error = expect_error(
            &mut client,
            &format!("SELECT * FROM pagevault.shred({real}::regclass, 'no')"),
        )?;
        ensure!(error.message.contains("\"s\\xe9cret\""), "{encoding}: {error}");
    }
    cluster.finish()
}

#[test]
fn commands_against_drift_name_the_right_relation() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    for (encoding, mut client) in databases(&cluster)? {
        for name in [NAME, DECOY] {
            execute(&mut client, "CREATE SCHEMA %I", name)?;
            execute(&mut client, "CREATE TABLE %I.%I AS SELECT 1 AS id", name)?;
            execute(&mut client, "CREATE INDEX ON %I.%I (id)", name)?;
            execute(&mut client, "CREATE SEQUENCE %1$I.\"it''s %1$s\"", name)?;
        }
        execute(&mut client, "SECURITY LABEL FOR pagevault ON SCHEMA %I IS 'encrypted'", NAME)?;
        let why = format!("SELECT DISTINCT reason = 'schema ' || {NAME} FROM pagevault.drift");
        ensure!(column(&mut client, &why)? == ["t"], "{encoding}: why");
        let heal = "DO $$ DECLARE c text; BEGIN
                FOR c IN SELECT fix FROM pagevault.drift LOOP EXECUTE c; END LOOP; END $$";
        run_sql(&mut client, heal)?;
        ensure!(text(&mut client, "SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
        let sealed = format!(
            "SELECT count(*), nspname = {NAME}::name FROM pagevault.relations r
               JOIN pg_class c ON c.oid = r.relation JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE r.encrypted AND nspname ~ '^s.*cret$' GROUP BY 2"
        );
        let rows = column(&mut client, &format!("SELECT s::text FROM ({sealed}) s"))?;
        ensure!(rows == ["(3,t)"], "{encoding}: {rows:?}");
        // All labels are removed, by name too.
        execute(
            &mut client,
            "SECURITY LABEL FOR pagevault ON SEQUENCE %1$I.\"it''s %1$s\" IS 'encrypted'",
            NAME,
        )?;
        run_sql(
            &mut client,
            "SET pagevault.data_catalog_encryption = off; SELECT count(*) FROM pagevault.decrypt_database()",
        )?;
        run_sql(&mut client, WAIT)?;
        ensure!(
            text(&mut client, "SELECT count(*) FROM pg_seclabels WHERE provider = 'pagevault'")?
                == "0",
            "{encoding}: labels"
        );
    }
    cluster.finish()
}

/// Copied files keep their keys: those of the template with this name.
#[test]
fn a_template_is_the_database_of_that_name() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    for (encoding, mut client) in databases(&cluster)? {
        // In SQL_ASCII, clients with UTF-8 cannot send this name.
        if encoding == "SQL_ASCII" {
            continue;
        }
        let settings = "ENCODING 'LATIN1' LOCALE 'C'";
        run_sql(
            &mut client,
            &format!("CREATE DATABASE \"s\u{e9}cret\" {settings} TEMPLATE latin1"),
        )?;
        run_sql(
            &mut client,
            &format!("CREATE DATABASE \"s\u{ef}\u{bf}\u{bd}cret\" {settings} TEMPLATE template0"),
        )?;
        let renamed = "ALTER DATABASE \"s\u{e9}cret\" RENAME TO reachable";
        run_sql(&mut client, renamed)?;
        let mut model = cluster.client_to("reachable")?;
        run_sql(&mut model, "CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
        drop(model);
        run_sql(&mut client, "ALTER DATABASE reachable RENAME TO \"s\u{e9}cret\"")?;
        run_sql(&mut client, "CREATE DATABASE copy TEMPLATE \"s\u{e9}cret\" STRATEGY file_copy")?;
        let mut copy = cluster.client_to("copy")?;
        ensure!(text(&mut copy, "SELECT id FROM t")? == "7", "the row");
        ensure!(text(&mut copy, "SELECT pagevault.is_encrypted('t')")? == "t", "in plaintext");
        drop(copy);
        let error = expect_error(
            &mut client,
            "SELECT * FROM pagevault.shred_database('s\u{e9}cret', 'no')",
        )?;
        ensure!(error.message.contains("was not confirmed"), "{error}");
    }
    cluster.finish()
}

/// Names and options of providers are UTF-8. Others are refused with an error.
#[test]
fn arguments_that_are_not_utf8_are_refused() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let path = keys.path().display().to_string();
    for (encoding, mut client) in databases(&cluster)? {
        let options = format!(r#"'{{"path": "{path}"}}'"#);
        for call in [
            format!("add_provider('p' || chr(233), 'file', {options})"),
            format!("add_provider('p', 'file' || chr(233), {options})"),
            format!("add_provider('p', 'file', jsonb_build_object('path', '{path}' || chr(233)))"),
            format!("alter_provider('p' || chr(233), {options})"),
            "alter_provider('local', jsonb_build_object('path', '/x' || chr(233)))".to_owned(),
            "drop_provider('p' || chr(233))".to_owned(),
            "check_provider('p' || chr(233))".to_owned(),
            "check_provider('local', 'k' || chr(233))".to_owned(),
            "set_database_master_key('p' || chr(233), 'main')".to_owned(),
            "set_database_master_key('local', 'k' || chr(233))".to_owned(),
            "set_cluster_master_key('local', 'k' || chr(233))".to_owned(),
        ] {
            // Messages contain arguments, in bytes that this client would reject.
            run_sql(&mut client, "SET client_encoding = 'SQL_ASCII'")?;
            let caught = format!(
                "CREATE TEMP TABLE IF NOT EXISTS said (what text);
                 DO $do$ DECLARE state text; said text; BEGIN
                     PERFORM pagevault.{call}; INSERT INTO said VALUES ('nothing');
                 EXCEPTION WHEN OTHERS THEN
                     GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, said = MESSAGE_TEXT;
                     INSERT INTO said VALUES (state || ' ' || encode(textsend(said), 'escape'));
                 END $do$"
            );
            run_sql(&mut client, &caught)?;
            let output = text(&mut client, "DELETE FROM said RETURNING what")?;
            let message = "has characters that are not UTF-8 in this database";
            ensure!(
                output.starts_with("22021") && output.ends_with(message),
                "{encoding} {call}: {output}"
            );
        }
    }
    cluster.finish()
}
