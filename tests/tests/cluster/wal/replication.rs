//! Standbys: the receiver writes at any offset and seals what it receives; promotion copies a
//! segment.

use std::ffi::OsStr;

use anyhow::{Result, ensure};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::WalPage;
use pagevault_tests::{Cluster, Settings};

use super::{assert_hidden, count, insert, last_page, marks, sealing, segments};

#[test]
fn a_standby_seals_what_it_receives() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default())?;
    let standby = standby_of(&primary, &[])?;
    primary.sql("SELECT pg_switch_wal()")?;
    wait_for(&standby, &primary)?;
    // Small transactions, each received in parts of a page.
    for _ in 0..30 {
        insert(&primary, "drossel", 7)?;
    }
    insert(&primary, "drossel", 10_000)?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    wait_for(&standby, &primary)?;
    for round in 0..10 {
        insert(&primary, "drossel", 5)?;
        if round == 5 {
            wait_for(&standby, &primary)?;
            standby.crash()?;
        }
    }
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "10260", "{} rows", count(&standby, "drossel")?);
    assert_hidden(&standby, "drossel")?;
    let marks = marks(&segments(&standby)?)?;
    ensure!(marks.ends_with(&[1, 2]), "keys {marks:?}");
    // A base backup of the standby, and a standby that follows it.
    let cascaded = standby_of(&standby, &[])?;
    insert(&primary, "fink", 1000)?;
    wait_for(&cascaded, &primary)?;
    ensure!(count(&cascaded, "fink")? == "1000", "rows are missing");
    primary.sql("SELECT pg_switch_wal()")?;
    insert(&primary, "zaunkoenig", 1000)?;
    wait_for(&cascaded, &primary)?;
    ensure!(count(&cascaded, "zaunkoenig")? == "1000", "rows are missing");
    assert_hidden(&cascaded, "zaunkoenig")?;
    cascaded.finish()?;
    standby.finish()?;
    primary.finish()
}

/// A standby created while WAL was plaintext gets the key by replay, also if it lags.
#[test]
fn a_standby_follows_switches() -> Result<()> {
    let (primary, _keys) = Cluster::with_keys(&Settings::default())?;
    primary.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    let mut standby = standby_of(&primary, &[])?;
    super::switch(&primary, true)?;
    primary.sql("SELECT pg_switch_wal()")?;
    wait_for(&standby, &primary)?;
    insert(&primary, "drossel", 1000)?;
    wait_for(&standby, &primary)?;
    assert_hidden(&standby, "drossel")?;
    standby.stop(pagevault_tests::StopMode::Fast)?;
    super::switch(&primary, false)?;
    super::switch(&primary, true)?;
    insert(&primary, "fink", 1000)?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "fink")? == "1000", "rows are missing");
    standby.crash()?;
    wait_for(&standby, &primary)?;
    standby.allow_log("could not receive data from WAL stream");
    standby.sql("SELECT pg_promote()")?;
    insert(&standby, "meise", 1000)?;
    assert_hidden(&standby, "meise")?;
    standby.finish()?;
    primary.finish()
}

/// A standby that does not lag knows each switch before it receives what follows: its segments are
/// those of the primary, as who compares copies in an archive requires (`archive_mode = always`).
#[test]
fn the_wal_of_a_standby_is_that_of_its_primary() -> Result<()> {
    let (primary, _keys) = Cluster::with_keys(&Settings::default())?;
    primary.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    let standby = standby_of(&primary, &[])?;
    wait_for(&standby, &primary)?;
    primary.sql("SELECT pg_switch_wal()")?;
    let from = primary.text("SELECT pg_walfile_name(pg_current_wal_lsn())")?;
    for round in 0..3 {
        super::switch(&primary, true)?;
        insert(&primary, "drossel", 1)?;
        for _ in 0..3 {
            primary.sql("SELECT pagevault.rotate_wal_key()")?;
            insert(&primary, "drossel", 3)?;
        }
        wait_for(&standby, &primary)?;
        for server in [&primary, &standby] {
            ensure!(!super::leaks(&segments(server)?, "drossel"), "plaintext in round {round}");
        }
        super::switch(&primary, false)?;
    }
    primary.sql("SELECT pg_switch_wal()")?;
    let end = primary.text("SELECT pg_walfile_name(pg_current_wal_lsn())")?;
    wait_for(&standby, &primary)?;
    let mut compared = 0;
    for segment in segments(&primary)? {
        let name = segment.path.file_name().unwrap_or_default();
        if name < OsStr::new(&from) || name >= OsStr::new(&end) {
            continue;
        }
        let theirs = std::fs::read(standby.data_directory().join("pg_wal").join(name))?;
        let differs = segment.bytes.chunks(8192).zip(theirs.chunks(8192)).position(|(a, b)| a != b);
        ensure!(differs.is_none(), "page {differs:?} of {name:?} differs");
        compared += 1;
    }
    ensure!(compared > 2, "{compared} segments");
    standby.finish()?;
    primary.finish()
}

