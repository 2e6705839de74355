//! Rekeying with standbys: they follow through WAL, and continue jobs of a lost primary.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::{SUM, cluster, versions};

#[test]
fn a_promoted_standby_continues_jobs() -> Result<()> {
    let mut primary = cluster("pagevault.rekey_rate = 2MB\npagevault.wal_encryption = on")?;
    primary.allow_log("the cluster has no master key");
    primary.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let before = primary.text(SUM)?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    // A job that the standby follows from begin to end, with a crash.
    primary.set(&[("pagevault.rekey_rate", "0")])?;
    let job = primary.text("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(primary.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    standby.crash()?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text(SUM)? == before, "the standby has other contents");
    let error = standby.error(&format!("SELECT pagevault.resume_rekey({job})"))?;
    ensure!(error.sqlstate == "25006", "{error}");

    // A job that the primary cannot finish.
    primary.set(&[("pagevault.rekey_rate", "1MB")])?;
    let job = primary.text("SELECT pagevault.rotate_data_key('t')")?;
    let running =
        format!("SELECT (pages_done > 200)::text FROM pagevault.rekey_jobs WHERE job = {job}");
    primary.eventually(&running, "true")?;
    wait_for(&standby, &primary)?;
    primary.kill()?;
    standby.sql("SELECT pg_promote()")?;
    standby.set(&[("pagevault.rekey_rate", "0")])?;
    standby
        .eventually(&format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}"), "done")?;
    for (relation, versions) in versions(&standby)? {
        ensure!(versions == [3], "{relation} has pages of versions {versions:?}");
    }
    ensure!(standby.text(SUM)? == before, "contents differ");
    standby.crash()?;
    ensure!(standby.text(SUM)? == before, "contents differ after a crash");
    standby.finish()?;

    // The old primary would continue its job too.
    primary.append_conf("pagevault.rekey_rate = 0")?;
    std::fs::write(primary.data_directory().join("postgresql.auto.conf"), "")?;
    primary.start_server()?;
    primary
        .eventually(&format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}"), "done")?;
    ensure!(primary.text(SUM)? == before, "contents differ");
    primary.finish()
}

/// Recovery writes a page with some of its changes, and once more with the rest, under the new key
/// already, though no change of it follows the switch in WAL. A standby has written the page in
/// plaintext, before the switch.
#[test]
fn a_page_that_recovery_wrote_is_rewritten_for_standbys() -> Result<()> {
    for settings in [Settings::default(), Settings::default().without_checksums()] {
        let settings = settings
            .conf("pagevault.rekey_threshold = 0")
            .conf("autovacuum = off")
            .conf("bgwriter_lru_maxpages = 0")
            .conf("checkpoint_timeout = 1d")
            .conf("shared_buffers = 1MB");
        let (primary, _keys) = Cluster::with_keys(&settings)?;
        primary.sql(
            "CREATE TABLE first (); SELECT pagevault.encrypt('first');
             CREATE TABLE late (id int, name text);
             INSERT INTO late SELECT i, md5(i::text) FROM generate_series(1, 30000) i; CHECKPOINT",
        )?;
        let mut standby = standby_of(&primary, &[])?;
        standby.allow_log("could not");
        // Each page changes several times, and others take its place in shared buffers meanwhile.
        for round in 0..3 {
            primary.sql(&format!("UPDATE late SET id = -id WHERE id % 20 = {round}"))?;
        }
        primary.stop_at("rekey.switched")?;
        primary.sql("SELECT pagevault.encrypt('late')")?;
        primary.stopped_at("rekey.switched")?;
        wait_for(&standby, &primary)?;
        let states = |cluster: &Cluster| -> Result<Vec<PageState>> {
            cluster.files("late")?.remove(0).states()
        };
        let before = states(&standby)?;
        ensure!(before.contains(&PageState::Plaintext), "nothing was written: {before:?}");
        primary.kill()?;
        primary.resume();
        primary.stop_at("rekey.claimed")?;
        primary.start_server()?;
        primary.stopped_at("rekey.claimed")?;
        let recovered = states(&primary)?;
        let sealed = recovered.iter().filter(|state| matches!(state, PageState::Sealed(_)));
        ensure!(sealed.count() > 0, "the test shows nothing: {recovered:?}");
        primary.resume();
        let done = "SELECT pagevault.wait_for_rekey('late'::regclass, '1min')";
        ensure!(primary.text(done)? == "t", "the job was not done");
        primary.sql("CHECKPOINT")?;
        wait_for(&standby, &primary)?;
        standby.sql("CHECKPOINT")?;
        let after = states(&standby)?;
        ensure!(!after.contains(&PageState::Plaintext), "{after:?}");
        standby.finish()?;
        primary.finish()?;
    }
    Ok(())
}

/// Redo makes a free space map when a page gets full. The primary makes it later. With data
/// checksums redo's changes of it stay in memory (`MarkBufferDirtyHint`, bufmgr.c).
#[test]
fn a_free_space_map_of_the_standby_alone_is_rewritten() -> Result<()> {
    let settings = Settings::default().conf("autovacuum = off").without_checksums();
    let (primary, _keys) = Cluster::with_keys(&settings)?;
    primary.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first'); CHECKPOINT")?;
    let standby = standby_of(&primary, &[])?;
    primary.sql(
        "CREATE TABLE small (id int, name text);
         INSERT INTO small SELECT i, repeat('x', 500) FROM generate_series(1, 14) i; CHECKPOINT",
    )?;
    let map = |cluster: &Cluster| -> Result<Vec<PageState>> {
        let mut states = Vec::new();
        for file in cluster.files("small")?.iter().filter(|file| is_free_space_map(file)) {
            states.extend(file.states()?);
        }
        Ok(states)
    };
    let restart_point = || -> Result<()> {
        primary.sql("CHECKPOINT")?;
        wait_for(&standby, &primary)?;
        standby.sql("CHECKPOINT")
    };
    restart_point()?;
    ensure!(map(&primary)?.is_empty(), "the primary has a map, too");
    let before = map(&standby)?;
    ensure!(before.contains(&PageState::Plaintext), "the test shows nothing: {before:?}");
    primary.sql("SELECT pagevault.encrypt('small')")?;
    let done = "SELECT pagevault.wait_for_rekey('small'::regclass, '1min')";
    ensure!(primary.text(done)? == "t", "the job was not done");
    restart_point()?;
    let after = map(&standby)?;
    ensure!(after.len() == before.len() && !after.contains(&PageState::Plaintext), "{after:?}");
    // Later it is used and nothing is refused.
    primary.sql("INSERT INTO small SELECT i, repeat('x', 500) FROM generate_series(1, 400) i")?;
    restart_point()?;
    ensure!(standby.text("SELECT count(*) FROM small")? == "414", "rows are missing");
    standby.sql("SELECT pg_promote()")?;
    standby.sql("INSERT INTO small SELECT i, 'y' FROM generate_series(1, 100) i")?;
    let refused = "SELECT sum(decrypt_failures) FROM pagevault.stats";
    ensure!(standby.text(refused)? == "0", "pages were refused");
    standby.finish()?;
    primary.finish()
}

/// A free space map has a page under a key that the standby does not know: it is read as empty.
#[test]
fn a_free_space_map_without_its_key_is_empty() -> Result<()> {
    let settings = Settings::default().conf("autovacuum = off").without_checksums();
    let (primary, _keys) = Cluster::with_keys(&settings)?;
    primary.sql(
        "CREATE TABLE big (id int, name text); SELECT pagevault.encrypt('big');
         INSERT INTO big SELECT i, repeat('x', 500) FROM generate_series(1, 2000) i;
         DELETE FROM big WHERE id % 2 = 0",
    )?;
    primary.sql("VACUUM big")?;
    primary.sql("CHECKPOINT")?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    let map = standby.files("big")?.into_iter().find(is_free_space_map);
    let Some(map) = map else { anyhow::bail!("there is no free space map") };
    standby.stop(StopMode::Fast)?;
    for block in 0..map.states()?.len() as u32 {
        let mut page = map.read_page(block)?;
        let flags = u16::from_le_bytes([page[10], page[11]]) & 7;
        page[10..12].copy_from_slice(&(flags | 99 << 3).to_le_bytes());
        map.write_page(block, &page)?;
    }
    standby.start_server()?;
    primary.sql("INSERT INTO big SELECT i, repeat('y', 300) FROM generate_series(1, 1000) i")?;
    primary.sql("SELECT pagevault.rotate_data_key('big')")?;
    let done = "SELECT pagevault.wait_for_rekey('big'::regclass, '1min')";
    ensure!(primary.text(done)? == "t", "the job was not done");
    primary.sql("INSERT INTO big SELECT i, repeat('z', 300) FROM generate_series(1, 1000) i")?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    standby.sql("SELECT pg_promote()")?;
    standby.sql("INSERT INTO big SELECT i, 'w' FROM generate_series(1, 1000) i")?;
    standby.sql("VACUUM big")?;
    ensure!(standby.text("SELECT count(*) FROM big")? == "4000", "rows are missing");
    standby.finish()?;
    primary.finish()
}

fn is_free_space_map(file: &DataFile) -> bool {
    file.path.to_string_lossy().contains("_fsm")
}
