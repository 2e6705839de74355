//! Removing pagevault: refused while anything needs it; afterwards nothing of it remains.

use std::fs;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::datafile::PageState;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, DataFile, Settings, StopMode};
use postgres::Client;

#[test]
fn the_extension_stays_while_anything_is_encrypted() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE boss SUPERUSER LOGIN")?;
    cluster.sql("CREATE DATABASE theirs")?;
    let mut client = cluster.client_to("theirs")?;
    run_sql(&mut client, "SET ROLE boss; CREATE EXTENSION pagevault; RESET ROLE")?;
    run_sql(&mut client, "CREATE TABLE notes (id int PRIMARY KEY, body text)")?;
    run_sql(&mut client, "INSERT INTO notes SELECT i, 'x' FROM generate_series(1, 5000) i")?;
    run_sql(&mut client, "SELECT pagevault.encrypt('notes')")?;
    let ways = [
        "DROP EXTENSION pagevault",
        "DROP EXTENSION IF EXISTS pagevault CASCADE",
        "DROP SCHEMA pagevault CASCADE",
        "DROP OWNED BY boss CASCADE",
    ];
    let refused = |client: &mut Client, named: &str| -> Result<()> {
        for way in ways {
            let error = expect_error(client, way)?;
            ensure!(error.sqlstate == "2BP01", "{way}: {error}");
            ensure!(
                error.message
                    == "cannot drop extension pagevault: this database has encrypted relations",
                "{error}"
            );
            ensure!(error.detail.contains(named), "{way}: {error}");
            ensure!(error.hint.contains("pagevault.decrypt_database()"), "{error}");
        }
        Ok(())
    };
    refused(&mut client, "public.notes")?;
    // The catalogs are encrypted too.
    run_sql(&mut client, "SELECT pagevault.decrypt('notes')")?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('notes'::regclass, '60 s')")?;
    refused(&mut client, "pg_catalog.pg_statistic")?;
    run_sql(&mut client, "SET pagevault.data_catalog_encryption = off")?;
    for catalog in ["pg_statistic", "pg_statistic_ext_data"] {
        run_sql(&mut client, &format!("SELECT pagevault.decrypt('{catalog}')"))?;
        let wait = format!("SELECT pagevault.wait_for_rekey('{catalog}'::regclass, '60 s')");
        run_sql(&mut client, &wait)?;
    }
    refused(&mut client, "pg_catalog.pg_largeobject")?;
    // Another extension can be dropped. So can the database, with everything in it.
    run_sql(&mut client, "SELECT pagevault.decrypt('pg_largeobject')")?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('pg_largeobject'::regclass, '60 s')")?;
    run_sql(&mut client, "BEGIN; DROP EXTENSION pagevault; ROLLBACK")?;
    run_sql(&mut client, "DROP SCHEMA pagevault CASCADE")?;
    ensure!(text(&mut client, "SELECT count(*) FROM notes")? == "5000", "rows");
    run_sql(&mut client, "CREATE EXTENSION pagevault; SELECT pagevault.encrypt('notes')")?;
    drop(client);
    cluster.sql("DROP DATABASE theirs")?;
    cluster.sql("DROP EXTENSION pagevault")?;
    cluster.finish()
}

/// A relation that is now written as plaintext still has sealed pages until its decryption has
/// ended.
#[test]
fn the_extension_stays_until_decryption_has_ended() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster
        .set(&[("pagevault.rekey_threshold", "0"), ("pagevault.data_catalog_encryption", "off")])?;
    cluster.sql(
        "CREATE TABLE big AS SELECT i, repeat('x', 1000) AS v FROM generate_series(1, 30000) i",
    )?;
    cluster.sql("SELECT pagevault.encrypt('big')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('big'::regclass, '120 s')")?;
    cluster.set(&[("pagevault.rekey_rate", "1MB")])?;
    cluster.sql("SELECT pagevault.decrypt('big')")?;
    cluster.eventually(
        "SELECT NOT encrypted FROM pagevault.relations WHERE relation = 'big'::regclass",
        "t",
    )?;
    let error = cluster.error("DROP EXTENSION pagevault")?;
    ensure!(error.detail.contains("public.big"), "{error}");
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    cluster.sql(
        "SELECT pagevault.wait_for_rekey('big'::regclass, '120 s'); DROP EXTENSION pagevault",
    )?;
    cluster.finish()
}

