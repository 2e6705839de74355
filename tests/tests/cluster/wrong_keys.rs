//! A provider that returns another key than the wrapped one: nothing is unlocked with it or sealed
//! under it, and the right wrapping stays.
//!
//! Every correct provider notices that itself. So these tests run the real one behind a wrapper: a
//! helper that exchanges the keys in its replies when told to. They also use key files in which
//! wrapped keys were exchanged.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagevault_keystore::log::{self, Log, Trust};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Record, Scope};
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, KeyFile, Settings, SqlError, Standby, StopMode};

const TABLES: &str = "CREATE TABLE open (id int);
    INSERT INTO open VALUES (1);
    CREATE TABLE secret AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 1000) i;
    SELECT pagevault.encrypt('secret')";

const STATE: &str = "SELECT state FROM pagevault.status";
const WRONG: &str = "master key \"main\" of provider \"local\": it gives a wrong key";

/// The wrapper returns wrong keys while a file exists.
struct FaultyHelper {
    lies: PathBuf,
}

impl FaultyHelper {
    fn return_wrong_keys(&self) -> Result<()> {
        Ok(fs::write(&self.lies, "")?)
    }

    fn return_right_keys(&self) -> Result<()> {
        Ok(fs::remove_file(&self.lies)?)
    }
}

/// A cluster with an encrypted table, whose helper is the wrapper.
fn cluster(settings: &Settings) -> Result<(Cluster, KeyFile, FaultyHelper)> {
    let (mut cluster, keys) = Cluster::with_keys(settings)?;
    cluster.allow_log("it gives a wrong key");
    let lies = cluster.directory().join("lies");
    let helper = cluster.script(
        "liar",
        &format!(
            "reply=$('{}' \"$@\")\n\
             [ -e '{}' ] && reply=$(printf %s \"$reply\" | \
             sed 's/\"plaintext\":\"[^\"]*\"/\"plaintext\":\"BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=\"/g')\n\
             printf %s \"$reply\"",
            cluster.installation().program("pagevault-keyring").display(),
            lies.display()
        ),
    )?;
    cluster.append_conf(&format!("pagevault.keyring_command = '{helper}'"))?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.eventually(
        "SELECT setting LIKE '%liar' FROM pg_settings WHERE name = 'pagevault.keyring_command'",
        "t",
    )?;
    cluster.sql(TABLES)?;
    Ok((cluster, keys, FaultyHelper { lies }))
}

fn impatient() -> Settings {
    Settings::default().conf("pagevault.unlock_timeout = 1s")
}

fn ensure_wrong(error: &SqlError) -> Result<()> {
    ensure!(error.sqlstate == "XX001", "{error}");
    ensure!(error.text().contains(WRONG), "{error}");
    ensure!(error.detail.contains("does not fit the check value of version"), "{error}");
    ensure!(!error.hint.is_empty(), "{error}");
    Ok(())
}

/// Contents of the cluster's key file.
fn key_file(cluster: &Cluster) -> Result<Vec<u8>> {
    Ok(fs::read(cluster.data_directory().join("pagevault").join(log::file_name(Scope::CLUSTER)))?)
}

#[test]
fn unlocks_nothing_and_is_not_wrapped() -> Result<()> {
    let (cluster, keys, faulty) = cluster(&impatient())?;
    cluster.stop(StopMode::Fast)?;
    faulty.return_wrong_keys()?;
    cluster.start_server()?;
    ensure!(cluster.log().contains("server starts with encrypted relations locked"));
    ensure!(cluster.log().contains(WRONG) && cluster.log().contains("\"outcome\":\"wrong_key\""));
    ensure!(cluster.text(STATE)? == "locked", "the server says that it is unlocked");
    let before = key_file(&cluster)?;

    let options = format!("{{\"path\": \"{}\"}}", keys.path().display());
    ensure_wrong(&cluster.error("SELECT pagevault.unlock()")?)?;
    let alter = format!("SELECT pagevault.alter_provider('local', '{options}')");
    ensure_wrong(&cluster.error(&alter)?)?;
    for statement in [
        "SELECT count(*) FROM secret",
        "CREATE TABLE more (id int); INSERT INTO more VALUES (1); SELECT pagevault.encrypt('more')",
        "SELECT pagevault.set_cluster_master_key('local', 'main')",
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
    ] {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
        ensure!(error.text().contains("locked"), "{statement}: {error}");
    }
    ensure!(cluster.text(STATE)? == "locked", "something unlocked it");
    ensure!(key_file(&cluster)? == before, "something was written");

    faulty.return_right_keys()?;
    cluster.sql(&alter)?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    cluster.finish()
}

#[test]
fn replaces_no_wrapping_while_the_server_runs() -> Result<()> {
    let (mut cluster, keys, faulty) =
        cluster(&Settings::default().conf("pagevault.revalidate_interval = 1s"))?;
    cluster.allow_log("was revoked: it gives another database key");
    keys.add_key("other")?;
    let other = cluster.key_file("keys2", "main")?;
    cluster.sql(&other.add_provider("second"))?;
    let before = key_file(&cluster)?;
    faulty.return_wrong_keys()?;
    // It is treated as a revocation, which removes nothing while the server runs.
    cluster.eventually_logs("it gives another database key than the one that was wrapped")?;
    for statement in [
        "SELECT pagevault.set_cluster_master_key('local', 'other')",
        "SELECT pagevault.set_cluster_master_key('second', 'main')",
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.set_database_master_key('local', 'main')",
    ] {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == "XX001", "{statement}: {error}");
        ensure!(error.text().contains("it gives a wrong key"), "{statement}: {error}");
    }
    ensure!(key_file(&cluster)? == before, "a wrapping was written that was not proven");
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    faulty.return_right_keys()?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('second', 'main')")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

