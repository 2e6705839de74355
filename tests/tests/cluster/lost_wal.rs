//! A failed start has truncated key files to their settled part; then WAL is lost. The keys are
//! still in files next to the key files, and a command restores them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_keystore::Scope;
use pagevault_keystore::log::unsettled;
use pagevault_keystore::storage::FileStorage;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const SUM: &str = "SELECT count(*) || ' ' || sum(hashtext(s::text)::bigint) FROM s";

fn cluster() -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default()
        .conf("fsync = on") // else checkpoints settle nothing
        .conf("checkpoint_timeout = 1h")
        .conf("autovacuum = off")
        .conf("pagevault.unlock_timeout = 1");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE t (id int); SELECT pagevault.encrypt('t')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    cluster.sql("CHECKPOINT; SET pagevault.default_encryption = on")?;
    Ok((cluster, keys))
}

/// A table whose keys no checkpoint has settled.
fn make_table(cluster: &Cluster) -> Result<()> {
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE s AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 3000) i;
         CREATE INDEX s_id ON s (id)",
    )
}

/// Kills the server when a checkpoint has written all pages but not yet settled keys.
fn crash_before_keys_are_settled(cluster: &Cluster) -> Result<()> {
    cluster.stop_at("keys.settling")?;
    let mut client = cluster.client()?;
    let session = std::thread::spawn(move || client.batch_execute("CHECKPOINT"));
    cluster.stopped_at("keys.settling")?;
    cluster.kill()?;
    cluster.resume();
    let _ = session.join();
    Ok(())
}

/// A start that fails because no key can be unwrapped.
fn start_and_fail(cluster: &Cluster, keys: &KeyFile) -> Result<()> {
    keys.take_away()?;
    ensure!(cluster.start_server().is_err(), "the server starts without its key file");
    keys.bring_back()
}

fn keystore(cluster: &Cluster) -> PathBuf {
    cluster.data_directory().join("pagevault")
}

/// The database `postgres`.
const DATABASE: Scope = Scope::database(5);

fn unsettled(cluster: &Cluster) -> Result<Vec<Scope>> {
    Ok(unsettled::scopes(&FileStorage::new(&keystore(cluster))?)?)
}

/// Output of `pagevault-keyring` for the data directory, and whether it succeeds.
fn keyring(cluster: &Cluster, command: &str) -> Result<(String, bool)> {
    let mut program = cluster.program("pagevault-keyring");
    let output = program.arg(command).arg(cluster.data_directory()).output()?;
    let response = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&response).into_owned(), output.status.success()))
}

/// With asynchronous reads (PostgreSQL 18) the message is the server's own.
fn says_no_key(message: &str) -> bool {
    message.contains("no data key of version 1") || message.contains("Required key not available")
}

fn allow_failed_starts(cluster: &mut Cluster) {
    for response in [
        "key file",
        "locked",
        "could not unlock",
        "database system",
        "lacks keys",
        "no data key of version",
        "could not read blocks",
        "shutting down",
    ] {
        cluster.allow_log(response);
    }
}

