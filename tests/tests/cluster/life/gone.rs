//! A dropped database whose key provider no longer exists.

use std::os::unix::fs::PermissionsExt;

use age::secrecy::ExposeSecret;
use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::wal::{count, insert, sealing};

#[test]
fn the_key_of_a_dropped_database_is_not_required() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default().conf("pagevault.unlock_timeout = 1s"))?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.allow_log("cannot start without keys");
    let other = cluster.key_file("other", "key")?;
    cluster.sql(&other.add_provider("other"))?;
    cluster.sql("CREATE DATABASE brief")?;
    let mut brief = cluster.client_to("brief")?;
    run_sql(&mut brief, "CREATE EXTENSION pagevault")?;
    run_sql(&mut brief, "SELECT pagevault.set_database_master_key('other', 'key')")?;
    run_sql(&mut brief, "CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')")?;
    drop(brief);
    cluster.sql("DROP DATABASE brief")?;
    std::fs::remove_file(other.path())?;
    insert(&cluster, "drossel", 100)?;
    let state = "SELECT state || ' ' || locked_database_keys FROM pagevault.status";
    for crash in [false, true] {
        if crash {
            cluster.crash()?
        } else {
            cluster.restart()?
        }
        ensure!(count(&cluster, "drossel")? == "100", "rows are missing");
        ensure!(cluster.text(state)? == "unlocked 0", "{}", cluster.text(state)?);
        cluster.sql("SELECT pagevault.unlock()")?;
    }
    let log = cluster.log();
    // Also the log line for a setting, which the audit trail writes at each start.
    let is_revocation =
        |line: &str| line.contains("revoked") && !line.contains("\"action\":\"start\"");
    ensure!(!log.lines().any(is_revocation), "its provider is asked");
    // A provider whose options change need not open keys of dropped databases.
    let elsewhere = cluster.key_file("elsewhere", "another")?;
    let options = format!("'{{\"path\": \"{}\"}}'", elsewhere.path().display());
    cluster.sql(&format!("SELECT pagevault.alter_provider('other', {options})"))?;
    let error = cluster.error("SELECT pagevault.drop_provider('other')")?;
    ensure!(error.hint.contains("These databases are gone"), "{error}");
    // Escrow works too.
    let identity = age::x25519::Identity::generate();
    let (private, bundle) =
        (cluster.directory().join("private"), cluster.directory().join("bundle"));
    std::fs::write(&private, identity.to_string().expose_secret())?;
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o600))?;
    cluster.installation().give(&private)?;
    let mut export = cluster.program("pagevault-keyring");
    export.args(["escrow", "export", "--recipient", &identity.to_public().to_string()]);
    run(export.arg("--output").arg(&bundle).arg(cluster.data_directory()))?;
    let mut check = cluster.program("pagevault-keyring");
    check.args(["escrow", "check", "--data-directory"]).arg(cluster.data_directory());
    let output = run(check.arg("--identity").arg(&private).arg(&bundle))?;
    ensure!(output.contains("contains 1 database keys, which unwrap all"), "{output}");
    cluster.stop(StopMode::Fast)?;
    let mut verify = cluster.program("pagevault-keyring");
    let output = run(verify.arg("verify").arg(cluster.data_directory()))?;
    ensure!(output.contains("No damage found."), "{output}");
    cluster.start_server()?;
    // Keys of existing databases are still required.
    cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE lasting TABLESPACE space")?;
    let mut lasting = cluster.client_to("lasting")?;
    run_sql(&mut lasting, "CREATE EXTENSION pagevault")?;
    let third = cluster.key_file("third", "key")?;
    run_sql(&mut lasting, &third.add_provider("third"))?;
    run_sql(&mut lasting, "SELECT pagevault.set_database_master_key('third', 'key')")?;
    drop(lasting);
    third.take_away()?;
    cluster.kill()?;
    ensure!(cluster.start_server().is_err(), "it started without a key");
    third.bring_back()?;
    cluster.start_server()?;
    cluster.finish()
}