/// After a restart the server switches before standbys have noticed that it is back.
#[test]
fn a_standby_with_a_slot_is_waited_for_after_a_restart() -> Result<()> {
    let (primary, _keys) = Cluster::with_keys(&Settings::default())?;
    primary.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    // It keeps WAL from now on. Otherwise the first restart may find a slot that never had any.
    primary.sql("SELECT pg_create_physical_replication_slot('standby', true)")?;
    let late = "primary_slot_name = 'standby'\nwal_retrieve_retry_interval = 3s";
    let standby = standby_of(&primary, &[late])?;
    wait_for(&standby, &primary)?;
    primary.append_conf("pagevault.wal_encryption = on")?;
    primary.restart()?;
    primary.eventually(super::STATE, "t")?;
    insert(&primary, "drossel", 1000)?;
    wait_for(&standby, &primary)?;
    // On a machine that is too busy, the primary does not wait until the standby is back.
    let is_late = primary.log().contains("a standby has not replayed a switch");
    let servers = if is_late { vec![&primary] } else { vec![&primary, &standby] };
    for server in servers {
        ensure!(!super::leaks(&segments(server)?, "drossel"), "plaintext");
    }
    standby.finish()?;
    primary.finish()
}

/// A standby that does not replay holds up a switch for seconds only.
#[test]
fn a_standby_that_lags_is_not_waited_for() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default())?;
    let standby = standby_of(&primary, &[])?;
    wait_for(&standby, &primary)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    primary.sql("SELECT pagevault.rotate_wal_key()")?;
    primary.eventually_logs("a standby has not replayed a switch of WAL encryption in time")?;
    insert(&primary, "drossel", 100)?;
    standby.sql("SELECT pg_wal_replay_resume()")?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby, "drossel")? == "100", "rows are missing");
    standby.finish()?;
    primary.finish()
}

/// On a machine that is too busy, ten seconds are over before the standby has replayed all that.
const LATE: &str = "a standby has not replayed a switch";

/// Others go on writing. A standby that lags, and replays as fast as they write, is waited for.
#[test]
fn a_switch_begins_behind_what_a_standby_lags_by() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let standby = standby_of(&primary, &[])?;
    wait_for(&standby, &primary)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    standby.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    insert(&primary, "amsel", 60_000)?;
    primary.eventually(
        "SELECT flush_lsn - replay_lsn > 6 * 1024 * 1024 FROM pg_stat_replication",
        "t",
    )?;
    let mut rotates = primary.client()?;
    std::thread::scope(|scope| -> Result<()> {
        let rotation = scope.spawn(move || {
            let rotated = rotates.batch_execute("SELECT pagevault.rotate_wal_key()");
            rotated.map_err(anyhow::Error::from)
        });
        std::thread::sleep(std::time::Duration::from_secs(1));
        insert(&primary, "drossel", 50_000)?;
        let waits = !rotation.is_finished();
        standby.sql("SELECT pg_wal_replay_resume()")?;
        rotation.join().expect("no panic")?;
        let is_late = primary.log().contains(LATE);
        ensure!(waits || is_late, "others have ended the wait");
        Ok(())
    })?;
    let is_late = primary.log().contains(LATE);
    insert(&primary, "fink", 1000)?;
    wait_for(&standby, &primary)?;
    let last = last_page(&segments(&standby)?)?.1;
    ensure!(is_late || last == WalPage::Sealed(2), "under the former key: {last:?}");
    standby.finish()?;
    primary.finish()
}

/// At the start of a timeline, the last segment is copied up to the fork, which may be at any byte.
#[test]
fn nothing_is_lost_by_a_kill_right_after_promotion() -> Result<()> {
    let (primary, _keys) = sealing(&Settings::default())?;
    for round in 1..=3_u32 {
        let mut standby = standby_of(&primary, &[])?;
        standby.allow_log("terminating walreceiver process");
        standby.allow_log("could not receive data from WAL stream");
        for rows in 1..=round {
            insert(&primary, "drossel", rows * 3)?;
        }
        let rows = count(&primary, "drossel")?;
        wait_for(&standby, &primary)?;
        standby.sql("SELECT pg_promote()")?;
        standby.kill()?;
        standby.start_server()?;
        ensure!(count(&standby, "drossel")? == rows, "round {round}: rows are missing");
        standby.sql("SELECT pg_switch_wal()")?;
        insert(&standby, "meise", 1000)?;
        standby.crash()?;
        ensure!(count(&standby, "meise")? == "1000", "round {round}: rows are missing");
        let forked: Vec<_> = segments(&standby)?
            .into_iter()
            .filter(|s| s.path.to_string_lossy().contains("/00000002"))
            .collect();
        ensure!(!super::leaks(&forked, "drossel") && !super::leaks(&forked, "meise"));
        let pages = forked.iter().map(|s| s.pages()).collect::<Result<Vec<_>>>()?.concat();
        ensure!(!pages.contains(&WalPage::Plain), "round {round}: plaintext on the new timeline");
        ensure!(pages.contains(&WalPage::Sealed(1)), "round {round}: no sealed page");
        standby.finish()?;
    }
    primary.finish()
}
