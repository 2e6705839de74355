//! A data directory without its key files, as after a restore that left them out, is refused.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings, StopMode};

fn refused(cluster: &Cluster, file: &str) -> Result<()> {
    ensure!(cluster.start_server().is_err(), "the server starts without {file}");
    let log = cluster.log();
    let last = log.rsplit("FATAL:").next().unwrap_or_default();
    ensure!(last.contains(&format!("key file \"{file}\" is missing")), "{last}");
    ensure!(last.contains("Restore the directory pagevault/"), "{last}");
    Ok(())
}

/// The error is of one attempt: the key file exists then, and the next attempt uses it.
#[test]
fn a_key_file_that_cannot_be_noted_is_used_later() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("could not read or write file");
    let files = cluster.data_directory().join("pagevault.files");
    fs::set_permissions(&files, Permissions::from_mode(0o400))?;
    let encrypt = "CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')";
    let error = cluster.error(encrypt)?;
    ensure!(error.sqlstate == "58030" && error.message.contains("pagevault.files"), "{error}");
    fs::set_permissions(&files, Permissions::from_mode(0o600))?;
    cluster.sql("CREATE TABLE IF NOT EXISTS t AS SELECT 7 AS id")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    ensure!(fs::read_to_string(&files)?.contains("\n5.keys "), "it is not noted");
    cluster.finish()
}

/// An older copy of the keystore lacks keys of files that have no pages yet, which would be written
/// in plaintext.
#[test]
fn an_older_keystore_is_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&durable())?;
    cluster.allow_log("is of an earlier time");
    cluster.allow_log("not properly shut down");
    cluster.without_witness("its keystore is replaced");
    let data = cluster.data_directory();
    let [keystore, newer, older] = ["pagevault", "newer", "older"].map(|name| data.join(name));
    let encrypt = |name: &str| {
        format!("CREATE TABLE {name} (id int); SELECT pagevault.encrypt('{name}'); CHECKPOINT")
    };
    cluster.sql(&encrypt("t"))?;
    cluster.stop(StopMode::Fast)?;
    crate::redo::copy(&keystore, &older)?;
    cluster.start_server()?;
    cluster.sql(&encrypt("u"))?;
    for crash in [false, true] {
        if crash {
            cluster.kill()?;
        } else {
            cluster.stop(StopMode::Fast)?;
        }
        fs::rename(&keystore, &newer)?;
        crate::redo::copy(&older, &keystore)?;
        ensure!(cluster.start_server().is_err(), "the server starts with older keys");
        let log = cluster.log();
        let last = log.rsplit("FATAL:").next().unwrap_or_default();
        ensure!(last.contains("key file \"5.keys\" is of an earlier time"), "{last}");
        if !crash {
            let damage = "damaged      pagevault/5.keys: of an earlier time than";
            cluster.expect_verified(&data, 2, &[damage])?;
        }
        ensure!(last.contains("Restore the directory pagevault/"), "{last}");
        fs::remove_dir_all(&keystore)?;
        fs::rename(&newer, &keystore)?;
        cluster.start_server()?;
    }
    cluster.sql("INSERT INTO u VALUES (7)")?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('u')")? == "t", "a key is lost");
    // A copy of it knows no less, though no key changes there.
    let mut copy = Cluster::from_files(|target| cluster.base_backup(target))?;
    copy.without_witness("its keystore is replaced");
    copy.allow_log("is of an earlier time");
    let files = copy.data_directory().join("pagevault.files");
    copy.start_server()?;
    copy.eventually_that("pagevault.files", || {
        ensure!(fs::read_to_string(&files)?.contains("5.keys has "), "it is not noted");
        Ok(())
    })?;
    copy.stop(StopMode::Fast)?;
    let keystore = copy.data_directory().join("pagevault");
    fs::remove_dir_all(&keystore)?;
    crate::redo::copy(&older, &keystore)?;
    ensure!(copy.start_server().is_err(), "the copy starts with older keys");
    cluster.finish()
}

