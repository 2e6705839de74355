//! Standbys of every kind during changes of every kind of key: streaming, cascading, from an
//! archive, delayed, paused, stopped.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::text;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::{CONTENT, each, everything, rotate_all};
use crate::wal::{assert_hidden, count, insert};

/// All changes of keys, and statements that use the new ones.
fn live(primary: &Cluster, canary: &str) -> Result<()> {
    rotate_all(primary)?;
    each(
        primary,
        &[
            "VACUUM FULL t",
            "SELECT pagevault.decrypt('large')",
            "SELECT pagevault.wait_for_rekey('large'::regclass, '1min')",
            "SELECT pagevault.encrypt('large')",
            "SELECT pagevault.wait_for_rekey('large'::regclass, '1min')",
            "UPDATE large SET name = md5(name) WHERE id % 100 = 0",
            "CHECKPOINT",
        ],
    )?;
    insert(primary, canary, 200)
}

/// Checks that the standby has the primary's contents, sealed.
fn check(standby: &Cluster, primary: &Cluster, canary: &str) -> Result<()> {
    wait_for(standby, primary)?;
    let (found, wanted) = (standby.text(CONTENT)?, primary.text(CONTENT)?);
    ensure!(found == wanted, "{found} instead of {wanted}");
    standby.sql("CHECKPOINT")?;
    for table in ["t", "large"] {
        crate::assert_sealed(&standby.family_files(table)?)?;
    }
    assert_hidden(standby, canary)
}

/// Reads a whole table repeatedly; every result must be one that the primary had at some time.
fn read_until(standby: &Cluster, stop: &AtomicBool) -> Result<u32> {
    let mut client = standby.client()?;
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let rows = text(&mut client, "SELECT count(*) FROM large WHERE length(name) > 0")?;
        ensure!(rows == "20000", "{rows} rows");
        text(&mut client, "SELECT sum(length(name)) FROM t")?;
        rounds += 1;
    }
    Ok(rounds)
}

#[test]
fn standbys_of_every_kind_follow_new_keys() -> Result<()> {
    let settings =
        Settings::default().conf("archive_mode = on").conf("max_slot_wal_keep_size = -1");
    let (mut primary, _keys) = everything(settings)?;
    primary.allow_log("archiving is not configured");
    let archive = primary.directory().join("archive");
    std::fs::create_dir(&archive)?;
    primary.installation().give(&archive)?;
    primary.set(&[("archive_command", &format!("cp %p {}/%f", archive.display()))])?;

    let named = Standby::default().named("one").slot("one");
    let mut streaming = named.conf("hot_standby_feedback = on").start(&primary)?;
    streaming.allow_log("canceling statement due to conflict with recovery");
    let cascading = Standby::default().slot("two").start(&streaming)?;
    let mut archived = Standby::default().archive_only(&archive).create(&primary)?;
    archived.allow_log("could not");
    archived.start_server()?;
    primary.set(&[("synchronous_standby_names", "one"), ("synchronous_commit", "remote_apply")])?;

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let reader = scope.spawn(|| read_until(&cascading, &stop));
        let lived = ["drossel", "fink"].iter().try_for_each(|canary| {
            live(&primary, canary)?;
            // remote_apply: the row is visible when the commit returns.
            let there = count(&streaming, canary)?;
            ensure!(there == "200", "{there} rows on the synchronous standby");
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let rounds = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        lived?;
        ensure!(rounds? > 0, "nothing was read meanwhile");
        Ok(())
    })?;
    check(&streaming, &primary, "fink")?;
    check(&cascading, &streaming, "fink")?;
    primary.sql("SELECT pg_switch_wal()")?;
    archived.eventually("SELECT count(*) FROM t WHERE name LIKE 'fink-%'", "200")?;
    archived.sql("CHECKPOINT")?;
    for table in ["t", "large"] {
        crate::assert_sealed(&archived.family_files(table)?)?;
    }
    for standby in [archived, cascading, streaming] {
        standby.crash()?;
        ensure!(count(&standby, "fink")? == "200", "rows are missing after a crash");
        standby.finish()?;
    }
    primary.set(&[("synchronous_standby_names", "")])?;
    primary.finish()
}