#[test]
fn keys_cut_off_by_a_failed_start_are_restored_after_pg_resetwal() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    allow_failed_starts(&mut cluster);
    make_table(&cluster)?;
    cluster.without_witness("pg_resetwal begins other WAL");
    let sum = cluster.text(SUM)?;
    let next: u64 = cluster.text("SELECT pg_current_xact_id()")?.parse()?;
    crash_before_keys_are_settled(&cluster)?;
    start_and_fail(&cluster, &keys)?;
    ensure!(unsettled(&cluster)? == [DATABASE], "{:?}", unsettled(&cluster)?);
    let first = fs::read(keystore(&cluster).join(unsettled::name(DATABASE)))?;
    start_and_fail(&cluster, &keys)?;
    ensure!(
        fs::read(keystore(&cluster).join(unsettled::name(DATABASE)))? == first,
        "the second start lost it"
    );

    let (response, _) = keyring(&cluster, "inspect")?;
    ensure!(
        response.contains("5.keys.unsettled") && response.contains("kept until recovery ends"),
        "{response}"
    );
    // WAL still exists.
    let (response, done) = keyring(&cluster, "restore-unsettled")?;
    ensure!(
        !done && response.contains("has WAL to replay") && response.contains("Start the server"),
        "{response}"
    );

    for entry in fs::read_dir(cluster.data_directory().join("pg_wal"))? {
        let path = entry?.path();
        if path.is_file() {
            fs::remove_file(path)?;
        }
    }
    let mut reset = cluster.program("pg_resetwal");
    let output = reset.args(["-f", "-x", &(next + 100).to_string(), "-D"]);
    let output = output.arg(cluster.data_directory()).output()?;
    ensure!(output.status.success(), "{output:?}");

    // No page is written before the keys are restored.
    let refused = cluster.start_server();
    let response = refused.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(response.contains("key file \"5.keys\" lacks keys"), "{response}");
    ensure!(response.contains("restore-unsettled"), "{response}");
    let (response, _) = keyring(&cluster, "verify")?;
    ensure!(
        response.contains("unsettled") && response.contains("pagevault/5.keys.unsettled"),
        "{response}"
    );
    // Without this file the keys would be lost.
    let (beside, away) =
        (keystore(&cluster).join(unsettled::name(DATABASE)), cluster.directory().join("unsettled"));
    fs::rename(&beside, &away)?;
    cluster.start_server()?;
    let error = cluster.error(SUM)?;
    ensure!(says_no_key(&error.message), "{}", error.message);
    cluster.stop(StopMode::Fast)?;
    fs::rename(&away, &beside)?;

    let (response, done) = keyring(&cluster, "restore-unsettled")?;
    ensure!(
        done && response.contains("data key rel 1663/5/") && response.contains("were restored"),
        "{response}"
    );
    ensure!(unsettled(&cluster)?.is_empty());
    let (response, done) = keyring(&cluster, "restore-unsettled")?;
    ensure!(done && response.contains("0 data keys were restored"), "{response}");
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    cluster.sql("INSERT INTO s SELECT i, 'more' FROM generate_series(1, 100) i; CHECKPOINT")?;
    let sum = cluster.text(SUM)?;
    cluster.crash()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ after a crash");
    cluster.finish()
}

/// With WAL, the next start does not need the file.
#[test]
fn saved_keys_are_removed_when_recovery_has_ended() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    allow_failed_starts(&mut cluster);
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("could not");
    make_table(&cluster)?;
    let sum = cluster.text(SUM)?;
    wait_for(&standby, &cluster)?;
    crash_before_keys_are_settled(&cluster)?;
    start_and_fail(&cluster, &keys)?;
    ensure!(unsettled(&cluster)? == [DATABASE]);
    // Killed during redo: the records that it has staged are cut off again.
    cluster.stop_at("redo.keys_in_use")?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| cluster.start_server());
        cluster.stopped_at("redo.keys_in_use")?;
        cluster.kill()?;
        let _ = start.join();
        Ok(())
    })?;
    cluster.resume();
    ensure!(unsettled(&cluster)? == [DATABASE]);
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    ensure!(unsettled(&cluster)?.is_empty(), "{:?}", unsettled(&cluster)?);
    // A standby keeps no such file either, even after a shutdown.
    for mode in [StopMode::Fast, StopMode::Immediate] {
        standby.stop(mode)?;
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
        ensure!(standby.text(SUM)? == sum, "the standby differs");
        ensure!(unsettled(&standby)?.is_empty(), "{:?}", unsettled(&standby)?);
    }
    standby.finish()?;
    cluster.finish()
}

/// A crash before any of the records was in WAL, and without WAL to replay: nothing is missing, and
/// the server starts repeatedly.
#[test]
fn records_that_never_reached_wal_are_not_required() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.stop_at("keys.in_file")?;
    let mut client = cluster.client()?;
    let session = std::thread::spawn(move || {
        client.batch_execute("SET pagevault.default_encryption = on; CREATE TABLE s (id int)")
    });
    cluster.stopped_at("keys.in_file")?;
    cluster.kill()?;
    cluster.resume();
    let _ = session.join();
    for _ in 0..2 {
        cluster.start_server()?;
        cluster.eventually_that("nothing is unsettled", || {
            ensure!(unsettled(&cluster)?.is_empty());
            Ok(())
        })?;
        cluster.stop(StopMode::Fast)?;
    }
    cluster.start_server()?;
    cluster.finish()
}