/// Otherwise checkpoints do not say what key files have.
fn durable() -> Settings {
    Settings::default().conf("fsync = on")
}

/// The file that says so does not grow for ever, and says less in a backup.
#[test]
fn what_key_files_have_is_condensed() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&durable())?;
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t'); CHECKPOINT")?;
    let files = cluster.data_directory().join("pagevault.files");
    let text = fs::read_to_string(&files)?;
    let has = text.lines().rfind(|line| line.starts_with("5.keys has ")).context("no line")?;
    let before = [&text, "\n", &format!("{has}\n").repeat(3000)].concat();
    fs::write(&files, &before)?;
    cluster.sql("CREATE TABLE u (id int); SELECT pagevault.encrypt('u'); CHECKPOINT")?;
    let after = fs::read_to_string(&files)?;
    ensure!(after.len() < 1000 && after.contains("5.keys has "), "{} bytes", after.len());
    cluster.stop(StopMode::Fast)?;
    fs::write(cluster.data_directory().join("backup_label"), "no label")?;
    ensure!(cluster.start_server().is_err(), "the server starts with such a label");
    cluster.allow_log("invalid data in file \"backup_label\"");
    let text = fs::read_to_string(&files)?;
    ensure!(text.contains("5.keys ") && !text.contains("has"), "{text}");
    fs::remove_file(cluster.data_directory().join("backup_label"))?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    cluster.finish()
}

/// The start after a crash rewrites key files, but not if one of them is missing.
#[test]
fn nothing_is_changed_if_a_key_file_is_missing_after_a_crash() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("is missing");
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t'); CHECKPOINT")?;
    // WAL would bring these again.
    cluster.sql("CREATE TABLE u AS SELECT 7 AS id; SELECT pagevault.encrypt('u')")?;
    cluster.kill()?;
    let keystore = cluster.data_directory().join("pagevault");
    let away = cluster.directory().join("away");
    for file in ["cluster.keys", "5.keys"] {
        fs::rename(keystore.join(file), &away)?;
        let before = contents(&keystore)?;
        refused(&cluster, file)?;
        ensure!(contents(&keystore)? == before, "key files were changed without {file}");
        fs::rename(&away, keystore.join(file))?;
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT t.id + u.id FROM t, u")? == "14", "a row is lost");
    cluster.finish()
}

/// The files of a directory, with their inodes and bytes.
fn contents(directory: &Path) -> Result<BTreeMap<PathBuf, (u64, Vec<u8>)>> {
    let one = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry?.path();
        Ok((path.clone(), (path.metadata()?.ino(), fs::read(&path)?)))
    };
    fs::read_dir(directory)?.map(one).collect()
}

