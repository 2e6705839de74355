//! A label on a database covers its catalogs; a setting covers the shared catalogs.

mod shared;

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, DataFile, KeyFile, Settings, StopMode};
use postgres::Client;

use crate::labels::label;
use crate::{assert_plain, assert_sealed};

const APP: &str = "DATABASE app";

/// Objects whose names are only in catalogs.
const OBJECTS: &str = "
    CREATE TABLE kanarienvogel (kanarienfutter int DEFAULT 4711, name text);
    INSERT INTO kanarienvogel VALUES (1, 'a'), (2, 'b');
    CREATE FUNCTION zwitschern() RETURNS text LANGUAGE sql AS 'SELECT ''kanarienlied''::text'";

/// A cluster with the database `app`, which contains a few objects; nothing is encrypted.
fn cluster() -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default().conf("pagevault.unlock_timeout = 1s");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "CREATE EXTENSION pagevault")?;
    run_sql(&mut app, OBJECTS)?;
    Ok((cluster, keys))
}

/// Main files and names of all catalogs of the client's database, or of the shared ones.
fn catalogs(
    cluster: &Cluster,
    client: &mut Client,
    shared: bool,
) -> Result<Vec<(String, Vec<DataFile>)>> {
    let rows = column(
        client,
        &format!(
            "SELECT oid::regclass || ' ' || pg_relation_filepath(oid) FROM pg_class
             WHERE oid < 16384 AND relkind IN ('r', 'i', 't') AND relisshared = {shared}"
        ),
    )?;
    rows.iter()
        .map(|row| {
            let (name, path) = row.split_once(' ').context("two words")?;
            Ok((name.to_owned(), DataFile::find(&cluster.data_directory().join(path))?))
        })
        .collect()
}

/// Checks every page of every catalog.
fn expect(cluster: &Cluster, client: &mut Client, shared: bool, sealed: bool) -> Result<()> {
    run_sql(client, "CHECKPOINT")?;
    let mut pages = 0;
    for (name, files) in catalogs(cluster, client, shared)? {
        for file in files {
            for state in file.states()? {
                match state {
                    PageState::Zero => {}
                    PageState::Sealed(_) if sealed => pages += 1,
                    PageState::Plaintext if !sealed => pages += 1,
                    _ => anyhow::bail!("{name}: {state:?} in {}", file.path.display()),
                }
            }
        }
    }
    ensure!(pages > 30, "{pages} pages");
    Ok(())
}

pub(crate) fn expect_no_drift_of_catalogs(client: &mut Client) -> Result<()> {
    let rows = column(
        client,
        "SELECT concat_ws(', ', relation, expected, reason, actual) FROM pagevault.drift(true)
         WHERE relation::oid < 16384",
    )?;
    ensure!(rows.is_empty(), "drift: {rows:?}");
    Ok(())
}

fn check_objects(client: &mut Client) -> Result<()> {
    ensure!(text(client, "SELECT zwitschern()")? == "kanarienlied", "function");
    ensure!(text(client, "SELECT count(*) FROM kanarienvogel")? == "2", "table");
    Ok(())
}