#[test]
fn standbys_that_lag_or_are_down_catch_up_across_new_keys() -> Result<()> {
    let (primary, _keys) = everything(Settings::default().conf("wal_keep_size = 1GB"))?;
    let paused = standby_of(&primary, &[])?;
    let delayed = standby_of(&primary, &["recovery_min_apply_delay = 1h"])?;
    let stopped = standby_of(&primary, &[])?;
    let killed = standby_of(&primary, &[])?;
    for standby in [&paused, &delayed, &stopped, &killed] {
        standby.eventually(CONTENT, &primary.text(CONTENT)?)?;
    }
    paused.sql("SELECT pg_wal_replay_pause()")?;
    stopped.stop(StopMode::Fast)?;
    killed.kill()?;
    let before = primary.text(CONTENT)?;
    for canary in ["drossel", "fink"] {
        live(&primary, canary)?;
        primary.sql("SELECT pg_switch_wal()")?;
    }
    let end = primary.text("SELECT pg_current_wal_flush_lsn()")?;
    for standby in [&paused, &delayed] {
        // They receive WAL sealed with keys that they do not have yet, and store it sealed.
        standby.eventually(&format!("SELECT pg_last_wal_receive_lsn() >= '{end}'"), "t")?;
        ensure!(standby.text(CONTENT)? == before, "it does not lag");
        assert_hidden(standby, "fink")?;
        standby.crash()?;
        assert_hidden(standby, "fink")?;
    }
    delayed.set(&[("recovery_min_apply_delay", "0")])?;
    stopped.start_server()?;
    killed.start_server()?;
    for standby in [paused, delayed, stopped, killed] {
        check(&standby, &primary, "fink")?;
        standby.promote()?;
        insert(&standby, "meise", 100)?;
        assert_hidden(&standby, "meise")?;
        standby.crash()?;
        ensure!(count(&standby, "meise")? == "100", "rows are missing");
        standby.finish()?;
    }
    primary.finish()
}

/// For each kind of key record in WAL, the standby is killed between receiving it, writing it to
/// the keystore, and using the key.
#[test]
fn a_standby_is_killed_while_it_replays_any_kind_of_key() -> Result<()> {
    let (primary, _keys) = everything(Settings::default())?;
    let standby = standby_of(&primary, &[])?;
    let other = primary.key_file("other", "elsewhere")?;
    let add = other.add_provider("other");
    for statement in [
        "SELECT pagevault.rotate_cluster_master_key()",
        add.as_str(),
        "SELECT pagevault.set_cluster_master_key('other', 'elsewhere')",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.set_database_master_key('local', 'main')",
        "SELECT pagevault.rotate_wal_key()",
        "TRUNCATE t",
    ] {
        for (round, point) in
            ["redo.keys", "redo.keys_in_file", "redo.keys_in_use"].into_iter().enumerate()
        {
            if round > 0 && statement.contains("add_provider") {
                primary.sql("SELECT pagevault.drop_provider('other')")?;
            }
            wait_for(&standby, &primary)?;
            standby.stop_at(point)?;
            primary.sql(statement)?;
            standby.stopped_at(point)?;
            standby.kill()?;
            standby.resume();
            standby.start_server()?;
            insert(&primary, "fink", 50)?;
            wait_for(&standby, &primary)?;
            let (found, wanted) = (standby.text(CONTENT)?, primary.text(CONTENT)?);
            ensure!(found == wanted, "{statement} at {point}: {found} instead of {wanted}");
            let keys = "SELECT string_agg(m::text, ' ' ORDER BY m::text) FROM
                (SELECT scope, provider, master_key, master_key_version FROM pagevault.database_keys) m";
            let (found, wanted) = (standby.text(keys)?, primary.text(keys)?);
            ensure!(found == wanted, "{statement} at {point}: {found} instead of {wanted}");
        }
    }
    assert_hidden(&standby, "fink")?;
    standby.promote()?;
    rotate_all(&standby)?;
    standby.finish()?;
    primary.finish()
}

/// A standby that is shut down need not have synced its key files, because replay continues from
/// the last restart point. After a power failure their ends may be missing.
#[test]
fn the_end_of_a_key_file_may_be_missing_after_a_standby_was_shut_down() -> Result<()> {
    let (primary, _keys) = everything(Settings::default().conf("fsync = on"))?;
    let standby = standby_of(&primary, &[])?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    primary.sql("CREATE TABLE later AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    wait_for(&standby, &primary)?;
    let database = primary.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?;
    standby.stop(StopMode::Fast)?;
    let keys = standby.data_directory().join(format!("pagevault/{database}.keys"));
    let file = std::fs::OpenOptions::new().write(true).open(&keys)?;
    file.set_len(file.metadata()?.len() - 10)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM later")? == "1000", "rows are missing");
    ensure!(standby.log().contains("unfinished write"), "nothing was cut off");
    standby.promote()?;
    standby.crash()?;
    ensure!(standby.text("SELECT count(*) FROM later")? == "1000", "rows are missing");
    standby.finish()?;
    primary.finish()
}