/// A tablespace that is not mounted is no sign that the database was dropped. If it seems so
/// nevertheless, no second key file is made.
#[test]
fn a_missing_key_file_is_missed_while_its_tablespace_is_away() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("is missing");
    cluster.allow_log("could not open directory");
    cluster.without_witness("a tablespace is outside of its data directory");
    let [space, away] = ["space", "space.away"].map(|name| cluster.directory().join(name));
    fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    cluster.sql("CREATE DATABASE app TABLESPACE space")?;
    let encrypt = "CREATE EXTENSION pagevault; CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')";
    run_sql(&mut cluster.client_to("app")?, encrypt)?;
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    cluster.stop(StopMode::Fast)?;
    let [file, aside] = ["keys", "aside"]
        .map(|end| cluster.data_directory().join(format!("pagevault/{app}.{end}")));
    fs::rename(&file, &aside)?;
    fs::rename(&space, &away)?;
    refused(&cluster, &format!("{app}.keys"))?;
    // An empty place where it would be mounted.
    fs::create_dir(&space)?;
    refused(&cluster, &format!("{app}.keys"))?;
    fs::remove_dir(&space)?;
    fs::rename(&away, &space)?;
    fs::rename(&aside, &file)?;
    // The key file is lost when its directory is looked at.
    let inside = |path: &Path| -> Result<PathBuf> {
        let versions = fs::read_dir(path)?.next().context("a directory of a version")??.path();
        Ok(versions.join(&app))
    };
    let (database, elsewhere) = (inside(&space)?, cluster.directory().join("database"));
    fs::rename(&file, &aside)?;
    fs::rename(&database, &elsewhere)?;
    cluster.start_server()?;
    fs::rename(&elsewhere, &database)?;
    let mut client = cluster.client_to("app")?;
    let more = "CREATE TABLE u AS SELECT 8 AS id; SELECT pagevault.encrypt('u')";
    let error = expect_error(&mut client, more)?;
    ensure!(error.message.contains(&format!("key file \"{app}.keys\" is missing")), "{error}");
    drop(client);
    ensure!(!file.exists(), "there is a second key file");
    cluster.stop(StopMode::Fast)?;
    fs::rename(&aside, &file)?;
    cluster.start_server()?;
    let row = text(&mut cluster.client_to("app")?, "SELECT id FROM t")?;
    ensure!(row == "7", "the row is lost");
    cluster.finish()
}

#[test]
fn a_data_directory_without_key_files_is_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("is missing");
    cluster.without_witness("its keystore is taken away");
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t'); CHECKPOINT")?;
    cluster.sql("CREATE DATABASE gone")?;
    let encrypt =
        "CREATE EXTENSION pagevault; CREATE TABLE t (id int); SELECT pagevault.encrypt('t')";
    run_sql(&mut cluster.client_to("gone")?, encrypt)?;
    let gone = cluster.text("SELECT oid FROM pg_database WHERE datname = 'gone'")?;
    cluster.stop(StopMode::Fast)?;
    let keystore = cluster.data_directory().join("pagevault");
    let away = cluster.directory().join("away");
    fs::rename(&keystore, &away)?;
    refused(&cluster, "cluster.keys")?;
    // As a restore may leave it.
    fs::remove_dir_all(&keystore).or_else(|_| anyhow::Ok(()))?;
    fs::create_dir(&keystore)?;
    cluster.installation().give(&keystore)?;
    refused(&cluster, "cluster.keys")?;
    fs::remove_dir_all(&keystore)?;
    fs::rename(&away, &keystore)?;
    for database in ["5", &gone] {
        let file = keystore.join(format!("{database}.keys"));
        let away = file.with_extension("away");
        fs::rename(&file, &away)?;
        refused(&cluster, &format!("{database}.keys"))?;
        fs::rename(&away, &file)?;
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    // Nobody needs the key file of a database that was dropped.
    cluster.sql("DROP DATABASE gone")?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(keystore.join(format!("{gone}.keys")))?;
    cluster.start_server()?;
    // The next start would miss the key file of a new one with its OID.
    let error = cluster.error(&format!("CREATE DATABASE again OID {gone}"))?;
    ensure!(error.message.contains("is that of a database that is gone"), "{error}");
    // Removed on purpose.
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(&keystore)?;
    fs::remove_file(cluster.data_directory().join("pagevault.files"))?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "no_master_key");
    cluster.finish()
}

/// After a clean shutdown no write is unfinished. `verify` judges key files as the server does.
#[test]
fn an_unfinished_end_of_a_key_file_is_damage_after_a_shutdown() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("is damaged: its last");
    cluster.allow_log("not properly shut down");
    cluster.allow_log("unfinished");
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    let data = cluster.data_directory();
    cluster.stop(StopMode::Fast)?;
    for file in ["cluster.keys", "5.keys"] {
        let path = data.join("pagevault").join(file);
        let whole = fs::read(&path)?;
        let longer = [&whole[..], b"1234567"].concat();
        for changed in [&whole[..whole.len() - 3], &longer] {
            fs::write(&path, changed)?;
            let damage = format!("damaged      pagevault/{file}: its last ");
            cluster.expect_verified(&data, 2, &[&damage, "Damage found: 1."])?;
            ensure!(cluster.start_server().is_err(), "the server starts with {file}");
            let log = cluster.log();
            let last = log.rsplit("FATAL:").next().unwrap_or_default();
            ensure!(last.contains(&format!("key file \"{file}\" is damaged")), "{last}");
        }
        fs::write(&path, &whole)?;
    }
    cluster.start_server()?;
    cluster.kill()?;
    let path = data.join("pagevault/5.keys");
    let longer = [&fs::read(&path)?[..], b"1234567"].concat();
    fs::write(&path, &longer)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    cluster.finish()
}