#[test]
fn a_label_on_the_database_seals_its_catalogs() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut app = cluster.client_to("app")?;
    expect(&cluster, &mut app, false, false)?;
    run_sql(&mut app, &label(APP, "'encrypted'"))?;
    expect(&cluster, &mut app, false, true)?;
    expect_no_drift_of_catalogs(&mut app)?;
    for name in ["pg_class", "pg_proc", "pg_attribute"] {
        ensure!(
            text(&mut app, &format!("SELECT pagevault.is_encrypted('{name}')"))? == "t",
            "{name}"
        );
        let known = format!(
            "SELECT encrypted FROM pagevault.relations WHERE relation = '{name}'::regclass"
        );
        ensure!(text(&mut app, &known)? == "t", "relations: {name}");
    }
    // Neither the catalogs of other databases nor shared ones.
    let mut postgres = cluster.client()?;
    expect(&cluster, &mut postgres, false, false)?;
    expect(&cluster, &mut postgres, true, false)?;
    drop((app, postgres));

    cluster.crash()?;
    check_objects(&mut cluster.client_to("app")?)?;
    cluster.restart()?;
    let mut app = cluster.client_to("app")?;
    check_objects(&mut app)?;
    for command in [
        "VACUUM FULL",
        "REINDEX SYSTEM app",
        "REINDEX DATABASE app",
        "VACUUM FULL pg_class",
        "REINDEX TABLE pg_class",
        "CLUSTER pg_attribute USING pg_attribute_relid_attnum_index",
        "VACUUM (FREEZE)",
        "ANALYZE",
    ] {
        run_sql(&mut app, command)?;
        expect(&cluster, &mut app, false, true).with_context(|| command.to_owned())?;
        check_objects(&mut app)?;
    }
    drop(app);
    cluster.crash()?;

    // Without the label they keep their state until they are decrypted.
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "SET pagevault.data_catalog_encryption = off")?;
    let refused =
        pagevault_tests::cluster::expect_error(&mut app, "SELECT pagevault.decrypt('pg_class')")?;
    ensure!(refused.detail.contains("database app says encrypted"), "{refused}");
    run_sql(&mut app, &label(APP, "'plaintext'"))?;
    run_sql(&mut app, "VACUUM FULL pg_proc")?;
    expect(&cluster, &mut app, false, true)?;
    expect_no_drift_of_catalogs(&mut app)?;
    run_sql(
        &mut app,
        "SELECT pagevault.decrypt(oid) FROM pg_class WHERE oid < 16384 AND relkind = 'r' AND NOT relisshared",
    )?;
    run_sql(&mut app, "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    expect(&cluster, &mut app, false, false)?;
    expect_no_drift_of_catalogs(&mut app)?;
    drop(app);
    cluster.crash()?;
    check_objects(&mut cluster.client_to("app")?)?;
    cluster.finish()
}

#[test]
fn a_label_set_in_another_database_causes_drift() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(&label(APP, "'encrypted aes-128-xts'"))?;
    let mut app = cluster.client_to("app")?;
    expect(&cluster, &mut app, false, false)?;
    let drift = "SELECT concat_ws(', ', expected, reason, actual, fix) FROM pagevault.drift
                 WHERE relation = 'pg_class'::regclass";
    let found = text(&mut app, drift)?;
    let wanted = "encrypted aes-128-xts, database app, plaintext, SELECT pagevault.encrypt('pg_catalog.pg_class')";
    ensure!(found == wanted, "{found}");
    run_sql(&mut app, "SELECT pagevault.encrypt('pg_catalog.pg_class')")?;
    ensure!(column(&mut app, drift)?.is_empty(), "not healed");
    // New files are sealed; one call seals the rest.
    run_sql(&mut app, "VACUUM FULL pg_proc")?;
    ensure!(text(&mut app, "SELECT pagevault.is_encrypted('pg_proc')")? == "t", "pg_proc");
    let sealed: u32 =
        text(&mut app, "SELECT count(*) FROM pagevault.encrypt_catalogs()")?.parse()?;
    ensure!(sealed > 50, "{sealed} catalogs");
    expect(&cluster, &mut app, false, true)?;
    expect_no_drift_of_catalogs(&mut app)?;
    let ciphers = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations WHERE relation::oid < 16384";
    ensure!(text(&mut app, ciphers)? == "aes-128-xts", "{}", text(&mut app, ciphers)?);
    drop(app);
    cluster.crash()?;
    check_objects(&mut cluster.client_to("app")?)?;
    cluster.finish()
}

