//! Standbys whose key provider is away when WAL is switched: they wait for the key in replay, store
//! WAL the old way meanwhile, and go on when the provider is back.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::process::postmaster;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, KeyFile, Settings, Standby, StopMode};

use super::{assert_hidden, count, insert, leaks, sealing, segments, switch};

const WAITS: &str = "recovery waits for the key of WAL";
const LOCKED: &str = "SELECT state FROM pagevault.status";

/// A server with keys that writes WAL in plaintext.
fn in_plaintext(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (primary, keys) = Cluster::with_keys(settings)?;
    primary.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    insert(&primary, "amsel", 100)?;
    Ok((primary, keys))
}

fn impatient(standby: Standby) -> Standby {
    let standby = standby.conf("pagevault.unlock_timeout = 1s");
    standby.conf("pagevault.revalidate_interval = 0")
}

/// Starts a stopped standby while its provider is away.
fn start_locked(standby: &mut Cluster) -> Result<()> {
    for text in [
        "server starts with encrypted relations locked",
        "cannot start without keys",
        "could not read",
        WAITS,
    ] {
        standby.allow_log(text);
    }
    standby.start_server()?;
    ensure!(standby.text(LOCKED)? == "locked", "it has its keys");
    Ok(())
}

/// A standby that streams, and has started while its provider is away.
fn locked_standby(primary: &Cluster, keys: &KeyFile) -> Result<Cluster> {
    let mut standby = impatient(Standby::default()).start(primary)?;
    wait_for(&standby, primary)?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, primary)?;
    standby.stop(StopMode::Fast)?;
    keys.take_away()?;
    start_locked(&mut standby)?;
    Ok(standby)
}

/// Waits until the standby has stored all WAL of the primary.
fn received(standby: &Cluster, primary: &Cluster) -> Result<()> {
    let end = primary.text("SELECT pg_current_wal_flush_lsn()")?;
    standby.eventually(&format!("SELECT pg_last_wal_receive_lsn() >= '{end}'"), "t")
}

#[test]
fn a_locked_standby_waits_for_the_key_of_wal() -> Result<()> {
    let (primary, keys) = in_plaintext(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let standby = locked_standby(&primary, &keys)?;
    switch(&primary, true)?;
    insert(&primary, "drossel", 5000)?;
    primary.sql("SELECT pg_switch_wal()")?;
    standby.eventually_logs(WAITS)?;
    received(&standby, &primary)?;
    ensure!(count(&standby, "amsel")? == "100", "it answers no queries");
    ensure!(count(&standby, "drossel")? == "0", "it did not wait");
    let error = standby.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(!error.is_empty(), "the status gives no reason");
    keys.bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &primary)?;
    standby.eventually_logs("recovery has the new key, and goes on")?;
    ensure!(count(&standby, "drossel")? == "5000", "rows are missing");
    insert(&primary, "fink", 5000)?;
    wait_for(&standby, &primary)?;
    assert_hidden(&standby, "fink")?;
    standby.crash()?;
    standby.promote()?;
    insert(&standby, "meise", 1000)?;
    assert_hidden(&standby, "meise")?;
    standby.finish()?;
    primary.finish()
}