/// The procedure of docs/removing.md.
#[test]
fn nothing_remains_after_removal() -> Result<()> {
    let settings = Settings::default().conf("pagevault.wal_encryption = on").wal_segment_size(1);
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.without_witness("the library that replays WAL from before is gone");
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.allow_log("cannot encrypt WAL: the cluster has no master key");
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    cluster.sql("SELECT pagevault.encrypt('pg_authid')")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted'")?;
    cluster.sql(
        "CREATE TABLE notes (id serial PRIMARY KEY, body text);
         INSERT INTO notes (body) SELECT repeat(md5(i::text), 100) FROM generate_series(1, 2000) i;
         CREATE MATERIALIZED VIEW mv AS SELECT count(*) FROM notes;
         CREATE UNLOGGED TABLE u AS SELECT 1 AS id;
         SELECT lo_from_bytea(0, 'a large object');
         ANALYZE",
    )?;
    cluster.set(&[
        ("pagevault.wal_encryption", "off"),
        ("pagevault.temp_encryption", "off"),
        ("pagevault.data_catalog_encryption", "off"),
        ("pagevault.shared_catalog_encryption", "off"),
        ("pagevault.default_encryption", "off"),
    ])?;
    cluster.sql("SECURITY LABEL FOR pagevault ON DATABASE postgres IS NULL")?;
    cluster.sql("SELECT pagevault.decrypt_database()")?;
    cluster.sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    let mut client = cluster.client()?;
    let rest = "SELECT relation FROM pagevault.relations WHERE encrypted AND kind = 'r'";
    for catalog in column(&mut client, rest)? {
        run_sql(&mut client, &format!("SELECT pagevault.decrypt('{catalog}')"))?;
        let wait = format!("SELECT pagevault.wait_for_rekey('{catalog}'::regclass, '60 s')");
        run_sql(&mut client, &wait)?;
    }
    ensure!(
        text(&mut client, "SELECT count(*) FROM pagevault.relations WHERE encrypted")? == "0",
        "{rest}"
    );
    drop(client);
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "f")?;
    cluster.sql("DROP EXTENSION pagevault; DROP SCHEMA pagevault; DROP ROLE pagevault_admin")?;
    // A server reads the first page of a segment before its other pages.
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    keys.take_away()?;
    fs::remove_dir_all(cluster.data_directory().join("pagevault"))?;
    let sealed = sealed_files(&cluster)?;
    ensure!(sealed.is_empty(), "sealed pages are left in {sealed:?}");
    cluster.pg_checksums()?;
    cluster.start_server()?;
    ensure!(
        cluster.text("SELECT count(*) || ' ' || sum(length(body)) FROM notes")? == "2000 6400000",
        "rows"
    );
    ensure!(
        cluster.text("SELECT convert_from(lo_get(oid), 'UTF8') FROM pg_largeobject_metadata")?
            == "a large object",
        "large objects"
    );
    cluster
        .sql("INSERT INTO notes (body) VALUES ('new'); REFRESH MATERIALIZED VIEW mv; ANALYZE")?;
    cluster.sql("REINDEX DATABASE postgres")?;
    cluster.allow_log("invalid configuration parameter");
    cluster.crash()?;
    ensure!(cluster.text("SELECT count FROM mv")? == "2001", "the view");
    let backup = cluster.directory().join("backup");
    cluster.base_backup(&backup)?;
    let dump = run(cluster.program("pg_dumpall").arg("--no-sync"))?;
    ensure!(!dump.contains("pagevault"), "something of pagevault is in the dump");
    cluster.finish()
}