#[test]
fn only_administrators_may_encrypt_catalogs() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE ROLE keeper IN ROLE pagevault_admin; CREATE ROLE anyone")?;
    for statement in [
        "SELECT pagevault.encrypt('pg_proc')",
        "SELECT pagevault.decrypt('pg_proc')",
        "SELECT pagevault.encrypt_catalogs()",
    ] {
        let refused = cluster.error(&format!("SET ROLE anyone; {statement}"))?;
        ensure!(refused.sqlstate == "42501", "{statement}: {refused}");
        cluster.sql(&format!("SET ROLE keeper; {statement}"))?;
    }
    // No labels on catalogs; no encryption by way of an index or by mistake.
    for (statement, code) in [
        ("SECURITY LABEL FOR pagevault ON TABLE pg_proc IS 'encrypted'", "0A000"),
        ("SECURITY LABEL FOR pagevault ON TABLE pg_proc IS 'plaintext'", "0A000"),
        ("SELECT pagevault.encrypt('pg_proc_oid_index')", "42809"),
        ("SELECT pagevault.encrypt('pg_authid')", "55000"),
        ("SELECT pagevault.encrypt('pg_proc', 'rot13')", "22023"),
    ] {
        let refused = cluster.error(statement)?;
        ensure!(refused.sqlstate == code, "{statement}: {refused}");
    }
    cluster.finish()
}

/// The catalogs of a new database are encrypted like those of its template, regardless of other
/// databases.
#[test]
fn copies_of_a_database_follow_their_template() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    // During replay of a move or DROP of a database whose directory was removed before the crash.
    cluster.allow_log("could not open directory");
    cluster.allow_log("some useless files may be left behind");
    cluster.make_tablespace("space")?;
    run_sql(&mut cluster.client_to("app")?, &label(APP, "'encrypted'"))?;
    for options in ["STRATEGY wal_log", "STRATEGY file_copy", "STRATEGY wal_log TABLESPACE space"] {
        cluster.sql(&format!("CREATE DATABASE copy TEMPLATE app {options}"))?;
        cluster.sql(&format!("CREATE DATABASE other TEMPLATE template0 {options}"))?;
        for round in 0..2 {
            let mut copy = cluster.client_to("copy")?;
            expect(&cluster, &mut copy, false, true).with_context(|| options.to_owned())?;
            check_objects(&mut copy)?;
            let mut other = cluster.client_to("other")?;
            expect(&cluster, &mut other, false, false).with_context(|| options.to_owned())?;
            drop((copy, other));
            if round == 0 {
                cluster.crash()?;
            }
        }
        cluster.sql("DROP DATABASE other")?;
        cluster.sql("DROP DATABASE copy")?;
    }
    for tablespace in ["space", "pg_default"] {
        cluster.sql(&format!("ALTER DATABASE app SET TABLESPACE {tablespace}"))?;
        cluster.crash()?;
        let mut app = cluster.client_to("app")?;
        check_objects(&mut app)?;
        run_sql(&mut app, "VACUUM FULL pg_class; ")?;
        expect(&cluster, &mut app, false, true).with_context(|| tablespace.to_owned())?;
    }
    cluster.finish()
}

#[test]
fn a_locked_database_does_not_affect_others() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    cluster.allow_log("locked");
    cluster.allow_log("pagevault");
    // The cluster's master key is in another file, so that only the database's key is locked.
    let near = cluster.key_file("near", "main")?;
    cluster.sql(&near.add_provider("near"))?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    run_sql(&mut app, &label(APP, "'encrypted'"))?;
    drop(app);
    cluster.sql("SELECT pagevault.set_cluster_master_key('near', 'main')")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    for init_files in [true, false] {
        let refused = match cluster.client_to("app") {
            Ok(mut app) => run_sql(&mut app, "SELECT zwitschern()"),
            Err(error) => Err(error),
        };
        let Err(refused) = refused else { anyhow::bail!("the locked database is open") };
        ensure!(format!("{refused:#}").contains("is locked"), "{refused:#}");
        ensure!(cluster.text("SELECT count(*) FROM pg_database")? == "4", "another database");
        cluster.sql("CREATE TABLE IF NOT EXISTS elsewhere (id int)")?;
        // The cache file of a session's first relations contains no copy of catalog contents.
        if init_files {
            let cached = cluster.text("SELECT pg_relation_filepath('pg_class')")?;
            ensure!(cached.starts_with("base/"), "{cached}");
            for entry in std::fs::read_dir(cluster.data_directory().join("base"))? {
                let cache = entry?.path().join("pg_internal.init");
                if cache.exists() {
                    ensure!(
                        !DataFile { path: cache.clone() }.contains_text("kanarien")?,
                        "{cache:?}"
                    );
                    std::fs::remove_file(cache)?;
                }
            }
        }
    }
    let state = "SELECT state FROM pagevault.database_keys WHERE database = 'app'";
    ensure!(cluster.text(state)? == "locked", "{}", cluster.text(state)?);
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    let mut app = cluster.client_to("app")?;
    check_objects(&mut app)?;
    run_sql(&mut app, "CREATE TABLE after (id int)")?;
    drop(app);
    cluster.finish()
}