/// The setting is about keys that nothing may need. This one is needed soon.
#[test]
fn a_locked_standby_waits_until_it_can_be_promoted() -> Result<()> {
    let (primary, keys) = in_plaintext(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let standby = locked_standby(&primary, &keys)?;
    standby.append_conf("pagevault.recovery_waits_for_keys = off")?;
    standby.sql("SELECT pg_reload_conf()")?;
    switch(&primary, true)?;
    insert(&primary, "drossel", 1000)?;
    standby.eventually_logs(WAITS)?;
    received(&standby, &primary)?;
    primary.kill()?;
    standby.sql("SELECT pg_promote(wait => false)")?;
    std::thread::sleep(std::time::Duration::from_millis(1500));
    ensure!(standby.text("SELECT pg_is_in_recovery()")? == "t", "it did not wait");
    keys.bring_back()?;
    // Recovery asks by itself.
    standby.eventually("SELECT pg_is_in_recovery()", "f")?;
    ensure!(count(&standby, "drossel")? == "1000", "rows are missing");
    standby.sql("SELECT pg_switch_wal()")?;
    insert(&standby, "meise", 1000)?;
    assert_hidden(&standby, "meise")?;
    standby.finish()?;
    primary.start_server()?;
    primary.finish()
}

#[test]
fn a_locked_standby_that_waits_can_be_stopped() -> Result<()> {
    let (primary, keys) = in_plaintext(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let standby = locked_standby(&primary, &keys)?;
    switch(&primary, true)?;
    insert(&primary, "drossel", 1000)?;
    standby.eventually_logs(WAITS)?;
    standby.stop(StopMode::Fast)?;
    keys.bring_back()?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "1000", "rows are missing");
    standby.finish()?;
    primary.finish()
}

#[test]
fn a_locked_standby_that_follows_an_archive_waits_for_the_key_of_wal() -> Result<()> {
    let (primary, keys) = in_plaintext(&Settings::default().conf("archive_mode = on"))?;
    let archive = primary.directory().join("archive");
    std::fs::create_dir(&archive)?;
    primary.installation().give(&archive)?;
    primary.set(&[("archive_command", &format!("cp %p {}/%f", archive.display()))])?;
    let mut standby = impatient(Standby::default().archive_only(&archive)).create(&primary)?;
    standby.allow_log("could not");
    primary.sql("CHECKPOINT; SELECT pg_switch_wal()")?;
    standby.start_server()?;
    standby.stop(StopMode::Fast)?;
    keys.take_away()?;
    start_locked(&mut standby)?;
    switch(&primary, true)?;
    insert(&primary, "drossel", 5000)?;
    primary.sql("SELECT pg_switch_wal()")?;
    standby.eventually_logs(WAITS)?;
    ensure!(count(&standby, "amsel")? == "100", "it answers no queries");
    ensure!(!leaks(&segments(&standby)?, "drossel"), "the archive is in plaintext");
    keys.bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    standby.eventually("SELECT count(*) FROM t WHERE name LIKE 'drossel-%'", "5000")?;
    standby.finish()?;
    primary.finish()
}

/// The key file of the standby's machine, a copy.
fn with_own_key_file(primary: &Cluster, keys: &KeyFile) -> Result<(Cluster, PathBuf)> {
    let mut standby = impatient(Standby::default()).create(primary)?;
    standby.allow_log("pagevault");
    let copy = standby.directory().join("copied");
    bring_up_to_date(&standby, keys, &copy)?;
    let helper = standby.installation().program("pagevault-keyring");
    let body = format!(
        "sed 's#{}#{}#g' | {} \"$@\"",
        keys.path().display(),
        copy.display(),
        helper.display()
    );
    let helper = standby.script("helper", &body)?;
    standby.append_conf(&format!("pagevault.keyring_command = '{helper}'"))?;
    standby.start_server()?;
    Ok((standby, copy))
}

fn bring_up_to_date(standby: &Cluster, keys: &KeyFile, copy: &std::path::Path) -> Result<()> {
    std::fs::copy(keys.path(), copy)?;
    standby.installation().give(copy)
}

/// Recovery of the standby goes on without a new database key, which wraps all WAL keys.
fn skip_database_key(standby: &Cluster, primary: &Cluster) -> Result<()> {
    standby.append_conf("pagevault.recovery_waits_for_keys = off")?;
    standby.sql("SELECT pg_reload_conf()")?;
    insert(primary, "amsel", 100)?;
    wait_for(standby, primary)?;
    primary.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    primary.sql("SELECT pagevault.rotate_database_key()")?;
    standby.eventually(LOCKED, "locked")
}

/// A new database key, which wraps all WAL keys, is skipped. Then a rotation of the WAL key waits,
/// and a new WAL receiver, which has no key in its memory, ends alone.
#[test]
fn a_wal_receiver_without_a_key_ends_alone() -> Result<()> {
    let (primary, keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let (mut standby, copy) = with_own_key_file(&primary, &keys)?;
    for text in ["recovery waits for", "cannot encrypt the WAL page", "could not unwrap"] {
        standby.allow_log(text);
    }
    skip_database_key(&standby, &primary)?;
    wait_for(&standby, &primary)?;
    let before = postmaster(&standby.data_directory());
    primary.restart()?;
    insert(&primary, "drossel", 1000)?;
    standby.eventually_logs("cannot encrypt the WAL page")?;
    standby.eventually_logs("the key of the cluster is locked")?;
    ensure!(count(&standby, "amsel")? == "100", "it answers no queries");
    ensure!(!standby.log().contains("PANIC"), "the server has crashed");
    ensure!(!standby.log().contains("terminating any other active"), "all sessions were ended");
    ensure!(postmaster(&standby.data_directory()) == before, "it was started again");
    bring_up_to_date(&standby, &keys, &copy)?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "1000", "rows are missing");
    assert_hidden(&standby, "drossel")?;
    standby.finish()?;
    primary.finish()
}

/// A new WAL key below a database key that the standby has skipped.
#[test]
fn a_standby_waits_for_the_key_of_a_rotation() -> Result<()> {
    let (primary, keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let (mut standby, copy) = with_own_key_file(&primary, &keys)?;
    for text in ["recovery waits for", "could not unwrap"] {
        standby.allow_log(text);
    }
    skip_database_key(&standby, &primary)?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&primary, "drossel", 1000)?;
    standby.eventually_logs(WAITS)?;
    received(&standby, &primary)?;
    ensure!(count(&standby, "amsel")? == "100", "it answers no queries");
    assert_hidden(&standby, "drossel")?;
    bring_up_to_date(&standby, &keys, &copy)?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "1000", "rows are missing");
    ensure!(!standby.log().contains("PANIC"), "the server has crashed");
    standby.finish()?;
    primary.finish()
}