/// A standby that was shut down may replay WAL from before a database was dropped, although its
/// files are gone already: a restart point is not made while WAL names pages that are not there.
#[test]
fn a_standby_that_was_shut_down_asks_for_keys_of_a_dropped_database() -> Result<()> {
    let settings = Settings::default().conf("full_page_writes = off").conf("autovacuum = off");
    let (mut primary, _keys) = Cluster::with_keys(&settings)?;
    primary.allow_log("connection to client lost");
    primary.sql("CREATE DATABASE brief")?;
    let mut brief = primary.client_to("brief")?;
    run_sql(&mut brief, "CREATE EXTENSION pagevault")?;
    run_sql(&mut brief, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    run_sql(&mut brief, "CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')")?;
    let standby = standby_of(&primary, &[])?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    // Without an image of the page, and of a new page.
    run_sql(&mut brief, "UPDATE t SET id = 2")?;
    run_sql(&mut brief, "CREATE TABLE new AS SELECT 1 AS id; SELECT pagevault.encrypt('new')")?;
    run_sql(&mut brief, "INSERT INTO new SELECT generate_series(1, 1000)")?;
    drop(brief);
    primary.sql("DROP DATABASE brief")?;
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Immediate)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Fast)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    standby.finish()?;
    primary.finish()
}

/// A file system that is not mounted does not count as a dropped database.
#[test]
fn the_key_of_a_database_on_an_unmounted_file_system_is_required() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE far TABLESPACE space")?;
    let other = cluster.key_file("other", "key")?;
    cluster.sql(&other.add_provider("other"))?;
    let mut far = cluster.client_to("far")?;
    run_sql(&mut far, "CREATE EXTENSION pagevault")?;
    run_sql(&mut far, "SELECT pagevault.set_database_master_key('other', 'key')")?;
    drop(far);
    cluster.sql("CHECKPOINT")?;
    let elsewhere = cluster.key_file("elsewhere", "another")?;
    let options = format!("'{{\"path\": \"{}\"}}'", elsewhere.path().display());
    let away = cluster.directory().join("away");
    std::fs::rename(&space, &away)?;
    let altered = cluster.error(&format!("SELECT pagevault.alter_provider('other', {options})"));
    std::fs::rename(&away, &space)?;
    let error = altered?;
    ensure!(error.sqlstate == "42704" && error.text().contains("has no key"), "{error}");
    cluster.finish()
}

/// Users with CREATEDB may choose the OID of a new database. With that of a dropped one, its keys
/// would be needed again: a start after a crash would fail without its provider, and checkpoints
/// would fail to write copied files under these keys.
#[test]
fn the_oid_of_a_dropped_database_is_not_used_again() -> Result<()> {
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("pagevault.unlock_timeout = 1s"))?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.sql("CREATE ROLE maker CREATEDB")?;
    let other = cluster.key_file("other", "key")?;
    cluster.sql(&other.add_provider("other"))?;
    let mut oids = Vec::new();
    for own_key in [true, false] {
        cluster.sql("CREATE DATABASE brief")?;
        let mut brief = cluster.client_to("brief")?;
        run_sql(&mut brief, "CREATE EXTENSION pagevault")?;
        if own_key {
            run_sql(&mut brief, "SELECT pagevault.set_database_master_key('other', 'key')")?;
        }
        run_sql(&mut brief, "SELECT pagevault.encrypt_database()")?;
        oids.push(text(&mut brief, "SELECT oid FROM pg_database WHERE datname = 'brief'")?);
        drop(brief);
        cluster.sql("DROP DATABASE brief")?;
    }
    std::fs::remove_file(other.path())?;
    cluster.restart()?;
    let mut maker = cluster.client()?;
    run_sql(&mut maker, "SET ROLE maker")?;
    for oid in &oids {
        for strategy in ["wal_log", "file_copy"] {
            let create = format!("CREATE DATABASE again OID = {oid} STRATEGY {strategy}");
            let error = expect_error(&mut maker, &create)?;
            ensure!(
                error.sqlstate == "55000"
                    && error.message
                        == format!("database OID {oid} is that of a database that is gone")
                    && error.hint.contains("another OID"),
                "{error}"
            );
        }
    }
    run_sql(&mut maker, "CREATE DATABASE again OID = 4000000000 STRATEGY file_copy")?;
    let mut again = cluster.client_to("again")?;
    run_sql(&mut again, "SET ROLE maker; CREATE SCHEMA mine; RESET ROLE; CHECKPOINT")?;
    drop((maker, again));
    cluster.crash()?;
    cluster.finish()
}