#[test]
fn ends_a_start_after_a_crash() -> Result<()> {
    let (mut cluster, _keys, faulty) = cluster(&impatient())?;
    cluster.allow_log("cannot start without keys");
    let before = key_file(&cluster)?;
    cluster.kill()?;
    faulty.return_wrong_keys()?;
    let Err(error) = cluster.start_server() else {
        anyhow::bail!("the server recovered with a wrong key");
    };
    let output = format!("{error:#}");
    ensure!(output.contains("cannot start without keys") && output.contains(WRONG), "{output}");
    faulty.return_right_keys()?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    ensure!(key_file(&cluster)?.len() >= before.len(), "keys are missing");
    cluster.finish()
}

#[test]
fn makes_a_standby_wait() -> Result<()> {
    let (primary, _keys, faulty) = cluster(&Settings::default())?;
    let mut standby = Standby::default().slot("standby").start(&primary)?;
    standby.allow_log("recovery waits for a new key");
    wait_for(&standby, &primary)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    primary.sql("SELECT pagevault.rotate_database_key(); INSERT INTO secret VALUES (1001, 'x')")?;
    faulty.return_wrong_keys()?;
    standby.sql("SELECT pg_wal_replay_resume()")?;
    standby.eventually_logs("recovery waits for a new key")?;
    ensure!(standby.log().contains(WRONG), "the log does not say why");
    ensure!(standby.text("SELECT count(*) FROM secret")? == "1000", "the standby does not answer");
    ensure!(standby.text(STATE)? == "locked", "the standby took the wrong key");
    ensure_wrong(&standby.error("SELECT pagevault.unlock()")?)?;
    faulty.return_right_keys()?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM secret")? == "1001", "rows are missing");
    standby.finish()?;
    primary.finish()
}

/// The record of this version in a keystore.
fn recorded(storage: &FileStorage, number: u32) -> Result<Record> {
    let (_, contents) =
        Log::open(storage, Scope::CLUSTER, Trust::All)?.context("there is no key file")?;
    let is_it =
        |r: &&Record| matches!(r, Record::DatabaseKey { version, .. } if version.get() == number);
    contents.records.iter().rfind(is_it).cloned().context("no such key")
}

/// Two histories of one cluster create different keys with the same version; the key files of one
/// do not accept the other's.
#[test]
fn of_another_history_is_not_replayed() -> Result<()> {
    let (primary, _keys) = Cluster::with_keys(&Settings::default())?;
    primary.sql(TABLES)?;
    let mut standby = Standby::default().slot("standby").start(&primary)?;
    standby.allow_log("contradicts this server's keystore");
    standby.allow_log("startup process");
    let other = Standby::default().slot("other").start(&primary)?;
    other.promote()?;
    other.sql("SELECT pagevault.rotate_database_key()")?;
    other.stop(StopMode::Fast)?;
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Fast)?;

    let keystore =
        |cluster: &Cluster| FileStorage::new(&cluster.data_directory().join("pagevault"));
    let foreign = recorded(&keystore(&other)?, 2)?;
    let storage = keystore(&standby)?;
    let (mut log, _) =
        Log::open(&storage, Scope::CLUSTER, Trust::All)?.context("there is no key file")?;
    log.append(std::slice::from_ref(&foreign))?;
    log.append_settled(&log.position())?;
    primary.sql("SELECT pagevault.rotate_database_key()")?;
    let _ = standby.start_server();
    standby.eventually_logs("contradicts this server's keystore")?;
    ensure!(standby.log().contains("differs from the key that is already known"));
    let _ = standby.kill();
    ensure!(recorded(&storage, 2)? == foreign, "the contradiction was written down");
    other.finish()?;
    standby.finish()?;
    primary.finish()
}

/// The context of a provider does not include the version, so one wrapping can be opened in place
/// of another.
#[test]
fn from_exchanged_wrappings_is_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&impatient())?;
    cluster.allow_log("it gives a wrong key");
    cluster.sql(TABLES)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.stop(StopMode::Fast)?;
    let storage = FileStorage::new(&cluster.data_directory().join("pagevault"))?;
    let (first, second) = (recorded(&storage, 1)?, recorded(&storage, 2)?);
    let (mut log, _) =
        Log::open(&storage, Scope::CLUSTER, Trust::All)?.context("there is no key file")?;
    let mut exchanged = second.clone();
    if let (Record::DatabaseKey { key, .. }, Record::DatabaseKey { key: other, .. }) =
        (&mut exchanged, &first)
    {
        key.first.wrapped.clone_from(&other.first.wrapped);
    }
    log.append(&[exchanged])?;
    log.append_settled(&log.position())?;
    cluster.start_server()?;
    ensure!(cluster.text(STATE)? == "locked", "the wrong key was taken");
    ensure_wrong(&cluster.error("SELECT pagevault.unlock()")?)?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.text().contains("locked"), "{error}");
    cluster.stop(StopMode::Fast)?;

    let (mut log, _) =
        Log::open(&storage, Scope::CLUSTER, Trust::All)?.context("there is no key file")?;
    log.append(&[second])?;
    log.append_settled(&log.position())?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}
