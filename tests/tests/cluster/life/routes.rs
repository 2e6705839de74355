//! A standby with its own access to the same master key: a copy of the key file, as on another
//! machine.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::process::postmaster;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, KeyFile, Settings, Standby, StopMode};

use super::{CONTENT, everything};
use crate::wal::{assert_hidden, count, insert, sealing};

/// The key file of the standby's machine.
struct Copied<'a> {
    original: &'a KeyFile,
    copy: PathBuf,
}

impl Copied<'_> {
    fn bring_up_to_date(&self, standby: &Cluster) -> Result<()> {
        std::fs::copy(self.original.path(), &self.copy)?;
        standby.installation().give(&self.copy)
    }
}

/// A standby on which the provider's path refers to another file, as on another machine.
fn standby<'a>(primary: &Cluster, keys: &'a KeyFile) -> Result<(Cluster, Copied<'a>)> {
    let mut standby = Standby::default()
        .conf("pagevault.unlock_timeout = 1s")
        .conf("pagevault.revalidate_interval = 0")
        .create(primary)?;
    standby.allow_log("pagevault");
    let copied = Copied { original: keys, copy: standby.directory().join("copied") };
    copied.bring_up_to_date(&standby)?;
    let helper = standby.installation().program("pagevault-keyring");
    let body = format!(
        "sed 's#{}#{}#g' | {} \"$@\"",
        keys.path().display(),
        copied.copy.display(),
        helper.display()
    );
    let helper = standby.script("helper", &body)?;
    standby.append_conf(&format!("pagevault.keyring_command = '{helper}'"))?;
    standby.start_server()?;
    Ok((standby, copied))
}

#[test]
fn a_standby_waits_for_a_new_version_in_its_key_file() -> Result<()> {
    let (primary, keys) = everything(Settings::default().conf("wal_keep_size = 1GB"))?;
    let (mut standby, copied) = standby(&primary, &keys)?;
    standby.allow_log("cannot start without keys");
    standby.allow_log("is locked");
    standby.allow_log("could not unwrap");
    insert(&primary, "drossel", 100)?;
    wait_for(&standby, &primary)?;
    // It has the database keys; their wrapping matters only at its next start.
    primary.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    insert(&primary, "fink", 100)?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text(CONTENT)? == primary.text(CONTENT)?, "contents differ");
    standby.stop(StopMode::Fast)?;
    // pg_ctl of 18 takes the end of the standby for a recovery with a target, and reports success.
    let _ = standby.start_server();
    standby.eventually_logs("cannot start without keys")?;
    standby.eventually_logs("wrapped by version 2 of the key")?;
    copied.bring_up_to_date(&standby)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;

    // A new database key that it cannot unwrap: it waits, answers queries, and continues as soon as
    // it can.
    new_keys(&primary)?;
    let before = standby.text(CONTENT)?;
    insert(&primary, "gimpel", 5000)?;
    primary.sql("SELECT pg_switch_wal()")?;
    standby.eventually_logs("recovery waits for a new key")?;
    standby.eventually_logs("version 3")?;
    ensure!(standby.text(CONTENT)? == before, "contents changed");
    ensure!(standby.text("SELECT state FROM pagevault.status")? == "locked", "the state");
    assert_hidden(&standby, "gimpel")?;
    copied.bring_up_to_date(&standby)?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &primary)?;
    standby.eventually_logs("recovery has the new key, and goes on")?;
    ensure!(standby.text(CONTENT)? == primary.text(CONTENT)?, "contents differ");
    ensure!(standby.text("SELECT count(*) FROM later")? != "0", "rows are missing");
    assert_hidden(&standby, "gimpel")?;
    standby.promote()?;
    standby.sql("SELECT pagevault.rotate_database_key()")?;
    standby.finish()?;
    primary.finish()
}

/// Creates keys below one that the standby's copy of the key file cannot unwrap.
fn new_keys(primary: &Cluster) -> Result<()> {
    primary.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    primary.sql("SELECT pagevault.rotate_database_key()")?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    primary.sql("CREATE TABLE later AS SELECT * FROM t")
}

/// While a standby waits for a key, it can be shut down, killed and promoted.
#[test]
fn a_standby_waiting_for_a_key_can_be_stopped_and_promoted() -> Result<()> {
    let (primary, keys) = everything(Settings::default().conf("wal_keep_size = 1GB"))?;
    let (mut standby, copied) = standby(&primary, &keys)?;
    for text in ["cannot start without keys", "recovery waits for a new key"] {
        standby.allow_log(text);
    }
    new_keys(&primary)?;
    insert(&primary, "gimpel", 1000)?;
    for end in [StopMode::Fast, StopMode::Immediate] {
        standby.eventually_logs("recovery waits for a new key")?;
        standby.stop(end)?;
        // By now the key is in its keystore, and WAL may need it.
        let _ = standby.start_server();
        standby.eventually_that("the standby's refusal", || {
            let runs = postmaster(&standby.data_directory()).is_some();
            ensure!(!runs && standby.log().contains("cannot start without keys"), "it runs");
            Ok(())
        })?;
        copied.bring_up_to_date(&standby)?;
        standby.start_server()?;
        wait_for(&standby, &primary)?;
        primary.sql("DROP TABLE later")?;
        new_keys(&primary)?;
        insert(&primary, "gimpel", 1000)?;
    }
    standby.eventually_that("its waiting", || {
        let waits = standby.text("SELECT state FROM pagevault.status")?;
        ensure!(waits == "locked", "{waits}");
        Ok(())
    })?;
    let received = format!(
        "SELECT pg_last_wal_receive_lsn() >= '{}'",
        primary.text("SELECT pg_current_wal_flush_lsn()")?
    );
    standby.eventually(&received, "t")?;
    primary.kill()?;
    // Promotion first replays all WAL that was received.
    standby.sql("SELECT pg_promote(wait => false)")?;
    ensure!(standby.text("SELECT pg_is_in_recovery()")? == "t", "it did not wait");
    copied.bring_up_to_date(&standby)?;
    standby.sql("SELECT pagevault.unlock()")?;
    standby.eventually("SELECT pg_is_in_recovery()", "f")?;
    ensure!(standby.text("SELECT count(*) FROM t WHERE name LIKE 'gimpel-%'")? == "3000", "rows");
    standby.sql("SELECT pagevault.rotate_database_key()")?;
    standby.finish()?;
    primary.start_server()?;
    primary.finish()
}

/// The key of a dropped database, from a provider that no longer exists: with the setting off,
/// recovery does not wait for it.
#[test]
fn recovery_can_skip_a_key_that_is_no_longer_needed() -> Result<()> {
    let (primary, keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let (standby, _copied) = standby(&primary, &keys)?;
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Fast)?;
    let other = primary.key_file("other", "key")?;
    primary.sql(&other.add_provider("other"))?;
    primary.sql("CREATE DATABASE brief")?;
    let mut brief = primary.client_to("brief")?;
    run_sql(&mut brief, "CREATE EXTENSION pagevault")?;
    run_sql(&mut brief, "SELECT pagevault.set_database_master_key('other', 'key')")?;
    drop(brief);
    primary.sql("DROP DATABASE brief")?;
    std::fs::remove_file(other.path())?;
    insert(&primary, "drossel", 100)?;
    standby.start_server()?;
    standby.eventually_logs("recovery waits for a new key")?;
    ensure!(count(&standby, "drossel")? == "0", "it did not wait");
    standby.append_conf("pagevault.recovery_waits_for_keys = off")?;
    standby.sql("SELECT pg_reload_conf()")?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "100", "rows are missing");
    standby.finish()?;
    primary.finish()
}