/// The relation files with a sealed page.
fn sealed_files(cluster: &Cluster) -> Result<Vec<String>> {
    let mut sealed = Vec::new();
    let base = cluster.data_directory().join("base");
    let mut directories = vec![cluster.data_directory().join("global")];
    for entry in fs::read_dir(base)? {
        directories.push(entry?.path());
    }
    let mut looked_at = 0;
    for directory in directories {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.parse::<u32>().is_err() {
                continue;
            }
            for file in DataFile::find(&path)? {
                looked_at += 1;
                if file.states()?.iter().any(|state| matches!(state, PageState::Sealed(_))) {
                    sealed.push(path.display().to_string());
                }
            }
        }
    }
    ensure!(looked_at > 500, "only {looked_at} files");
    Ok(sealed)
}

/// The library is removed while it is needed: the server reports that in some way, and starts again
/// with the library.
#[test]
fn a_library_removed_too_early_is_reported() -> Result<()> {
    let settings = Settings::default().conf("pagevault.data_catalog_encryption = off");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("resource manager with ID");
    cluster.allow_log("could not locate a valid checkpoint record");
    cluster.allow_log("page verification failed");
    cluster.allow_log("could not locate");
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    let without = |cluster: &Cluster| -> Result<String> {
        let before = cluster.log().len();
        cluster.append_conf("shared_preload_libraries = ''")?;
        let started = cluster.start_server();
        cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
        ensure!(started.is_err(), "it starts");
        Ok(cluster.log()[before..].to_owned())
    };
    // WAL with keys must be replayed.
    cluster.kill()?;
    let output = without(&cluster)?;
    ensure!(
        output.contains("resource manager with ID") && output.contains("shared_preload_libraries"),
        "{output}"
    );
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the table");
    // WAL is sealed.
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    let output = without(&cluster)?;
    ensure!(output.contains("checkpoint record"), "{output}");
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the table");
    // Neither, but a table is sealed: the server starts, and refuses to read the table.
    cluster.set(&[("pagevault.wal_encryption", "off")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "f")?;
    cluster.stop(StopMode::Fast)?;
    // The segment begins with sealed pages.
    let output = without(&cluster)?;
    ensure!(output.contains("checkpoint record"), "{output}");
    cluster.start_server()?;
    cluster.sql("SELECT pg_switch_wal()")?;
    for catalog in ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"] {
        cluster.sql(&format!("SELECT pagevault.decrypt('{catalog}')"))?;
        cluster.sql(&format!("SELECT pagevault.wait_for_rekey('{catalog}'::regclass, '60 s')"))?;
    }
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT * FROM t")?;
    ensure!(error.message.contains("invalid page in block 0"), "{error}");
    let error = cluster.error("SELECT pagevault.is_encrypted('t')")?;
    ensure!(error.hint.contains("shared_preload_libraries"), "{error}");
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the table");
    cluster.finish()
}

/// Rows that were added without the library are refused, until an administrator accepts them.
#[test]
fn rows_added_without_the_library_can_be_accepted() -> Result<()> {
    let settings = Settings::default().conf("pagevault.data_catalog_encryption = off");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("is in plaintext, which is not accepted there");
    cluster.sql("CREATE SCHEMA s; SECURITY LABEL FOR pagevault ON SCHEMA s IS 'encrypted'")?;
    cluster.sql("CREATE TABLE s.e (id int)")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO s.e SELECT generate_series(1, 500)")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM s.e")?;
    ensure!(error.message.contains("is in plaintext, which is not accepted there"), "{error}");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0", "the view reads files");
    let fix = cluster.text("SELECT fix FROM pagevault.drift(true)")?;
    ensure!(fix == "SELECT pagevault.reconcile('s.e')", "{fix}");
    // Whoever runs all fixes does not accept forged pages unseen.
    let error = cluster.error(&fix)?;
    ensure!(error.message.contains("is in plaintext, which is not accepted there"), "{error}");
    ensure!(error.hint.contains("pagevault.decrypt"), "{error}");
    ensure!(cluster.text("SELECT pagevault.is_encrypted('s.e')")? == "f", "it was changed");
    for function in ["decrypt", "wait_for_rekey", "encrypt"] {
        cluster.sql(&format!("SELECT pagevault.{function}('s.e')"))?;
    }
    ensure!(cluster.text("SELECT count(*) FROM s.e")? == "500", "rows");
    ensure!(cluster.text("SELECT pagevault.is_encrypted('s.e')")? == "t", "not encrypted");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    cluster.finish()
}