/// After an interruption at any point, catalogs are readable, and the next call continues.
#[test]
fn sealing_may_be_interrupted() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    cluster.allow_log("canceling statement");
    run_sql(
        &mut cluster.client_to("app")?,
        "CREATE TABLE wide AS SELECT i AS id, repeat(md5(i::text), 30) AS name FROM generate_series(1, 3000) i;
         ALTER TABLE wide ALTER name SET STATISTICS 5000; ANALYZE wide",
    )?;
    let encrypt = [label(APP, "'encrypted'"), "SELECT pagevault.encrypt('wide')".to_owned()];
    let mut interrupted = 0;
    for pause in [30, 70, 150, 300, 600] {
        for statement in &encrypt {
            let mut app = cluster.client_to("app")?;
            run_sql(&mut app, &format!("SET statement_timeout = {pause}"))?;
            interrupted += u32::from(run_sql(&mut app, statement).is_err());
            check_objects(&mut cluster.client_to("app")?)?;
        }
        let mut app = cluster.client_to("app")?;
        let statement = encrypt[0].clone();
        let command = std::thread::spawn(move || run_sql(&mut app, &statement));
        std::thread::sleep(std::time::Duration::from_millis(pause));
        cluster.crash()?;
        let outcome = command.join().map_err(|_| anyhow::anyhow!("a thread died"))?;
        interrupted += u32::from(outcome.is_err());
        check_objects(&mut cluster.client_to("app")?)?;
    }
    ensure!(interrupted > 0, "nothing was interrupted");
    let mut app = cluster.client_to("app")?;
    for statement in &encrypt {
        run_sql(&mut app, statement)?;
    }
    expect(&cluster, &mut app, false, true)?;
    expect_no_drift_of_catalogs(&mut app)?;
    drop(app);
    cluster.crash()?;
    let mut app = cluster.client_to("app")?;
    check_objects(&mut app)?;
    run_sql(&mut app, "ANALYZE wide")?;
    expect(&cluster, &mut app, false, true)?;
    drop(app);
    cluster.finish()
}

/// `postgres --single`, in which broken system indexes are rebuilt.
#[test]
fn single_user_mode_follows_the_policy_too() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, &label(APP, "'encrypted'"))?;
    run_sql(&mut app, "CREATE TABLE secret AS SELECT 7 AS id")?;
    drop(app);
    cluster.stop(StopMode::Fast)?;
    let commands = "REINDEX SYSTEM app\nVACUUM FULL pg_statistic\nVACUUM FULL secret\n\
                    CREATE TABLE IF NOT EXISTS single AS SELECT 8 AS id\nCHECKPOINT\n";
    for options in [&["--single"][..], &["--single", "-P"]] {
        let mut server = cluster.installation().command("postgres");
        server.args(options).arg("-D").arg(cluster.data_directory()).arg("app");
        let mut server =
            server.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        server.stdin.take().context("its input")?.write_all(commands.as_bytes())?;
        ensure!(server.wait()?.success(), "{options:?}");
    }
    cluster.start_server()?;
    let mut app = cluster.client_to("app")?;
    check_objects(&mut app)?;
    for (table, id) in [("secret", "7"), ("single", "8")] {
        ensure!(text(&mut app, &format!("SELECT id FROM {table}"))? == id, "{table}");
        let path = text(&mut app, &format!("SELECT pg_relation_filepath('{table}')"))?;
        assert_sealed(&DataFile::find(&cluster.data_directory().join(path))?)?;
    }
    expect(&cluster, &mut app, false, true)?;
    drop(app);
    cluster.finish()
}