/// The keystore is lost for ever. Catalogs with values of tables are unreadable, too: errors name
/// the statements that make them empty, and after these what was in plaintext is usable
/// (docs/troubleshooting.md, "A lost keystore").
#[test]
fn what_was_in_plaintext_outlives_a_lost_keystore() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.without_witness("its keystore is lost");
    cluster.allow_log("no data key of version");
    cluster.sql(
        "CREATE TABLE plain AS SELECT g AS id FROM generate_series(1, 1000) g;
         CREATE SCHEMA s; SECURITY LABEL FOR pagevault ON SCHEMA s IS 'encrypted';
         CREATE TABLE s.sec (id serial PRIMARY KEY, v text);
         INSERT INTO s.sec (v) SELECT 'x' || g FROM generate_series(1, 1000) g;
         CREATE TABLE s.kept (id int PRIMARY KEY, v text);
         INSERT INTO s.kept SELECT g, 'x' || g FROM generate_series(1, 1000) g;
         CREATE TABLE other AS SELECT g AS id FROM generate_series(1, 1000) g",
    )?;
    cluster.sql("SELECT pagevault.encrypt('other')")?;
    cluster.sql("SELECT lo_from_bytea(0, 'abc'); ANALYZE")?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(cluster.data_directory().join("pagevault"))?;
    fs::remove_file(cluster.data_directory().join("pagevault.files"))?;
    cluster.start_server()?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;

    let error = cluster.error("DROP TABLE other")?;
    ensure!(error.message.contains("no data key of version"), "{error}");
    let mut dump = cluster.program("pg_dump");
    ensure!(!dump.arg("--table=plain").output()?.status.success(), "pg_dump reads statistics");
    for (catalog, query) in [
        ("pg_statistic", "SELECT count(*) FROM pg_statistic"),
        ("pg_largeobject", "SELECT count(*) FROM pg_largeobject"),
    ] {
        let error = cluster.error(query)?;
        let expected = format!("TRUNCATE pg_catalog.{catalog}.");
        ensure!(error.hint.contains(&expected), "{error}");
    }
    for catalog in ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"] {
        cluster.sql(&format!(
            "SET pagevault.data_catalog_encryption = off;
             SET allow_system_table_mods = on;
             TRUNCATE pg_catalog.{catalog}"
        ))?;
    }
    let error = cluster.error("SELECT count(*) FROM other")?;
    ensure!(!error.hint.contains("TRUNCATE pg_catalog"), "{error}");
    cluster.sql("DROP TABLE other, s.sec; TRUNCATE s.kept; ANALYZE")?;
    let mut client = cluster.client()?;
    for fix in column(&mut client, "SELECT fix FROM pagevault.drift")? {
        run_sql(&mut client, &fix)?;
    }
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    drop(client);
    cluster.sql("INSERT INTO s.kept VALUES (1, 'new')")?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('s.kept')")? == "t", "not encrypted");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    ensure!(cluster.text("SELECT count(*) FROM plain")? == "1000", "rows in plaintext");
    ensure!(cluster.program("pg_dump").output()?.status.success(), "pg_dump");
    cluster.restart()?;
    ensure!(cluster.text("SELECT v FROM s.kept")? == "new", "the new row");
    cluster.finish()
}
